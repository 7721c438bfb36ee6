# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode attention over packed pages as a CUDA kernel, built by FlashInfer's JIT.

As ``triton.decode``, but one persistent grid cuts the batch's tiles evenly among
its warps, whatever the lengths. ``cuda.merge`` joins the partial results. Of more
queries than attend at once those of some numbers are served, on Hopper, by the kernel
of ``decode_columns``.
"""

from collections.abc import Callable, Iterator

import torch

from vllm.v1.attention.ops.turbo.cuda import decode_columns
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES, capability_of
from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.cuda.family import Demand, Family, by_head_size
from vllm.v1.attention.ops.turbo.cuda.merge import merge_splits
from vllm.v1.attention.ops.turbo.format import TILE_TOKENS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    LOG2_E,
    MAX_KV_SPLITS,
    PLAIN,
    AttentionCall,
    Partials,
    RotatedQuery,
    Variant,
)

# Queries of a KV head that attend at once; more do in further passes. The tensor core
# has eight columns: with four queries they are shared by two halves of the work, and
# with 16 each decoded fragment is multiplied by two of queries.
QUERIES = (4, 8, 16)
# Warps a block, one block a multiprocessor; multiples of kTeamWarps of
# decode/partition.cuh. More leave too few registers. Two pairs of tiles a warp are in
# flight.
_TEAM_WARPS = 4
_TILES_IN_FLIGHT = 4
# Splits of all query tokens of a batch that there is room for in any case.
_MAX_PARTIALS = 4096
# A warp's columns at least. Of each: the query in int8 for both halves of the scale
# groups, a few numbers, and the result, which is written where tiles were. Of each
# token of two tiles, where a warp's lanes decode scales for each other: those of K, and
# two sums of them. Then scores, where warps share tiles.
_MIN_COLUMNS = 8
_QUERY_COPIES = 2
_SCALE_SUMS = 2
_COLUMN_BYTES = 32
_RESULT_PADDING = 4
_SHARED_BYTES_OF_SCORES = 1024
# A block's. GPUs with less were not timed with scales that lanes decode for each other,
# which on some takes room that warps need, and on some more registers.
_SHARED_BYTES_OF_HOPPER = 232448


def _max_warps(head_size: int, queries: int) -> int:
    if head_size > 128 or head_size == 128 and queries > 8:
        return 8
    return 16 if head_size < 128 and queries <= 4 else 12


def tile_warps(head_size: int) -> int:
    """Warps that attend to a tile together: kTileWarps of common/tile_warps.cuh."""
    return max(1, head_size // 256)


def scales_by_warp(layout: TurboFormat, shared_bytes: int) -> bool:
    """Whether a warp's lanes decode the scales of K for each other, by shared memory.

    Else each lane decodes what it needs, as three others do. A block has
    ``shared_bytes`` of shared memory at most.
    """
    if shared_bytes < _SHARED_BYTES_OF_HOPPER:
        return False
    # Where there are few warps, lanes wait for each other longer than they gain, but
    # with three bits.
    return layout.head_size <= 128 or layout.key_codebook.bits == 3


def num_warps(layout: TurboFormat, queries: int, shared_bytes: int) -> int:
    """Warps a block, of which ``shared_bytes`` of shared memory serve all."""
    size, columns = layout.head_size, max(queries, _MIN_COLUMNS)
    sharing = tile_warps(size)
    word = torch.float32.itemsize
    results = columns * (size + _RESULT_PADDING) * word
    per_tile = max(_TILES_IN_FLIGHT * layout.tile_bytes, results)
    per_tile += columns * (_QUERY_COPIES * size + sharing * _COLUMN_BYTES)
    if scales_by_warp(layout, shared_bytes):
        floats = layout.num_groups + sharing * _SCALE_SUMS
        per_tile += 2 * TILE_TOKENS * floats * word
    if sharing > 1:
        per_tile += sharing * _SHARED_BYTES_OF_SCORES
    fitting = shared_bytes // per_tile * sharing // _TEAM_WARPS * _TEAM_WARPS
    assert fitting > 0, (layout, shared_bytes)
    return min(_max_warps(size, queries), fitting)


def queries_at_once(head_size: int) -> tuple[int, ...]:
    """The numbers of ``QUERIES`` that have modules: registers hold the results."""
    return QUERIES if head_size <= 128 else QUERIES[:-1]


def num_queries_at_once(head_size: int, num_queries: int) -> int:
    """Which module serves so many queries of a sequence and KV head."""
    served = queries_at_once(head_size)
    return next((n for n in served if num_queries <= n), served[-1])


def _served(
    layout: TurboFormat, demand: Demand
) -> Iterator[tuple[TurboFormat, int, Variant]]:
    capability, variant = demand.capability, demand.variant
    for num_queries in demand.numbers_of_queries(demand.max_query_len):
        if not decode_columns.serves(layout, num_queries, capability, variant):
            queries = num_queries_at_once(layout.head_size, num_queries)
            yield layout, queries, variant


# Its plans are queries of a KV head that attend at once.
DECODE = Family[TurboFormat, int](
    kernel="decode",
    title="decode kernel",
    refusal=by_head_size(SUPPORTED_HEAD_SIZES, "decode kernel"),
    name=lambda layout, queries: f"{layout.name}_{layout.head_size}_{queries}",
    header=layout_header,
    served=_served,
    variants=Variant(key_offset=True, soft_cap=True),
    defines=lambda layout, queries, shared_bytes: {
        "DECODE_QUERIES": queries,
        "DECODE_WARPS": num_warps(layout, queries, shared_bytes),
        "DECODE_SCALES_BY_WARP": scales_by_warp(layout, shared_bytes),
    },
)


def rounds_queries(
    layout: TurboFormat,
    num_queries: int,
    device: torch.device,
    variant: Variant = PLAIN,
) -> bool:
    """Whether queries are used as ``reference.round_query`` has them, in int8; those of
    ``decode_columns`` are used as they are, in fp16. The arguments are ``load``'s.
    """
    capability = capability_of(device)
    return not decode_columns.serves(layout, num_queries, capability, variant)


def load(
    layout: TurboFormat,
    num_queries: int,
    device: torch.device,
    variant: Variant = PLAIN,
) -> Callable[..., None]:
    """Build, if need be, and load the kernel for a number of queries.

    Args:
        layout: The cache's format.
        num_queries: Queries of a sequence and KV head: query heads, times tokens.
        device: Where it is to run.
        variant: The layer's variant.

    Raises:
        RuntimeError: If it cannot be built.

    """
    if not rounds_queries(layout, num_queries, device, variant):
        return decode_columns.COLUMNS.load(layout, None, device, variant)
    queries = num_queries_at_once(layout.head_size, num_queries)
    return DECODE.load(layout, queries, device, variant)


def num_kv_splits(
    num_seqs: int, num_kv_heads: int, num_sms: int, query_len: int = 1
) -> int:
    """Splits a sequence at most: room for partial results.

    The kernel itself decides on the ranges that its warps attend to, by lengths. A
    sequence that is as long as all others together, or alone, is to have teams of
    warps on every multiprocessor, unless the batch is so large that room for it would
    cost too much.

    Args:
        num_seqs: Sequences in the (padded) batch.
        num_kv_heads: KV heads.
        num_sms: Multiprocessors of the GPU.
        query_len: Query tokens a sequence.

    """
    num_seqs = max(1, num_seqs)
    teams = num_sms * _max_warps(128, QUERIES[0]) // _TEAM_WARPS
    alone = -(-teams // num_kv_heads) + 1
    average = -(-teams * _TEAM_WARPS // (num_seqs * num_kv_heads))
    room = max(_MAX_PARTIALS // (num_seqs * query_len), 2 * average + 1)
    return max(2, min(MAX_KV_SPLITS, alone, room))


def attend(
    load_kernel: Callable[
        [TurboFormat, int, torch.device, Variant], Callable[..., None]
    ],
    query: RotatedQuery,
    call: AttentionCall,
    partials: Partials,
    enable_pdl: bool,
) -> None:
    """Run a kernel that makes partial results of pages, and the merge of these.

    With a window the kernel is also given lengths without its tokens, which the kernel
    before it may have written, and the merge attends to these. ``load_kernel`` gives
    the kernel of a layout, number of queries of a sequence and KV head, device, and
    variant. The other arguments are ``AttentionFn``'s.
    """
    batch, scoring, device = call.batch, call.scoring, call.kv_cache.device
    num_tokens, num_heads, _ = query.vectors.shape
    batch.check(num_tokens)
    if batch.num_seqs == 0:
        return
    batch.num_splits(partials.lse.shape[0])  # checks that there is room
    call.check()
    num_queries = num_heads // call.num_kv_heads * batch.query_len
    original_query, table, scale = call.offset or (None, None, 0.0)
    load_kernel(call.layout, num_queries, device, scoring.variant())(
        *query,
        call.kv_cache,
        batch.block_table,
        batch.seq_lens,
        *partials,
        batch.query_start_loc,
        batch.num_seqs,
        batch.query_len,
        call.newest is not None or call.lse is not None,
        None if call.window is None else call.window.packed_lens,
        original_query,
        table,
        scale * LOG2_E,
        scoring.sliding_window or 0,
        (scoring.soft_cap or 0.0) * LOG2_E,
        enable_pdl,
    )
    merge_splits(partials, call, enable_pdl=enable_pdl)


def decode_attention(
    query: RotatedQuery,
    call: AttentionCall,
    partials: Partials,
    enable_pdl: bool = True,
) -> None:
    """Attend from each sequence's last tokens to its cached tokens: ``AttentionFn``.

    The layout is one that ``DECODE`` has. S is the most splits of a
    sequence; with S = 1 a result does not depend on the rest of the batch. With
    ``enable_pdl`` kernels may begin, on GPUs that can, before the one before them on
    the stream has ended; they wait for what they read.

    Raises:
        RuntimeError: If the kernels cannot be built; see ``build_and_load`` for what
            their functions raise.

    """
    attend(load, query, call, partials, enable_pdl)
