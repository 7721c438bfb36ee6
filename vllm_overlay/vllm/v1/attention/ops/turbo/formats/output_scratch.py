# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The scratch of kernels that end in outputs: see ``interface.OutputsFn``."""

from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.format import TILE_TOKENS

# Query tokens of a tile of ``OutputScratch``.
RAW_TILE_TOKENS = TILE_TOKENS


def num_raw_tiles(num_tokens: int, num_seqs: int) -> int:
    """The most tiles that query tokens take; no two sequences share a tile.

    Args:
        num_tokens: Query tokens of all sequences.
        num_seqs: Sequences.

    """
    return num_tokens // RAW_TILE_TOKENS + num_seqs


class OutputScratch(NamedTuple):
    """Scratch of attention that ends in outputs; see ``KernelSet.output_scratch``.

    Attributes:
        raw_tiles: (N, H, 2 * 16 * D) fp16, keys and values of the query tokens.
        partial: (P, D) fp32, results of parts of sequences. With too few rows for
            parts, each thread block takes its queries' whole sequence, and a result
            does not depend on the batch.
        partial_lse: (P,) fp32, their LSE.

    """

    raw_tiles: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor
