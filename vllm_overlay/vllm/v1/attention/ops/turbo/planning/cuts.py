# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Cuts of a batch's requests and query tokens into parts that fit in scratch memory."""

import torch

from vllm.utils.math_utils import cdiv


def plan_runs(
    lens: list[int], max_tokens: int, may_be_empty: bool = True
) -> list[tuple[int, int]]:
    """Group requests so that a group shares a slice, or is dequantised together.

    Args:
        lens: Tokens of each request: raw ones, or cached ones.
        max_tokens: The most tokens of a group of several requests.
        may_be_empty: Whether a group may have no tokens if any request has some.

    Returns:
        First and last (exclusive) request of each group. Each request is in one.

    """
    firsts, total = [0], 0
    for i, length in enumerate(lens):
        if total and total + length > max_tokens and (length or may_be_empty):
            firsts.append(i)
            total = 0
        total += length
    return list(zip(firsts, [*firsts[1:], len(lens)]))


def plan_slices(
    query_start_loc: torch.Tensor, max_tokens: int
) -> list[tuple[slice, slice]]:
    """Cut query tokens evenly.

    Args:
        query_start_loc: (R + 1,) int32 on the host, where requests' tokens begin.
        max_tokens: The most query tokens of a slice.

    Returns:
        For each slice the ranges of its query tokens and of its requests.

    """
    begin, end = int(query_start_loc[0]), int(query_start_loc[-1])
    size = cdiv(end - begin, cdiv(end - begin, max_tokens))
    firsts = torch.arange(begin, end, size, dtype=torch.int32)
    lasts = (firsts + size).clamp(max=end)
    begins = torch.searchsorted(query_start_loc, firsts, right=True) - 1
    ends = torch.searchsorted(query_start_loc, lasts)
    bounds = zip(*(x.tolist() for x in (firsts, lasts, begins, ends)))
    return [(slice(first, last), slice(*rest)) for first, last, *rest in bounds]
