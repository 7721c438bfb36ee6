# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Store: one launch rotates and quantises K and V into their pages."""

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.triton.codec import (
    check_pages,
    tile_layout,
    tile_pointers,
)
from vllm.v1.attention.ops.turbo.triton.encode import encode_vectors


@triton.jit(do_not_specialize=["num_tokens"])
def store_kernel(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    kv_cache_ptr,  # [num_blocks, H, N, C] uint8
    slot_mapping_ptr,  # [T]
    matrix_ptr,  # [D, D] fp16
    num_tokens,
    inverse_sqrt_d,
    block_size,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_cache_block: tl.int64,
    stride_cache_head: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Program (i, j): tokens [i * BLOCK_T, ...) of head j of K, then V."""
    TILE_BYTES: tl.constexpr = LAYOUT.tile_bytes
    head = tl.program_id(1)
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_mapping_ptr + o_t, mask=o_t < num_tokens, other=-1)
    slot = slot.to(tl.int64)
    m_t = slot >= 0
    slot = tl.where(m_t, slot, 0)
    kv_head = head % NUM_KV_HEADS
    page_ptr = kv_cache_ptr + slot // block_size * stride_cache_block
    page_ptr += kv_head.to(tl.int64) * stride_cache_head
    tile_ptr, token = tile_pointers(page_ptr, slot % block_size, TILE_BYTES)
    tokens = tile_ptr, token, m_t, matrix_ptr, inverse_sqrt_d
    if head < NUM_KV_HEADS:
        x_ptr = key_ptr + o_t * stride_key_token + kv_head * stride_key_head
        encode_vectors(x_ptr, *tokens, LAYOUT, True, FOLD)
    else:
        x_ptr = value_ptr + o_t * stride_value_token + kv_head * stride_value_head
        encode_vectors(x_ptr, *tokens, LAYOUT, False, FOLD)


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Quantise K and V into their slots.

    Args:
        key: (>= T, H, D), fp16 or bf16, last axis contiguous.
        value: (>= T, H, D), likewise.
        kv_cache: (num_blocks, H, N, C) uint8; a (block, head) contiguous.
        slot_mapping: (T,) slots; tokens with a negative one are left out.

    """
    num_tokens = slot_mapping.shape[0]
    _, num_kv_heads, head_size = key.shape
    layout = TurboFormat(head_size)
    check_pages(kv_cache, layout)
    assert kv_cache.shape[1] == num_kv_heads, (kv_cache.shape, num_kv_heads)
    assert key.stride(2) == value.stride(2) == 1
    if num_tokens == 0:
        return
    # Steps of a program depend on each other, so few tokens take few steps of many
    # columns. Many tokens fill the GPU anyway. Tuning: heads of 128, an H200, 2026-11.
    block_t, fold = (64, 1) if num_tokens > 1024 else (16, 8 if head_size <= 128 else 4)
    store_kernel[(triton.cdiv(num_tokens, block_t), 2 * num_kv_heads)](
        key,
        value,
        kv_cache,
        slot_mapping,
        rotation_matrix(head_size, kv_cache.device),
        num_tokens,
        inverse_sqrt(head_size),
        kv_cache.shape[2],
        *key.stride()[:2],
        *value.stride()[:2],
        *kv_cache.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        LAYOUT=tile_layout(layout),
        BLOCK_T=block_t,
        FOLD=fold,
        num_warps=4,
        # A fused multiply-add would change the stored bytes.
        enable_fp_fusion=False,
    )
