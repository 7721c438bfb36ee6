# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tiles and their words, for Triton kernels."""

from functools import cache
from typing import NamedTuple

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import TurboFormat

# The least depth of a dot, and the least columns of its result on tensor cores.
MIN_DOT_SIZE = 16
MIN_OUTPUT_COLUMNS = 8
TILE = tl.constexpr(fmt.TILE_TOKENS)
_SCALE_SHIFT = tl.constexpr(fmt.SCALE_SHIFT)


class TileLayout(NamedTuple):
    """The constants of a format, as the argument LAYOUT of kernels.

    Triton 3.6 takes an attribute for a plain number, which is no constexpr for a device
    function. It has to be assigned to a name annotated as ``tl.constexpr`` first.

    Attributes:
        value_codes_offset: Bytes in a tile before V's codes; K's are at 0.
        key_scales_offset: Bytes before K's scales.
        value_scales_offset: Bytes before V's scales.
        tile_bytes: Bytes of a tile.
        key_coefficients: ``format.Codebook.coefficients`` of K.
        value_coefficients: ``format.Codebook.coefficients`` of V.
        scale_words: ``format.ScaleWords`` as a tuple.
        head_size: D.
        columns: Coordinates of a step.

    """

    value_codes_offset: int
    key_scales_offset: int
    value_scales_offset: int
    tile_bytes: int
    key_coefficients: tuple[float, float]
    value_coefficients: tuple[float, float]
    scale_words: tuple[int, ...]
    head_size: int
    columns: int


def check_pages(kv_cache: torch.Tensor, layout: TurboFormat) -> None:
    """Check the kernels' preconditions on a layer's cache, (num_blocks, H, N, C).

    Raises:
        ValueError: If a (block, head) is not contiguous, or does not start at a
            multiple of 16 bytes, or is not a whole number of tiles.

    """
    block_size, slot_size = kv_cache.shape[-2:]
    alignments = (block_size, *kv_cache.stride()[:-2], kv_cache.data_ptr())
    if (
        slot_size != layout.slot_size
        or kv_cache.stride()[-2:] != (slot_size, 1)
        or any(x % fmt.TILE_TOKENS for x in alignments)
    ):
        raise ValueError(
            f"pages of turbo4 have slots of {layout.slot_size} bytes, contiguous, 16 "
            "or a multiple in a block, and begin at multiples of 16 bytes. These have "
            f"shape {tuple(kv_cache.shape)}, strides {kv_cache.stride()} and address "
            f"{kv_cache.data_ptr():#x}"
        )


@cache
def tile_layout(layout: TurboFormat) -> TileLayout:
    """The constants of kernels that read or write pages."""
    return TileLayout(
        layout.value_codes_offset,
        layout.key_scales_offset,
        layout.value_scales_offset,
        layout.tile_bytes,
        fmt.KEY_CODEBOOK.coefficients,
        fmt.VALUE_CODEBOOK.coefficients,
        tuple(layout.scale_words),
        layout.head_size,
        max(layout.num_units, MIN_DOT_SIZE),
    )


@triton.jit
def tile_pointers(
    page_ptr,  # [N] uint8 pointers to the (block, head) regions
    position,  # [N] position in the block
    TILE_BYTES: tl.constexpr,
):
    """Pointers to the tokens' tiles, and the tokens' indices in them."""
    return page_ptr + position // TILE * TILE_BYTES, position % TILE


@triton.jit
def scale_value(scale_code):
    """The values of E5M3 codes, fp16."""
    bits = scale_code.to(tl.int16) << _SCALE_SHIFT
    return bits.to(tl.float16, bitcast=True)
