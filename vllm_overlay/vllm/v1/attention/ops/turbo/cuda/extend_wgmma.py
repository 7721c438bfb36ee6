# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The extend kernel of Hopper, whose warpgroups multiply.

It has the same partial results as ``cuda.extend_mma``, but queries are the rows of
warpgroups' products. Some warps of a block decode each tile once to shared memory, and
others attend to it, with 64 queries a warpgroup. The scales of a tile's keys are
relative to a power of two near the largest, and scores are multiplied by that in fp32.

It ends in partial results for the merge, or in outputs (``extend_outputs``). For the
latter, the query tokens' keys and values are a sequence's last tiles, rotated in fp16.
These keys lose the offset of the last cached token, so that all scores can be compared.
A block rotates queries as it loads them. It rotates results back if it has all tiles of
these queries. Another kernel joins results that several blocks have parts of.
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
from vllm.v1.attention.ops.turbo.formats.output_scratch import OutputScratch
from vllm.v1.attention.ops.turbo.interface import (
    LOG2_E,
    AttentionCall,
    TensorSpecs,
    Variant,
    score_factor,
)

# The compute capability whose instructions it needs.
CAPABILITY = 90
# Queries of a product.
_TILE_ROWS = 64
# The most partial results of a row in a block: one for a pass that another block began,
# and one for a pass that it does not end.
_RANGE_PARTS = 2


class RowsPlan(NamedTuple):
    """The division of work among a block's warps: RowsPlan of extend_wgmma/layout.cuh.

    Attributes:
        consumers: Warpgroups that attend.
        producers: Warpgroups that decode, taking turns at steps.
        blocks: Blocks of a multiprocessor.
        tiles: Tiles of a step.
        stages: Steps that are decoded and not yet attended to.
        copies: A producer's steps whose pages are being copied.
        registers: Registers of a consumer's lane; producers have the rest.
        holds_queries: Whether a consumer has its queries in registers, not in shared
            memory.
        row_tiles: Products of a consumer, with 64 queries each.
        overlaps: Whether a consumer weighs scores while values are added, which takes
            more registers.

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
        """Queries of a KV head that attend in one pass; more take further passes."""
        return _TILE_ROWS * self.row_tiles * self.consumers


# Plans by head size, ascending by rows.
# Tuning: us with the merge / of FlashAttention 3 on bf16, 16 x 32768, 8 KV heads of
# 128, an H200, 2026-11, `ci/gpu.py extend`.
# 64 queries of a KV head: 420 / 497.
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
# The same for kernels that end in outputs, by dtype and head size. Others were not
# measured, except heads of 256, with which the merge was faster.
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
    """The plan for a number of queries of a sequence and KV head."""
    plans: Sequence[RowsPlan] = _PLANS[layout.head_size]
    if with_outputs:
        plans = _OUTPUT_PLANS[layout.name, layout.head_size]
    *smaller, largest = plans
    if largest.row_tiles > 1:
        # The largest plan is slower if it has a whole product without queries.
        if -num_queries % largest.rows < _TILE_ROWS:
            return largest
        plans = smaller
    return next((plan for plan in plans if num_queries <= plan.rows), plans[-1])


def _served(
    layout: TurboFormat, demand: Demand, with_outputs: bool
) -> Iterator[tuple[TurboFormat, RowsPlan, Variant]]:
    # All layers also need partial results, for ranks that share the context and for
    # few requests.
    family = OUTPUTS if with_outputs else EXTEND_WGMMA
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
EXTEND_WGMMA = Family[TurboFormat, RowsPlan](
    kernel="extend_wgmma",
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
    folder="extend_wgmma",
    is_specific=lambda plan: True,
)
OUTPUTS = replace(
    EXTEND_WGMMA,
    kernel="extend_outputs",
    refusal=_refuse_outputs,
    served=partial(_served, with_outputs=True),
)


def output_lens(layout: TurboFormat, num_queries_per_kv: int, most: int) -> list[int]:
    """``KernelSet.output_lens``: a length for each plan."""
    lens = {
        plan_for(layout, num_queries_per_kv * n, True): n for n in range(1, most + 1)
    }
    return list(lens.values())


def output_scratch(
    layout: TurboFormat,
    num_kv_heads: int,
    num_sms: int,
    num_raw_tiles: int,
) -> TensorSpecs:
    """``KernelSet.output_scratch``: shapes and dtypes of ``OutputScratch``."""
    tile_numbers = 2 * fmt.TILE_TOKENS * layout.head_size
    plans = _OUTPUT_PLANS[layout.name, layout.head_size]
    rows = max(plan.blocks * plan.rows for plan in plans)
    num_partials = _RANGE_PARTS * num_sms * rows
    return [
        ((num_raw_tiles, num_kv_heads, tile_numbers), torch.float16),
        ((num_partials, layout.head_size), torch.float32),
        ((num_partials,), torch.float32),
    ]


def extend_outputs(
    call: AttentionCall, scratch: OutputScratch, enable_pdl: bool = True
) -> None:
    """Attend from each sequence's query tokens to all its tokens: an ``OutputsFn``.

    Raises:
        RuntimeError: If the kernel cannot be built. ``build_and_load`` lists the errors
            of its function.

    """
    query, batch, scoring = call.query, call.batch, call.scoring
    assert query is not None
    num_tokens, num_heads, head_size = query.shape
    batch.check(num_tokens)
    if batch.num_seqs == 0:
        return
    call.check()
    key = value = raw_tiles = None
    if call.raw is not None:
        key, value, raw_tiles = call.raw.key, call.raw.value, scratch.raw_tiles
    num_queries = num_heads // call.num_kv_heads * batch.query_len
    plan = plan_for(call.layout, num_queries, True)
    OUTPUTS.load(call.layout, plan, call.kv_cache.device, scoring.variant())(
        query,
        # The kernel rotates with entries +-1, so the factor has the rotation's norm.
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
        raw_tiles,
        scoring.sliding_window or 0,
        scoring.sinks,
        (scoring.soft_cap or 0.0) * LOG2_E,
        scoring.key_offset,
        scoring.scale * LOG2_E,
        enable_pdl,
    )
