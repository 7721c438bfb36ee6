# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Chooses few cases of many."""

from collections.abc import Callable, Hashable, Iterable
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case")


def covering(
    cases: Iterable[Case],
    values_of: Callable[[Case], Iterable[Hashable]],
    together: int,
) -> list[Case]:
    """Returns cases that have all values, and all that occur together in a case.

    Args:
        cases: All cases; the first ones are preferred.
        values_of: Returns the values of a case, which can be sorted.
        together: Values that are to occur together: 1, or 2 for pairs.

    """
    chosen, seen = [], set()
    for case in cases:
        values = sorted(set(values_of(case)))
        own = set(combinations(values, together))
        if not own <= seen:
            seen |= own
            chosen.append(case)
    return chosen
