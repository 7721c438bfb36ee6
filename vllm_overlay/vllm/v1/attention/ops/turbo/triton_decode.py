# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode attention over packed pages: split-KV attention, then merge.

One program serves all query heads of a KV head, so a page is read once. The
attention runs in rotated space; the merge combines the splits, rotates back
and adds a sequence's newest token, which needs no quantisation. Softmax is in
base 2.
"""

from typing import NamedTuple

import torch

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.reference import inverse_sqrt
from vllm.v1.attention.ops.turbo.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.triton_codec import (
    LOG2_E,
    MIN_OUTPUT_COLUMNS,
    as_loaded,
    key_coordinates,
    layout_constants,
    load_scales,
    load_units,
    step_positions,
    tile_pointers,
    value_coordinates,
)

# Splits a sequence is cut into at most; sizes the partial results.
MAX_KV_SPLITS = 64


class DecodeTuning(NamedTuple):
    """How the decode kernel is launched.

    Attributes:
        block_n: Tokens a step of a program.
        num_warps: Warps a program. One is best: more would each dequantise
            the same values.
        num_stages: Depth of the software pipeline.

    """

    block_n: int = 32
    num_warps: int = 1
    num_stages: int = 2


def default_tuning(layout: TurboFormat) -> DecodeTuning:
    """Launch parameters, chosen on an H200 at head size 128, GQA 4.

    ``benchmark_turbo_decode.py --variants`` compares them with others. The time
    goes into issuing instructions, so what keeps registers (fewer tokens a step
    for 3-bit keys) matters more than what hides latency.
    """
    return DecodeTuning(block_n=16 if layout.key_bits == 3 else 32)


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
def _scores(
    query,  # NUM_STEPS of [C, H] fp16
    tile_ptr,  # [N]
    token,  # [N]
    inside,  # [N]
    column,  # [C]
    same_column,  # [C], from ``as_loaded``
    SCALES_OFFSET: tl.constexpr,
    CUBIC: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """K q^T of one block of tokens, fp32 [N, H]."""
    tile_ptr = tile_ptr[:, None]
    token = token[:, None]
    inside = inside[:, None]
    column = column[None, :]
    same_column = same_column[None, :]
    mask = inside & (column < COLUMNS)
    word = load_units(tile_ptr, token, column, same_column, mask, HEAD_SIZE, BITS)
    scale = load_scales(
        tile_ptr + SCALES_OFFSET,
        token,
        column,
        same_column,
        inside,
        mask,
        HEAD_SIZE,
        SCALE_WORDS,
    )
    scale = scale * 0.0078125
    scores = tl.zeros([inside.shape[0], query[0].shape[1]], tl.float32)
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        v = step_positions(word, same_column, i, COLUMNS, HEAD_SIZE, BITS)
        key = key_coordinates(v, scale, CUBIC)  # [N, C]
        scores = tl.dot(key, query[i], scores)
    return scores


@triton.jit
def _accumulate_values(
    accumulator,  # NUM_STEPS of [C, H] fp32
    weights,  # [N, H] fp16
    rescale,  # [H]
    tile_ptr,  # [N]
    token,  # [N]
    inside,  # [N]
    column,  # [C]
    same_column,  # [C], from ``as_loaded``
    CODES_OFFSET: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    CUBIC: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rescale the accumulator and add V^T P of one block of tokens."""
    tile_ptr = tile_ptr[None, :]
    token = token[None, :]
    inside = inside[None, :]
    column = column[:, None]
    same_column = same_column[:, None]
    mask = inside & (column < COLUMNS)
    codes_ptr = tile_ptr + CODES_OFFSET
    word = load_units(codes_ptr, token, column, same_column, mask, HEAD_SIZE, BITS)
    scale = load_scales(
        tile_ptr + SCALES_OFFSET,
        token,
        column,
        same_column,
        inside,
        mask,
        HEAD_SIZE,
        SCALE_WORDS,
    )
    linear = scale * CUBIC[0]
    cubic = scale * CUBIC[1]
    result = ()
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        v = step_positions(word, same_column, i, COLUMNS, HEAD_SIZE, BITS)
        value = value_coordinates(v, linear, cubic)  # [C, N]
        rescaled = accumulator[i] * rescale[None, :]
        result = result + (tl.dot(value, weights, rescaled),)
    return result


