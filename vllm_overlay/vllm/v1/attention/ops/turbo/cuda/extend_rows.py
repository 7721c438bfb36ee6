# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of many queries to packed pages on Hopper, as a CUDA kernel.

As ``cuda.extend``, with the same partial results, but queries are the rows of
warpgroups' products: some warps of a block decode each tile once to shared memory, and
others attend to that, with 64 queries a warpgroup.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda.build import CudaModule, build_and_load
from vllm.v1.attention.ops.turbo.cuda.constants import instance_suffix, layout_header
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    DecodeBatch,
    NewestTokens,
    OffsetScores,
    Partials,
    RecentWindow,
    RotatedQuery,
)

SUPPORTED_HEAD_SIZES = (128,)
# Queries of a warpgroup.
_GROUP_ROWS = 64


class RowsPlan(NamedTuple):
    """How a block's warps share the work: see RowsPlan of extend_rows/layout.cuh.

    Attributes:
        consumers: Warpgroups that attend, with 64 queries each.
        producers: Warpgroups that decode.
        blocks: Blocks of a multiprocessor.
        tiles: Tiles of a step.
        copies: Steps whose pages are being copied.
        registers: Those of a lane that attends.

    """

    consumers: int
    producers: int
    blocks: int
    tiles: int
    copies: int
    registers: int

    @property
    def rows(self) -> int:
        """Queries of a KV head that attend at once; more do in further passes."""
        return _GROUP_ROWS * self.consumers


PLANS = (RowsPlan(1, 1, 2, 4, 3, 152), RowsPlan(2, 1, 1, 8, 3, 208))


def unsupported_reason(layout: TurboFormat) -> str | None:
    """Why a layout has no such kernel; None if it has."""
    if layout.head_size not in SUPPORTED_HEAD_SIZES:
        return f"head size {layout.head_size} has no kernel for many queries"
    return None


def plan_of(num_queries: int) -> RowsPlan:
    """How so many queries of a sequence and KV head attend."""
    return next((plan for plan in PLANS if num_queries <= plan.rows), PLANS[-1])


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
    reason = unsupported_reason(layout)
    if reason is not None:
        raise RuntimeError(reason)
    return CudaModule(
        "extend_rows",
        instance(layout, plan, has_key_offset, has_soft_cap),
        layout_header(layout, has_key_offset, has_soft_cap=has_soft_cap),
        tuple(f"-DROWS_{k.upper()}={v}" for k, v in plan._asdict().items()),
        is_specific=True,
    )


def load(
    layout: TurboFormat,
    num_queries: int,
    device: torch.device,
    has_key_offset: bool = False,
    has_soft_cap: bool = False,
) -> Callable[..., None]:
    """Build, if need be, and load the kernel for a number of queries, as
    ``cuda.extend.load``."""
    return load_instance(
        layout, plan_of(num_queries), device, has_key_offset, has_soft_cap
    )


@cache
def load_instance(
    layout: TurboFormat,
    plan: RowsPlan,
    device: torch.device,
    has_key_offset: bool = False,
    has_soft_cap: bool = False,
) -> Callable[..., None]:
    """As ``load``, of one of the modules of a layout."""
    return build_and_load(module(layout, plan, has_key_offset, has_soft_cap), device)


def extend_attention(
    query: RotatedQuery,
    kv_cache: torch.Tensor,
    layout: TurboFormat,
    batch: DecodeBatch,
    partials: Partials,
    output: torch.Tensor,
    newest: NewestTokens | None = None,
    offset: OffsetScores | None = None,
    window: RecentWindow | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
    lse: torch.Tensor | None = None,
    enable_pdl: bool = True,
) -> None:
    """Attend from each sequence's last tokens to its cached tokens: ``AttentionFn``.

    As ``cuda.extend.extend_attention``.

    Raises:
        RuntimeError: If the kernel cannot be built; see ``build_and_load`` for what its
            function raises.

    """
    cuda_decode.attend(
        load,
        query,
        kv_cache,
        layout,
        batch,
        partials,
        output,
        newest,
        offset,
        window,
        sliding_window,
        sinks,
        logits_soft_cap,
        lse,
        enable_pdl,
    )
