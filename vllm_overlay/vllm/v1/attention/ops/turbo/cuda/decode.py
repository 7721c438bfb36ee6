# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode attention over packed pages as a CUDA kernel, built by FlashInfer's JIT.

It computes the same as ``triton.decode``, but one persistent grid cuts the batch's
tiles evenly among its warps, whatever the lengths. ``cuda.merge`` joins the partial
results. On Hopper ``decode_wgmma`` serves some numbers of queries that would take
several passes here.
"""

from collections.abc import Callable, Iterator

import torch

from vllm.v1.attention.ops.turbo.cuda import decode_wgmma
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES, capability_of
from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.cuda.family import Demand, Family, by_head_size
from vllm.v1.attention.ops.turbo.cuda.merge import launch_merge
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

# Queries of a KV head that attend in one pass; more take further passes. A product of
# the tensor cores has eight columns. With four queries, two halves of the work share
# them. With 16, each decoded fragment is multiplied by two fragments of queries.
QUERIES = (4, 8, 16)
# The number of a block's warps is a multiple of kTeamWarps of decode/partition.cuh.
# There is one block a multiprocessor, and more warps would leave too few registers. A
# warp has two pairs of tiles in flight.
_TEAM_WARPS = 4
_TILES_IN_FLIGHT = 4
# Partial results of a batch that there is room for in any case.
_MAX_PARTIALS = 4096
# Sizes of a warp's shared memory. It has at least _MIN_COLUMNS columns. Each column has
# the query in int8 for both halves of the scale groups, _COLUMN_BYTES of numbers, and
# the result, which is written over the tiles. If lanes decode scales for each other,
# each token of two tiles has its scales of K and _SCALE_SUMS sums. If warps share
# tiles, there are scores.
_MIN_COLUMNS = 8
_QUERY_COPIES = 2
_SCALE_SUMS = 2
_COLUMN_BYTES = 32
_RESULT_PADDING = 4
_SHARED_BYTES_OF_SCORES = 1024
# Shared memory of a block on Hopper. Lanes that decode scales for each other were not
# timed on GPUs with less. There they take room that warps need, or more registers.
_SHARED_BYTES_OF_HOPPER = 232448


def _max_warps(head_size: int, queries: int) -> int:
    if head_size > 128 or head_size == 128 and queries > 8:
        return 8
    return 16 if head_size < 128 and queries <= 4 else 12


def tile_warps(head_size: int) -> int:
    """Warps that attend to a tile together: kTileWarps of common/tile_warps.cuh."""
    return max(1, head_size // 256)


def scales_by_warp(layout: TurboFormat, shared_bytes: int) -> bool:
    """Whether a warp's lanes decode the scales of K for each other.

    They exchange them through shared memory, of which a block has at most
    ``shared_bytes``. Otherwise four lanes each decode the same scales.
    """
    if shared_bytes < _SHARED_BYTES_OF_HOPPER:
        return False
    # With few warps, lanes wait for each other longer than they gain, except with
    # codes of three bits.
    return layout.head_size <= 128 or layout.key_codebook.bits == 3


def num_warps(layout: TurboFormat, queries: int, shared_bytes: int) -> int:
    """Warps of a block, which share ``shared_bytes`` of shared memory."""
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
    """The numbers of ``QUERIES`` that have modules: registers must hold the results."""
    return QUERIES if head_size <= 128 else QUERIES[:-1]


def num_queries_at_once(head_size: int, num_queries: int) -> int:
    """The queries of the module that serves ``num_queries`` of a sequence and KV head.

    If there are more than in any module, they take several passes of the largest.
    """
    served = queries_at_once(head_size)
    return next((n for n in served if num_queries <= n), served[-1])


def _served(
    layout: TurboFormat, demand: Demand
) -> Iterator[tuple[TurboFormat, int, Variant]]:
    capability, variant = demand.capability, demand.variant
    for num_queries in demand.numbers_of_queries(demand.max_query_len):
        if not decode_wgmma.serves(layout, num_queries, capability, variant):
            queries = num_queries_at_once(layout.head_size, num_queries)
            yield layout, queries, variant


# A plan is the number of a KV head's queries that attend in one pass.
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
    """Whether the kernel rounds queries to int8, as ``reference.round_query`` does.

    ``decode_wgmma`` uses them in fp16. The arguments are those of ``load``.
    """
    capability = capability_of(device)
    return not decode_wgmma.serves(layout, num_queries, capability, variant)


def load(
    layout: TurboFormat,
    num_queries: int,
    device: torch.device,
    variant: Variant = PLAIN,
) -> Callable[..., None]:
    """Load the kernel for a number of queries, and build it first if it is not built.

    Args:
        layout: The cache's format.
        num_queries: Queries of a sequence and KV head: query heads times tokens.
        device: The GPU that runs it.
        variant: The layer's variant.

    Raises:
        RuntimeError: If it cannot be built.

    """
    if not rounds_queries(layout, num_queries, device, variant):
        return decode_wgmma.DECODE_WGMMA.load(layout, None, device, variant)
    queries = num_queries_at_once(layout.head_size, num_queries)
    return DECODE.load(layout, queries, device, variant)


def num_kv_splits(
    num_seqs: int, num_kv_heads: int, num_sms: int, query_len: int = 1
) -> int:
    """The most splits of a sequence, which bounds its partial results.

    The kernel chooses the ranges of its warps by lengths. A sequence that is alone, or
    as long as all others together, gets teams of warps on every multiprocessor, unless
    the batch is so large that its partial results would take too much memory.

    Args:
        num_seqs: Sequences of the (padded) batch.
        num_kv_heads: KV heads.
        num_sms: Multiprocessors of the GPU.
        query_len: Query tokens of a sequence.

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
    """Run a kernel that computes partial results from pages, and the merge.

    With a tail, the kernel also takes lengths without the tail's tokens, and the
    merge attends to these. The previous kernel may have written the lengths.

    Args:
        load_kernel: Loads the kernel for a layout, a number of queries of a sequence
            and KV head, a device and a variant.
        query: The rotated queries of the call's T tokens.
        call: The tokens that are attended to, and the output.
        partials: Scratch; its size bounds the splits of a sequence.
        enable_pdl: Whether kernels may begin before the previous one on the stream has
            ended.

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
        call.raw is not None or call.lse is not None,
        None if call.tail is None else call.tail.packed_lens,
        original_query,
        table,
        scale * LOG2_E,
        scoring.sliding_window or 0,
        (scoring.soft_cap or 0.0) * LOG2_E,
        enable_pdl,
    )
    launch_merge(partials, call, None, enable_pdl)


def decode_attention(
    query: RotatedQuery,
    call: AttentionCall,
    partials: Partials,
    enable_pdl: bool = True,
) -> None:
    """Attend from each sequence's query tokens to cached ones: an ``AttentionFn``.

    ``DECODE`` has to support the layout. With one split a result does not depend on the
    rest of the batch. With ``enable_pdl`` kernels may begin before the previous one on
    the stream has ended, on GPUs that can. They wait for the data that they read.

    Raises:
        RuntimeError: If the kernels cannot be built. ``build_and_load`` lists the
            errors of their functions.

    """
    attend(load, query, call, partials, enable_pdl)
