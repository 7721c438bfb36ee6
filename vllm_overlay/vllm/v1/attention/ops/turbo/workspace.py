# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scratch memory of the turbo kernels, in one piece."""

import math
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.prefill import PrefillBuffers
from vllm.v1.worker.workspace import (
    current_workspace_manager,
    is_workspace_manager_initialized,
)


class Workspace(NamedTuple):
    """What one forward pass of a layer needs.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_size: Of query, key and value.
        dtype: The model's.
        tokens_per_piece: Tokens that a prefill dequantises at a time.

    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    tokens_per_piece: int

    def parts(
        self, num_short_tokens: int, num_partials: int, num_prefill_tokens: int
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the scratch tensors.

        Args:
            num_short_tokens: Query tokens of decodes and extends.
            num_partials: Partial results of the decodes, or of one call of extends:
                they follow each other.
            num_prefill_tokens: Query tokens of the prefills; 0 if these need none.

        Returns:
            Of rotated queries, their scales, partial outputs and their LSE of decodes
            and extends, then, if there are prefill tokens, of the ``PrefillBuffers``.

        """
        heads, size = self.num_heads, self.head_size
        wanted: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((num_short_tokens, heads, size), torch.float16),
            ((num_short_tokens, heads), torch.float32),
            ((num_partials, heads, size), torch.float32),
            ((num_partials, heads), torch.float32),
        ]
        if num_prefill_tokens > 0:
            shapes = PrefillBuffers.shapes(
                num_prefill_tokens,
                self.tokens_per_piece,
                heads,
                self.num_kv_heads,
                size,
            )
            wanted += [(shape, self.dtype) for shape in shapes]
        return wanted

    def num_bytes(
        self, num_short_tokens: int, num_partials: int, num_prefill_tokens: int
    ) -> int:
        """Bytes of ``parts``, without what aligns them."""
        parts = self.parts(num_short_tokens, num_partials, num_prefill_tokens)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)

    def take(
        self,
        num_short_tokens: int,
        num_partials: int,
        num_prefill_tokens: int,
        device: torch.device,
    ) -> list[torch.Tensor]:
        """The tensors of ``parts``, in a single request: a second request would
        overlap the first.
        """
        parts = self.parts(num_short_tokens, num_partials, num_prefill_tokens)
        if is_workspace_manager_initialized():
            return current_workspace_manager().get_simultaneous(*parts)
        return [torch.empty(s, dtype=dtype, device=device) for s, dtype in parts]
