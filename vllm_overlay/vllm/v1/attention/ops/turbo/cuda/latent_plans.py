# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The instances of MLA's CUDA decode kernel, and the choice among them.

There are three kernels. Two have products of warpgroups, on GPUs of compute capability
9.0 alone. Query rows are columns of the products in one, and rows of them in the other,
which is for many rows: see latent/columns_kernel.cuh and latent/rows_kernel.cuh. The
third has slices of a latent and products of warps, from 8.0 on: see
latent/slices_segment.cuh.
"""

from collections.abc import Sequence
from typing import NamedTuple

# The first compute capability that has the kernels, the first with bulk copies, and the
# only one with products of warpgroups.
FIRST_CAPABILITY = 80
_BULK_CAPABILITY = 90
_WARPGROUP_CAPABILITY = 90


class Plan(NamedTuple):
    """An instance: ColumnsKernel, or SliceKernel if it has teams, or RowsKernel.

    Attributes:
        columns: Query rows, heads times tokens, that attend in one pass.
        time: Microseconds of a pass over 32 x 32768 tokens on an H200, 2026-11,
            `ci/gpu.py mla`, 4cc4ed79. For slices of 32, the kernel alone.
        teams: Teams of four warps, each with a slice of the coordinates. With 0,
            warpgroups multiply, and fields of teams have no meaning.
        stages: Times ``tiles``, the tiles in flight of a team.
        tiles: Tiles that a team takes at once.
        held: Blocks of eight columns whose queries a team has in registers.
        is_bulk: Whether a team's copies are bulk copies.
        by_rows: Whether query rows are rows of warpgroups' products.
        is_listed: Whether tokens are listed by their slots, as in sparse MLA.

    """

    columns: int
    time: int
    teams: int = 0
    stages: int = 0
    tiles: int = 1
    held: int = 0
    is_bulk: bool = True
    by_rows: bool = False
    is_listed: bool = False

    def runs_on(self, capability: int) -> bool:
        """Whether GPUs of a compute capability have its instructions."""
        if not self.teams:
            return capability == _WARPGROUP_CAPABILITY
        return capability >= (_BULK_CAPABILITY if self.is_bulk else FIRST_CAPABILITY)


# Above 32 columns too few registers are left for the result. More rows take several
# passes.
WARPGROUPS = (Plan(16, 174), Plan(24, 193), Plan(32, 216))
LISTED = tuple(plan._replace(is_listed=True) for plan in WARPGROUPS)
# It takes as long for a few rows as for 64, because producers decode all tiles.
ROWS = (Plan(64, 308, by_rows=True),)
ROWS_HEAD_SIZE = 576
# As many teams as registers allow. All GPUs have the shared memory that they take:
# kLeastSharedBytes of latent/slices_layout.cuh.
SLICES = (
    Plan(8, 175, teams=4, stages=3, held=1),
    Plan(16, 239, teams=3, stages=3, held=2),
    Plan(24, 305, teams=2, stages=3, held=3),
    Plan(32, 330, teams=2, stages=3, held=2),
)
# The same for GPUs without bulk copies, timed on the H200.
COPYING_SLICES = tuple(
    plan._replace(is_bulk=False, time=time)
    for plan, time in zip(SLICES, (186, 226, 286, 330), strict=True)
)


def plans_of(
    capability: int, head_size: int = ROWS_HEAD_SIZE, has_lists: bool = False
) -> tuple[Plan, ...]:
    """The plans that serve a size of a latent and its rotary key.

    Args:
        capability: The GPU's compute capability, from 80 on, such as 90.
        head_size: The size.
        has_lists: Whether tokens are listed by their slots. GPUs may have no such plan.

    """
    if has_lists:
        is_served = capability == _WARPGROUP_CAPABILITY and head_size == ROWS_HEAD_SIZE
        return LISTED if is_served else ()
    if capability == _WARPGROUP_CAPABILITY:
        # Slices take 177 us for eight rows, where 16 columns take 171.
        return *WARPGROUPS, *(ROWS if head_size == ROWS_HEAD_SIZE else ())
    return SLICES if capability >= _BULK_CAPABILITY else COPYING_SLICES


def plan_for(num_rows: int, plans: Sequence[Plan]) -> Plan:
    """The plan that serves ``num_rows`` query rows of a sequence fastest."""
    return min(plans, key=lambda plan: -(-num_rows // plan.columns) * plan.time)
