# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How decodes and extends are cut into calls of the kernels, once for all layers."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm.utils.math_utils import cdiv

# Splits of a sequence that a call has room for, if the kernels want so many: else
# sequences of unlike lengths could not keep the GPU busy, and more calls are better.
_LEAST_SPLITS = 4


def plan_calls(
    num_seqs: int, query_len: int, num_splits: int, max_partials: int
) -> list[tuple[int, int]]:
    """Cut decodes or extends evenly into calls, by sizes that a CUDA graph has, too.

    Args:
        num_seqs: Sequences of the batch.
        query_len: Query tokens of each.
        num_splits: Splits of a sequence that the kernels want.
        max_partials: Partial results of a call.

    Returns:
        First and last (exclusive) sequence of each call.

    """
    if num_seqs == 0:
        return []
    most = max_partials // (query_len * min(num_splits, _LEAST_SPLITS))
    size = cdiv(num_seqs, cdiv(num_seqs, max(1, most)))
    return [(first, min(first + size, num_seqs)) for first in range(0, num_seqs, size)]


class AttentionCall(NamedTuple):
    """One call of decode or extend attention: what no layer has of its own.

    Attributes:
        attention: The kernel.
        tokens: Of the batch; with ``start_loc``, those it is relative to.
        block_table: Of the call's requests, and of those after them.
        seq_lens: Likewise.
        num_partials: Partial results.
        query_len: Query tokens of a request, at most.
        start_loc: Where requests' tokens begin; None if all have as many.

    """

    attention: Callable[..., None]
    tokens: slice
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_partials: int
    query_len: int
    start_loc: torch.Tensor | None


class ShortPlan(NamedTuple):
    """How a batch's decodes and extends are served: the same in all layers alike.

    A batch that is in no CUDA graph would else be planned anew in every layer, for
    longer than a GPU takes for a layer of few tokens.

    Attributes:
        slot_mapping: Of all tokens.
        calls: One after the other.
        query_scale: Scratch of all calls' queries.
        partial: Scratch of the largest call.
        partial_lse: Likewise.

    """

    slot_mapping: torch.Tensor
    calls: list[AttentionCall]
    query_scale: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor
