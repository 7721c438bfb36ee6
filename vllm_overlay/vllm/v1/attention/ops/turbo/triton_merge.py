# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merge of decode attention's splits.

It combines the partial results of a sequence, rotates them back and adds the
sequence's newest tokens, which need no quantisation.
"""

from typing import NamedTuple

import torch

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.reference import inverse_sqrt
from vllm.v1.attention.ops.turbo.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.triton_codec import LOG2_E

# Splits a sequence is cut into at most; sizes the partial results.
MAX_KV_SPLITS = 64


class NewestToken(NamedTuple):
    """The sequences' newest tokens, attended to as they are: not quantised.

    A sequence's lie one after the other; each sees itself and those before it.

    Attributes:
        query: (T, Hq, D), not rotated.
        key: (T, H, D).
        value: (T, H, D). All three have a contiguous last axis.
        scale: Softmax scale.

    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float


def count_sequences(
    num_tokens: int, query_len: int, query_start_loc: torch.Tensor | None
) -> int:
    """Sequences of a batch of query tokens: see ``decode_attention``."""
    if query_start_loc is None:
        assert num_tokens % query_len == 0, (num_tokens, query_len)
        return num_tokens // query_len
    assert query_start_loc.dtype == torch.int32 and query_start_loc.stride(0) == 1
    return query_start_loc.shape[0] - 1


