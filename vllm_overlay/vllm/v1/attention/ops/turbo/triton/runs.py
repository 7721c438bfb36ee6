# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs of tokens that a prefill under a sliding window sees.

A run has dequantised cached tokens, followed by the request's raw tokens.
"""

from typing import TYPE_CHECKING

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.triton.isolate import isolated
from vllm.v1.attention.ops.turbo.triton.offset import offset_row
from vllm.v1.attention.ops.turbo.triton.prefill import gather_context, rotate_rows

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.planning.tokens import KeyRuns


@triton.jit(
    do_not_specialize=["num_offsets"],
    # These are slices of one tensor.
    do_not_specialize_on_alignment=[
        "starts_ptr",
        "cached_lens_ptr",
        "raw_starts_ptr",
        "cu_lens_ptr",
    ],
)
def _complete_runs_kernel(
    run_key_ptr,  # [N, H, D], cached tokens dequantised
    run_value_ptr,  # [N, H, D of V]
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D of V]
    offset_ptr,  # [G, H, D] fp32, taken off the cached keys, or None
    starts_ptr,  # [R]
    cached_lens_ptr,  # [R]
    raw_starts_ptr,  # [R]
    cu_lens_ptr,  # [R + 1]
    num_offsets,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D_V: tl.constexpr,
):
    """Program (i, r, h): tokens [i * BLOCK_N, ...) of run r, KV head h."""
    run = tl.program_id(1)
    head = tl.program_id(2)
    begin = tl.load(cu_lens_ptr + run)
    length = tl.load(cu_lens_ptr + run + 1) - begin
    cached_len = tl.load(cached_lens_ptr + run)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)[None, :]
    run_row = ((begin + n).to(tl.int64) * NUM_KV_HEADS + head) * HEAD_SIZE
    p_run_key = run_key_ptr + run_row[:, None] + d
    if offset_ptr is not None:
        # All keys of a run lack its last token's offset, which changes no softmax.
        start = tl.load(starts_ptr + run)
        last_row = offset_row(start + length - 1, num_offsets, OFFSET_SEGMENT)
        p_last = offset_ptr + (last_row * NUM_KV_HEADS + head) * HEAD_SIZE + d
        last_offset = tl.load(p_last, mask=d < HEAD_SIZE, other=0.0)
        own_row = offset_row(start + n, num_offsets, OFFSET_SEGMENT)
        mask = ((n < cached_len) & (own_row < last_row))[:, None] & (d < HEAD_SIZE)
        p_offset = offset_ptr + ((own_row * NUM_KV_HEADS + head) * HEAD_SIZE)[:, None]
        offset = tl.load(p_offset + d, mask=mask, other=0.0) - last_offset
        cached = tl.load(p_run_key, mask=mask, other=0.0).to(tl.float32) + offset
        tl.store(p_run_key, cached.to(run_key_ptr.dtype.element_ty), mask=mask)
    is_raw = (n >= cached_len) & (n < length)
    mask = is_raw[:, None] & (d < HEAD_SIZE)
    token = (tl.load(raw_starts_ptr + run) + n - cached_len).to(tl.int64)
    key_row = token * stride_key_token + head * stride_key_head
    key = tl.load(key_ptr + key_row[:, None] + d, mask=mask, other=0.0)
    if offset_ptr is not None:
        key = key.to(tl.float32) - last_offset
    m_key, m_value = mask, mask
    if HEAD_SIZE_V != HEAD_SIZE:
        run_row = ((begin + n).to(tl.int64) * NUM_KV_HEADS + head) * HEAD_SIZE_V
        d = tl.arange(0, BLOCK_D_V)[None, :]
        m_value = is_raw[:, None] & (d < HEAD_SIZE_V)
    value_row = token * stride_value_token + head * stride_value_head
    value = tl.load(value_ptr + value_row[:, None] + d, mask=m_value, other=0.0)
    key, value = isolated(key, value)
    tl.store(p_run_key, key.to(run_key_ptr.dtype.element_ty), mask=m_key)
    p_run_value = run_value_ptr + run_row[:, None] + d
    tl.store(p_run_value, value.to(run_value_ptr.dtype.element_ty), mask=m_value)


def lay_out_runs(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    runs: "KeyRuns",
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TurboFormat,
    run_key: torch.Tensor,
    run_value: torch.Tensor,
    key_offset: torch.Tensor | None = None,
) -> None:
    """Write the tokens that requests see into a buffer, not in rotated space.

    With an offset of K, all keys of a run lack the offset of its last token. This
    changes no softmax, and makes the keys smaller, so that their dtype has more bits
    for them. Most tokens have the last one's offset, but a first token has its own.

    Non-finite values are kept from other requests, as by ``isolate_broken_values``.

    Args:
        kv_cache: (num_blocks, H, N, C) uint8; see ``check_pages``.
        block_table: (R, max_blocks) int32.
        runs: The tokens that are seen, N of them.
        key: (T, H, D) of the prefills' tokens, last axis contiguous; not read if runs
            have no raw tokens.
        value: (T, H, D of V), likewise.
        layout: The cache's format.
        run_key: (N, H, D) contiguous, written.
        run_value: (N, H, D of V), likewise.
        key_offset: (G, H, D) fp32, the offset that was taken off the cached keys, see
            ``KeyOffset``; None for none.

    """
    num_tokens, num_kv_heads, head_size = run_key.shape
    cached = runs.cached
    head_size_v = run_value.shape[2]
    assert num_tokens == runs.lens.num_tokens, (num_tokens, runs)
    assert run_value.shape[:2] == run_key.shape[:2], (run_value.shape, run_key.shape)
    assert run_value.is_contiguous() and run_key.is_contiguous()
    assert key.stride(2) == value.stride(2) == 1
    if cached.lens.max_len:
        gather_context(kv_cache, block_table, cached, layout, run_key, run_value)
        rotated = run_key[: runs.num_rotated]
        rotate_rows(rotated, rotated, inverse=True, gain=layout.key_codebook.gain)
        rotated = run_value[: runs.num_rotated]
        rotate_rows(rotated, rotated, inverse=True)
    num_offsets = 0
    if key_offset is not None:
        assert key_offset.is_contiguous()
        num_offsets = key_offset.shape[0]
    block_n = 32
    grid = (triton.cdiv(runs.lens.max_len, block_n), len(cached.starts), num_kv_heads)
    _complete_runs_kernel[grid](
        run_key,
        run_value,
        key,
        value,
        key_offset,
        cached.starts,
        cached.cached_lens,
        runs.raw_starts,
        runs.lens.cu_lens,
        num_offsets,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_SIZE_V=head_size_v,
        OFFSET_SEGMENT=interface.OFFSET_SEGMENT,
        BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_D_V=triton.next_power_of_2(head_size_v),
        num_warps=4,
    )
