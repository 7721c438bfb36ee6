# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merge of decode attention's splits.

It combines the partial results of a sequence, rotates them back and adds the
sequence's newest tokens, which need no quantisation.
"""

import torch

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.interface import (
    LOG2_E,
    MAX_KV_SPLITS,
    DecodeBatch,
    NewestTokens,
    Partials,
)
from vllm.v1.attention.ops.turbo.rotation import inverse_sqrt, rotation_matrix


@triton.jit
def _newest_scores(
    query,  # [R, D] fp32
    key_ptr,  # [T, H, D]
    first_token,  # [R] of the row's sequence
    kv_head,  # [R]
    seen,  # [R], whether a row sees the token
    mask,  # [R, D]
    d,  # [D]
    other,  # a token's place among its sequence's
    score_factor,
    stride_key_token,
    stride_key_head,
):
    """Scores of rows and one of their sequences' newest tokens, fp32 [R]."""
    key_row = (first_token + other) * stride_key_token + kv_head * stride_key_head
    p_key = key_ptr + key_row[:, None] + d[None, :]
    # What padding holds may be NaN.
    key = tl.load(p_key, mask=mask & seen[:, None], other=0.0).to(tl.float32)
    score = score_factor * tl.sum(query * key, 1)
    return tl.where(seen, score, float("-inf"))


@triton.jit(
    do_not_specialize=["num_rows", "num_splits", "max_query_len"],
    # A call begins with any of the batch's requests.
    do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_loc_ptr"],
)
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
    max_query_len,
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
    MULTIPLE: tl.constexpr,
    UNIFORM: tl.constexpr,
    WITH_NEWEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program i: rows [i * BLOCK_R, ...) of the (sequence, token, head) triples.

    MULTIPLE: whether ``max_query_len`` is more than one.
    """
    if not MULTIPLE:
        max_query_len = 1
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_mask = row < num_rows
    place = (row // NUM_HEADS).to(tl.int32)
    sequence = (place // max_query_len).to(tl.int64)
    place = place % max_query_len
    if UNIFORM:
        first_token = sequence * max_query_len
        query_len = max_query_len
    else:
        p_start = query_start_loc_ptr + sequence
        first_token = tl.load(p_start, mask=row_mask, other=0).to(tl.int64)
        query_len = tl.load(p_start + 1, mask=row_mask, other=0) - first_token
        row_mask = row_mask & (place < query_len)
    token = first_token + place
    split_rows = max_query_len * NUM_HEADS
    first_partial = row + sequence * ((num_splits - 1) * split_rows)
    s = tl.arange(0, MAX_SPLITS)
    p_lse = partial_lse_ptr + first_partial[:, None] + (s * split_rows)[None, :]
    mask = row_mask[:, None] & (s < num_splits)[None, :]
    lse = tl.load(p_lse, mask=mask, other=float("-inf"))  # [R, S]
    d = tl.arange(0, BLOCK_D)
    if WITH_NEWEST:
        seq_len = tl.load(seq_lens_ptr + sequence, mask=row_mask, other=0)
        head = row % NUM_HEADS
        kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
        # Rows of padding may lie past what there is to load.
        newest_mask = (row_mask & (seq_len > 0))[:, None] & (d < HEAD_SIZE)[None, :]
        query_row = token * stride_query_token + head * stride_query_head
        p_query = query_ptr + query_row[:, None] + d[None, :]
        query = tl.load(p_query, mask=newest_mask, other=0.0).to(tl.float32)
    largest = tl.max(lse, 1)
    if WITH_NEWEST:
        # Tokens of the sequence's that do not exist.
        num_missing = query_len - seq_len
        for other in range(max_query_len):
            score = _newest_scores(
                query,
                key_ptr,
                first_token,
                kv_head,
                (other >= num_missing) & (other <= place),
                newest_mask,
                d,
                other,
                score_factor,
                stride_key_token,
                stride_key_head,
            )
            largest = tl.maximum(largest, score)
    # A row without tokens has no finite LSE: its output is zero.
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(lse - largest[:, None]), 1)
    output = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if WITH_NEWEST:
        # Scores are made once more: how many there are is not known when the kernel
        # is compiled.
        for other in range(max_query_len):
            score = _newest_scores(
                query,
                key_ptr,
                first_token,
                kv_head,
                (other >= num_missing) & (other <= place),
                newest_mask,
                d,
                other,
                score_factor,
                stride_key_token,
                stride_key_head,
            )
            weight = tl.exp2(score - largest)
            total += weight
            value_row = (first_token + other) * stride_value_token
            value_row += kv_head * stride_value_head
            # Not "> 0": a NaN stays one.
            read = newest_mask & (weight != 0)[:, None]
            p_value = value_ptr + value_row[:, None] + d[None, :]
            value = tl.load(p_value, mask=read, other=0.0).to(tl.float32)
            output += weight[:, None] * value
    # Not "> 0": a NaN stays one.
    reciprocal = tl.where(total != 0, 1 / total, 0.0)
    normaliser = inverse_sqrt_d * reciprocal
    output *= reciprocal[:, None]

    for start in range(0, HEAD_SIZE, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < HEAD_SIZE
        combined = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for first_split in range(0, num_splits, BLOCK_S):
            split = first_split + tl.arange(0, BLOCK_S)
            partial_row = first_partial[:, None] + (split * split_rows)[None, :]
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

    offset = token * stride_output_token + row % NUM_HEADS * stride_output_head
    output_mask = row_mask[:, None] & (d < HEAD_SIZE)[None, :]
    output = output.to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + offset[:, None] + d[None, :], output, mask=output_mask)


def merge_splits(
    partials: Partials,
    batch: DecodeBatch,
    output: torch.Tensor,
    num_kv_heads: int,
    newest: NewestTokens | None = None,
) -> None:
    """Combine splits in rotated space into outputs.

    Args:
        partials: The splits' results, B * S * Q of them.
        batch: The sequences; its block table is not read.
        output: (T, Hq, D), written; last axis contiguous.
        num_kv_heads: KV heads.
        newest: The tokens that the splits leave out; None if there are none.

    """
    num_tokens, num_heads, head_size = output.shape
    batch.check(num_tokens)
    num_splits = batch.num_splits(partials.lse.shape[0])
    with_newest = newest is not None
    if newest is None:
        # Not read, but a launch needs arguments.
        newest = NewestTokens(output, output, output, 0.0)
    query, key, value, scale = newest
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    num_rows = batch.num_query_slots * num_heads
    block_r = 16
    block_d = triton.next_power_of_2(head_size)
    _merge_kernel[(triton.cdiv(num_rows, block_r),)](
        partials.output,
        partials.lse,
        rotation_matrix(head_size, output.device, inverse=True),
        output,
        query,
        key,
        value,
        batch.seq_lens,
        batch.seq_lens if batch.query_start_loc is None else batch.query_start_loc,
        num_rows,
        num_splits,
        batch.query_len,
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
        MULTIPLE=batch.query_len > 1,
        UNIFORM=batch.query_start_loc is None,
        WITH_NEWEST=with_newest,
        BLOCK_R=block_r,
        MAX_SPLITS=MAX_KV_SPLITS,
        BLOCK_S=8,
        BLOCK_D=block_d,
        BLOCK_K=32,
        PRECISION="tf32x3" if current_platform.is_cuda() else "ieee",
        num_warps=4,
    )
