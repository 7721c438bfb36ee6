# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merge of decode attention's splits.

It combines the partial results of a sequence, rotates them back and adds the
sequence's newest token, which needs no quantisation.
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

    Attributes:
        query: (B, Hq, D), not rotated.
        key: (B, H, D).
        value: (B, H, D). All three have a contiguous last axis.
        scale: Softmax scale.

    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float


@triton.jit
def _newest_score(
    query_ptr,  # [B, Hq, D]
    key_ptr,  # [B, H, D]
    token,  # [R]
    head,  # [R]
    kv_head,  # [R]
    mask,  # [R, D]
    d,  # [D]
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
):
    """Products of queries and newest keys, fp32 [R]."""
    query_row = token * stride_query_token + head * stride_query_head
    query = tl.load(query_ptr + query_row[:, None] + d[None, :], mask=mask, other=0.0)
    key_row = token * stride_key_token + kv_head * stride_key_head
    key = tl.load(key_ptr + key_row[:, None] + d[None, :], mask=mask, other=0.0)
    return tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge_kernel(
    partial_ptr,  # [B, S, Hq, D] fp32
    partial_lse_ptr,  # [B, S, Hq] fp32, base 2
    matrix_ptr,  # [D, D] fp16, entries +-1, the inverse rotation
    output_ptr,  # [B, Hq, D]
    query_ptr,  # [B, Hq, D]
    key_ptr,  # [B, H, D]
    value_ptr,  # [B, H, D]
    seq_lens_ptr,  # [B]
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
    NUM_NEWEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program i: rows [i * BLOCK_R, ...) of the (token, head) pairs."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_mask = row < num_rows
    token = row // NUM_HEADS
    first_partial = row + token * ((num_splits - 1) * NUM_HEADS)
    s = tl.arange(0, MAX_SPLITS)
    p_lse = partial_lse_ptr + first_partial[:, None] + (s * NUM_HEADS)[None, :]
    mask = row_mask[:, None] & (s < num_splits)[None, :]
    lse = tl.load(p_lse, mask=mask, other=float("-inf"))  # [R, S]
    largest = tl.max(lse, 1)
    d = tl.arange(0, BLOCK_D)
    if NUM_NEWEST > 0:
        seq_len = tl.load(seq_lens_ptr + token, mask=row_mask, other=0)
        head = row % NUM_HEADS
        kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
        newest_mask = (seq_len > 0)[:, None] & (d < HEAD_SIZE)[None, :]
        newest_lse = score_factor * _newest_score(
            query_ptr,
            key_ptr,
            token,
            head,
            kv_head,
            newest_mask,
            d,
            stride_query_token,
            stride_query_head,
            stride_key_token,
            stride_key_head,
        )
        newest_lse = tl.where(seq_len > 0, newest_lse, float("-inf"))
        largest = tl.maximum(largest, newest_lse)
    # A row without tokens has no finite LSE: its output is zero.
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(lse - largest[:, None]), 1)
    if NUM_NEWEST > 0:
        newest_weight = tl.exp2(newest_lse - largest)
        total += newest_weight
    # Not "> 0": a NaN stays one.
    normaliser = tl.where(total != 0, inverse_sqrt_d / total, 0.0)

    output = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(0, HEAD_SIZE, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < HEAD_SIZE
        combined = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for first_split in range(0, num_splits, BLOCK_S):
            split = first_split + tl.arange(0, BLOCK_S)
            partial_row = first_partial[:, None] + (split * NUM_HEADS)[None, :]
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

    if NUM_NEWEST > 0:
        value_row = token * stride_value_token + kv_head * stride_value_head
        p_value = value_ptr + value_row[:, None] + d[None, :]
        value = tl.load(p_value, mask=newest_mask, other=0.0).to(tl.float32)
        newest_weight = tl.where(total != 0, newest_weight / total, 0.0)
        output += newest_weight[:, None] * value

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
) -> None:
    """Combine splits in rotated space into outputs.

    Args:
        partial: (B * S, Hq, D) fp32, contiguous, each a softmax of its own; S
            splits a sequence. Not read where the LSE is -inf.
        partial_lse: (B * S, Hq) fp32, contiguous, in base 2.
        seq_lens: (>= B,) int32, the newest token included.
        output: (B, Hq, D), written; last axis contiguous.
        num_kv_heads: KV heads.
        newest: The tokens that the splits leave out; None if there are none.

    """
    num_seqs, num_heads, head_size = output.shape
    num_splits = partial.shape[0] // num_seqs
    assert 1 <= num_splits <= MAX_KV_SPLITS, num_splits
    num_newest = 0 if newest is None else 1
    if newest is None:
        # Not read, but a launch needs arguments.
        newest = NewestToken(output, output, output, 0.0)
    query, key, value, scale = newest
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    num_rows = num_seqs * num_heads
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
        NUM_NEWEST=num_newest,
        BLOCK_R=block_r,
        MAX_SPLITS=MAX_KV_SPLITS,
        BLOCK_S=8,
        BLOCK_D=block_d,
        BLOCK_K=32,
        PRECISION="tf32x3" if current_platform.is_cuda() else "ieee",
        num_warps=4,
    )
