# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode attention over packed pages: split-KV attention, then merge.

One program serves all query heads of a KV head, so a page is read once. More query
tokens take more programs. Attention runs in rotated space, and ``triton.merge`` rotates
back. Softmax is in base 2.
"""

from typing import NamedTuple

from vllm.platforms import current_platform
from vllm.triton_utils import triton
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.formats.pages import check_pages
from vllm.v1.attention.ops.turbo.interface import (
    LOG2_E,
    MAX_KV_SPLITS,
    AttentionCall,
    DecodeBatch,
    Partials,
    RotatedQuery,
)
from vllm.v1.attention.ops.turbo.triton.decode_kernel import (
    DecodeCase,
    OriginalQuery,
    decode_kernel,
)
from vllm.v1.attention.ops.turbo.triton.merge import launch_merge
from vllm.v1.attention.ops.turbo.triton.pages import (
    MIN_OUTPUT_COLUMNS,
    block_divisor,
    tile_layout,
)
from vllm.v1.attention.ops.turbo.triton.soft_cap import in_base_2


class DecodeTuning(NamedTuple):
    """Launch parameters of the decode kernel.

    Attributes:
        block_n: Tokens of a step of a program.
        num_warps: Warps of a program. One is best: with more, each would dequantise
            the same values.
        num_stages: Depth of the software pipeline.
        max_registers: The most 32-bit registers of a thread, on NVIDIA GPUs; None for
            no limit.

    """

    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def default_tuning(head_size: int) -> DecodeTuning:
    """The launch parameters for a head size, the larger one of K's and V's.

    Issuing instructions takes most of the time. Large blocks repeat the softmax and
    addresses least, and 168 registers let 12 programs share a multiprocessor. Heads
    above 128 would spill registers with these.
    """
    # Tuning: heads of 128, GQA 4, an H200, 2026-11, `benchmark_turbo_decode.py
    # --variants`, which compares other parameters.
    if head_size <= 128:
        return DecodeTuning(64, 1, 3, max_registers=168)
    return DecodeTuning(32, 1, 2)


def num_kv_splits(
    num_seqs: int, num_kv_heads: int, num_sms: int, query_len: int = 1
) -> int:
    """Splits of a sequence, so that the programs fill the GPU.

    The number depends on the batch and not on lengths, so a CUDA graph of a batch size
    keeps its grid.

    Args:
        num_seqs: Sequences of the (padded) batch.
        num_kv_heads: KV heads.
        num_sms: Multiprocessors of the GPU.
        query_len: Query tokens of a sequence.

    """
    programs_per_sm = 32
    programs = max(1, num_seqs * query_len * num_kv_heads)
    wanted = triton.cdiv(num_sms * programs_per_sm, programs)
    return max(1, min(MAX_KV_SPLITS, wanted))


def splits_of_window(
    partials: Partials, batch: DecodeBatch, sliding_window: int, block_n: int
) -> Partials:
    """The scratch for at most as many splits as a sliding window has steps.

    Args:
        partials: Scratch for any number of splits.
        batch: The call's sequences.
        sliding_window: The most tokens that a query token sees.
        block_n: Tokens of a step.

    """
    # The first step may begin before the window, and the last may end after it.
    num_steps = triton.cdiv(sliding_window + batch.query_len - 2, block_n) + 1
    num_splits = min(batch.num_splits(partials.lse.shape[0]), num_steps)
    count = num_splits * batch.num_query_slots
    return Partials(partials.output[:count], partials.lse[:count])


def decode_attention(
    query: RotatedQuery,
    call: AttentionCall,
    partials: Partials,
    tuning: DecodeTuning | None = None,
) -> None:
    """Attend from each sequence's query tokens to cached ones: an ``AttentionFn``.

    Args:
        query: The rotated queries of T tokens, from ``triton.store``.
        call: The tokens that are attended to, and the output. The merge attends to the
            raw tokens and the tail.
        partials: Scratch; its size bounds the splits of a sequence.
        tuning: Launch parameters; None for those of ``default_tuning``.

    """
    kv_cache, layout, batch = call.kv_cache, call.layout, call.batch
    raw, tail, lse, offset = call.raw, call.tail, call.lse, call.offset
    sliding_window, logits_soft_cap = call.scoring.sliding_window, call.scoring.soft_cap
    call.check()
    num_tokens, num_heads, head_size = query.vectors.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    check_pages(kv_cache, layout)
    assert partials.output.is_contiguous() and partials.lse.is_contiguous()
    assert head_size == layout.head_size, (head_size, layout)
    assert call.output.stride(2) == 1
    batch.check(num_tokens)
    if batch.num_seqs == 0:
        return
    if tuning is None:
        tuning = default_tuning(max(head_size, layout.head_size_v))
    if sliding_window is not None:
        partials = splits_of_window(partials, batch, sliding_window, tuning.block_n)
    num_splits = batch.num_splits(partials.lse.shape[0])
    num_queries_per_kv = num_heads // num_kv_heads
    block_h = max(MIN_OUTPUT_COLUMNS, triton.next_power_of_2(num_queries_per_kv))
    query_blocks = triton.cdiv(num_queries_per_kv * batch.query_len, block_h)
    start_loc = batch.query_start_loc
    seq_lens, whole_lens = batch.seq_lens, None
    if tail is not None:
        seq_lens = tail.packed_lens
        if sliding_window is not None:
            whole_lens = batch.seq_lens
    options = {}
    if tuning.max_registers and current_platform.is_cuda():
        options["maxnreg"] = tuning.max_registers
    original = original_vectors = table = None
    num_offsets = 0
    if offset is not None:
        original_vectors, table, scale = offset
        assert table.is_contiguous() and original_vectors.stride(2) == 1
        assert table.shape[1:] == (num_kv_heads, head_size), table.shape
        num_offsets = table.shape[0]
        original = OriginalQuery(scale * LOG2_E, *original_vectors.stride()[:2])
    decode_kernel[(batch.num_seqs, num_kv_heads, num_splits * query_blocks)](
        query.vectors,
        query.scale,
        kv_cache,
        batch.block_table,
        seq_lens,
        whole_lens,
        batch.seq_lens if start_loc is None else start_loc,
        partials,
        original_vectors,
        table,
        num_offsets,
        original,
        num_splits,
        batch.query_len,
        sliding_window or 0,
        in_base_2(logits_soft_cap),
        kv_cache.stride(0),
        kv_cache.stride(1),
        batch.block_table.stride(0),
        **block_divisor(block_size),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        LAYOUT=tile_layout(layout),
        CASE=DecodeCase(
            step_in_block=block_size % tuning.block_n == 0,
            multiple=batch.query_len > 1,
            uniform=start_loc is None,
            with_raw=raw is not None or lse is not None,
            sliding=sliding_window is not None,
        ),
        BLOCK_H=block_h,
        BLOCK_N=tuning.block_n,
        NUM_STAGES=tuning.num_stages,
        OFFSET_SEGMENT=interface.OFFSET_SEGMENT,
        num_warps=tuning.num_warps,
        **options,
    )
    launch_merge(partials, call)
