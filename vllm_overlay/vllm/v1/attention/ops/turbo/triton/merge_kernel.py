# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kernel of ``triton.merge``.

Three tuples are passed on to helpers:

* ``queries``: vectors, [R, D]; the mask of coordinates, [R, D]; the coordinates, [D];
  for each row, [R], its sequence's first token, its KV head, its index among the
  sequence's query tokens, and the number of padding tokens among these; the most tokens
  that a row sees.
* ``raw``: pointers to K and V, ``MergeStrides``, ``ScoreFactors``, and the most
  raw tokens of a sequence.
* ``values``: the mask of V's coordinates, [R, D], and these, [D].
* ``splits``: ``Partials``; each row's first partial result, [R]; rows between a split
  and the next; the number of splits; the mask of rows, [R].

Names of blocks of values begin with ``b_``, of indices with ``o_``, of masks with
``m_``.
"""

from typing import NamedTuple

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.triton.soft_cap import capped
from vllm.v1.attention.ops.turbo.triton.tail_attention import attend_to_tail

# Rows of a program.
BLOCK_R = 16
_BLOCK_R = tl.constexpr(BLOCK_R)
_MAX_SPLITS = tl.constexpr(interface.MAX_KV_SPLITS)
_BLOCK_S = tl.constexpr(8)
_BLOCK_K = tl.constexpr(32)
_PRECISION = tl.constexpr("tf32x3" if current_platform.is_cuda() else "ieee")
_LOG2_E = tl.constexpr(interface.LOG2_E)


class ScoreFactors(NamedTuple):
    """The rule that turns products into scores in base 2.

    Attributes:
        factor: The factor of products.
        soft_cap: The cap that bounds scores by a tanh, not with an offset; None for
            none.

    """

    factor: float
    soft_cap: float | None


class MergeStrides(NamedTuple):
    """Strides between tokens, and between heads of a token, in elements."""

    output_token: int
    output_head: int
    query_token: int
    query_head: int
    key_token: int
    key_head: int
    value_token: int
    value_head: int


class TailPlanes(NamedTuple):
    """The layout of a tail's rows.

    Attributes:
        value: Bytes in a page before V's codes; K's are at 0.
        key_scale: Bytes before K's scales.
        value_scale: Bytes before V's scales.
        stride_block: Bytes between pages.
        stride_head: Bytes between KV heads of a page.

    """

    value: int
    key_scale: int
    value_scale: int
    stride_block: int
    stride_head: int


class MergeSizes(NamedTuple):
    """Sizes of vectors, as the argument SIZES of kernels.

    Attributes:
        head_size: D of q and K.
        head_size_v: D of V and of the output.
        block_d: ``head_size``, padded to a power of two.
        block_d_v: ``head_size_v``, padded likewise.

    """

    head_size: int
    head_size_v: int
    block_d: int
    block_d_v: int


class MergeCase(NamedTuple):
    """The cases that the kernel is compiled for, besides sizes.

    Attributes:
        multiple: Whether a sequence may have more than one query token.
        uniform: Whether all sequences have the same number of query tokens.
        with_raw: Whether the splits leave out the query tokens themselves.

    """

    multiple: bool
    uniform: bool
    with_raw: bool


@triton.jit
def _program_rows(
    query_start_loc_ptr,
    num_rows,
    max_query_len,
    NUM_HEADS: tl.constexpr,
    CASE: tl.constexpr,
):
    """The program's rows.

    Returns:
        The rows, [R]; the mask of those that exist, and of those that have a query
        token. For each row its sequence, its token's index in this, the sequence's
        first token and number of query tokens.

    """
    row = tl.program_id(0).to(tl.int64) * _BLOCK_R + tl.arange(0, _BLOCK_R)
    m_slot = row < num_rows
    m_row = m_slot
    place = (row // NUM_HEADS).to(tl.int32)
    sequence = (place // max_query_len).to(tl.int64)
    place = place % max_query_len
    if CASE.uniform:
        first_token = sequence * max_query_len
        query_len = max_query_len
    else:
        p_start = query_start_loc_ptr + sequence
        first_token = tl.load(p_start, mask=m_row, other=0).to(tl.int64)
        query_len = tl.load(p_start + 1, mask=m_row, other=0) - first_token
        m_row = m_row & (place < query_len)
    return row, m_slot, m_row, sequence, place, first_token, query_len


@triton.jit
def _raw_scores(
    queries,
    raw,
    other,  # a token's index among its sequence's raw ones
):
    """Scores of rows and one of their sequences' raw tokens, fp32 [R]."""
    b_query, m_query, o_d, first_token, kv_head, place, num_missing, most = queries
    key_ptr, _, strides, scoring, _ = raw
    in_window = place - other < most
    seen = (other >= num_missing) & (other <= place) & in_window
    key_row = (first_token + other) * strides.key_token + kv_head * strides.key_head
    p_key = key_ptr + key_row[:, None] + o_d[None, :]
    # Padding may hold NaN.
    b_key = tl.load(p_key, mask=m_query & seen[:, None], other=0.0).to(tl.float32)
    score = scoring.factor * tl.sum(b_query * b_key, 1)
    if scoring.soft_cap is not None:
        score = capped(score, scoring.soft_cap)
    return tl.where(seen, score, float("-inf"))


