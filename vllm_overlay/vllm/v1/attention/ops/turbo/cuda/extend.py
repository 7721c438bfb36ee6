# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of a few dozen query tokens to packed pages, as a CUDA kernel.

It is for prefix hits and short continuations of long contexts. As ``cuda.decode``,
with the same partial results, but queries are the rows of products: some warps of a
block decode each tile once, to fragments in shared memory, and others attend to that,
with 16 queries a warp and up to 128 queries of a KV head a block. On Hopper the kernel
of ``extend_rows`` serves. Queries are used in fp16 as they are, and keys are decoded to
fp16 exactly, but where a scale is as good as zero beside one above 5120 in its tile, so
scores have no error but that of the products' fp32 sums.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import extend_rows
from vllm.v1.attention.ops.turbo.cuda.build import capability_of
from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.cuda.family import Demand, Family, by_head_size
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    MAX_KV_SPLITS,
    PLAIN,
    AttentionCall,
    Partials,
    RotatedQuery,
    Variant,
)

SUPPORTED_HEAD_SIZES = (64, 128, 256)
# Queries of a warp, and the bytes of what is decoded, which is fp16.
_WARP_ROWS = 16
_NUMBER_BYTES = 2
# Steps that are decoded and not yet attended to: the most, and the least with which
# producers and consumers overlap.
_MAX_STAGES = 4
_MIN_STAGES = 2
# Steps of a producer whose pages are being copied.
_COPIES = 3
# Bytes of shared memory of a row, of a tile of a stage beside its numbers, and of a
# block beside these: barriers, ranges and padding.
_ROW_BYTES = 12
_TILE_FACTOR_BYTES = 8
_BLOCK_BYTES = 384
# The driver's own bytes of a block's shared memory.
_RESERVED_BYTES = 1024
# Blocks a multiprocessor that work is divided among, and the splits of all query
# tokens of a batch that there is room for in any case.
_BLOCKS_PER_SM = 2
_MAX_PARTIALS = 4096


class ExtendPlan(NamedTuple):
    """How a block's warps share the work: ExtendPlan of extend/layout.cuh.

    Attributes:
        consumers: Warps that attend, with 16 queries each.
        producers: Warps that decode.
        blocks: Blocks of a multiprocessor that registers have room for.
        splits: Whether half of the producers decode K, and half V: then as many have
            steps of half as many tiles.
        overlaps: Whether a consumer makes scores of a part of a step while it weighs
            those of the part before, or while it adds that part's values: for the
            former it has the scores of two parts in registers.

    """

    consumers: int
    producers: int
    blocks: int
    splits: bool = False
    overlaps: bool = True

    @property
    def tiles(self) -> int:
        """Tiles of a step."""
        return self.producers // 2 if self.splits else self.producers

    @property
    def rows(self) -> int:
        """Queries of a KV head that attend at once; more do in further passes."""
        return _WARP_ROWS * self.consumers


# By head size, and by their rows: the fastest of what was tried on an H200, within the
# shared memory of GPUs whose blocks have 99 KiB. That of heads of 256 and 32 rows was
# not timed. benchmark_turbo_extend.py has --warps and --plans to try others.
_PLANS = {
    64: (
        ExtendPlan(2, 2, 3),
        ExtendPlan(4, 4, 2, splits=True),
        ExtendPlan(8, 4, 1),
    ),
    128: (ExtendPlan(2, 2, 3), ExtendPlan(4, 2, 2), ExtendPlan(8, 4, 1)),
    256: (
        ExtendPlan(2, 2, 2, overlaps=False),
        ExtendPlan(4, 4, 1, splits=True, overlaps=False),
    ),
}


def plan_for(layout: TurboFormat, num_queries: int) -> ExtendPlan:
    """How so many queries of a sequence and KV head attend."""
    plans = _PLANS[layout.head_size]
    return next((plan for plan in plans if num_queries <= plan.rows), plans[-1])