@triton.jit
def _newest_scores(
    query_ptr,  # [T, Hq, D]
    key_ptr,  # [T, H, D]
    first_token,  # [R] of the row's sequence
    place,  # [R] of the row's token among its sequence's
    num_missing,  # [R] tokens of the sequence's that do not exist
    head,  # [R]
    kv_head,  # [R]
    mask,  # [R, D]
    d,  # [D]
    score_factor,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Scores of rows and their sequences' newest tokens, fp32 [R, Q]."""
    query_row = (first_token + place) * stride_query_token + head * stride_query_head
    query = tl.load(query_ptr + query_row[:, None] + d[None, :], mask=mask, other=0.0)
    query = query.to(tl.float32)
    i = tl.arange(0, BLOCK_Q)
    scores = tl.full([place.shape[0], BLOCK_Q], float("-inf"), tl.float32)
    for other in tl.static_range(QUERY_LEN):
        # What padding holds may be NaN.
        seen = (other >= num_missing) & (other <= place)
        key_row = (first_token + other) * stride_key_token + kv_head * stride_key_head
        p_key = key_ptr + key_row[:, None] + d[None, :]
        key = tl.load(p_key, mask=mask & seen[:, None], other=0.0).to(tl.float32)
        score = score_factor * tl.sum(query * key, 1)
        score = tl.where(seen, score, float("-inf"))
        scores = tl.where((i == other)[None, :], score[:, None], scores)
    return scores


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge_kernel(
    partial_ptr,  # [B, S, Q, Hq, D] fp32
    partial_lse_ptr,  # [B, S, Q, Hq] fp32, base 2
    matrix_ptr,  # [D, D] fp16, entries +-1, the inverse rotation
    output_ptr,  # [T, Hq, D]
    query_ptr,  # [T, Hq, D]
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    seq_lens_ptr,  # [B]
    query_start_loc_ptr,  # [B + 1]
    num_rows,
    num_splits,
    inverse_sqrt_d,
    score_factor,
    stride_output_token,
    stride_output_head,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    UNIFORM: tl.constexpr,
    WITH_NEWEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program i: rows [i * BLOCK_R, ...) of the (sequence, token, head) triples."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_mask = row < num_rows
    sequence = row // (QUERY_LEN * NUM_HEADS)
    place = row // NUM_HEADS % QUERY_LEN
    if UNIFORM:
        first_token = sequence * QUERY_LEN
        query_len = QUERY_LEN
    else:
        p_start = query_start_loc_ptr + sequence
        first_token = tl.load(p_start, mask=row_mask, other=0).to(tl.int64)
        query_len = tl.load(p_start + 1, mask=row_mask, other=0) - first_token
        row_mask = row_mask & (place < query_len)
    token = first_token + place
    SPLIT_ROWS: tl.constexpr = QUERY_LEN * NUM_HEADS
    first_partial = row + sequence * ((num_splits - 1) * SPLIT_ROWS)
    s = tl.arange(0, MAX_SPLITS)
    p_lse = partial_lse_ptr + first_partial[:, None] + (s * SPLIT_ROWS)[None, :]
    mask = row_mask[:, None] & (s < num_splits)[None, :]
    lse = tl.load(p_lse, mask=mask, other=float("-inf"))  # [R, S]
    largest = tl.max(lse, 1)
    d = tl.arange(0, BLOCK_D)
    if WITH_NEWEST:
        seq_len = tl.load(seq_lens_ptr + sequence, mask=row_mask, other=0)
        head = row % NUM_HEADS
        kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
        # Rows of padding may lie past what there is to load.
        newest_mask = (row_mask & (seq_len > 0))[:, None] & (d < HEAD_SIZE)[None, :]
        newest_scores = _newest_scores(
            query_ptr,
            key_ptr,
            first_token,
            place,
            query_len - seq_len,
            head,
            kv_head,
            newest_mask,
            d,
            score_factor,
            stride_query_token,
            stride_query_head,
            stride_key_token,
            stride_key_head,
            QUERY_LEN,
            BLOCK_Q,
        )
        largest = tl.maximum(largest, tl.max(newest_scores, 1))
    # A row without tokens has no finite LSE: its output is zero.
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(lse - largest[:, None]), 1)
    if WITH_NEWEST:
        newest_weights = tl.exp2(newest_scores - largest[:, None])  # [R, Q]
        total += tl.sum(newest_weights, 1)
    # Not "> 0": a NaN stays one.
    normaliser = tl.where(total != 0, inverse_sqrt_d / total, 0.0)

    output = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(0, HEAD_SIZE, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < HEAD_SIZE
        combined = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for first_split in range(0, num_splits, BLOCK_S):
            split = first_split + tl.arange(0, BLOCK_S)
            partial_row = first_partial[:, None] + (split * SPLIT_ROWS)[None, :]
            some_mask = row_mask[:, None] & (split < num_splits)[None, :]
            some_lse = tl.load(
                partial_lse_ptr + partial_row, mask=some_mask, other=float("-inf")
            )
            weight = tl.exp2(some_lse - largest[:, None]) * normaliser[:, None]
            # Splits without tokens were not written.
            written = (weight > 0)[:, :, None] & inside[None, None, :]
            p_partial = partial_ptr + (partial_row * HEAD_SIZE)[:, :, None]
            partial = tl.load(p_partial + k[None, None, :], mask=written, other=0.0)
            combined += tl.sum(partial * weight[:, :, None], 1)
        p_matrix = matrix_ptr + k[:, None] * HEAD_SIZE + d[None, :]
        matrix_mask = inside[:, None] & (d < HEAD_SIZE)[None, :]
        matrix = tl.load(p_matrix, mask=matrix_mask, other=0.0).to(tl.float32)
        output = tl.dot(combined, matrix, output, input_precision=PRECISION)

    if WITH_NEWEST:
        newest_weights = tl.where(
            (total != 0)[:, None], newest_weights / total[:, None], 0.0
        )
        i = tl.arange(0, BLOCK_Q)
        for other in tl.static_range(QUERY_LEN):
            newest_row = (first_token + other) * stride_value_token
            newest_row += kv_head * stride_value_head
            weight = tl.sum(tl.where((i == other)[None, :], newest_weights, 0.0), 1)
            # Not "> 0": a NaN stays one.
            read = newest_mask & (weight != 0)[:, None]
            p_value = value_ptr + newest_row[:, None] + d[None, :]
            value = tl.load(p_value, mask=read, other=0.0).to(tl.float32)
            output += weight[:, None] * value

    offset = token * stride_output_token + row % NUM_HEADS * stride_output_head
    output_mask = row_mask[:, None] & (d < HEAD_SIZE)[None, :]
    output = output.to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + offset[:, None] + d[None, :], output, mask=output_mask)


def merge_splits(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    num_kv_heads: int,
    newest: NewestToken | None = None,
    query_len: int = 1,
    query_start_loc: torch.Tensor | None = None,
) -> None:
    """Combine splits in rotated space into outputs.

    Args:
        partial: (B * S * Q, Hq, D) fp32, contiguous, each a softmax of its own; S
            splits a sequence. Not read where the LSE is -inf.
        partial_lse: (B * S * Q, Hq) fp32, contiguous, in base 2.
        seq_lens: (>= B,) int32, the newest tokens included.
        output: (T, Hq, D), written; last axis contiguous.
        num_kv_heads: KV heads.
        newest: The tokens that the splits leave out; None if there are none.
        query_len: Q, query tokens a sequence, at most.
        query_start_loc: (B + 1,) int32, where sequences' tokens begin; None if each
            has Q, so that T = B * Q.

    """
    num_tokens, num_heads, head_size = output.shape
    num_seqs = count_sequences(num_tokens, query_len, query_start_loc)
    num_splits = partial.shape[0] // (num_seqs * query_len)
    assert 1 <= num_splits <= MAX_KV_SPLITS, num_splits
    with_newest = newest is not None
    if newest is None:
        # Not read, but a launch needs arguments.
        newest = NewestToken(output, output, output, 0.0)
    query, key, value, scale = newest
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    num_rows = num_seqs * query_len * num_heads
    block_r = 16
    block_d = triton.next_power_of_2(head_size)
    _merge_kernel[(triton.cdiv(num_rows, block_r),)](
        partial,
        partial_lse,
        rotation_matrix(head_size, output.device, inverse=True),
        output,
        query,
        key,
        value,
        seq_lens,
        seq_lens if query_start_loc is None else query_start_loc,
        num_rows,
        num_splits,
        inverse_sqrt(head_size),
        scale * LOG2_E,
        output.stride(0),
        output.stride(1),
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        QUERY_LEN=query_len,
        UNIFORM=query_start_loc is None,
        WITH_NEWEST=with_newest,
        BLOCK_R=block_r,
        BLOCK_Q=triton.next_power_of_2(query_len),
        MAX_SPLITS=MAX_KV_SPLITS,
        BLOCK_S=8,
        BLOCK_D=block_d,
        BLOCK_K=32,
        PRECISION="tf32x3" if current_platform.is_cuda() else "ieee",
        num_warps=4,
    )
