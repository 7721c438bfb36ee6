# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA kernel that merges decode attention's splits, like ``triton.merge``."""

from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES
from vllm.v1.attention.ops.turbo.cuda.constants import head_size_header
from vllm.v1.attention.ops.turbo.cuda.family import Family
from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail
from vllm.v1.attention.ops.turbo.interface import (
    LOG2_E,
    AttentionCall,
    Partials,
    RawTokens,
    Variant,
)

# kTailHeads of merge/tail_scores.cuh, for heads of up to 128.
_TAIL_HEADS = 4
# The most raw tokens of an extend that a row of the merge attends to, one by one.
# Tuning: us of an extend so / if FlashAttention attends to them before, 64 x 4096, 32
# query heads, 8 KV heads of 128, an H200, 2026-11, `ci/gpu.py extend`.
# 32 tokens: 472 / 448. 64 tokens: 1086 / 874. 128 tokens: 2772 / 1719.
MAX_MERGED_TOKENS = 16
# Blocks of a multiprocessor that rows are spread over.
_BLOCKS_PER_SM = 4


def _refusal(head_size: int) -> str | None:
    if head_size in SUPPORTED_HEAD_SIZES:
        return None
    return f"head size {head_size} has no CUDA merge kernel"


# The layout of this family is a head size.
MERGE = Family[int, None](
    kernel="merge",
    title="merge kernel",
    refusal=_refusal,
    name=lambda head_size, _: str(head_size),
    header=head_size_header,
    served=lambda layout, demand: [(layout.head_size, None, demand.variant)],
    variants=Variant(soft_cap=True),
)


def block_warps(head_size: int) -> int:
    """Warps of a block: kMergeWarps of merge/params.cuh."""
    return 8 if head_size <= 256 else 4


def warps_a_row(num_rows: int, num_splits: int, head_size: int, num_sms: int) -> int:
    """Warps that share a row's splits, a power of two.

    There are as many as the GPU has room for, so that the splits are read at the same
    time. A single split has one warp, so its result does not depend on the batch.
    """
    warps, most = 1, block_warps(head_size)
    while (
        2 * warps <= min(most, num_splits)
        and 2 * warps * num_rows <= _BLOCKS_PER_SM * most * num_sms
    ):
        warps *= 2
    return warps


def warps_a_row_with_tail(
    num_rows: int, num_splits: int, heads_per_kv: int, head_size: int, num_sms: int
) -> int:
    """``warps_a_row`` where a block's rows share the tail's tokens that it reads.

    If multiprocessors would have several blocks, as many rows of a KV head as possible
    share a block. Otherwise each block would read the tail for its own rows.
    """
    most = block_warps(head_size)
    warps = warps_a_row(num_rows, num_splits, head_size, num_sms)
    sharing = _TAIL_HEADS if head_size <= 128 else _TAIL_HEADS // 2
    sharing = min(sharing, heads_per_kv)
    while warps > 1 and most // warps < sharing and warps * num_rows > most * num_sms:
        warps //= 2
    return warps


# Planes of a tail's pages that are read: K, V and their scales.
_NUM_PLANES = 4
_NO_TAIL = (None, None, None, 0, *[0] * _NUM_PLANES)


def _tail_arguments(tail: Tail | None) -> tuple[object, ...]:
    """The tail's tensors, the rows of a page, and the planes' offsets in bytes."""
    if tail is None:
        return _NO_TAIL
    planes = tail.format.plane_offsets[:_NUM_PLANES]
    return (
        tail.pages,
        tail.blocks,
        tail.packed_lens,
        tail.format.num_rows,
        *planes,
    )


def merge_splits(
    partials: Partials,
    call: AttentionCall,
    num_warps: int | None = None,
    enable_pdl: bool = True,
) -> None:
    """Combine splits in rotated space into outputs: a ``MergeFn``.

    The kernel may begin before the previous one on the stream has ended. It waits for
    that before it reads ``partials`` and the tail and before it writes anything. It
    reads the raw tokens and the batch before.

    Args:
        partials: The results of S splits of B * Q query tokens.
        call: The tokens that the splits leave out, and the output. ``raw.attended``
            is read after ``partials``.
        num_warps: Warps of a row; None to choose by the batch.
        enable_pdl: Whether it may begin early, on GPUs that can.

    Raises:
        RuntimeError: If the kernel cannot be built. ``build_and_load`` lists the errors
            of its function.

    """
    call.check()
    if call.batch.num_seqs > 0:
        launch_merge(partials, call, num_warps, enable_pdl)


def launch_merge(
    partials: Partials,
    call: AttentionCall,
    num_warps: int | None,
    enable_pdl: bool,
) -> None:
    """Launch the kernel of ``merge_splits`` for a call that has been checked."""
    batch, output, scoring = call.batch, call.output, call.scoring
    raw, tail, num_kv_heads = call.raw, call.tail, call.num_kv_heads
    _, num_heads, head_size = output.shape
    num_splits = batch.num_splits(partials.lse.shape[0])
    with_raw = raw is not None
    if raw is None:
        # A launch needs these arguments, but does not read them.
        raw = RawTokens(output, output, output, 0.0)
    query, key, value, scale, attended = raw
    if num_warps is None:
        num_sms = num_compute_units(output.device.index)
        num_rows = batch.num_query_slots * num_heads
        if tail is None:
            num_warps = warps_a_row(num_rows, num_splits, head_size, num_sms)
        else:
            group = num_heads // num_kv_heads
            num_warps = warps_a_row_with_tail(
                num_rows, num_splits, group, head_size, num_sms
            )
    assert num_warps in (1, 2, 4, block_warps(head_size)), num_warps
    # Scores of splits already include the offset. Those of a tail's keys get it here.
    table = None if tail is None else scoring.key_offset
    MERGE.load(head_size, None, output.device, scoring.variant())(
        *partials,
        batch.seq_lens,
        output,
        query,
        key,
        value,
        num_kv_heads,
        with_raw,
        scale * LOG2_E,
        batch.query_start_loc,
        batch.num_seqs,
        batch.query_len,
        num_warps.bit_length() - 1,
        *_tail_arguments(tail),
        table,
        scoring.sliding_window or 0,
        scoring.sinks,
        (scoring.soft_cap or 0.0) * LOG2_E,
        call.lse,
        *(attended or (None, None)),
        enable_pdl,
    )
