# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment, misc"
"""The kernels of ``triton.decode``.

A step has N tokens, as pairs: N / 2 even ones and N / 2 odd ones. Names of blocks of
values begin with ``b_``, of indices with ``o_``, of masks with ``m_``. Softmax is in
base 2.
"""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.triton.codec import TILE
from vllm.v1.attention.ops.turbo.triton.operands import (
    as_loaded,
    load_keys,
    load_value_pairs,
    load_values,
    value_coordinate,
)

# The most splits of a sequence.
MAX_KV_SPLITS = 64
_MAX_SPLITS = tl.constexpr(MAX_KV_SPLITS)


@triton.jit
def _step_tiles(
    start,
    o_pair,  # [N / 2]
    m_pair,  # [N / 2], whether a token of the pair is read
    pages,  # pointer to the KV head's pages, stride of a block, sequence's block table
    tiles_per_block,
    LAYOUT: tl.constexpr,
    STEP_IN_BLOCK: tl.constexpr,
):
    """Pointers to the tiles of a step's pairs of tokens."""
    cache_ptr, stride_cache_block, table_ptr = pages
    tile = start // TILE
    if STEP_IN_BLOCK:
        block = tl.load(table_ptr + tile // tiles_per_block)
        tile = tile % tiles_per_block + 2 * o_pair // TILE
    else:
        tile = tile + 2 * o_pair // TILE
        block = tl.load(table_ptr + tile // tiles_per_block, mask=m_pair, other=0)
        tile = tile % tiles_per_block
    page_ptr = cache_ptr + block.to(tl.int64) * stride_cache_block
    return page_ptr + tile * LAYOUT.tile_bytes


@triton.jit
def _plus_products(b_acc, b_value, b_weight):
    result = ()
    for i in tl.static_range(len(b_acc)):
        result = result + (tl.dot(b_value[i], b_weight, b_acc[i]),)
    return result


@triton.jit
def _rescaled(b_acc, rescale):
    result = ()
    for i in tl.static_range(len(b_acc)):
        result = result + (b_acc[i] * rescale[None, :],)
    return result


@triton.jit(
    do_not_specialize=[
        "num_splits",
        "sliding_window",
        "tiles_per_block",
        "stride_block_table",
    ],
    # A call may begin at any request of the batch.
    do_not_specialize_on_alignment=["block_table_ptr", "seq_lens_ptr"],
)
def decode_kernel(
    query_ptr,  # [B, Hq, D] fp32, rotated, with the factor of scores in base 2
    kv_cache_ptr,  # [num_blocks, H, N, C] uint8
    block_table_ptr,  # [B, max_blocks]
    seq_lens_ptr,  # [B]
    partial_ptr,  # [B, S, Hq, D] fp32
    lse_ptr,  # [B, S, Hq] fp32, base 2
    num_splits,
    sliding_window,
    stride_cache_block: tl.int64,
    stride_cache_head: tl.int64,
    stride_block_table,
    tiles_per_block,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
    STEP_IN_BLOCK: tl.constexpr,
    SLIDING: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (b, h, s): split s of sequence b, KV head h."""
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size
    COLUMNS: tl.constexpr = LAYOUT.columns
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    batch = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + batch)
    lowest = 0
    begin = 0
    if SLIDING:
        lowest = tl.maximum(seq_len - sliding_window, 0)
        begin = lowest // BLOCK_N * BLOCK_N
    split_size = tl.cdiv(tl.cdiv(seq_len - begin, num_splits), BLOCK_N) * BLOCK_N
    first = begin + split * split_size
    last = tl.minimum(first + split_size, seq_len)

    o_h = tl.arange(0, BLOCK_H)
    m_h = o_h < GROUP
    row = batch * NUM_HEADS + kv_head * GROUP + o_h
    partial_row = (batch * num_splits + split) * NUM_HEADS + kv_head * GROUP + o_h
    if first >= last:
        tl.store(lse_ptr + partial_row, float("-inf"), mask=m_h)
        return

    o_column = tl.arange(0, COLUMNS)
    columns = o_column, as_loaded(o_column, seq_lens_ptr, seq_len < 0)
    p_query = query_ptr + o_column[:, None] + (row * HEAD_SIZE)[None, :]
    b_query = ()
    b_acc = ()
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        part = tl.load(p_query + i * COLUMNS, mask=m_h[None, :], other=0.0)
        b_query = b_query + (part.to(tl.float16),)
        b_acc = b_acc + (tl.zeros([COLUMNS, BLOCK_H], tl.float32),)
    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    # A sum for each index in a block of tokens; they are added after the loop.
    b_sum = tl.zeros([BLOCK_N // 2, BLOCK_H], tl.float32)
    cache_ptr = kv_cache_ptr + kv_head.to(tl.int64) * stride_cache_head
    pages = cache_ptr, stride_cache_block, block_table_ptr + batch * stride_block_table

    o_pair = tl.arange(0, BLOCK_N // 2)
    for start in tl.range(first, last, BLOCK_N, num_stages=NUM_STAGES):
        o_n = start + 2 * o_pair
        m_n = o_n < last, o_n + 1 < last
        if SLIDING:
            # Blocks before ``lowest`` may belong to another sequence.
            m_n = m_n[0] & (o_n >= lowest), m_n[1] & (o_n + 1 >= lowest)
        tile_ptr = _step_tiles(
            start,
            o_pair,
            m_n[0] | m_n[1],
            pages,
            tiles_per_block,
            LAYOUT,
            STEP_IN_BLOCK,
        )
        # A step begins at the start of a tile.
        o_token = 2 * o_pair % TILE
        b_score = ()
        for i in tl.static_range(2):
            # Any block of the table may be read: scores of other tokens are masked.
            b_key = load_keys(tile_ptr, o_token + i, columns, LAYOUT)
            product = tl.zeros([BLOCK_N // 2, BLOCK_H], tl.float32)
            for j in tl.static_range(len(b_key)):
                product = tl.dot(b_key[j], b_query[j], product)
            product = tl.where(m_n[i][:, None], product, float("-inf"))
            b_score = b_score + (product,)
        # Each step has a token that is seen.
        new_max = tl.maximum(b_max, tl.max(tl.maximum(b_score[0], b_score[1]), 0))
        rescale = tl.exp2(b_max - new_max)
        b_max = new_max
        b_sum = b_sum * rescale[None, :]
        b_acc = _rescaled(b_acc, rescale)
        words = load_value_pairs(tile_ptr, o_token // 2, columns, LAYOUT)
        for i in tl.static_range(2):
            b_weight = tl.exp2(b_score[i] - b_max[None, :])
            b_sum += b_weight
            # Where there is no token the cache may hold infinity, and zero times
            # infinity is not zero.
            b_value = load_values(
                words, tile_ptr, o_token // 2, m_n[i], columns, LAYOUT, i
            )
            b_acc = _plus_products(b_acc, b_value, b_weight.to(tl.float16))

    total = tl.sum(b_sum, 0)
    tl.store(lse_ptr + partial_row, b_max + tl.log2(total), mask=m_h)
    p_partial = partial_ptr + (partial_row * HEAD_SIZE)[None, :]
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        o_d = value_coordinate(o_column, i, COLUMNS, HEAD_SIZE)[:, None]
        tl.store(p_partial + o_d, b_acc[i] / total[None, :], mask=m_h[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    partial_ptr,  # [B, S, Hq, D] fp32
    lse_ptr,  # [B, S, Hq] fp32, base 2
    output_ptr,  # [B, Hq, D] fp32, written
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (b, h): the outputs of a head's splits, weighted; zero without tokens."""
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    o_s = tl.arange(0, _MAX_SPLITS)
    p_lse = lse_ptr + (batch * num_splits + o_s) * NUM_HEADS + head
    b_lse = tl.load(p_lse, mask=o_s < num_splits, other=float("-inf"))
    largest = tl.max(b_lse, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(b_lse - largest), 0)
    o_d = tl.arange(0, HEAD_SIZE)
    b_output = tl.zeros([HEAD_SIZE], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        o_block = first + tl.arange(0, BLOCK_S)
        row = (batch * num_splits + o_block) * NUM_HEADS + head
        m_block = o_block < num_splits
        b_block = tl.load(lse_ptr + row, mask=m_block, other=float("-inf"))
        weight = tl.exp2(b_block - largest)
        # Splits without tokens were not written. Not "> 0", so that NaN is kept.
        m_partial = (weight != 0)[:, None]
        p_partial = partial_ptr + (row * HEAD_SIZE)[:, None] + o_d[None, :]
        b_partial = tl.load(p_partial, mask=m_partial, other=0.0)
        b_output += tl.sum(b_partial * weight[:, None], 0)
    b_output = tl.where(total != 0, b_output / total, 0.0)
    p_output = output_ptr + (batch * NUM_HEADS + head) * HEAD_SIZE + o_d
    tl.store(p_output, b_output)