@triton.jit
def _largest_raw_score(
    largest,  # [R]
    queries,
    raw,
):
    """The largest score, [R], of those so far and of the raw tokens."""
    max_query_len = raw[4]
    for other in range(max_query_len):
        largest = tl.maximum(largest, _raw_scores(queries, raw, other))
    return largest


@triton.jit
def _add_raw(
    total,  # [R]
    b_output,  # [R, D]
    largest,  # [R]
    queries,
    raw,
    values,
):
    """Add the raw tokens to the sums of weights and of weighted values.

    Scores are computed a second time, because their number is not known when the kernel
    is compiled.
    """
    _, _, _, first_token, kv_head, _, _, _ = queries
    m_values, o_d = values
    _, value_ptr, strides, _, max_query_len = raw
    for other in range(max_query_len):
        weight = tl.exp2(_raw_scores(queries, raw, other) - largest)
        total += weight
        value_row = (first_token + other) * strides.value_token
        value_row += kv_head * strides.value_head
        # Not "> 0", so that NaN is kept.
        m_value = m_values & (weight != 0)[:, None]
        p_value = value_ptr + value_row[:, None] + o_d[None, :]
        b_value = tl.load(p_value, mask=m_value, other=0.0).to(tl.float32)
        b_output += weight[:, None] * b_value
    return total, b_output


