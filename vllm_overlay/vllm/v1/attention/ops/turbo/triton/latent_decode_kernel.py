# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment"
"""The kernel of ``triton.latent_decode``: attention to a split of a sequence.

Names of blocks of values begin with ``b_``, of indices with ``o_``, of masks with
``m_``.
"""

from typing import NamedTuple

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.triton.latent_codec import (
    ROPE_UNIT,
    load_latents,
    load_ropes,
)
from vllm.v1.attention.ops.turbo.triton.pages import TILE, divide_by_block
from vllm.v1.attention.ops.turbo.triton.scales import exponent_of, power_of_two


class LatentStrides(NamedTuple):
    """Strides between tokens, and between heads of a token, in elements."""

    query_token: int
    query_head: int
    rope_token: int
    rope_head: int


@triton.jit
def _largest(x_ptr, m_h, SIZE: tl.constexpr):
    """Largest magnitudes of rows, fp32 [H]."""
    x = tl.load(
        x_ptr[:, None] + tl.arange(0, SIZE)[None, :], mask=m_h[:, None], other=0.0
    )
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def _load_half(
    x_ptr,  # [H] pointers to rows
    m_h,  # [H]
    factor,  # [H] fp32
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Coordinates of rows, times a factor, fp16 [H, SIZE]."""
    c = tl.arange(0, SIZE)[None, :] + FIRST
    x = tl.load(x_ptr[:, None] + c, mask=m_h[:, None], other=0.0)
    return (x.to(tl.float32) * factor[:, None]).to(tl.float16)


@triton.jit
def _load_queries(
    query_ptr,  # [T, Hq, L]
    rope_ptr,  # [T, Hq, R], or None
    strides,  # ``LatentStrides``
    token,  # [H]
    head,  # [H]
    m_h,  # [H]
    score_factor,
    LAYOUT: tl.constexpr,
):
    """Load queries in fp16, rows scaled to near 1 by powers of two that are normal.

    They are scaled because bf16 has numbers that fp16 does not have.

    Returns:
        Latent parts by chunks, NUM_CHUNKS of [H, CHUNK]; rotary parts, [H, R]; and the
        factors that turn products into scores, fp32 [H].

    """
    RANK: tl.constexpr = LAYOUT.rank
    CHUNK: tl.constexpr = LAYOUT.chunk
    ROPE: tl.constexpr = LAYOUT.rope
    p_query = query_ptr + token * strides.query_token + head * strides.query_head
    largest = _largest(p_query, m_h, RANK)
    if ROPE > 0:
        p_rope = rope_ptr + token * strides.rope_token + head * strides.rope_head
        largest = tl.maximum(largest, _largest(p_rope, m_h, ROPE))
    exponent = tl.minimum(tl.maximum(exponent_of(largest), -126), 126)
    to_unit = power_of_two(-exponent)
    factor = power_of_two(exponent) * score_factor
    b_query = ()
    for i in tl.static_range(RANK // CHUNK):
        b_query = b_query + (_load_half(p_query, m_h, to_unit, i * CHUNK, CHUNK),)
    b_rope = to_unit  # not read
    if ROPE > 0:
        b_rope = _load_half(p_rope, m_h, to_unit * ROPE_UNIT, 0, ROPE)
    return b_query, b_rope, factor


@triton.jit
def _scores(
    b_query,  # NUM_CHUNKS of [H, CHUNK] fp16
    b_rope,  # [H, R] fp16, or None
    tile_ptr,  # [N]
    o_token,  # [N], index in the tile
    LAYOUT: tl.constexpr,
):
    """Products of rows and tokens, fp32 [H, N], and latents, NUM_CHUNKS of [N, CHUNK].

    Latents are fp16.
    """
    b_score = tl.zeros([b_query[0].shape[0], o_token.shape[0]], tl.float32)
    b_latent = ()
    for i in tl.static_range(len(b_query)):
        latent = load_latents(tile_ptr, o_token, i, LAYOUT)
        b_score = tl.dot(b_query[i], tl.trans(latent), b_score)
        b_latent = b_latent + (latent,)
    if LAYOUT.rope > 0:
        b_key = load_ropes(tile_ptr, o_token, LAYOUT)
        b_score = tl.dot(b_rope, tl.trans(b_key), b_score)
    return b_score, b_latent


@triton.jit
def _attend(
    b_acc,  # NUM_CHUNKS of [H, CHUNK] fp32
    b_sum,  # [H]
    b_max,  # [H]
    b_score,  # [H, N]
    b_latent,  # NUM_CHUNKS of [N, CHUNK] fp16
    MULTIPLE: tl.constexpr,
):
    """Add a step's tokens to an online softmax's sums."""
    new_max = tl.maximum(b_max, tl.max(b_score, 1))
    if MULTIPLE:
        # A row may have seen no token so far.
        new_max = tl.where(new_max == float("-inf"), -1e30, new_max)
    rescale = tl.exp2(b_max - new_max)
    b_weight = tl.exp2(b_score - new_max[:, None])
    b_sum = b_sum * rescale + tl.sum(b_weight, 1)
    b_weight = b_weight.to(tl.float16)
    added = ()
    for i in tl.static_range(len(b_acc)):
        rescaled = b_acc[i] * rescale[:, None]
        added = added + (tl.dot(b_weight, b_latent[i], rescaled),)
    return added, b_sum, new_max


@triton.jit(
    do_not_specialize=[
        "num_splits",
        "max_query_len",
        "tiles_per_block",
        "block_shift",
        "block_multiplier",
        "stride_block_table",
    ],
    # A call may begin at any request of the batch.
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seq_lens_ptr",
        "query_start_loc_ptr",
    ],
)
def decode_latent_kernel(
    query_ptr,  # [T, Hq, L]
    query_rope_ptr,  # [T, Hq, R], or None
    kv_cache_ptr,  # [num_blocks, N, C] uint8
    block_table_ptr,  # [B, max_blocks], or [B, K] slots if SPARSE
    seq_lens_ptr,  # [B]
    query_start_loc_ptr,  # [B + 1]
    partials,  # ``Partials``, base 2: [B, S, Q, Hq, L] and [B, S, Q, Hq] fp32
    score_factor,
    num_splits,
    max_query_len,
    strides,  # ``LatentStrides``
    stride_cache_block: tl.int64,
    stride_block_table,
    tiles_per_block,
    block_shift,
    block_multiplier,
    NUM_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    MULTIPLE: tl.constexpr,
    UNIFORM: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Program (h, b, s): rows [h * BLOCK_H, ...) of sequence b, split s.

    MULTIPLE: whether ``max_query_len`` is more than one.
    """
    RANK: tl.constexpr = LAYOUT.rank
    CHUNK: tl.constexpr = LAYOUT.chunk
    if not MULTIPLE:
        max_query_len = 1
    batch = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    if UNIFORM:
        first_token = batch * max_query_len
        query_len = max_query_len
    else:
        first_token = tl.load(query_start_loc_ptr + batch).to(tl.int64)
        query_len = tl.load(query_start_loc_ptr + batch + 1) - first_token.to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + batch)
    split_size = tl.cdiv(tl.cdiv(seq_len, num_splits), BLOCK_N) * BLOCK_N
    first = split * split_size
    last = tl.minimum(first + split_size, seq_len)

    o_h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < query_len * NUM_HEADS
    query_token = o_h // NUM_HEADS
    # The tokens that a row sees, up to its own.
    end = seq_len - query_len + 1 + query_token
    partial_row = (batch * num_splits + split) * (max_query_len * NUM_HEADS) + o_h
    p_lse = partials.lse + partial_row
    # Tokens that no row of the program sees are not read.
    last_token = (tl.program_id(0) * BLOCK_H + BLOCK_H - 1) // NUM_HEADS
    last = tl.minimum(last, seq_len - query_len + 1 + last_token)
    if first >= last:
        tl.store(p_lse, float("-inf"), mask=m_h)
        return

    token = first_token + query_token
    head = o_h % NUM_HEADS
    b_query, b_rope, factor = _load_queries(
        query_ptr, query_rope_ptr, strides, token, head, m_h, score_factor, LAYOUT
    )
    b_acc = ()
    for _ in tl.static_range(len(b_query)):
        b_acc = b_acc + (tl.zeros([BLOCK_H, CHUNK], tl.float32),)
    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    table_ptr = block_table_ptr + batch * stride_block_table

    for start in tl.range(first, last, BLOCK_N, num_stages=NUM_STAGES):
        o_n = start + tl.arange(0, BLOCK_N)
        # Past the end the last token is repeated, because recycled pages may hold NaN.
        own = tl.minimum(o_n, last - 1)
        if SPARSE:
            own = tl.load(table_ptr + own)
        block, tile = divide_by_block(
            own // TILE, tiles_per_block, block_shift, block_multiplier
        )
        if not SPARSE:
            block = tl.load(table_ptr + block)
        block = block.to(tl.int64)
        tile_ptr = kv_cache_ptr + block * stride_cache_block + tile * LAYOUT.tile_bytes
        b_score, b_latent = _scores(b_query, b_rope, tile_ptr, own % TILE, LAYOUT)
        b_score = b_score * factor[:, None]
        seen = (o_n < last)[None, :]
        if MULTIPLE:
            seen = seen & (o_n[None, :] < end[:, None])
        b_score = tl.where(seen, b_score, float("-inf"))
        b_acc, b_sum, b_max = _attend(b_acc, b_sum, b_max, b_score, b_latent, MULTIPLE)

    tl.store(p_lse, b_max + tl.log2(b_sum), mask=m_h)
    o_c = tl.arange(0, CHUNK)[None, :]
    p_partial = partials.output + (partial_row * RANK)[:, None] + o_c
    for i in tl.static_range(len(b_acc)):
        b_output = b_acc[i] / b_sum[:, None]
        tl.store(p_partial + i * CHUNK, b_output, mask=m_h[:, None])
