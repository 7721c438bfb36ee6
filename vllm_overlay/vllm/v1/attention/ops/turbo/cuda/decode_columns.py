# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The decode kernel of many queries of a KV head on GPUs whose warpgroups multiply,
which are Hopper's.

As ``cuda.decode``, with the same partial results, but queries are the columns of
products of warpgroups: keys and values are decoded once, to fp16 in registers, for all
queries. Queries are used in fp16 as they are, and keys are decoded exactly, so scores
have no error but that of the products' fp32 sums.
"""

from collections.abc import Callable
from functools import cache

import torch

from vllm.v1.attention.ops.turbo.cuda.build import CudaModule, build_and_load
from vllm.v1.attention.ops.turbo.cuda.constants import instance_suffix, layout_header
from vllm.v1.attention.ops.turbo.format import TurboFormat

# Whose instructions it is made of.
CAPABILITY = 90
# Queries of a KV head that attend at once.
COLUMNS = 32
# How many queries of a sequence and KV head it serves: fewer are served in one pass by
# ``cuda.decode``, too, and more in several. On an H200, 16 sequences of 32768 tokens
# and 2 KV heads of 128 take 99 us for 17 queries and 101 for 32, which take that one
# 151 and 154: benchmark_turbo_decode.py, turbo4_passes.
SERVED = range(17, COLUMNS + 1)
# Whether cached keys lack an offset, and scores have a soft cap: ``cuda.decode`` serves
# the other variants, of which more registers are spilled.
SERVED_VARIANTS = frozenset({(False, False)})
SUPPORTED_HEAD_SIZES = (64, 128)
# Warpgroups a block, one block a multiprocessor, and steps of 64 tokens that each has
# or waits for.
_SETS = 4
_STAGES = 3


def unsupported_reason(layout: TurboFormat, capability: int | None) -> str | None:
    """Why a layout has no such kernel on GPUs of a compute capability; None if it has.

    Args:
        layout: The cache's format.
        capability: Such as 90; None without a GPU.

    """
    if capability != CAPABILITY:
        return "GPUs other than Hopper's have no decode kernel of warpgroups"
    if layout.head_size not in SUPPORTED_HEAD_SIZES:
        return f"head size {layout.head_size} has no decode kernel of warpgroups"
    return None


def serves(
    layout: TurboFormat,
    num_queries: int,
    capability: int | None,
    has_key_offset: bool = False,
    has_soft_cap: bool = False,
) -> bool:
    """Whether so many queries of a sequence and KV head attend by it."""
    return (
        num_queries in SERVED
        and (has_key_offset, has_soft_cap) in SERVED_VARIANTS
        and unsupported_reason(layout, capability) is None
    )


def instance(
    layout: TurboFormat, has_key_offset: bool = False, has_soft_cap: bool = False
) -> str:
    """The name of a module's instance."""
    suffix = instance_suffix(has_key_offset, has_soft_cap=has_soft_cap)
    return f"{layout.name}_{layout.head_size}_c{COLUMNS}{suffix}"


def module(
    layout: TurboFormat, has_key_offset: bool = False, has_soft_cap: bool = False
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
        "decode_columns",
        instance(layout, has_key_offset, has_soft_cap),
        layout_header(layout, has_key_offset, has_soft_cap=has_soft_cap),
        (
            f"-DCOLUMNS={COLUMNS}",
            f"-DCOLUMNS_SETS={_SETS}",
            f"-DCOLUMNS_STAGES={_STAGES}",
        ),
        is_specific=True,
    )


@cache
def load(
    layout: TurboFormat,
    device: torch.device,
    has_key_offset: bool = False,
    has_soft_cap: bool = False,
) -> Callable[..., None]:
    """Build, if need be, and load an instance.

    Raises:
        RuntimeError: If it cannot be built.

    """
    return build_and_load(module(layout, has_key_offset, has_soft_cap), device)
