# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tables that go by the position of a token in its sequence: their rows, and q.m."""

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.interface import OffsetScores

_DIRECTION_SEGMENT = tl.constexpr(interface.DIRECTION_SEGMENT)


@triton.jit
def offset_row(position, num_offsets, OFFSET_SEGMENT: tl.constexpr):
    """The row of tokens at ``position`` in their sequence: ``interface.offset_rows``.

    Padding may have any position.
    """
    position = tl.maximum(position, 0)
    row = position // OFFSET_SEGMENT + (position > 0).to(tl.int32)
    return tl.minimum(row, num_offsets - 1)


@triton.jit
def direction_row(position, num_directions):
    """The row of tokens at ``position``: ``interface.direction_rows``.

    Padding may have any position.
    """
    row = tl.maximum(position, 0) // _DIRECTION_SEGMENT
    return tl.minimum(row, num_directions - 1)


@triton.jit(
    do_not_specialize=["num_offsets", "stride_lse_head"],
    # A slice may begin at any request of the batch.
    do_not_specialize_on_alignment=["query_start_loc_ptr", "starts_ptr", "cu_lens_ptr"],
)
def _add_offset_scores_kernel(
    lse_ptr,  # [Hq, T] fp32
    query_ptr,  # [T, Hq, D]
    offset_ptr,  # [G, H, D] fp32
    query_start_loc_ptr,  # [R + 1]
    starts_ptr,  # [R]
    cu_lens_ptr,  # [R + 1]
    num_offsets,
    scale,
    stride_lse_head,
    stride_query_token,
    stride_query_head,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (i, r, h): tokens [i * BLOCK_T, ...) of request r, query head h."""
    request = tl.program_id(1)
    head = tl.program_id(2)
    begin = tl.load(query_start_loc_ptr + request)
    length = tl.load(query_start_loc_ptr + request + 1) - begin
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < length
    token += begin
    d = tl.arange(0, BLOCK_D)
    row = token.to(tl.int64) * stride_query_token + head * stride_query_head
    mask = inside[:, None] & (d < HEAD_SIZE)[None, :]
    query = tl.load(query_ptr + row[:, None] + d[None, :], mask=mask, other=0.0)
    num_keys = tl.load(cu_lens_ptr + request + 1) - tl.load(cu_lens_ptr + request)
    last = tl.load(starts_ptr + request) + num_keys - 1
    offset_of = offset_row(last, num_offsets, OFFSET_SEGMENT)
    p_offset = offset_ptr + (offset_of * NUM_KV_HEADS + head // GROUP) * HEAD_SIZE + d
    offset = tl.load(p_offset, mask=d < HEAD_SIZE, other=0.0)
    score = scale * tl.sum(query.to(tl.float32) * offset[None, :], 1)
    p_lse = lse_ptr + head.to(tl.int64) * stride_lse_head + token
    lse = tl.load(p_lse, mask=inside, other=0.0)
    tl.store(p_lse, lse + score, mask=inside)


def add_offset_scores(
    lse: torch.Tensor,
    offset: OffsetScores,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    starts: torch.Tensor,
    cu_lens: torch.Tensor,
) -> None:
    """Add the part of scores that keys lack to the keys' LSE.

    All keys of a request lack the offset of its last key: see ``gather_context`` and
    ``lay_out_runs``.

    Args:
        lse: (Hq, T) fp32 natural log-sum-exp, last axis contiguous; changed.
        offset: The queries, and the offset that was taken off the keys.
        query_start_loc: (R + 1,) int32, where requests' tokens begin.
        max_query_len: Most query tokens of a request.
        starts: (R,) int32, the position of each request's first key in the request.
        cu_lens: (R + 1,) int32, cumulative numbers of the requests' keys.

    """
    query, table, scale = offset
    num_tokens, num_heads, head_size = query.shape
    num_offsets, num_kv_heads = table.shape[:2]
    assert lse.shape == (num_heads, num_tokens) and lse.stride(1) == 1
    assert query.stride(2) == 1 and table.is_contiguous()
    block_t = 32
    grid = (triton.cdiv(max_query_len, block_t), starts.shape[0], num_heads)
    _add_offset_scores_kernel[grid](
        lse,
        query,
        table,
        query_start_loc,
        starts,
        cu_lens,
        num_offsets,
        scale,
        lse.stride(0),
        query.stride(0),
        query.stride(1),
        GROUP=num_heads // num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        OFFSET_SEGMENT=interface.OFFSET_SEGMENT,
        BLOCK_T=block_t,
        BLOCK_D=triton.next_power_of_2(head_size),
        num_warps=4,
    )