@triton.jit(do_not_specialize=["num_splits"])
def _decode_kernel(
    query_ptr,  # [B, Hq, D] fp16, rotated
    query_scale_ptr,  # [B, Hq] fp32
    kv_cache_ptr,  # [num_blocks, H, N, C] uint8
    block_table_ptr,  # [B, max_blocks]
    seq_lens_ptr,  # [B]
    partial_ptr,  # [B, S, Hq, D] fp32
    partial_lse_ptr,  # [B, S, Hq] fp32, base 2
    num_splits,
    stride_cache_block,
    stride_cache_head,
    stride_block_table,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    VALUE_CODES_OFFSET: tl.constexpr,
    KEY_SCALES_OFFSET: tl.constexpr,
    VALUE_SCALES_OFFSET: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    KEY_CUBIC: tl.constexpr,
    VALUE_CUBIC: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_SCALE_WORDS: tl.constexpr,
    VALUE_SCALE_WORDS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    NUM_NEWEST: tl.constexpr,
):
    """Program (b, h, s): split s of sequence b, KV head h.

    The last NUM_NEWEST tokens, 0 or 1, are left to the merge.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    batch = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + batch) - NUM_NEWEST
    split_size = tl.cdiv(tl.cdiv(seq_len, num_splits), BLOCK_N) * BLOCK_N
    first = split * split_size
    last = tl.minimum(first + split_size, seq_len)

    h = tl.arange(0, BLOCK_H)
    head_mask = h < GROUP
    row = batch * NUM_HEADS + kv_head * GROUP + h
    partial_row = row + (batch * (num_splits - 1) + split) * NUM_HEADS
    p_lse = partial_lse_ptr + partial_row
    if first >= last:
        tl.store(p_lse, float("-inf"), mask=head_mask)
        return

    column = tl.arange(0, BLOCK_C)
    same_column = as_loaded(column, seq_lens_ptr, seq_len < 0)
    column_mask = column < COLUMNS
    p_query = query_ptr + column[:, None] + (row * HEAD_SIZE)[None, :]
    query_mask = column_mask[:, None] & head_mask[None, :]
    query = ()
    accumulator = ()
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        query = query + (tl.load(p_query + i * COLUMNS, mask=query_mask, other=0.0),)
        accumulator = accumulator + (tl.zeros([BLOCK_C, BLOCK_H], tl.float32),)
    query_scale = tl.load(query_scale_ptr + row, mask=head_mask, other=0.0)
    running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_H], tl.float32)
    cache_ptr = kv_cache_ptr + kv_head.to(tl.int64) * stride_cache_head
    table_ptr = block_table_ptr + batch * stride_block_table

    for start in tl.range(first, last, BLOCK_N, num_stages=NUM_STAGES):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < last
        block = tl.load(table_ptr + n // BLOCK_SIZE, mask=inside, other=0)
        page_ptr = cache_ptr + block.to(tl.int64) * stride_cache_block
        tile_ptr, token = tile_pointers(page_ptr, n % BLOCK_SIZE, TILE_BYTES)

        scores = _scores(
            query,
            tile_ptr,
            token,
            inside,
            column,
            same_column,
            KEY_SCALES_OFFSET,
            KEY_CUBIC,
            KEY_BITS,
            KEY_SCALE_WORDS,
            HEAD_SIZE,
            COLUMNS,
        )
        scores = scores * query_scale[None, :]
        scores = tl.where(inside[:, None], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 0))
        rescale = tl.exp2(running_max - new_max)
        weights = tl.exp2(scores - new_max[None, :])
        running_sum = running_sum * rescale + tl.sum(weights, 0)
        running_max = new_max
        accumulator = _accumulate_values(
            accumulator,
            weights.to(tl.float16),
            rescale,
            tile_ptr,
            token,
            inside,
            column,
            same_column,
            VALUE_CODES_OFFSET,
            VALUE_SCALES_OFFSET,
            VALUE_CUBIC,
            VALUE_BITS,
            VALUE_SCALE_WORDS,
            HEAD_SIZE,
            COLUMNS,
        )

    tl.store(p_lse, running_max + tl.log2(running_sum), mask=head_mask)
    p_partial = partial_ptr + (partial_row * HEAD_SIZE)[None, :] + column[:, None]
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        result = accumulator[i] / running_sum[None, :]
        tl.store(p_partial + i * COLUMNS, result, mask=query_mask)


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


def num_kv_splits(num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Splits a sequence, so that the programs fill the GPU.

    It depends on the batch alone, not on the lengths, so a CUDA graph of a
    batch size keeps its grid.

    Args:
        num_seqs: Sequences in the (padded) batch.
        num_kv_heads: KV heads.
        num_sms: Multiprocessors of the GPU.

    """
    programs_per_sm = 32
    wanted = triton.cdiv(num_sms * programs_per_sm, max(1, num_seqs * num_kv_heads))
    return max(1, min(MAX_KV_SPLITS, wanted))


