# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Instances of the CUDA decode kernel of MLA: which there are, and which serve.

Two kernels attend. Warpgroups multiply on GPUs of compute capability 9.0 alone. Slices,
with the products of warps, are for all from 8.0 on, and for few rows take less on 9.0,
too: see latent/segment.cuh and latent/slices_segment.cuh.
"""

from collections.abc import Sequence
from typing import NamedTuple

# The first compute capability that the kernels are for, the first with bulk copies, and
# the one with products of warpgroups.
FIRST_CAPABILITY = 80
_BULK_CAPABILITY = 90
_WARPGROUP_CAPABILITY = 90


class Plan(NamedTuple):
    """An instance: see LatentPlan of latent/plan.cuh, and with teams SlicePlan of
    latent/slices_layout.cuh.

    Attributes:
        columns: Query rows, heads times tokens, that attend at once.
        stages: Tiles that a warp, or times ``tiles`` a team, has or waits for.
        time: Microseconds of a pass over 32 x 32768 tokens on an H200, November 2026:
            ``benchmark_turbo_mla.py``, and of 48 columns and slices of 32 the kernel
            alone.
        is_early: Whether a lane loads all of a tile before it decodes it.
        shares: Whether both warpgroups have the same tokens, each with half of
            their coordinates.
        teams: Teams of four warps, each with a slice of the coordinates; 0: warpgroups
            multiply, and the further fields have no meaning.
        tiles: That a team takes at once.
        held: Blocks of eight columns whose queries a team has in registers.
        is_bulk: Whether a team's copies are bulk copies.

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

    def runs_on(self, capability: int) -> bool:
        """Whether GPUs of a compute capability have its instructions."""
        if not self.teams:
            return capability == _WARPGROUP_CAPABILITY
        return capability >= (_BULK_CAPABILITY if self.is_bulk else FIRST_CAPABILITY)


# More columns than 32 leave too few registers for all of a latent's coordinates, and
# more than 64 for half of them: more rows take several passes.
WARPGROUPS = (
    Plan(16, 1, 202, is_early=True),
    Plan(24, 1, 219),
    Plan(32, 1, 247),
    Plan(40, 2, 283, is_early=True, shares=True),
    Plan(48, 2, 295, is_early=True, shares=True),
    Plan(64, 2, 386, is_early=True, shares=True),
)
# Of as many teams as registers are for. The shared memory that they take all GPUs have:
# kLeastSharedBytes of latent/slices_layout.cuh.
SLICES = (
    Plan(8, 3, 175, teams=4, held=1),
    Plan(16, 3, 239, teams=3, held=2),
    Plan(24, 3, 305, teams=2, held=3),
    Plan(32, 3, 330, teams=2, held=2),
)
# The same where there are no bulk copies, run by the H200.
COPYING_SLICES = tuple(
    plan._replace(is_bulk=False, time=time)
    for plan, time in zip(SLICES, (186, 226, 286, 330), strict=True)
)


def plans_of(capability: int) -> tuple[Plan, ...]:
    """The plans that serve on GPUs of a compute capability, such as 90, from 80 on."""
    if capability == _WARPGROUP_CAPABILITY:
        # A product of warpgroups for eight columns has 64 rows of work for little: 195.
        return SLICES[0], *WARPGROUPS
    return SLICES if capability >= _BULK_CAPABILITY else COPYING_SLICES


def plan_for(num_rows: int, plans: Sequence[Plan]) -> Plan:
    """The one that serves so many query rows of a sequence soonest."""
    return min(plans, key=lambda plan: -(-num_rows // plan.columns) * plan.time)
