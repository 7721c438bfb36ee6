# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode attention to the packed latents of MLA, built by FlashInfer's JIT.

Like ``cuda.decode``, with the instances of ``latent_plans``. One persistent grid cuts
the batch's steps of 64 tokens evenly among its blocks, whatever the lengths.
"""

from collections.abc import Iterator, Sequence
from functools import cache

from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo.cuda.constants import latent_header
from vllm.v1.attention.ops.turbo.cuda.family import Demand, Family
from vllm.v1.attention.ops.turbo.cuda.latent_plans import (
    FIRST_CAPABILITY,
    ROWS_HEAD_SIZE,
    Plan,
    plan_for,
    plans_of,
)
from vllm.v1.attention.ops.turbo.interface import Partials, Variant
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import (
    LATENT_MAX_SPLITS,
    LatentCall,
)

# Partial results of a batch that there is room for in any case.
_MAX_PARTIALS = 1024


def unsupported_reason(capability: int) -> str | None:
    """The reason why GPUs have no CUDA kernels of MLA; None if they have them.

    Args:
        capability: The compute capability, such as 90.

    """
    if capability < FIRST_CAPABILITY:
        return "GPUs before compute capability 8.0 have no CUDA kernels of MLA"
    return None


def serves(layout: LatentFormat) -> bool:
    """Whether the kernel reads a layout's codes: only four-bit ones."""
    return layout.bits == 4


@cache
def plans_on(
    device_id: int, head_size: int, has_lists: bool = False
) -> tuple[Plan, ...]:
    """The plans that serve a size on a GPU of this machine: see ``plans_of``."""
    capability = current_platform.get_device_capability(device_id)
    assert capability is not None
    return plans_of(capability.to_int(), head_size, has_lists)


def _name(layout: LatentFormat, plan: Plan) -> str:
    name = f"{layout.name}_{layout.rank}_{layout.rope}_{plan.columns}"
    if plan.by_rows:
        name += "_rows"
    if plan.is_listed:
        name += "_listed"
    if plan.teams:
        name += f"_{plan.teams}_{plan.tiles}" + ("" if plan.is_bulk else "_copies")
    return name


def _refusal(layout: LatentFormat) -> str | None:
    if serves(layout):
        return None
    return f"{layout.name} has no CUDA decode kernel of MLA"


def _served(
    layout: LatentFormat, demand: Demand
) -> Iterator[tuple[LatentFormat, Plan, Variant]]:
    if serves(layout):
        assert demand.capability is not None
        plans = plans_of(demand.capability, layout.head_size, demand.has_lists)
        numbers = demand.numbers_of_queries(demand.max_query_len) if plans else ()
        for plan in sorted({plan_for(num_rows, plans) for num_rows in numbers}):
            yield layout, plan, demand.variant


LATENT_DECODE = Family[LatentFormat, Plan](
    kernel="latent_decode",
    title="decode kernel of MLA",
    refusal=_refusal,
    name=_name,
    header=lambda layout, _: latent_header(layout),
    served=_served,
    defines=lambda layout, plan, _: {
        "LATENT_COLUMNS": plan.columns,
        "LATENT_ROWS": plan.by_rows,
        "LATENT_LISTED": plan.is_listed,
        "LATENT_STAGES": plan.stages,
        "LATENT_TEAMS": plan.teams,
        "LATENT_TILES": plan.tiles,
        "LATENT_HELD": plan.held,
        "LATENT_BULK": plan.is_bulk,
    },
    folder="latent",
    is_specific=lambda plan: not plan.teams,
)


def num_decode_splits(
    num_seqs: int,
    num_heads: int,
    num_sms: int,
    query_len: int = 1,
    plans: Sequence[Plan] | None = None,
) -> int:
    """The most splits of a sequence: a ``SplitsFn``.

    The kernel chooses the ranges of its blocks by lengths. A sequence that is alone
    gets a range on every multiprocessor, unless the batch is so large that its partial
    results would take too much memory.

    Args:
        num_seqs: Sequences of the (padded) batch.
        num_heads: Query heads.
        num_sms: Multiprocessors of the GPU.
        query_len: The most query tokens of a sequence.
        plans: Plans to choose from; None for those that serve on the first GPU.

    """
    num_seqs = max(1, num_seqs)
    num_rows = num_heads * query_len
    if plans is None:
        plans = plans_on(0, ROWS_HEAD_SIZE)
    plan = plan_for(num_rows, plans)
    passes = -(-num_rows // plan.columns)
    alone = -(-num_sms // passes) + 1
    average = -(-num_sms // (num_seqs * passes))
    room = max(_MAX_PARTIALS // (num_seqs * query_len), 2 * average + 1)
    return max(2, min(LATENT_MAX_SPLITS, alone, room))


def decode_attention(
    call: LatentCall,
    partials: Partials,
    enable_pdl: bool = True,
    plans: Sequence[Plan] | None = None,
) -> None:
    """Attend to packed latents: a ``LatentAttentionFn``.

    Args:
        call: The tokens that are attended to, and the output. The layout is one that
            this ``serves``, with lists only where ``plans_on`` has plans, and the GPU
            has no ``unsupported_reason``. Queries' strides are even. Coordinates are
            decoded to fp16, so rotary keys have to be within 65504.
        partials: Scratch of vectors of L.
        enable_pdl: Whether kernels may begin before the previous one on the stream has
            ended. They wait for what they read.
        plans: Plans to choose from, which run on the GPU; None for those that serve
            there.

    Raises:
        RuntimeError: If the kernel cannot be built. ``build_and_load`` lists the errors
            of its function.

    """
    batch, device = call.batch, call.kv_cache.device
    if batch.num_seqs == 0:
        return
    call.check(partials)
    if plans is None:
        plans = plans_on(device.index or 0, call.layout.head_size, call.is_sparse)
    plan = plan_for(call.query.shape[1] * batch.query_len, plans)
    LATENT_DECODE.load(call.layout, plan, device)(
        call.query,
        call.query_rope,
        call.kv_cache,
        batch.block_table,
        batch.seq_lens,
        *partials,
        batch.query_start_loc,
        call.output,
        call.lse,
        call.rotated_mean,
        batch.num_seqs,
        batch.query_len,
        call.scale,
        enable_pdl,
    )
