# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The decode kernel for many queries of a KV head, on Hopper.

Only Hopper's warpgroups multiply as it needs. It has the same partial results as
``cuda.decode``, but queries are the columns of warpgroups' products. Keys and values
are decoded once to fp16 in registers for all queries. Queries stay in fp16 and keys are
decoded exactly, so only the products' fp32 sums have an error.
"""

from collections.abc import Iterator

from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.cuda.family import Demand, Family, by_head_size
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import PLAIN, Variant

# The compute capability whose instructions it needs.
CAPABILITY = 90
# Queries of a KV head that attend in one pass.
NUM_COLUMNS = 32
# Numbers of queries of a sequence and KV head that it serves. For fewer,
# ``cuda.decode`` also takes one pass. More take several passes of either kernel.
# Tuning: us of this kernel / of ``cuda.decode`` / of ``cuda.extend_wgmma``, turbo4, 2
# KV heads of 128, 2026-11, `benchmark_turbo_decode.py --arms turbo4 turbo4_passes
# turbo4_extend`. 16 x 32768, an H200: 17 queries 99 / 151, 32 queries 101 / 154. An
# H100: 17 queries 102 / 148 / 118, 32 queries 103 / 152 / 119; 64 x 4096, 32 queries
# 66 / 93 / 73; 1 x 131072, 32 queries 43 / 52 / 44.
SERVED = range(17, NUM_COLUMNS + 1)
# Warpgroups of a block, with one block a multiprocessor, and the steps of 64 tokens
# that each has in flight.
_SETS = 4
_STAGES = 3


def serves(
    layout: TurboFormat,
    num_queries: int,
    capability: int | None,
    variant: Variant = PLAIN,
) -> bool:
    """Whether this kernel serves ``num_queries`` of a sequence and KV head.

    With a soft cap this kernel would spill registers, and ``cuda.decode`` serves.
    """
    return (
        num_queries in SERVED
        and not variant.soft_cap
        and DECODE_WGMMA.unsupported_reason(layout, capability) is None
    )


def _served(
    layout: TurboFormat, demand: Demand
) -> Iterator[tuple[TurboFormat, None, Variant]]:
    if any(
        serves(layout, num_queries, demand.capability, demand.variant)
        for num_queries in demand.numbers_of_queries(demand.max_query_len)
    ):
        yield layout, None, demand.variant


_TITLE = "decode kernel of warpgroups"
DECODE_WGMMA = Family[TurboFormat, None](
    kernel="decode_wgmma",
    title=_TITLE,
    refusal=by_head_size((64, 128), _TITLE),
    name=lambda layout, _: f"{layout.name}_{layout.head_size}_c{NUM_COLUMNS}",
    header=layout_header,
    served=_served,
    variants=Variant(key_offset=True, soft_cap=True),
    capability=CAPABILITY,
    defines=lambda *_: {
        "COLUMNS": NUM_COLUMNS,
        "COLUMNS_SETS": _SETS,
        "COLUMNS_STAGES": _STAGES,
    },
    is_specific=lambda _: True,
)