@triton.jit
def _combined(
    splits,
    largest,  # [R]
    normaliser,  # [R]
    o_k,  # [K], coordinates
    m_k,  # [K]
    HEAD_SIZE: tl.constexpr,
):
    """The weighted sum of the splits' outputs at some coordinates, fp32 [R, K]."""
    partials, first_partial, split_rows, num_splits, m_row = splits
    b_combined = tl.zeros([_BLOCK_R, _BLOCK_K], tl.float32)
    for first_split in range(0, num_splits, _BLOCK_S):
        o_s = first_split + tl.arange(0, _BLOCK_S)
        partial_row = first_partial[:, None] + (o_s * split_rows)[None, :]
        m_lse = m_row[:, None] & (o_s < num_splits)[None, :]
        b_lse = tl.load(partials.lse + partial_row, mask=m_lse, other=float("-inf"))
        weight = tl.exp2(b_lse - largest[:, None]) * normaliser[:, None]
        # Splits without tokens were not written.
        m_partial = (weight > 0)[:, :, None] & m_k[None, None, :]
        p_partial = partials.output + (partial_row * HEAD_SIZE)[:, :, None]
        b_partial = tl.load(p_partial + o_k[None, None, :], mask=m_partial, other=0.0)
        b_combined += tl.sum(b_partial * weight[:, :, None], 1)
    return b_combined


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_splits",
        "max_query_len",
        "num_offsets",
        "num_tail_rows",
        "sliding_window",
    ],
    # A call may begin at any request of the batch.
    do_not_specialize_on_alignment=[
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "packed_lens_ptr",
        "blocks_ptr",
    ],
)
def merge_kernel(
    partials,  # ``Partials``, base 2: [B, S, Q, Hq, D of V] and [B, S, Q, Hq] fp32
    matrix_ptr,  # [D, D] of V, fp16, entries +-1, the inverse rotation
    output_ptr,  # [T, Hq, D of V]; with an LSE [B, Q, Hq, D], in rotated space
    lse_ptr,  # [B, Q, Hq] fp32, the output's LSE in base 2, or None
    query_ptr,  # [T, Hq, D]
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D of V]
    seq_lens_ptr,  # [B]
    query_start_loc_ptr,  # [B + 1]
    pages_ptr,  # [num_blocks, H, N, C] uint8 of the tail, or None
    blocks_ptr,  # [B], with a tail
    packed_lens_ptr,  # [B], with a tail
    offset_ptr,  # [G, H, D] fp32, taken off the tail's keys, or None
    sinks_ptr,  # [Hq], logits in base e, or None
    num_rows,
    num_splits,
    max_query_len,
    sliding_window,
    inverse_sqrt_d,
    scoring,  # ``ScoreFactors``
    strides,  # ``MergeStrides``
    num_offsets,
    num_tail_rows,
    planes,  # ``TailPlanes``, with a tail
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZES: tl.constexpr,
    CASE: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
):
    """Program i: rows [i * BLOCK_R, ...) of the (sequence, token, head) triples."""
    HEAD_SIZE: tl.constexpr = SIZES.head_size
    HEAD_SIZE_V: tl.constexpr = SIZES.head_size_v
    BLOCK_D: tl.constexpr = SIZES.block_d
    BLOCK_D_V: tl.constexpr = SIZES.block_d_v
    if not CASE.multiple:
        max_query_len = 1
    row, m_slot, m_row, sequence, place, first_token, query_len = _program_rows(
        query_start_loc_ptr, num_rows, max_query_len, NUM_HEADS, CASE
    )
    token = first_token + place
    split_rows = max_query_len * NUM_HEADS
    first_partial = row + sequence * ((num_splits - 1) * split_rows)
    o_s = tl.arange(0, _MAX_SPLITS)
    p_lse = partials.lse + first_partial[:, None] + (o_s * split_rows)[None, :]
    m_lse = m_row[:, None] & (o_s < num_splits)[None, :]
    b_lse = tl.load(p_lse, mask=m_lse, other=float("-inf"))  # [R, S]
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_D_V)
    if CASE.with_raw:
        seq_len = tl.load(seq_lens_ptr + sequence, mask=m_row, other=0)
        head = row % NUM_HEADS
        kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
        # Padding rows may be past the end of ``seq_lens`` or ``query``.
        has_tokens = m_row & (seq_len > 0)
        m_query = has_tokens[:, None] & (o_d < HEAD_SIZE)[None, :]
        query_row = token * strides.query_token + head * strides.query_head
        p_query = query_ptr + query_row[:, None] + o_d[None, :]
        b_query = tl.load(p_query, mask=m_query, other=0.0).to(tl.float32)
    largest = tl.max(b_lse, 1)
    if pages_ptr is not None:
        packed_len = tl.load(packed_lens_ptr + sequence, mask=has_tokens, other=0)
        block = tl.load(blocks_ptr + sequence, mask=has_tokens, other=0)
        page_ptr = pages_ptr + block.to(tl.int64) * planes.stride_block
        own_largest, own_total, own_output = attend_to_tail(
            query_ptr + query_row,
            page_ptr + kv_head * planes.stride_head,
            planes,
            offset_ptr,
            kv_head,
            (packed_len - query_len).to(tl.int32),
            tl.where(has_tokens, seq_len - packed_len, 0),
            scoring,
            num_offsets,
            num_tail_rows,
            NUM_KV_HEADS,
            SIZES,
            OFFSET_SEGMENT,
            _BLOCK_R,
        )
        largest = tl.maximum(largest, own_largest)
    if CASE.with_raw:
        # Query tokens of the sequence that are padding.
        num_missing = query_len - seq_len
        places = first_token, kv_head, place, num_missing, sliding_window
        queries = (b_query, m_query, o_d) + places
        raw = key_ptr, value_ptr, strides, scoring, max_query_len
        largest = _largest_raw_score(largest, queries, raw)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % NUM_HEADS).to(tl.float32) * _LOG2_E
        largest = tl.maximum(largest, sink)
    # A row without tokens has an LSE of -inf, and its output is zero.
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(b_lse - largest[:, None]), 1)
    if sinks_ptr is not None:
        total += tl.exp2(sink - largest)
    b_output = tl.zeros([_BLOCK_R, BLOCK_D_V], tl.float32)
    if pages_ptr is not None:
        rescale = tl.exp2(own_largest - largest)
        total += own_total * rescale
        b_output += own_output * rescale[:, None]
    if CASE.with_raw:
        values = has_tokens[:, None] & (o_v < HEAD_SIZE_V)[None, :], o_v
        total, b_output = _add_raw(total, b_output, largest, queries, raw, values)
    if lse_ptr is not None:
        # It is -inf without tokens.
        tl.store(lse_ptr + row, largest + tl.log2(total), mask=m_slot)
    # Not "> 0", so that NaN is kept.
    reciprocal = tl.where(total != 0, 1 / total, 0.0)
    normaliser = reciprocal
    if lse_ptr is None:
        normaliser *= inverse_sqrt_d
    b_output *= reciprocal[:, None]

    splits = partials, first_partial, split_rows, num_splits, m_row
    for start in range(0, HEAD_SIZE_V, _BLOCK_K):
        o_k = start + tl.arange(0, _BLOCK_K)
        m_k = o_k < HEAD_SIZE_V
        b_combined = _combined(splits, largest, normaliser, o_k, m_k, HEAD_SIZE_V)
        if lse_ptr is not None:
            p_output = output_ptr + row[:, None] * HEAD_SIZE_V + o_k[None, :]
            tl.store(p_output, b_combined, mask=m_slot[:, None] & m_k[None, :])
        else:
            p_matrix = matrix_ptr + o_k[:, None] * HEAD_SIZE_V + o_v[None, :]
            m_matrix = m_k[:, None] & (o_v < HEAD_SIZE_V)[None, :]
            b_matrix = tl.load(p_matrix, mask=m_matrix, other=0.0).to(tl.float32)
            b_output = tl.dot(
                b_combined, b_matrix, b_output, input_precision=_PRECISION
            )

    if lse_ptr is None:
        output_row = token * strides.output_token
        output_row += row % NUM_HEADS * strides.output_head
        m_output = m_row[:, None] & (o_v < HEAD_SIZE_V)[None, :]
        b_output = b_output.to(output_ptr.dtype.element_ty)
        p_output = output_ptr + output_row[:, None] + o_v[None, :]
        tl.store(p_output, b_output, mask=m_output)
