# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment, misc"
"""The kernel of ``triton.decode``: attention to a split of a sequence.

Names of blocks of values begin with ``b_``, of indices with ``o_``, of masks with
``m_``.
"""

from typing import NamedTuple

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.triton.codec import as_loaded
from vllm.v1.attention.ops.turbo.triton.decode_steps import (
    attend,
    load_queries,
    rescaled,
    step_scores,
    step_tiles,
    step_tokens,
)
from vllm.v1.attention.ops.turbo.triton.operands import value_coordinate
from vllm.v1.attention.ops.turbo.triton.pages import TILE


class OriginalQuery(NamedTuple):
    """Strides and factor of the queries that are not rotated, for an offset of K.

    Attributes:
        factor: The factor that turns their products with an offset into scores.
        stride_token: Stride of the queries between tokens, in elements.
        stride_head: Stride of the queries between heads, in elements.

    """

    factor: float
    stride_token: int
    stride_head: int


class DecodeCase(NamedTuple):
    """The cases that the kernel is compiled for, besides sizes.

    Attributes:
        step_in_block: Whether a block is a whole number of steps.
        multiple: Whether a sequence may have more than one query token.
        uniform: Whether all sequences have the same number of query tokens.
        with_raw: Whether the query tokens themselves are left to the merge.
        sliding: Whether a query token sees at most ``sliding_window`` tokens.

    """

    step_in_block: bool
    multiple: bool
    uniform: bool
    with_raw: bool
    sliding: bool


@triton.jit
def _split_bounds(
    seq_lens_ptr,
    whole_lens_ptr,
    query_start_loc_ptr,
    batch,
    split,
    num_splits,
    max_query_len,
    sliding_window,
    BLOCK_N: tl.constexpr,
    CASE: tl.constexpr,
):
    """The bounds of a sequence's query tokens and of a split's tokens.

    Returns:
        The index of the first query token among the batch's. The number of query
        tokens. The number of the sequence's tokens that are read. The number that the
        first query token sees, itself included. The first that any query token sees.
        The split's first token, and its last (exclusive).

    """
    if CASE.uniform:
        first_token = batch * max_query_len
        query_len = max_query_len
    else:
        first_token = tl.load(query_start_loc_ptr + batch)
        query_len = tl.load(query_start_loc_ptr + batch + 1) - first_token
    seq_len = tl.load(seq_lens_ptr + batch)
    first_end = seq_len - query_len + 1
    if whole_lens_ptr is not None:
        first_end = tl.load(whole_lens_ptr + batch) - query_len + 1
    if CASE.with_raw:
        seq_len -= query_len
    lowest = 0
    begin = 0
    if CASE.sliding:
        lowest = tl.maximum(first_end - sliding_window, 0)
        begin = lowest // BLOCK_N * BLOCK_N
    split_size = tl.cdiv(tl.cdiv(seq_len - begin, num_splits), BLOCK_N) * BLOCK_N
    first = begin + split * split_size
    last = tl.minimum(first + split_size, seq_len)
    return first_token, query_len, seq_len, first_end, lowest, first, last


