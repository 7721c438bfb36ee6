# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merge of decode attention's splits.

It combines the partial results of a sequence, rotates them back, and adds attention to
the sequence's raw tokens and to the tail's tokens in 8 bits.
If ranks share a sequence's context, it only combines this rank's partial results. The
merge of the ranks' results does the rest.
"""

from vllm.triton_utils import triton
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.formats.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    LOG2_E,
    AttentionCall,
    Partials,
    RawTokens,
)
from vllm.v1.attention.ops.turbo.triton.merge_kernel import (
    BLOCK_R,
    MergeCase,
    MergeSizes,
    MergeStrides,
    ScoreFactors,
    TailPlanes,
    merge_kernel,
)
from vllm.v1.attention.ops.turbo.triton.soft_cap import in_base_2
from vllm.v1.attention.ops.turbo.triton.tail import check_tail


def merge_splits(partials: Partials, call: AttentionCall) -> None:
    """Combine splits in rotated space into outputs: a ``MergeFn``.

    Args:
        partials: The results of S splits of B * Q query tokens.
        call: The tokens that the splits leave out, and the output.

    """
    call.check()
    launch_merge(partials, call)


def launch_merge(partials: Partials, call: AttentionCall) -> None:
    """Launch the kernel of ``merge_splits`` for a call that has been checked."""
    batch, output, raw = call.batch, call.output, call.raw
    tail, num_kv_heads, table = call.tail, call.num_kv_heads, None
    sliding_window, sinks = call.scoring.sliding_window, call.scoring.sinks
    logits_soft_cap = call.scoring.soft_cap
    _, num_heads, head_size_v = output.shape
    num_splits = batch.num_splits(partials.lse.shape[0])
    with_raw = raw is not None
    pages = planes = blocks = packed_lens = None
    num_offsets = num_tail_rows = 0
    if tail is not None:
        check_tail(tail, call.layout, num_kv_heads)
        assert tail.num_tokens <= interface.OFFSET_SEGMENT, tail.num_tokens
        pages, blocks, packed_lens = tail[:3]
        planes = TailPlanes(*tail.format.plane_offsets[1:4], *pages.stride()[:2])
        num_tail_rows = tail.format.num_rows
        table = call.scoring.key_offset
        if table is not None:
            assert table.is_contiguous()
            shape = (num_kv_heads, call.layout.head_size)
            assert table.shape[1:] == shape, table.shape
            num_offsets = table.shape[0]
    if raw is None:
        # A launch needs these arguments, but does not read them.
        raw = RawTokens(output, output, output, 0.0)
    query, key, value, scale, attended = raw
    assert attended is None, "attended tokens are for CUDA's merge"
    head_size = query.shape[2]
    assert head_size == key.shape[2] and head_size_v == value.shape[2], call
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    strides = (x.stride(axis) for x in (output, query, key, value) for axis in (0, 1))
    if sinks is not None:
        assert sinks.shape == (num_heads,) and sinks.is_contiguous(), sinks.shape
    num_rows = batch.num_query_slots * num_heads
    merge_kernel[(triton.cdiv(num_rows, BLOCK_R),)](
        partials,
        rotation_matrix(head_size_v, output.device, inverse=True),
        output,
        call.lse,
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
        inverse_sqrt(head_size_v),
        ScoreFactors(scale * LOG2_E, in_base_2(logits_soft_cap)),
        MergeStrides(*strides),
        num_offsets,
        num_tail_rows,
        planes,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        SIZES=MergeSizes(
            head_size,
            head_size_v,
            triton.next_power_of_2(head_size),
            triton.next_power_of_2(head_size_v),
        ),
        CASE=MergeCase(
            multiple=batch.query_len > 1,
            uniform=batch.query_start_loc is None,
            with_raw=with_raw,
        ),
        OFFSET_SEGMENT=interface.OFFSET_SEGMENT,
        # With four warps a tail's rows would spill.
        num_warps=4 if tail is None else 8,
    )
