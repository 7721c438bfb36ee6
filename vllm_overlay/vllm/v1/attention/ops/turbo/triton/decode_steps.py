# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment, misc"
"""The phases of a step of ``triton.decode_kernel``.

A step has N tokens, as pairs: N / 2 even ones and N / 2 odd ones. ``columns`` has the
columns of a step of coordinates, [C], and the same numbers from ``codec.as_loaded``. C
is of K where scores are computed, and of V where values are added.
``rows`` determines the tokens that rows see: their query tokens, [H], the number of
tokens that the first of these sees, and the most that each sees. Names of blocks of
values begin with ``b_``, of indices with ``o_``, of masks with ``m_``.
"""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.triton.codec import key_scale, load_scales, load_side
from vllm.v1.attention.ops.turbo.triton.operands import (
    key_operands,
    load_value_pairs,
    value_operands,
    value_places,
)
from vllm.v1.attention.ops.turbo.triton.pages import TILE, divide_by_block
from vllm.v1.attention.ops.turbo.triton.soft_cap import capped


@triton.jit
def load_queries(
    p_query,  # [C, H]
    m_query,  # [C, H]
    LAYOUT: tl.constexpr,
):
    """Load queries by steps of coordinates: NUM_STEPS of fp16 [C, H]."""
    b_query = ()
    for i in tl.static_range(LAYOUT.head_size // LAYOUT.columns):
        part = tl.load(p_query + i * LAYOUT.columns, mask=m_query, other=0.0)
        b_query = b_query + (part,)
    return b_query


@triton.jit
def step_tokens(
    start,
    o_pair,  # [N / 2]
    lowest,
    last,
    CASE: tl.constexpr,
):
    """A step's even tokens, [N / 2], and masks of even and odd ones, 2 of [N / 2]."""
    o_n = start + 2 * o_pair
    m_n = o_n < last, o_n + 1 < last
    if CASE.sliding:
        # Blocks before ``lowest`` may belong to another sequence.
        m_n = m_n[0] & (o_n >= lowest), m_n[1] & (o_n + 1 >= lowest)
    return o_n, m_n


@triton.jit
def step_tiles(
    start,
    o_pair,  # [N / 2]
    m_pair,  # [N / 2], whether a token of the pair is read
    pages,  # pointer to the KV head's pages, stride of a block, sequence's block table
    divisor,  # from ``pages.block_divisor``
    LAYOUT: tl.constexpr,
    CASE: tl.constexpr,
):
    """Pointers to the tiles of a step's pairs of tokens."""
    cache_ptr, stride_cache_block, table_ptr = pages
    tile = start // TILE
    if CASE.step_in_block:
        place = tile // divisor[0]
        block = tl.load(table_ptr + place)
        tile = tile - place * divisor[0] + 2 * o_pair // TILE
    else:
        place, tile = divide_by_block(tile + 2 * o_pair // TILE, *divisor)
        block = tl.load(table_ptr + place, mask=m_pair, other=0)
    page_ptr = cache_ptr + block.to(tl.int64) * stride_cache_block
    return page_ptr + tile * LAYOUT.tile_bytes


@triton.jit
def _scores(
    b_query,  # NUM_STEPS of [C, H] fp16
    tile_ptr,  # [N]
    o_token,  # [N], index in the tile
    columns,
    LAYOUT: tl.constexpr,
):
    """K q^T of tokens, fp32 [N, H]."""
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size
    COLUMNS: tl.constexpr = LAYOUT.columns
    COEFFICIENTS: tl.constexpr = LAYOUT.key_coefficients
    tile_ptr = tile_ptr[:, None]
    o_token = o_token[:, None]
    o_column = columns[0][None, :]
    same_column = columns[1][None, :]
    # Any block of the table may be read: scores of other tokens are masked later.
    word, b_scale = load_side(
        tile_ptr, o_token, None, o_column, same_column, LAYOUT, False
    )
    b_key = key_operands(
        word,
        key_scale(b_scale),
        same_column,
        COEFFICIENTS,
        COLUMNS,
        HEAD_SIZE,
    )
    b_score = tl.zeros([o_token.shape[0], b_query[0].shape[1]], tl.float32)
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        b_score = tl.dot(b_key[i], b_query[i], b_score)
    return b_score


@triton.jit
def _seen_scores(
    b_score,  # [N, H] of tokens and rows
    o_n,  # [N]
    m_n,  # [N], which tokens are read
    rows,
    soft_cap,
    CASE: tl.constexpr,
):
    """Capped scores, -inf where a row does not see the token."""
    if soft_cap is not None:
        b_score = capped(b_score, soft_cap)
    b_score = tl.where(m_n[:, None], b_score, float("-inf"))
    if CASE.multiple and (CASE.sliding or not CASE.with_raw):
        query_token, first_end, sliding_window = rows
        end = first_end + query_token
        seen = o_n[:, None] < end[None, :]
        if CASE.sliding:
            seen &= o_n[:, None] >= (end - sliding_window)[None, :]
        b_score = tl.where(seen, b_score, float("-inf"))
    return b_score


@triton.jit
def step_scores(
    b_query,  # NUM_STEPS of [C, H] fp16
    query_scale,  # [H]
    tile_ptr,  # [N / 2]
    o_n,  # [N / 2], even tokens
    o_token,  # [N / 2], their indices in tiles
    m_n,  # 2 of [N / 2], masks of even and odd tokens
    columns,
    rows,
    soft_cap,  # in base 2, or None
    LAYOUT: tl.constexpr,
    CASE: tl.constexpr,
):
    """Scores of even and odd tokens, in base 2 and without offsets: 2 of [N / 2, H]."""
    b_score = ()
    for i in tl.static_range(2):
        product = _scores(b_query, tile_ptr, o_token + i, columns, LAYOUT)
        product = product * query_scale[None, :]
        product = _seen_scores(product, o_n + i, m_n[i], rows, soft_cap, CASE)
        b_score = b_score + (product,)
    return b_score


@triton.jit
def rescaled(
    b_acc,  # NUM_STEPS of [C, H] fp32
    b_sum,  # [N / 2, H]
    b_max,  # [H]
    b_score,  # 2 of [N / 2, H]
    CASE: tl.constexpr,
):
    """An online softmax's sums, rescaled to the largest score including a step's."""
    new_max = tl.max(tl.maximum(b_score[0], b_score[1]), 0)
    new_max = tl.maximum(b_max, new_max)
    if CASE.sliding or (CASE.multiple and not CASE.with_raw):
        # A query may have seen no token so far.
        new_max = tl.where(new_max == float("-inf"), -1e30, new_max)
    rescale = tl.exp2(b_max - new_max)
    b_sum = b_sum * rescale[None, :]
    b_rescaled = ()
    for i in tl.static_range(len(b_acc)):
        b_rescaled = b_rescaled + (b_acc[i] * rescale[None, :],)
    return b_rescaled, b_sum, new_max


@triton.jit
def _add_values(
    b_acc,  # NUM_STEPS of [C, H] fp32
    b_weight,  # [N / 2, H] fp16
    words,  # from ``load_value_pairs``
    tile_ptr,  # [N / 2]
    o_pair,  # [N / 2], in the tile
    m_n,  # [N / 2]
    columns,
    LAYOUT: tl.constexpr,
    TOKEN: tl.constexpr,
):
    """Add V^T P of the even (TOKEN 0) or odd (TOKEN 1) tokens of pairs."""
    COLUMNS: tl.constexpr = LAYOUT.columns_v
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size_v
    SCALE_WORDS: tl.constexpr = LAYOUT.scale_words_v
    o_column, same_column = columns
    # Where there is no token the cache may hold infinity, and zero times infinity is
    # not zero.
    m_n = m_n[None, :]
    group, _, _ = value_places(o_column[:, None], COLUMNS, HEAD_SIZE)
    same_group, _, _ = value_places(same_column[:, None], COLUMNS, HEAD_SIZE)
    b_scale = load_scales(
        (tile_ptr + LAYOUT.value_scales_offset)[None, :],
        (2 * o_pair + TOKEN)[None, :],
        group,
        same_group,
        m_n,
        m_n & (o_column < COLUMNS)[:, None],
        HEAD_SIZE,
        SCALE_WORDS,
    )
    linear = b_scale * LAYOUT.value_coefficients[0]
    quadratic = b_scale * LAYOUT.value_coefficients[1]
    b_value = value_operands(words, linear, quadratic, TOKEN)  # [C, N / 2]
    result = ()
    for i in tl.static_range(len(b_acc)):
        result = result + (tl.dot(b_value[i], b_weight, b_acc[i]),)
    return result


@triton.jit
def attend(
    b_acc,  # NUM_STEPS of [C, H] fp32
    b_sum,  # [N / 2, H]
    b_max,  # [H]
    b_score,  # 2 of [N / 2, H]
    tile_ptr,  # [N / 2]
    o_pair,  # [N / 2], in the tile
    m_n,  # 2 of [N / 2]
    columns,
    LAYOUT: tl.constexpr,
):
    """Add a step's weights and weighted values to the sums, relative to ``b_max``."""
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size_v
    COLUMNS: tl.constexpr = LAYOUT.columns_v
    BITS: tl.constexpr = LAYOUT.value_bits
    o_column, same_column = columns
    mask = (o_column < COLUMNS)[:, None]
    if LAYOUT.block_c_v == COLUMNS:
        mask = None
    words = load_value_pairs(
        (tile_ptr + LAYOUT.value_codes_offset)[None, :],
        o_pair[None, :],
        o_column[:, None],
        same_column[:, None],
        mask,
        HEAD_SIZE,
        COLUMNS,
        BITS,
    )
    for i in tl.static_range(2):
        b_weight = tl.exp2(b_score[i] - b_max[None, :])
        b_sum += b_weight
        b_acc = _add_values(
            b_acc,
            b_weight.to(tl.float16),
            words,
            tile_ptr,
            o_pair,
            m_n[i],
            columns,
            LAYOUT,
            i,
        )
    return b_acc, b_sum
