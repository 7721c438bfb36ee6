# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The pages of a layer's cache that kernels take."""

from typing import Protocol

import torch

from vllm.v1.attention.ops.turbo.format import TILE_TOKENS


class PageLayout(Protocol):
    """The part of a format that determines its pages."""

    @property
    def name(self) -> str:
        """The ``--kv-cache-dtype`` value."""

    @property
    def slot_size(self) -> int:
        """Bytes of a slot."""


def check_pages(kv_cache: torch.Tensor, layout: PageLayout) -> None:
    """Check the kernels' preconditions on a layer's cache.

    Args:
        kv_cache: (num_blocks, H, N, C) uint8, or (num_blocks, N, C) with MLA.
        layout: The cache's format.

    Raises:
        ValueError: If a (block, head) is not contiguous, or does not start at a
            multiple of 16 bytes, or is not a whole number of tiles.

    """
    block_size, slot_size = kv_cache.shape[-2:]
    alignments = (block_size, *kv_cache.stride()[:-2], kv_cache.data_ptr())
    if (
        slot_size != layout.slot_size
        or kv_cache.stride()[-2:] != (slot_size, 1)
        or any(x % TILE_TOKENS for x in alignments)
    ):
        raise ValueError(
            f"pages of {layout.name} have slots of {layout.slot_size} bytes, "
            f"contiguous, {TILE_TOKENS} or a multiple in a block; blocks and heads "
            f"begin at multiples of {TILE_TOKENS} bytes. These have shape "
            f"{tuple(kv_cache.shape)}, strides "
            f"{kv_cache.stride()} and address {kv_cache.data_ptr():#x}"
        )