def decode_attention(
    rotated_query: torch.Tensor,
    query_scale: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: TurboFormat,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    output: torch.Tensor,
    newest: NewestToken | None = None,
    tuning: DecodeTuning | None = None,
) -> None:
    """Attend from one query token a sequence to the sequence's cached tokens.

    Args:
        rotated_query: (B, Hq, D) fp16 contiguous, from ``triton_store.store``.
        query_scale: (B, Hq) fp32 contiguous, likewise.
        kv_cache: (num_blocks, H, N, C) uint8; N a multiple of 16, a
            (block, head) contiguous.
        block_table: (>= B, max_blocks) int32.
        seq_lens: (>= B,) int32; zero for padding, whose output is zero.
        layout: The cache's format.
        partial: (B * S, Hq, D) fp32 scratch, contiguous; S splits a sequence.
        partial_lse: (B * S, Hq) fp32 scratch, contiguous.
        output: (B, Hq, D), written; last axis contiguous.
        newest: The last of each sequence's cached tokens, to be attended to
            in place of what the cache holds of it.
        tuning: Launch parameters; None for ``default_tuning``.

    """
    num_seqs, num_heads, head_size = rotated_query.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    assert block_size % 16 == 0, block_size
    assert kv_cache.stride()[2:] == (layout.slot_size, 1), kv_cache.stride()
    assert partial.is_contiguous() and partial_lse.is_contiguous()
    assert output.stride(2) == 1 and block_table.stride(1) == 1
    if num_seqs == 0:
        return
    num_splits = partial.shape[0] // num_seqs
    assert 1 <= num_splits <= MAX_KV_SPLITS, num_splits
    if tuning is None:
        tuning = default_tuning(layout)
    group = num_heads // num_kv_heads
    num_newest = 0 if newest is None else 1
    if newest is None:
        # Not read, but a launch needs arguments.
        unread = rotated_query
        newest = NewestToken(unread, unread, unread, 0.0)
    query, key, value, scale = newest
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    _decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        rotated_query,
        query_scale,
        kv_cache,
        block_table,
        seq_lens,
        partial,
        partial_lse,
        num_splits,
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        **layout_constants(layout),
        BLOCK_H=max(MIN_OUTPUT_COLUMNS, triton.next_power_of_2(group)),
        BLOCK_N=tuning.block_n,
        NUM_STAGES=tuning.num_stages,
        NUM_NEWEST=num_newest,
        num_warps=tuning.num_warps,
    )
    num_rows = num_seqs * num_heads
    block_r = 16
    block_d = triton.next_power_of_2(head_size)
    _merge_kernel[(triton.cdiv(num_rows, block_r),)](
        partial,
        partial_lse,
        rotation_matrix(head_size, kv_cache.device, inverse=True),
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