def num_stages(layout: TurboFormat, plan: ExtendPlan, shared_bytes: int) -> int:
    """Stages of a block of GPUs whose blocks have ``shared_bytes`` of shared memory:
    as many as leave room for all of a multiprocessor's blocks, or for fewer blocks.
    """
    numbers = 2 * fmt.TILE_TOKENS * layout.head_size
    per_stage = plan.tiles * (numbers * _NUMBER_BYTES + _TILE_FACTOR_BYTES)
    others = plan.rows * _ROW_BYTES + _BLOCK_BYTES
    others += plan.tiles * _COPIES * layout.tile_bytes
    fitting = 0
    for blocks in range(plan.blocks, 0, -1):
        room = (shared_bytes + _RESERVED_BYTES) // blocks - _RESERVED_BYTES
        fitting = (room - others) // per_stage
        if fitting >= _MIN_STAGES:
            break
    assert fitting >= _MIN_STAGES, (layout, plan, shared_bytes)
    return min(_MAX_STAGES, fitting)


def _served(
    layout: TurboFormat, demand: Demand
) -> Iterator[tuple[TurboFormat, ExtendPlan, Variant]]:
    if EXTEND.refusal(layout) or _has_rows(layout, demand.capability):
        return
    for num_queries in demand.numbers_of_queries(demand.max_extend_len):
        yield layout, plan_for(layout, num_queries), demand.variant


def _defines(
    layout: TurboFormat, plan: ExtendPlan, shared_bytes: int
) -> dict[str, int]:
    numbers = plan._asdict() | {
        "stages": num_stages(layout, plan, shared_bytes),
        "copies": _COPIES,
        "max_shared_bytes": shared_bytes,
    }
    return {f"EXTEND_{name.upper()}": n for name, n in numbers.items()}


EXTEND = Family[TurboFormat, ExtendPlan](
    kernel="extend",
    title="extend kernel",
    refusal=by_head_size(SUPPORTED_HEAD_SIZES, "extend kernel"),
    name=lambda layout, plan: f"{layout.name}_{layout.head_size}_r{plan.rows}",
    header=layout_header,
    served=_served,
    variants=Variant(key_offset=True, soft_cap=True),
    defines=_defines,
)


def _has_rows(layout: TurboFormat, capability: int | None) -> bool:
    """Whether the kernel of ``extend_rows`` serves in place of this one."""
    return extend_rows.ROWS.unsupported_reason(layout, capability) is None


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
    if _has_rows(layout, capability_of(device)):
        plan = extend_rows.plan_for(layout, num_queries)
        return extend_rows.ROWS.load(layout, plan, device, variant)
    return EXTEND.load(layout, plan_for(layout, num_queries), device, variant)


def num_kv_splits(
    num_seqs: int, num_kv_heads: int, num_sms: int, query_len: int = 1
) -> int:
    """Splits a sequence at most: room for partial results.

    As ``cuda.decode.num_kv_splits``, with blocks in place of warps: the kernel itself
    decides on the ranges, by lengths, and a sequence that is alone is to have all
    blocks, unless the batch is so large that room for it would cost too much.

    Args:
        num_seqs: Sequences in the (padded) batch.
        num_kv_heads: KV heads.
        num_sms: Multiprocessors of the GPU.
        query_len: Query tokens a sequence.

    """
    num_seqs = max(1, num_seqs)
    blocks = num_sms * _BLOCKS_PER_SM
    alone = -(-blocks // num_kv_heads) + 1
    average = -(-blocks // (num_seqs * num_kv_heads))
    room = max(_MAX_PARTIALS // (num_seqs * query_len), average + 1)
    return max(2, min(MAX_KV_SPLITS, alone, room))


def extend_attention(
    query: RotatedQuery,
    call: AttentionCall,
    partials: Partials,
    enable_pdl: bool = True,
) -> None:
    """Attend from each sequence's last tokens to its cached tokens: ``AttentionFn``.

    The layout is one that ``EXTEND`` has. With newest tokens the cache is read up to
    the query tokens, and the merge attends to these, one after the other, or adds what
    attention to them gave.

    Raises:
        RuntimeError: If the kernel cannot be built; see ``build_and_load`` for what its
            function raises.

    """
    cuda_decode.attend(load, query, call, partials, enable_pdl)