@triton.jit
def _offset_scores(
    p_query,  # [H] of vectors that are not rotated
    offset,  # pointer to the KV head's first row, rows, mask of queries, factor
    row,
    NUM_KV_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """The part that scores lack by a row, or the last one, in base 2, fp32 [H]."""
    offset_ptr, num_offsets, m_h, factor = offset
    offset_ptr += tl.minimum(row, num_offsets - 1) * (NUM_KV_HEADS * LAYOUT.head_size)
    o_d = tl.arange(0, LAYOUT.block_d)
    m_d = o_d < LAYOUT.head_size
    b_offset = tl.load(offset_ptr + o_d, mask=m_d, other=0.0)
    m_query = m_h[:, None] & m_d[None, :]
    b_query = tl.load(p_query[:, None] + o_d[None, :], mask=m_query, other=0.0)
    return factor * tl.sum(b_query.to(tl.float32) * b_offset[None, :], 1)


@triton.jit
def _first_token_gain(
    p_query,  # [H] of vectors that are not rotated
    offset,  # as in ``_offset_scores``
    first,  # the split's first token
    NUM_KV_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """The part that scores of a sequence's first token lack more than its tile's.

    Returns:
        fp32 [H], in base 2; not used by splits that begin later.

    """
    gain = tl.zeros([p_query.shape[0]], tl.float32)
    if first == 0:
        gain = _offset_scores(p_query, offset, 0, NUM_KV_HEADS, LAYOUT)
        gain -= _offset_scores(p_query, offset, 1, NUM_KV_HEADS, LAYOUT)
    return gain


@triton.jit
def _value_columns(
    columns,  # of K, [C], and the same numbers from ``as_loaded``
    ptr,  # any pointer to int32
    never,  # see ``as_loaded``
    LAYOUT: tl.constexpr,
):
    """The columns of a step of V; those of K if there are as many."""
    BLOCK_C: tl.constexpr = LAYOUT.block_c_v
    if LAYOUT.block_c == BLOCK_C:
        return columns
    else:
        o_column = tl.arange(0, BLOCK_C)
        return o_column, as_loaded(o_column, ptr, never)


@triton.jit
def _no_values(LAYOUT: tl.constexpr, BLOCK_H: tl.constexpr):
    """Zeros for each step of V's coordinates, fp32 [C, H]."""
    BLOCK_C: tl.constexpr = LAYOUT.block_c_v
    b_acc = ()
    for _ in tl.static_range(LAYOUT.head_size_v // LAYOUT.columns_v):
        b_acc = b_acc + (tl.zeros([BLOCK_C, BLOCK_H], tl.float32),)
    return b_acc


@triton.jit
def _store_partial(
    partials,
    partial_row,  # [H]
    b_acc,  # NUM_STEPS of [C, H] fp32
    b_sum,  # [N / 2, H]
    b_max,  # [H]
    m_h,  # [H]
    o_column,  # [C], of V
    LAYOUT: tl.constexpr,
):
    """Write a split's output and LSE."""
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size_v
    COLUMNS: tl.constexpr = LAYOUT.columns_v
    total = tl.sum(b_sum, 0)
    tl.store(partials.lse + partial_row, b_max + tl.log2(total), mask=m_h)
    m_output = (o_column < COLUMNS)[:, None] & m_h[None, :]
    p_partial = partials.output + (partial_row * HEAD_SIZE)[None, :]
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        o_d = value_coordinate(o_column, i, COLUMNS, HEAD_SIZE)[:, None]
        b_output = b_acc[i] / total[None, :]
        tl.store(p_partial + o_d, b_output, mask=m_output)


@triton.jit(
    # Names of tuples have no effect here: Triton specialises all their elements.
    do_not_specialize=[
        "num_splits",
        "max_query_len",
        "tiles_per_block",
        "block_shift",
        "block_multiplier",
        "stride_block_table",
        "num_offsets",
        "sliding_window",
    ],
    # A call may begin at any request of the batch.
    do_not_specialize_on_alignment=[
        "query_scale_ptr",
        "original_query_ptr",
        "block_table_ptr",
        "seq_lens_ptr",
        "whole_lens_ptr",
        "query_start_loc_ptr",
    ],
)
def decode_kernel(
    query_ptr,  # [T, Hq, D] fp16, rotated
    query_scale_ptr,  # [T, Hq] fp32
    kv_cache_ptr,  # [num_blocks, H, N, C] uint8
    block_table_ptr,  # [B, max_blocks]
    seq_lens_ptr,  # [B]
    whole_lens_ptr,  # [B], including tokens of the tail, or None
    query_start_loc_ptr,  # [B + 1]
    partials,  # ``Partials``, base 2: [B, S, Q, Hq, D of V] and [B, S, Q, Hq] fp32
    original_query_ptr,  # [T, Hq, D], not rotated, with an offset
    offset_ptr,  # [G, H, D] fp32, taken off the cached keys, or None
    num_offsets,
    original,  # ``OriginalQuery``, or None
    num_splits,
    max_query_len,
    sliding_window,
    soft_cap,  # cap of scores, in base 2, or None; not with an offset
    stride_cache_block: tl.int64,
    stride_cache_head: tl.int64,
    stride_block_table,
    tiles_per_block,
    block_shift,
    block_multiplier,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
    CASE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
):
    """Program (b, h, s): split s // P of sequence b, KV head h.

    P programs share the queries, with BLOCK_H queries each.
    """
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size
    COLUMNS: tl.constexpr = LAYOUT.columns
    BLOCK_C: tl.constexpr = LAYOUT.block_c
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    if not CASE.multiple:
        max_query_len = 1
    query_blocks = tl.cdiv(max_query_len * GROUP, BLOCK_H)
    batch = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2) // query_blocks
    first_token, query_len, seq_len, first_end, lowest, first, last = _split_bounds(
        seq_lens_ptr,
        whole_lens_ptr,
        query_start_loc_ptr,
        batch,
        split,
        num_splits,
        max_query_len,
        sliding_window,
        BLOCK_N,
        CASE,
    )

    o_h = tl.program_id(2) % query_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < query_len * GROUP
    query_token = o_h // GROUP
    own_row = query_token * NUM_HEADS + kv_head * GROUP + o_h % GROUP
    row = first_token.to(tl.int64) * NUM_HEADS + own_row
    partial_row = (batch * num_splits + split) * (max_query_len * NUM_HEADS) + own_row
    p_lse = partials.lse + partial_row
    if first >= last:
        tl.store(p_lse, float("-inf"), mask=m_h)
        return

    o_column = tl.arange(0, BLOCK_C)
    columns = o_column, as_loaded(o_column, seq_lens_ptr, seq_len < 0)
    columns_v = _value_columns(columns, seq_lens_ptr, seq_len < 0, LAYOUT)
    p_query = query_ptr + o_column[:, None] + (row * HEAD_SIZE)[None, :]
    m_query = (o_column < COLUMNS)[:, None] & m_h[None, :]
    b_query = load_queries(p_query, m_query, LAYOUT)
    b_acc = _no_values(LAYOUT, BLOCK_H)
    query_scale = tl.load(query_scale_ptr + row, mask=m_h, other=0.0)
    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    # A sum for each index in a block of tokens; they are added after the loop.
    b_sum = tl.zeros([BLOCK_N // 2, BLOCK_H], tl.float32)
    if offset_ptr is not None:
        query_head = kv_head * GROUP + o_h % GROUP
        p_original = original_query_ptr + query_head * original.stride_head
        p_original += (first_token + query_token).to(tl.int64) * original.stride_token
        offset = offset_ptr + kv_head * HEAD_SIZE, num_offsets, m_h, original.factor
        gain = _first_token_gain(p_original, offset, first, NUM_KV_HEADS, LAYOUT)
        # The part that scores of the current segment lack. ``b_max`` is without it.
        missing = tl.zeros([BLOCK_H], tl.float32)
    cache_ptr = kv_cache_ptr + kv_head.to(tl.int64) * stride_cache_head
    table_ptr = block_table_ptr + batch * stride_block_table
    pages = cache_ptr, stride_cache_block, table_ptr
    divisor = tiles_per_block, block_shift, block_multiplier
    rows = query_token, first_end, sliding_window

    o_pair = tl.arange(0, BLOCK_N // 2)
    for start in tl.range(first, last, BLOCK_N, num_stages=NUM_STAGES):
        o_n, m_n = step_tokens(start, o_pair, lowest, last, CASE)
        # A step begins at the start of a tile.
        o_token = 2 * o_pair % TILE
        tile_ptr = step_tiles(
            start, o_pair, m_n[0] | m_n[1], pages, divisor, LAYOUT, CASE
        )
        # Nested, because the second condition is not a constant.
        if offset_ptr is not None:  # noqa: SIM102
            if (start == first) | (start % OFFSET_SEGMENT == 0):
                others = start // OFFSET_SEGMENT + 1
                now = _offset_scores(p_original, offset, others, NUM_KV_HEADS, LAYOUT)
                b_max += missing - now
                missing = now
        b_score = step_scores(
            b_query,
            query_scale,
            tile_ptr,
            o_n,
            o_token,
            m_n,
            columns,
            rows,
            soft_cap,
            LAYOUT,
            CASE,
        )
        if offset_ptr is not None:
            # Not a branch, because registers would spill there.
            is_first = (o_pair == 0)[:, None] & (start == 0)
            b_score = b_score[0] + tl.where(is_first, gain[None, :], 0.0), b_score[1]
        b_acc, b_sum, b_max = rescaled(b_acc, b_sum, b_max, b_score, CASE)
        b_acc, b_sum = attend(
            b_acc, b_sum, b_max, b_score, tile_ptr, o_token // 2, m_n, columns_v, LAYOUT
        )

    if offset_ptr is not None:
        b_max += missing
    _store_partial(
        partials, partial_row, b_acc, b_sum, b_max, m_h, columns_v[0], LAYOUT
    )
