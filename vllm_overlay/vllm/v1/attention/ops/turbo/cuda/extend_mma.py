# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of a few dozen query tokens to packed pages, as a CUDA kernel.

It is for prefix hits and short continuations of long contexts. It has the same partial
results as ``cuda.decode``, but queries are the rows of products. Some warps of a block
decode each tile once to fragments in shared memory, and others attend to these, with 16
queries a warp and up to 128 queries of a KV head a block. On Hopper ``extend_wgmma``
serves.

Queries stay in fp16. Keys are decoded to fp16 exactly, except where a scale is
negligible beside a scale above 5120 in its tile. So only the products' fp32 sums have
an error.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import extend_wgmma
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
# Queries of a warp, and bytes of a decoded number, which is fp16.
_WARP_ROWS = 16
_NUMBER_BYTES = 2
# Stages, steps that are decoded and not yet attended to: the most, and the least with
# which producers and consumers overlap.
_MAX_STAGES = 4
_MIN_STAGES = 2
# Steps of a producer whose pages are being copied.
_COPIES = 3
# Bytes of shared memory for a row, for a stage's tile in addition to its numbers, and
# for the rest of a block: barriers, ranges and padding.
_ROW_BYTES = 12
_TILE_FACTOR_BYTES = 8
_BLOCK_BYTES = 384
# Bytes of a block's shared memory that the driver reserves.
_RESERVED_BYTES = 1024
# Blocks of a multiprocessor that share the work, and the partial results of a batch
# that there is room for in any case.
_BLOCKS_PER_SM = 2
_MAX_PARTIALS = 4096


class ExtendPlan(NamedTuple):
    """The division of work among a block's warps: ExtendPlan of extend_mma/layout.cuh.

    Attributes:
        consumers: Warps that attend, with 16 queries each.
        producers: Warps that decode.
        blocks: Blocks of a multiprocessor that registers have room for.
        splits: Whether half of the producers decode K and half V. A step then has half
            as many tiles.
        overlaps: Whether a consumer computes a part's scores while it weighs the
            previous part's, with the scores of two parts in registers. Otherwise it
            computes them while it adds the previous part's values.

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
        """Queries of a KV head that attend in one pass; more take further passes."""
        return _WARP_ROWS * self.consumers


# Plans by head size, ascending by rows. They fit in 99 KiB of shared memory, the least
# that a GPU's blocks have.
# Tuning: the fastest that were tried on an H200, 2026-11, `ci/gpu.py extend`, whose
# --warps and --plans try others. The plan of 256 and 32 rows was not timed.
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
    """The plan for a number of queries of a sequence and KV head."""
    plans = _PLANS[layout.head_size]
    return next((plan for plan in plans if num_queries <= plan.rows), plans[-1])


def num_stages(layout: TurboFormat, plan: ExtendPlan, shared_bytes: int) -> int:
    """The stages of a block that has at most ``shared_bytes`` of shared memory.

    They leave room for all blocks of a multiprocessor, or for fewer if they must.
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
    if EXTEND_MMA.refusal(layout) or _has_wgmma(layout, demand.capability):
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


EXTEND_MMA = Family[TurboFormat, ExtendPlan](
    kernel="extend_mma",
    title="extend kernel",
    refusal=by_head_size(SUPPORTED_HEAD_SIZES, "extend kernel"),
    name=lambda layout, plan: f"{layout.name}_{layout.head_size}_r{plan.rows}",
    header=layout_header,
    served=_served,
    variants=Variant(key_offset=True, soft_cap=True),
    defines=_defines,
)


def _has_wgmma(layout: TurboFormat, capability: int | None) -> bool:
    """Whether a GPU runs the kernel of ``extend_wgmma`` in place of this one."""
    return extend_wgmma.EXTEND_WGMMA.unsupported_reason(layout, capability) is None


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
    if _has_wgmma(layout, capability_of(device)):
        plan = extend_wgmma.plan_for(layout, num_queries)
        return extend_wgmma.EXTEND_WGMMA.load(layout, plan, device, variant)
    return EXTEND_MMA.load(layout, plan_for(layout, num_queries), device, variant)


def num_kv_splits(
    num_seqs: int, num_kv_heads: int, num_sms: int, query_len: int = 1
) -> int:
    """The most splits of a sequence, which bounds its partial results.

    The kernel chooses the ranges of its blocks by lengths. A sequence that is alone
    gets all blocks, unless the batch is so large that its partial results would take
    too much memory.

    Args:
        num_seqs: Sequences of the (padded) batch.
        num_kv_heads: KV heads.
        num_sms: Multiprocessors of the GPU.
        query_len: Query tokens of a sequence.

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
    """Attend from each sequence's query tokens to cached ones: an ``AttentionFn``.

    ``EXTEND_MMA`` has to support the layout. With ``call.raw`` the cache is read up to
    the query tokens. The merge attends to these one by one, or adds
    ``call.raw.attended``.

    Raises:
        RuntimeError: If the kernel cannot be built. ``build_and_load`` lists the errors
            of its function.

    """
    cuda_decode.attend(load, query, call, partials, enable_pdl)
