# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment, misc"
"""The kernel of ``triton.decode``: attention of a split of a sequence."""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.triton.codec import (
    TILE,
    as_loaded,
    divide_by_block,
    key_scale,
    load_scales,
    load_side,
)
from vllm.v1.attention.ops.turbo.triton.operands import (
    key_operands,
    load_value_pairs,
    value_coordinate,
    value_operands,
    value_places,
)
from vllm.v1.attention.ops.turbo.triton.soft_cap import capped


@triton.jit
def _scores(
    query,  # NUM_STEPS of [C, H] fp16
    tile_ptr,  # [N]
    token,  # [N]
    column,  # [C]
    same_column,  # [C], from ``as_loaded``
    SCALES_OFFSET: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """K q^T of tokens, fp32 [N, H]."""
    tile_ptr = tile_ptr[:, None]
    token = token[:, None]
    column = column[None, :]
    same_column = same_column[None, :]
    # All that the table has may be read: what is not the sequence's is left out later.
    word, scale = load_side(
        tile_ptr,
        tile_ptr + SCALES_OFFSET,
        token,
        None,
        column,
        same_column,
        BITS,
        False,
        SCALE_WORDS,
        HEAD_SIZE,
        COLUMNS,
    )
    keys = key_operands(
        word, key_scale(scale), same_column, COEFFICIENTS, COLUMNS, HEAD_SIZE
    )
    scores = tl.zeros([token.shape[0], query[0].shape[1]], tl.float32)
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        scores = tl.dot(keys[i], query[i], scores)
    return scores


@triton.jit
def _offset_scores(
    p_query,  # [H] of vectors that are not rotated
    offset_ptr,  # [D] fp32
    mask,  # [H]
    factor,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What scores of a segment's keys lack, in base 2, fp32 [H]."""
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_SIZE
    offset = tl.load(offset_ptr + d, mask=inside, other=0.0)
    query_mask = mask[:, None] & inside[None, :]
    query = tl.load(p_query[:, None] + d[None, :], mask=query_mask, other=0.0)
    return factor * tl.sum(query.to(tl.float32) * offset[None, :], 1)


@triton.jit
def _add_values(
    accumulator,  # NUM_STEPS of [C, H] fp32
    weights,  # [N, H] fp16
    words,  # from ``load_value_pairs``
    tile_ptr,  # [N]
    pair,  # [N]
    inside,  # [N]
    column,  # [C]
    same_column,  # [C], from ``as_loaded``
    SCALES_OFFSET: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKEN: tl.constexpr,
):
    """Add V^T P of the even or (TOKEN 1) odd tokens of pairs."""
    # The cache holds any bytes where there is no token, but zero times infinity is
    # not zero.
    inside = inside[None, :]
    group, _, _ = value_places(column[:, None], COLUMNS, HEAD_SIZE)
    same_group, _, _ = value_places(same_column[:, None], COLUMNS, HEAD_SIZE)
    scale = load_scales(
        (tile_ptr + SCALES_OFFSET)[None, :],
        (2 * pair + TOKEN)[None, :],
        group,
        same_group,
        inside,
        inside & (column < COLUMNS)[:, None],
        HEAD_SIZE,
        SCALE_WORDS,
    )
    linear = scale * COEFFICIENTS[0]
    quadratic = scale * COEFFICIENTS[1]
    values = value_operands(words, linear, quadratic, TOKEN)  # [C, N]
    result = ()
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        result = result + (tl.dot(values[i], weights, accumulator[i]),)
    return result


@triton.jit(
    do_not_specialize=[
        "num_splits",
        "max_query_len",
        "tiles_per_block",
        "block_shift",
        "block_multiplier",
        "stride_block_table",
        "num_segments",
        "sliding_window",
    ],
    # A call begins with any of the batch's requests.
    do_not_specialize_on_alignment=[
        "query_scale_ptr",
        "raw_query_ptr",
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
    whole_lens_ptr,  # [B], with the tokens that are read elsewhere, or None
    query_start_loc_ptr,  # [B + 1]
    partial_ptr,  # [B, S, Q, Hq, D] fp32
    partial_lse_ptr,  # [B, S, Q, Hq] fp32, base 2
    raw_query_ptr,  # [T, Hq, D], not rotated, with an offset
    offset_ptr,  # [G, H, D] fp32, missing in the scores, or None
    num_segments,
    offset_factor,
    stride_raw_token,
    stride_raw_head,
    num_splits,
    max_query_len,
    sliding_window,
    soft_cap,  # of scores, in base 2, or None; not with an offset
    stride_cache_block: tl.int64,
    stride_cache_head: tl.int64,
    stride_block_table,
    tiles_per_block,
    block_shift,
    block_multiplier,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    VALUE_CODES_OFFSET: tl.constexpr,
    KEY_SCALES_OFFSET: tl.constexpr,
    VALUE_SCALES_OFFSET: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    KEY_COEFFICIENTS: tl.constexpr,
    VALUE_COEFFICIENTS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    STEP_IN_BLOCK: tl.constexpr,
    MULTIPLE: tl.constexpr,
    UNIFORM: tl.constexpr,
    WITH_NEWEST: tl.constexpr,
    SLIDING: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
):
    """Program (b, h, s): split s // P of sequence b, KV head h.

    P programs share the queries, BLOCK_H each. MULTIPLE: whether ``max_query_len`` is
    more than one. STEP_IN_BLOCK: whether a block has whole steps of BLOCK_N tokens.
    SLIDING: whether a query token sees ``sliding_window`` tokens at most. The query
    tokens themselves are left to the merge, if so asked.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    if not MULTIPLE:
        max_query_len = 1
    query_blocks = tl.cdiv(max_query_len * GROUP, BLOCK_H)
    batch = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2) // query_blocks
    if UNIFORM:
        first_token = batch * max_query_len
        query_len = max_query_len
    else:
        first_token = tl.load(query_start_loc_ptr + batch)
        query_len = tl.load(query_start_loc_ptr + batch + 1) - first_token
    seq_len = tl.load(seq_lens_ptr + batch)
    # Tokens up to a sequence's first query token, and itself.
    first_end = seq_len - query_len + 1
    if whole_lens_ptr is not None:
        first_end = tl.load(whole_lens_ptr + batch) - query_len + 1
    if WITH_NEWEST:
        seq_len -= query_len
    lowest = 0
    begin = 0
    if SLIDING:
        lowest = tl.maximum(first_end - sliding_window, 0)
        begin = lowest // BLOCK_N * BLOCK_N
    split_size = tl.cdiv(tl.cdiv(seq_len - begin, num_splits), BLOCK_N) * BLOCK_N
    first = begin + split * split_size
    last = tl.minimum(first + split_size, seq_len)

    h = tl.program_id(2) % query_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = h < query_len * GROUP
    query_token = h // GROUP
    own_row = query_token * NUM_HEADS + kv_head * GROUP + h % GROUP
    row = first_token.to(tl.int64) * NUM_HEADS + own_row
    partial_row = (batch * num_splits + split) * (max_query_len * NUM_HEADS) + own_row
    p_lse = partial_lse_ptr + partial_row
    if first >= last:
        tl.store(p_lse, float("-inf"), mask=head_mask)
        return

    column = tl.arange(0, BLOCK_C)
    same_column = as_loaded(column, seq_lens_ptr, seq_len < 0)
    p_query = query_ptr + column[:, None] + (row * HEAD_SIZE)[None, :]
    query_mask = (column < COLUMNS)[:, None] & head_mask[None, :]
    query = ()
    accumulator = ()
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        query = query + (tl.load(p_query + i * COLUMNS, mask=query_mask, other=0.0),)
        accumulator = accumulator + (tl.zeros([BLOCK_C, BLOCK_H], tl.float32),)
    query_scale = tl.load(query_scale_ptr + row, mask=head_mask, other=0.0)
    running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    # Of each place in a block, joined behind the loop.
    running_sum = tl.zeros([BLOCK_N // 2, BLOCK_H], tl.float32)
    if offset_ptr is not None:
        raw_row = (first_token + query_token).to(tl.int64) * stride_raw_token
        raw_row += (kv_head * GROUP + h % GROUP) * stride_raw_head
        # Of the segment's scores; the running maximum is without it.
        missing = tl.zeros([BLOCK_H], tl.float32)
    cache_ptr = kv_cache_ptr + kv_head.to(tl.int64) * stride_cache_head
    table_ptr = block_table_ptr + batch * stride_block_table

    pair_of_block = tl.arange(0, BLOCK_N // 2)
    for start in tl.range(first, last, BLOCK_N, num_stages=NUM_STAGES):
        n = start + 2 * pair_of_block
        inside = n < last, n + 1 < last
        if SLIDING:
            # Before, blocks may be another sequence's.
            inside = inside[0] & (n >= lowest), inside[1] & (n + 1 >= lowest)
        # Steps, and so their first tokens, begin where tiles do.
        token = 2 * pair_of_block % TILE
        tile = start // TILE
        if STEP_IN_BLOCK:
            place = tile // tiles_per_block
            block = tl.load(table_ptr + place)
            tile = tile - place * tiles_per_block + 2 * pair_of_block // TILE
        else:
            place, tile = divide_by_block(
                tile + 2 * pair_of_block // TILE,
                tiles_per_block,
                block_shift,
                block_multiplier,
            )
            block = tl.load(table_ptr + place, mask=inside[0] | inside[1], other=0)
        page_ptr = cache_ptr + block.to(tl.int64) * stride_cache_block
        tile_ptr = page_ptr + tile * TILE_BYTES
        pair = token // 2
        # Nested, for the second is no constant.
        if offset_ptr is not None:  # noqa: SIM102
            if (start == first) | (start % OFFSET_SEGMENT == 0):
                segment = tl.minimum(start // OFFSET_SEGMENT, num_segments - 1)
                p_offset = offset_ptr + (segment * NUM_KV_HEADS + kv_head) * HEAD_SIZE
                now = _offset_scores(
                    raw_query_ptr + raw_row,
                    p_offset,
                    head_mask,
                    offset_factor,
                    HEAD_SIZE,
                    BLOCK_D,
                )
                running_max += missing - now
                missing = now

        scores = ()
        for i in tl.static_range(2):
            product = _scores(
                query,
                tile_ptr,
                token + i,
                column,
                same_column,
                KEY_SCALES_OFFSET,
                KEY_COEFFICIENTS,
                KEY_BITS,
                SCALE_WORDS,
                HEAD_SIZE,
                COLUMNS,
            )
            product = product * query_scale[None, :]
            if soft_cap is not None:
                product = capped(product, soft_cap)
            product = tl.where(inside[i][:, None], product, float("-inf"))
            if MULTIPLE and (SLIDING or not WITH_NEWEST):
                end = first_end + query_token
                seen = (n + i)[:, None] < end[None, :]
                if SLIDING:
                    seen &= (n + i)[:, None] >= (end - sliding_window)[None, :]
                product = tl.where(seen, product, float("-inf"))
            scores = scores + (product,)
        new_max = tl.max(tl.maximum(scores[0], scores[1]), 0)
        new_max = tl.maximum(running_max, new_max)
        if SLIDING or (MULTIPLE and not WITH_NEWEST):
            # A query may see none of the tokens so far.
            new_max = tl.where(new_max == float("-inf"), -1e30, new_max)
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale[None, :]
        running_max = new_max
        rescaled = ()
        for i in tl.static_range(HEAD_SIZE // COLUMNS):
            rescaled = rescaled + (accumulator[i] * rescale[None, :],)
        accumulator = rescaled

        mask = (column < COLUMNS)[:, None]
        if BLOCK_C == COLUMNS:
            mask = None
        words = load_value_pairs(
            (tile_ptr + VALUE_CODES_OFFSET)[None, :],
            pair[None, :],
            column[:, None],
            same_column[:, None],
            mask,
            HEAD_SIZE,
            COLUMNS,
            VALUE_BITS,
        )
        for i in tl.static_range(2):
            weights = tl.exp2(scores[i] - new_max[None, :])
            running_sum += weights
            accumulator = _add_values(
                accumulator,
                weights.to(tl.float16),
                words,
                tile_ptr,
                pair,
                inside[i],
                column,
                same_column,
                VALUE_SCALES_OFFSET,
                VALUE_COEFFICIENTS,
                SCALE_WORDS,
                HEAD_SIZE,
                COLUMNS,
                i,
            )

    total = tl.sum(running_sum, 0)
    if offset_ptr is not None:
        running_max += missing
    tl.store(p_lse, running_max + tl.log2(total), mask=head_mask)
    p_partial = partial_ptr + (partial_row * HEAD_SIZE)[None, :]
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        coordinate = value_coordinate(column, i, COLUMNS, HEAD_SIZE)[:, None]
        result = accumulator[i] / total[None, :]
        tl.store(p_partial + coordinate, result, mask=query_mask)
