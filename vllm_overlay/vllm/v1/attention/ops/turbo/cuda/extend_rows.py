# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The extend kernel of GPUs whose warpgroups multiply, which are Hopper's.

As ``cuda.extend``, with the same partial results, but queries are the rows of products
of warpgroups: some warps of a block decode each tile once to shared memory, and others
attend to that, with 64 queries a warpgroup. Of a tile's keys the scales are taken
relative to a power of two of its largest, which scores are multiplied by in fp32.

Its results are partial ones for the merge, or outputs (``extend_outputs``): then the
query tokens' keys and values are a sequence's last tiles, rotated in fp16, and a block
rotates queries as it loads them, and the results back if it has all tiles of these
queries. Only what several blocks have parts of is joined by another kernel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.cuda.family import Demand, Family, by_head_size
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    LOG2_E,
    AttentionCall,
    OutputScratch,
    TensorSpecs,
    Variant,
    score_factor,
)

# Whose instructions it is made of.
CAPABILITY = 90
# Queries of a product.
_TILE_ROWS = 64
# Partial results of a row that a block may have: of the pass that it goes on with, and
# of the one that it does not end.
_RANGE_PARTS = 2


class RowsPlan(NamedTuple):
    """How a block's warps share the work: RowsPlan of extend_rows/layout.cuh.

    Attributes:
        consumers: Warpgroups that attend.
        producers: Warpgroups that decode, step by step in turns.
        blocks: Blocks of a multiprocessor.
        tiles: Tiles of a step.
        stages: Steps that are decoded and not yet attended to.
        copies: A producer's steps whose pages are being copied.
        registers: Registers of a lane that attends; producers have the rest.
        holds_queries: Whether it has its queries in registers, not in shared memory.
        row_tiles: Its products, of 64 queries each.
        overlaps: Whether it weighs scores while values are added: it takes more
            registers.

    """

    consumers: int
    producers: int
    blocks: int
    tiles: int
    stages: int
    copies: int
    registers: int
    holds_queries: bool = False
    row_tiles: int = 1
    overlaps: bool = False

    @property
    def rows(self) -> int:
        """Queries of a KV head that attend at once; more do in further passes."""
        return _TILE_ROWS * self.row_tiles * self.consumers


# By head size, and by their rows. On an H200, merge included, 16 sequences of 32768
# tokens and 8 KV heads of 128 take 420 us for 64 queries, where bf16's FlashAttention 3
# takes 497: benchmark_turbo_extend.py.
_PLANS = {
    64: (RowsPlan(1, 2, 1, 4, 4, 3, 200), RowsPlan(2, 2, 1, 4, 4, 2, 152)),
    128: (
        RowsPlan(1, 2, 1, 4, 4, 3, 200, holds_queries=True, overlaps=True),
        RowsPlan(2, 2, 1, 4, 4, 2, 184, holds_queries=True),
    ),
    256: (
        RowsPlan(1, 2, 1, 4, 2, 1, 240, overlaps=True),
        RowsPlan(2, 2, 1, 4, 2, 1, 208),
    ),
}
# The same of kernels that end in outputs, by dtype and head size: of what was measured.
# With heads of 256 the merge was faster.
_OUTPUT_PLANS = {
    ("turbo4", 64): (
        RowsPlan(1, 2, 1, 4, 4, 3, 200, holds_queries=True, overlaps=True),
        RowsPlan(2, 2, 1, 4, 4, 3, 160, holds_queries=True, overlaps=True),
        RowsPlan(2, 1, 1, 4, 4, 3, 208, holds_queries=True, row_tiles=2, overlaps=True),
    ),
    ("turbo4", 128): (
        RowsPlan(1, 2, 1, 4, 4, 3, 200, holds_queries=True),
        RowsPlan(2, 2, 1, 4, 4, 3, 192, holds_queries=True, overlaps=True),
        RowsPlan(2, 1, 1, 4, 4, 3, 224, row_tiles=2),
    ),
}


