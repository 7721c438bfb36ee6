# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Gather: the K and V that a prefill sees, cached tokens dequantised, in one launch."""

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.format import KEY_GAIN, TILE_TOKENS, TurboFormat
from vllm.v1.attention.ops.turbo.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.triton.codec import TILE, check_pages, tile_layout
from vllm.v1.attention.ops.turbo.triton.operands import (
    load_keys,
    load_value_pairs,
    load_values,
    value_coordinate,
)


@triton.jit(
    do_not_specialize=["tiles_per_block", "stride_block_table", "max_blocks"],
    # A group may begin at any request of the batch.
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "cu_lens_ptr",
    ],
)
def _gather_kernel(
    kv_cache_ptr,  # [num_blocks, H, N, C] uint8
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    gathered_key_ptr,  # [S, H, D]
    gathered_value_ptr,  # [S, H, D]
    matrix_ptr,  # [D, D] fp16, entries +-1, the rotation
    inverse_ptr,  # [D, D] fp16, the same to rotate back
    block_table_ptr,  # [R, max_blocks]
    query_start_loc_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    cu_lens_ptr,  # [R + 1]
    inverse_sqrt_d,
    key_gain,
    stride_cache_block: tl.int64,
    stride_cache_head: tl.int64,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block_table,
    max_blocks,
    tiles_per_block,
    NUM_KV_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (i, r, h): positions [i * BLOCK_N, ...) of those that request r sees."""
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size
    COLUMNS: tl.constexpr = LAYOUT.columns
    request = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    begin = tl.load(cu_lens_ptr + request)
    length = tl.load(cu_lens_ptr + request + 1) - begin
    first_query = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first_query
    seq_len = tl.load(seq_lens_ptr + request)
    cached_len = seq_len - query_len
    start = seq_len - length
    # Positions are in pairs, which share words of V.
    even = start // 2 * 2 + tl.program_id(0) * BLOCK_N
    if even >= seq_len:
        return
    even += 2 * tl.arange(0, BLOCK_N // 2)
    tile = even // TILE
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_block_table
    # Requests of vLLM's dummy batches may be longer than the block table.
    place = tile // tiles_per_block
    m_place = (even < cached_len) & (place < max_blocks)
    block = tl.load(table_ptr + place, mask=m_place, other=0)
    page_ptr = kv_cache_ptr + block.to(tl.int64) * stride_cache_block
    page_ptr += head * stride_cache_head
    tile_ptr = page_ptr + tile % tiles_per_block * LAYOUT.tile_bytes
    token = even % TILE
    o_d = tl.arange(0, HEAD_SIZE)
    column = tl.arange(0, COLUMNS)
    columns = column, column
    p_inverse = inverse_ptr + column[:, None] * HEAD_SIZE + o_d[None, :]
    words = load_value_pairs(tile_ptr, token // 2, columns, LAYOUT)
    for i in tl.static_range(2):
        position = even + i
        m_row = (position >= start) & (position < seq_len)
        m_raw = m_row & (position >= cached_len)
        source = (first_query + position - cached_len).to(tl.int64)
        row = (begin + position - start).to(tl.int64) * NUM_KV_HEADS + head
        row = row * HEAD_SIZE

        parts = load_keys(tile_ptr, token + i, columns, LAYOUT)
        cached = tl.zeros([BLOCK_N // 2, HEAD_SIZE], tl.float32)
        for j in tl.static_range(len(parts)):
            matrix = tl.load(p_inverse + j * (COLUMNS * HEAD_SIZE))
            cached = tl.dot(parts[j], matrix, cached)
        p_raw = key_ptr + source * stride_key_token + head * stride_key_head
        raw = tl.load(p_raw[:, None] + o_d[None, :], mask=m_raw[:, None], other=0.0)
        # Where nothing is cached, old bytes have been read.
        key = tl.where(m_raw[:, None], raw, cached * (inverse_sqrt_d * key_gain))
        p_key = gathered_key_ptr + row[:, None] + o_d[None, :]
        tl.store(p_key, key.to(key_ptr.dtype.element_ty), mask=m_row[:, None])

        parts = load_values(words, tile_ptr, token // 2, None, columns, LAYOUT, i)
        cached = tl.zeros([HEAD_SIZE, BLOCK_N // 2], tl.float32)
        for j in tl.static_range(len(parts)):
            coordinate = value_coordinate(column, j, COLUMNS, HEAD_SIZE)
            p_matrix = matrix_ptr + o_d[:, None] * HEAD_SIZE + coordinate[None, :]
            cached = tl.dot(tl.load(p_matrix), parts[j], cached)
        p_raw = value_ptr + source * stride_value_token + head * stride_value_head
        raw = tl.load(p_raw[None, :] + o_d[:, None], mask=m_raw[None, :], other=0.0)
        value = tl.where(m_raw[None, :], raw, cached * inverse_sqrt_d)
        p_value = gathered_value_ptr + row[None, :] + o_d[:, None]
        tl.store(p_value, value.to(value_ptr.dtype.element_ty), mask=m_row[None, :])


def gather(
    kv_cache: torch.Tensor,
    chunk: tuple[torch.Tensor, torch.Tensor],
    gathered: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_lens: torch.Tensor,
    max_len: int,
) -> None:
    """Lay out the newest tokens of each request, those of its chunk as computed.

    Args:
        kv_cache: (num_blocks, H, N, C) uint8; a (block, head) contiguous.
        chunk: K and V of the step's tokens, (T, H, D) each, last axis contiguous.
        gathered: (S, H, D) contiguous each, written.
        block_table: (R, max_blocks) int32.
        query_start_loc: (R + 1,) int32, where the requests' chunks begin in ``chunk``.
        seq_lens: (R,) int32, cached tokens and those of the chunk.
        cu_lens: (R + 1,) int32, where the requests' tokens begin in ``gathered``. A
            request has at least the tokens of its chunk there.
        max_len: The most tokens of a request in ``gathered``.

    """
    (key, value), (gathered_key, gathered_value) = chunk, gathered
    _, num_kv_heads, head_size = key.shape
    layout = TurboFormat(head_size)
    check_pages(kv_cache, layout)
    assert key.stride(2) == value.stride(2) == 1
    assert gathered_key.is_contiguous() and gathered_value.is_contiguous()
    num_requests = seq_lens.shape[0]
    if num_requests == 0 or max_len == 0:
        return
    block_n = 64
    _gather_kernel[(triton.cdiv(max_len + 1, block_n), num_requests, num_kv_heads)](
        kv_cache,
        key,
        value,
        gathered_key,
        gathered_value,
        rotation_matrix(head_size, kv_cache.device),
        rotation_matrix(head_size, kv_cache.device, inverse=True),
        block_table,
        query_start_loc,
        seq_lens,
        cu_lens,
        inverse_sqrt(head_size),
        KEY_GAIN,
        *kv_cache.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        block_table.stride(0),
        block_table.shape[1],
        kv_cache.shape[2] // TILE_TOKENS,
        NUM_KV_HEADS=num_kv_heads,
        LAYOUT=tile_layout(layout),
        BLOCK_N=block_n,
        num_warps=4,
    )
