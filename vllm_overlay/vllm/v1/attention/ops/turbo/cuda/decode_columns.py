# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The decode kernel of many queries of a KV head on GPUs whose warpgroups multiply,
which are Hopper's.

As ``cuda.decode``, with the same partial results, but queries are the columns of
products of warpgroups: keys and values are decoded once, to fp16 in registers, for all
queries. Queries are used in fp16 as they are, and keys are decoded exactly, so scores
have no error but that of the products' fp32 sums.
"""

from collections.abc import Iterator

from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.cuda.family import Demand, Family, by_head_size
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import PLAIN, Variant

# Whose instructions it is made of.
CAPABILITY = 90
# Queries of a KV head that attend at once.
NUM_COLUMNS = 32
# How many queries of a sequence and KV head it serves: fewer are served in one pass by
# ``cuda.decode``, too, and more in several. On an H200, 16 sequences of 32768 tokens
# and 2 KV heads of 128 take 99 us for 17 queries and 101 for 32, which take that one
# 151 and 154: benchmark_turbo_decode.py, turbo4_passes.
SERVED = range(17, NUM_COLUMNS + 1)
# Warpgroups a block, one block a multiprocessor, and steps of 64 tokens that each has
# or waits for.
_SETS = 4
_STAGES = 3


def serves(
    layout: TurboFormat,
    num_queries: int,
    capability: int | None,
    variant: Variant = PLAIN,
) -> bool:
    """Whether so many queries of a sequence and KV head attend by it.

    ``cuda.decode`` serves layers with an offset or a soft cap: with these this kernel
    spills registers.
    """
    return (
        num_queries in SERVED
        and COLUMNS.own_variant(variant) == PLAIN
        and COLUMNS.unsupported_reason(layout, capability) is None
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
COLUMNS = Family[TurboFormat, None](
    kernel="decode_columns",
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