def plan_for(
    layout: TurboFormat, num_queries: int, with_outputs: bool = False
) -> RowsPlan:
    """How so many queries of a sequence and KV head attend."""
    plans: Sequence[RowsPlan] = _PLANS[layout.head_size]
    if with_outputs:
        plans = _OUTPUT_PLANS[layout.name, layout.head_size]
    *smaller, largest = plans
    if largest.row_tiles > 1:
        # With more products of no queries than a smaller one has it takes longer.
        if -num_queries % largest.rows < _TILE_ROWS:
            return largest
        plans = smaller
    return next((plan for plan in plans if num_queries <= plan.rows), plans[-1])


def _served(
    layout: TurboFormat, demand: Demand, with_outputs: bool
) -> Iterator[tuple[TurboFormat, RowsPlan, Variant]]:
    # Outputs are for keys without an offset. Partial results are for these, too: for
    # ranks that share the context, and for few requests.
    family = OUTPUTS if with_outputs else ROWS
    if with_outputs and demand.variant.key_offset:
        return
    if family.unsupported_reason(layout, demand.capability) is not None:
        return
    for num_queries in demand.numbers_of_queries(demand.max_extend_len):
        yield layout, plan_for(layout, num_queries, with_outputs), demand.variant


def _refuse_outputs(layout: TurboFormat) -> str | None:
    if (layout.name, layout.head_size) in _OUTPUT_PLANS:
        return None
    layout_name = f"{layout.name} with head size {layout.head_size}"
    return f"{layout_name} has no CUDA extend kernel that ends in outputs"


_TITLE = "extend kernel of warpgroups"
ROWS = Family[TurboFormat, RowsPlan](
    kernel="extend_rows",
    title=_TITLE,
    refusal=by_head_size(_PLANS, _TITLE),
    name=lambda layout, plan: f"{layout.name}_{layout.head_size}_r{plan.rows}",
    header=layout_header,
    served=partial(_served, with_outputs=False),
    variants=Variant(key_offset=True, soft_cap=True),
    capability=CAPABILITY,
    defines=lambda layout, plan, _: {
        f"ROWS_{name.upper()}": n for name, n in plan._asdict().items()
    },
    folder="extend_rows",
    is_specific=lambda plan: True,
)
OUTPUTS = replace(
    ROWS,
    kernel="extend_outputs",
    refusal=_refuse_outputs,
    served=partial(_served, with_outputs=True),
)


def output_scratch(
    layout: TurboFormat,
    num_kv_heads: int,
    num_sms: int,
    num_own_tiles: int,
) -> TensorSpecs:
    """See ``KernelSet.output_scratch``."""
    tile_numbers = 2 * fmt.TILE_TOKENS * layout.head_size
    plans = _OUTPUT_PLANS[layout.name, layout.head_size]
    rows = max(plan.blocks * plan.rows for plan in plans)
    num_partials = _RANGE_PARTS * num_sms * rows
    return [
        ((num_own_tiles, num_kv_heads, tile_numbers), torch.float16),
        ((num_partials, layout.head_size), torch.float32),
        ((num_partials,), torch.float32),
    ]


def extend_outputs(
    call: AttentionCall, scratch: OutputScratch, enable_pdl: bool = True
) -> None:
    """Attend from each sequence's last tokens to all that it has: ``OutputsFn``.

    Raises:
        RuntimeError: If the kernel cannot be built; see ``build_and_load`` for what its
            function raises.

    """
    query, batch, scoring = call.query, call.batch, call.scoring
    assert query is not None
    num_tokens, num_heads, head_size = query.shape
    batch.check(num_tokens)
    if batch.num_seqs == 0:
        return
    call.check()
    key = value = own_tiles = None
    if call.newest is not None:
        key, value, own_tiles = call.newest.key, call.newest.value, scratch.own_tiles
    num_queries = num_heads // call.num_kv_heads * batch.query_len
    plan = plan_for(call.layout, num_queries, True)
    OUTPUTS.load(call.layout, plan, call.kv_cache.device, scoring.variant())(
        query,
        # The rotation's norm is taken off where it is done.
        score_factor(call.layout, scoring.scale) * head_size**-0.5,
        call.kv_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        batch.num_seqs,
        batch.query_len,
        call.output,
        scratch.partial,
        scratch.partial_lse,
        key,
        value,
        own_tiles,
        scoring.sliding_window or 0,
        scoring.sinks,
        (scoring.soft_cap or 0.0) * LOG2_E,
        enable_pdl,
    )
