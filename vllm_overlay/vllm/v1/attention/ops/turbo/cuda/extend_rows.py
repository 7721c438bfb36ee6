# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The extend kernel of GPUs whose warpgroups multiply, which are Hopper's.

As ``cuda.extend``, with the same partial results, but queries are the rows of products
of warpgroups: some warps of a block decode each tile once to shared memory, and others
attend to that, with 64 queries a warpgroup. Of a tile's keys the scales are taken
relative to a power of two of its largest, which scores are multiplied by in fp32.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.cuda.build import CudaModule, build_and_load
from vllm.v1.attention.ops.turbo.cuda.constants import instance_suffix, layout_header
from vllm.v1.attention.ops.turbo.format import TurboFormat

# Whose instructions it is made of.
CAPABILITY = 90
# Queries of a warpgroup.
_GROUP_ROWS = 64


class RowsPlan(NamedTuple):
    """How a block's warps share the work: RowsPlan of extend_rows/layout.cuh.

    Attributes:
        consumers: Warpgroups that attend, with 64 queries each.
        producers: Warpgroups that decode, step by step in turns.
        blocks: Blocks of a multiprocessor.
        tiles: Tiles of a step.
        stages: Steps that are decoded and not yet attended to.
        copies: A producer's steps whose pages are being copied.
        registers: Those of a lane that attends; producers have what is left.
        holds_queries: Whether it has its queries in registers, not in shared memory.

    """

    consumers: int
    producers: int
    blocks: int
    tiles: int
    stages: int
    copies: int
    registers: int
    holds_queries: bool = False

    @property
    def rows(self) -> int:
        """Queries of a KV head that attend at once; more do in further passes."""
        return _GROUP_ROWS * self.consumers


# By head size, and by their rows. On an H200, merge included, 16 sequences of 32768
# tokens and 8 KV heads of 128 take 426 us for 64 queries, where bf16's FlashAttention 3
# takes 503: benchmark_turbo_extend.py.
_PLANS = {
    64: (RowsPlan(1, 2, 1, 4, 4, 3, 200), RowsPlan(2, 2, 1, 4, 4, 2, 152)),
    128: (
        RowsPlan(1, 2, 1, 4, 4, 3, 200),
        RowsPlan(2, 2, 1, 4, 4, 2, 184, holds_queries=True),
    ),
    256: (RowsPlan(1, 1, 1, 4, 2, 3, 240),),
}


def unsupported_reason(layout: TurboFormat, capability: int | None) -> str | None:
    """Why a layout has no such kernel on GPUs of a compute capability; None if it has.

    Args:
        layout: The cache's format.
        capability: Such as 90; None without a GPU.

    """
    if capability != CAPABILITY:
        return "GPUs other than Hopper's have no extend kernel of warpgroups"
    if layout.head_size not in _PLANS:
        return f"head size {layout.head_size} has no extend kernel of warpgroups"
    return None


def plan_for(layout: TurboFormat, num_queries: int) -> RowsPlan:
    """How so many queries of a sequence and KV head attend."""
    plans = _PLANS[layout.head_size]
    return next((plan for plan in plans if num_queries <= plan.rows), plans[-1])


def instance(
    layout: TurboFormat,
    plan: RowsPlan,
    has_key_offset: bool = False,
    has_soft_cap: bool = False,
) -> str:
    """The name of a module's instance."""
    suffix = instance_suffix(has_key_offset, has_soft_cap=has_soft_cap)
    return f"{layout.name}_{layout.head_size}_r{plan.rows}{suffix}"


def module(
    layout: TurboFormat,
    plan: RowsPlan,
    has_key_offset: bool = False,
    has_soft_cap: bool = False,
) -> CudaModule:
    """What is built, for cached keys with an offset or without, and for scores with a
    soft cap or without.

    Raises:
        RuntimeError: If there is no instance for the layout.

    """
    reason = unsupported_reason(layout, CAPABILITY)
    if reason is not None:
        raise RuntimeError(reason)
    return CudaModule(
        "extend_rows",
        instance(layout, plan, has_key_offset, has_soft_cap),
        layout_header(layout, has_key_offset, has_soft_cap=has_soft_cap),
        tuple(f"-DROWS_{name.upper()}={int(n)}" for name, n in plan._asdict().items()),
        is_specific=True,
    )


@cache
def load(
    layout: TurboFormat,
    plan: RowsPlan,
    device: torch.device,
    has_key_offset: bool = False,
    has_soft_cap: bool = False,
) -> Callable[..., None]:
    """Build, if need be, and load an instance.

    Raises:
        RuntimeError: If it cannot be built.

    """
    return build_and_load(module(layout, plan, has_key_offset, has_soft_cap), device)
