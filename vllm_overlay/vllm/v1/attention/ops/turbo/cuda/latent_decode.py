# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode attention to the packed latents of MLA on Hopper, built by FlashInfer's JIT.

As ``cuda.decode``, but by the matrix products of warpgroups, which GPUs of compute
capability 9.0 alone have, or for few rows by those of warps. One persistent grid cuts
the batch's steps of 64 tokens evenly among its blocks, whatever the lengths.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.cuda.build import CudaModule, build_and_load
from vllm.v1.attention.ops.turbo.cuda.constants import LATENT_MAX_SPLITS, latent_header
from vllm.v1.attention.ops.turbo.interface import DecodeBatch, Partials
from vllm.v1.attention.ops.turbo.latent_format import LatentFormat
from vllm.v1.attention.ops.turbo.latent_interface import check_latent_query

CAPABILITY = 90
# Splits of all query tokens of a batch that there is room for in any case.
_MAX_PARTIALS = 1024


class Plan(NamedTuple):
    """An instance: see LatentPlan of latent/plan.cuh, and with teams SlicePlan of
    latent/slices_layout.cuh.

    Attributes:
        columns: Query rows, heads times tokens, that attend at once.
        stages: Tiles that a warp, or times ``tiles`` a team, has or waits for.
        is_early: Whether a lane loads all of a tile before it decodes it.
        shares: Whether both warpgroups have the same tokens, each with half of
            their coordinates.
        time: Microseconds of a pass over 32 x 32768 tokens on an H200, November 2026:
            ``benchmark_turbo_mla.py``, and of 8 and 48 columns the kernel alone.
        teams: Of four warps, each with a slice of the coordinates; 0: warpgroups
            multiply, and what follows has no meaning.
        tiles: That a team takes at once.
        held: Blocks of eight columns whose queries a team has in registers.
        is_bulk: Whether a team's copies are bulk copies.

    """

    columns: int
    stages: int
    is_early: bool
    shares: bool
    time: int
    teams: int = 0
    tiles: int = 1
    held: int = 0
    is_bulk: bool = True


# More columns than 32 leave too few registers for all of a latent's coordinates, and
# more than 64 for half of them: more rows take several passes.
PLANS = (
    Plan(8, 3, False, False, 175, teams=4, tiles=1, held=1),
    Plan(16, 1, True, False, 202),
    Plan(24, 1, False, False, 219),
    Plan(32, 1, False, False, 247),
    Plan(40, 2, True, True, 283),
    Plan(48, 2, True, True, 295),
    Plan(64, 2, True, True, 386),
)


def unsupported_reason(layout: LatentFormat, capability: int) -> str | None:
    """Why a layout has no such kernel on GPUs of a compute capability; None if it has.

    Args:
        layout: The cache's format.
        capability: Such as 90.

    """
    if capability != CAPABILITY:
        return "GPUs other than Hopper's have no CUDA decode kernel of MLA"
    if layout.bits != 4:
        return f"{layout.name} has no CUDA decode kernel of MLA"
    return None


def plan_for(num_rows: int) -> Plan:
    """The instance that serves so many query rows of a sequence soonest."""
    return min(PLANS, key=lambda plan: -(-num_rows // plan.columns) * plan.time)


def instance(layout: LatentFormat, plan: Plan) -> str:
    """The name of a module's instance."""
    name = f"{layout.name}_{layout.rank}_{layout.rope}_{plan.columns}"
    if plan.teams:
        name += f"_{plan.teams}_{plan.tiles}" + ("" if plan.is_bulk else "_copies")
    return name


def module(layout: LatentFormat, plan: Plan) -> CudaModule:
    """What is built.

    Raises:
        RuntimeError: If there is no instance for the layout.

    """
    reason = unsupported_reason(layout, CAPABILITY)
    if reason is not None:
        raise RuntimeError(reason)
    return CudaModule(
        "latent_decode",
        instance(layout, plan),
        latent_header(layout),
        (
            f"-DLATENT_COLUMNS={plan.columns}",
            f"-DLATENT_STAGES={plan.stages}",
            f"-DLATENT_EARLY={int(plan.is_early)}",
            f"-DLATENT_SHARES={int(plan.shares)}",
            f"-DLATENT_TEAMS={plan.teams}",
            f"-DLATENT_TILES={plan.tiles}",
            f"-DLATENT_HELD={plan.held}",
            f"-DLATENT_BULK={int(plan.is_bulk)}",
        ),
        folder="latent",
        is_specific=True,
    )


@cache
def load(layout: LatentFormat, plan: Plan, device: torch.device) -> Callable[..., None]:
    """Build, if need be, and load an instance.

    Raises:
        RuntimeError: If it cannot be built.

    """
    return build_and_load(module(layout, plan), device)


def num_decode_splits(
    num_seqs: int, num_heads: int, num_sms: int, query_len: int = 1
) -> int:
    """See ``latent_interface.LatentSplitsFn``.

    The kernel itself decides on the ranges that its blocks attend to, by lengths. A
    sequence alone is to have a range on every multiprocessor, unless the batch is so
    large that room for it would cost too much.
    """
    num_seqs = max(1, num_seqs)
    num_rows = num_heads * query_len
    passes = -(-num_rows // plan_for(num_rows).columns)
    alone = -(-num_sms // passes) + 1
    average = -(-num_sms // (num_seqs * passes))
    room = max(_MAX_PARTIALS // (num_seqs * query_len), 2 * average + 1)
    return max(2, min(LATENT_MAX_SPLITS, alone, room))


def decode_attention(
    query: torch.Tensor,
    query_rope: torch.Tensor | None,
    kv_cache: torch.Tensor,
    layout: LatentFormat,
    batch: DecodeBatch,
    partials: Partials,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    enable_pdl: bool = True,
) -> None:
    """See ``latent_interface.LatentAttentionFn``.

    The layout and the GPU are such as have no ``unsupported_reason``. Queries' strides
    are even. Coordinates are decoded to fp16: rotary keys are to be within 65504. S may
    be more than ``MAX_KV_SPLITS``, up to
    ``LATENT_MAX_SPLITS``. With ``enable_pdl`` kernels
    may begin before the one before them on the stream has ended; they wait for what
    they read.

    Raises:
        RuntimeError: If the kernel cannot be built; see ``build_and_load`` for what its
            function raises.

    """
    if batch.num_seqs == 0:
        return
    check_latent_query(
        query,
        query_rope,
        layout,
        batch,
        partials,
        output,
        lse,
        LATENT_MAX_SPLITS,
    )
    plan = plan_for(query.shape[1] * batch.query_len)
    load(layout, plan, kv_cache.device)(
        query,
        query_rope,
        kv_cache,
        batch.block_table,
        batch.seq_lens,
        *partials,
        batch.query_start_loc,
        output,
        lse,
        batch.num_seqs,
        batch.query_len,
        scale,
        enable_pdl,
    )
