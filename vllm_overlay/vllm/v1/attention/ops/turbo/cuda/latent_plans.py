# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The instances of MLA's CUDA decode kernel, and the choice among them.

There are three kernels. Two have products of warpgroups, on GPUs of compute capability
9.0 alone. Query rows are columns of the products in one, and rows of them in the other,
which is for many rows: see latent/segment.cuh and latent/rows_kernel.cuh. The third has
slices of a latent and products of warps, from 8.0 on. It is also faster for few rows on
9.0: see latent/slices_segment.cuh.
"""

from collections.abc import Sequence
from typing import NamedTuple

# The first compute capability that has the kernels, the first with bulk copies, and the
# only one with products of warpgroups.
FIRST_CAPABILITY = 80
_BULK_CAPABILITY = 90
_WARPGROUP_CAPABILITY = 90


class Plan(NamedTuple):
    """An instance: LatentPlan of latent/plan.cuh, or SlicePlan of
    latent/slices_layout.cuh if it has teams, or RowsKernel.

    Attributes:
        columns: Query rows, heads times tokens, that attend in one pass.
        stages: Tiles in flight of a warp; multiplied by ``tiles``, those of a team.
        time: Microseconds of a pass over 32 x 32768 tokens on an H200, 2026-11,
            `ci/gpu.py mla`. For 48 columns, and for slices of 32, the kernel alone.
        is_early: Whether a lane loads all of a tile before it decodes it.
        shares: Whether both warpgroups have the same tokens, each with half of the
            coordinates.
        teams: Teams of four warps, each with a slice of the coordinates. With 0,
            warpgroups multiply, and the further fields have no meaning.
        tiles: Tiles that a team takes at once.
        held: Blocks of eight columns whose queries a team has in registers.
        is_bulk: Whether a team's copies are bulk copies.
        by_rows: Whether query rows are rows of warpgroups' products. Fields between
            ``time`` and this one then have no meaning.

    """

    columns: int
    stages: int
    time: int
    is_early: bool = False
    shares: bool = False
    teams: int = 0
    tiles: int = 1
    held: int = 0
    is_bulk: bool = True
    by_rows: bool = False

    def runs_on(self, capability: int) -> bool:
        """Whether GPUs of a compute capability have its instructions."""
        if not self.teams:
            return capability == _WARPGROUP_CAPABILITY
        return capability >= (_BULK_CAPABILITY if self.is_bulk else FIRST_CAPABILITY)


# Above 32 columns too few registers are left for all coordinates of a latent, and above
# 64 for half of them. More rows take several passes.
WARPGROUPS = (
    Plan(16, 1, 202, is_early=True),
    Plan(24, 1, 219),
    Plan(32, 1, 247),
    Plan(40, 2, 283, is_early=True, shares=True),
    Plan(48, 2, 295, is_early=True, shares=True),
    Plan(64, 2, 386, is_early=True, shares=True),
)
# It takes 308 us for 16 rows, because the producers' decode of tiles is the limit.
ROWS = (Plan(64, 2, 330, by_rows=True),)
ROWS_HEAD_SIZE = 576
# As many teams as registers allow. All GPUs have the shared memory that they take:
# kLeastSharedBytes of latent/slices_layout.cuh.
SLICES = (
    Plan(8, 3, 175, teams=4, held=1),
    Plan(16, 3, 239, teams=3, held=2),
    Plan(24, 3, 305, teams=2, held=3),
    Plan(32, 3, 330, teams=2, held=2),
)
# The same for GPUs without bulk copies, timed on the H200.
COPYING_SLICES = tuple(
    plan._replace(is_bulk=False, time=time)
    for plan, time in zip(SLICES, (186, 226, 286, 330), strict=True)
)


def plans_of(capability: int, head_size: int = ROWS_HEAD_SIZE) -> tuple[Plan, ...]:
    """The plans that serve a size of a latent and its rotary key.

    Args:
        capability: The GPU's compute capability, from 80 on, such as 90.
        head_size: The size.

    """
    if capability == _WARPGROUP_CAPABILITY:
        # Eight columns leave a product of warpgroups mostly idle. Tuning: us of slices
        # / warpgroups, eight rows, an H100, 2026-11, `benchmark_turbo_mla.py --arms
        # turbo4 turbo4_warpgroups`. 32 x 32768: 175 / 194. 128 x 4096: 99 / 110.
        rows = ROWS if head_size == ROWS_HEAD_SIZE else ()
        return SLICES[0], *WARPGROUPS, *rows
    return SLICES if capability >= _BULK_CAPABILITY else COPYING_SLICES


def plan_for(num_rows: int, plans: Sequence[Plan]) -> Plan:
    """The plan that serves ``num_rows`` query rows of a sequence fastest."""
    return min(plans, key=lambda plan: -(-num_rows // plan.columns) * plan.time)
