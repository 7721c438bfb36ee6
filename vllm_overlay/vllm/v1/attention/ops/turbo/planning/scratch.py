# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scratch memory of the turbo kernels, which a step's kernels take in turn."""

import math
from typing import NamedTuple, TypeAlias

import torch

from vllm.v1.attention.ops.turbo.prefill import PrefillBuffers
from vllm.v1.worker.workspace import (
    current_workspace_manager,
    is_workspace_manager_initialized,
)

# Shapes and dtypes of tensors that are there at the same time.
Parts: TypeAlias = list[tuple[tuple[int, ...], torch.dtype]]


class Workspace(NamedTuple):
    """What one forward pass of a layer needs.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_size: Of query, key and value.
        dtype: The model's.
        piece_tokens: Tokens that a prefill dequantises at a time.

    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    piece_tokens: int

    def short_parts(self, num_tokens: int, num_partials: int) -> Parts:
        """Scratch of decodes and extends, which begin when the one before has ended.

        Args:
            num_tokens: Query tokens of all.
            num_partials: Partial results of one call.

        Returns:
            Of the queries' scales, partial outputs and their LSE. Rotated queries lie
            where the output comes to be.

        """
        heads, size = self.num_heads, self.head_size
        return [
            ((num_tokens, heads), torch.float32),
            ((num_partials, heads, size), torch.float32),
            ((num_partials, heads), torch.float32),
        ]

    def prefill_parts(self, num_tokens: int | None) -> Parts:
        """The ``PrefillBuffers`` for so many query tokens; None: for no slice."""
        if num_tokens is None:
            return []
        shapes = PrefillBuffers.shapes(
            num_tokens,
            self.piece_tokens,
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
        )
        return [(shape, self.dtype) for shape in shapes]

    @staticmethod
    def num_bytes(parts: Parts) -> int:
        """Bytes of tensors, without what aligns them."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)

    @staticmethod
    def take(parts: Parts, device: torch.device) -> list[torch.Tensor]:
        """The tensors, which end those of all requests before: they overlap.

        So what reads earlier ones has to come before what writes these in the stream.
        """
        # A manager that was asked for nothing yet fails if that is asked for.
        if is_workspace_manager_initialized() and Workspace.num_bytes(parts) > 0:
            return current_workspace_manager().get_simultaneous(*parts)
        return [torch.empty(s, dtype=dtype, device=device) for s, dtype in parts]
