# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merge of decode attention's splits.

It combines the partial results of a sequence, rotates them back and adds the
sequence's newest tokens, which need no quantisation, and those that the recent window
has in 8 bits. Where ranks share a sequence's context it leaves all that to the merge of
their results, and combines its own.
"""

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.interface import (
    LOG2_E,
    MAX_KV_SPLITS,
    AttentionCall,
    NewestTokens,
    Partials,
)
from vllm.v1.attention.ops.turbo.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.triton.recent import attend_to_window
from vllm.v1.attention.ops.turbo.triton.soft_cap import capped, in_base_2
from vllm.v1.attention.ops.turbo.triton.window import check_window


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
    soft_cap,
    stride_key_token,
    stride_key_head,
):
    """Scores of rows and one of their sequences' newest tokens, fp32 [R]."""
    key_row = (first_token + other) * stride_key_token + kv_head * stride_key_head
    p_key = key_ptr + key_row[:, None] + d[None, :]
    # What padding holds may be NaN.
    key = tl.load(p_key, mask=mask & seen[:, None], other=0.0).to(tl.float32)
    score = score_factor * tl.sum(query * key, 1)
    if soft_cap is not None:
        score = capped(score, soft_cap)
    return tl.where(seen, score, float("-inf"))


@triton.jit
def _is_seen(
    other,  # a token's place among its sequence's newest
    place,  # [R]
    num_missing,  # [R] of them that do not exist
    sliding_window,
):
    """Whether rows see the token, [R]."""
    in_window = place - other < sliding_window
    return (other >= num_missing) & (other <= place) & in_window


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_splits",
        "max_query_len",
        "num_segments",
        "num_window_rows",
        "sliding_window",
    ],
    # A call begins with any of the batch's requests.
    do_not_specialize_on_alignment=[
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "packed_lens_ptr",
        "blocks_ptr",
    ],
)
def _merge_kernel(
    partial_ptr,  # [B, S, Q, Hq, D] fp32
    partial_lse_ptr,  # [B, S, Q, Hq] fp32, base 2
    matrix_ptr,  # [D, D] fp16, entries +-1, the inverse rotation
    output_ptr,  # [T, Hq, D]; with an LSE [B, Q, Hq, D], rotated
    lse_ptr,  # [B, Q, Hq] fp32, base 2, of the output; or None
    query_ptr,  # [T, Hq, D]
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    seq_lens_ptr,  # [B]
    query_start_loc_ptr,  # [B + 1]
    pages_ptr,  # [num_blocks, H, N, C] uint8 of the recent window, or None
    blocks_ptr,  # [B], with a window
    packed_lens_ptr,  # [B], with a window
    offset_ptr,  # [G, H, D] fp32, missing in the window's scores, or None
    sinks_ptr,  # [Hq], logits in base e, or None
    num_rows,
    num_splits,
    max_query_len,
    sliding_window,
    inverse_sqrt_d,
    score_factor,
    soft_cap,  # of scores, in base 2, or None; not with an offset
    stride_output_token,
    stride_output_head,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    num_segments,
    num_window_rows,
    value_plane,
    key_scale_plane,
    value_scale_plane,
    stride_page_block,
    stride_page_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    MULTIPLE: tl.constexpr,
    UNIFORM: tl.constexpr,
    WITH_NEWEST: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """Program i: rows [i * BLOCK_R, ...) of the (sequence, token, head) triples.

    MULTIPLE: whether ``max_query_len`` is more than one.
    """
    if not MULTIPLE:
        max_query_len = 1
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_mask = row < num_rows
    slot_mask = row_mask
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
    if pages_ptr is not None:
        has_tokens = row_mask & (seq_len > 0)
        packed_len = tl.load(packed_lens_ptr + sequence, mask=has_tokens, other=0)
        block = tl.load(blocks_ptr + sequence, mask=has_tokens, other=0)
        page_ptr = pages_ptr + block.to(tl.int64) * stride_page_block
        own_largest, own_total, own_output = attend_to_window(
            query_ptr + query_row,
            page_ptr + kv_head * stride_page_head,
            offset_ptr,
            kv_head,
            (packed_len - query_len).to(tl.int32),
            tl.where(has_tokens, seq_len - packed_len, 0),
            score_factor,
            soft_cap,
            num_segments,
            num_window_rows,
            value_plane,
            key_scale_plane,
            value_scale_plane,
            NUM_KV_HEADS,
            HEAD_SIZE,
            OFFSET_SEGMENT,
            BLOCK_R,
            BLOCK_D,
            BLOCK_N,
        )
        largest = tl.maximum(largest, own_largest)
    if WITH_NEWEST:
        # Tokens of the sequence's that do not exist.
        num_missing = query_len - seq_len
        for other in range(max_query_len):
            score = _newest_scores(
                query,
                key_ptr,
                first_token,
                kv_head,
                _is_seen(other, place, num_missing, sliding_window),
                newest_mask,
                d,
                other,
                score_factor,
                soft_cap,
                stride_key_token,
                stride_key_head,
            )
            largest = tl.maximum(largest, score)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % NUM_HEADS).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    # A row without tokens has no finite LSE: its output is zero.
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(lse - largest[:, None]), 1)
    if sinks_ptr is not None:
        total += tl.exp2(sink - largest)
    output = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if pages_ptr is not None:
        rescale = tl.exp2(own_largest - largest)
        total += own_total * rescale
        output += own_output * rescale[:, None]
    if WITH_NEWEST:
        # Scores are made once more: how many there are is not known when the kernel
        # is compiled.
        for other in range(max_query_len):
            score = _newest_scores(
                query,
                key_ptr,
                first_token,
                kv_head,
                _is_seen(other, place, num_missing, sliding_window),
                newest_mask,
                d,
                other,
                score_factor,
                soft_cap,
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
    if lse_ptr is not None:
        # Of no tokens -inf.
        tl.store(lse_ptr + row, largest + tl.log2(total), mask=slot_mask)
    # Not "> 0": a NaN stays one.
    reciprocal = tl.where(total != 0, 1 / total, 0.0)
    normaliser = reciprocal
    if lse_ptr is None:
        normaliser *= inverse_sqrt_d
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
        if lse_ptr is not None:
            p_output = output_ptr + row[:, None] * HEAD_SIZE + k[None, :]
            tl.store(p_output, combined, mask=slot_mask[:, None] & inside[None, :])
        else:
            p_matrix = matrix_ptr + k[:, None] * HEAD_SIZE + d[None, :]
            matrix_mask = inside[:, None] & (d < HEAD_SIZE)[None, :]
            matrix = tl.load(p_matrix, mask=matrix_mask, other=0.0).to(tl.float32)
            output = tl.dot(combined, matrix, output, input_precision=PRECISION)

    if lse_ptr is None:
        offset = token * stride_output_token + row % NUM_HEADS * stride_output_head
        output_mask = row_mask[:, None] & (d < HEAD_SIZE)[None, :]
        output = output.to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + offset[:, None] + d[None, :], output, mask=output_mask)


def merge_splits(partials: Partials, call: AttentionCall) -> None:
    """Combine splits in rotated space into outputs: ``MergeFn``.

    Args:
        partials: The splits' results, B * S * Q of them.
        call: The tokens that the splits leave out, and the output.

    """
    batch, output, lse, newest = call.batch, call.output, call.lse, call.newest
    window, num_kv_heads, table = call.window, call.num_kv_heads, None
    sliding_window, sinks = call.scoring.sliding_window, call.scoring.sinks
    logits_soft_cap = call.scoring.soft_cap
    call.check()
    num_tokens, num_heads, head_size = output.shape
    if lse is None:
        batch.check(num_tokens)
    else:
        batch.check_shared(output, lse)
    num_splits = batch.num_splits(partials.lse.shape[0])
    with_newest = newest is not None
    pages = blocks = packed_lens = None
    num_segments = num_window_rows = stride_page_block = stride_page_head = 0
    planes = (0, 0, 0)
    if window is not None:
        check_window(window, head_size, num_kv_heads)
        assert window.num_tokens <= interface.OFFSET_SEGMENT, window.num_tokens
        pages, blocks, packed_lens = window[:3]
        stride_page_block, stride_page_head = pages.stride()[:2]
        num_window_rows = window.format.num_rows
        planes = window.format.plane_offsets[1:4]
        table = call.scoring.key_offset
        if table is not None:
            assert table.is_contiguous()
            assert table.shape[1:] == (num_kv_heads, head_size), table.shape
            num_segments = table.shape[0]
    if newest is None:
        # Not read, but a launch needs arguments.
        newest = NewestTokens(output, output, output, 0.0)
    query, key, value, scale, attended = newest
    assert attended is None, "attended tokens are for CUDA's merge"
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    if sinks is not None:
        assert sinks.shape == (num_heads,) and sinks.is_contiguous(), sinks.shape
    num_rows = batch.num_query_slots * num_heads
    block_r = 16
    block_d = triton.next_power_of_2(head_size)
    _merge_kernel[(triton.cdiv(num_rows, block_r),)](
        partials.output,
        partials.lse,
        rotation_matrix(head_size, output.device, inverse=True),
        output,
        lse,
        query,
        key,
        value,
        batch.seq_lens,
        batch.seq_lens if batch.query_start_loc is None else batch.query_start_loc,
        pages,
        blocks,
        packed_lens,
        table,
        sinks,
        num_rows,
        num_splits,
        batch.query_len,
        batch.query_len if sliding_window is None else sliding_window,
        inverse_sqrt(head_size),
        scale * LOG2_E,
        in_base_2(logits_soft_cap),
        output.stride(0),
        output.stride(1),
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        num_segments,
        num_window_rows,
        *planes,
        stride_page_block,
        stride_page_head,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        MULTIPLE=batch.query_len > 1,
        UNIFORM=batch.query_start_loc is None,
        WITH_NEWEST=with_newest,
        OFFSET_SEGMENT=interface.OFFSET_SEGMENT,
        BLOCK_R=block_r,
        MAX_SPLITS=MAX_KV_SPLITS,
        BLOCK_S=8,
        BLOCK_D=block_d,
        BLOCK_K=32,
        BLOCK_N=max(1, 512 // block_d),
        PRECISION="tf32x3" if current_platform.is_cuda() else "ieee",
        LOG2_E=LOG2_E,
        # Four would spill a part of a window's rows.
        num_warps=4 if window is None else 8,
    )
