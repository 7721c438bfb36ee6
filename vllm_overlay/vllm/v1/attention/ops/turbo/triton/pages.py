# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Addresses of tiles in pages, and the constants of a format for kernels."""

from functools import cache
from typing import NamedTuple

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import TurboFormat

MIN_DOT_SIZE = 16
# The least columns of a dot's result: NVIDIA's tensor cores have 8.
MIN_OUTPUT_COLUMNS = 8 if current_platform.is_cuda() else MIN_DOT_SIZE
TILE = tl.constexpr(fmt.TILE_TOKENS)


class TileLayout(NamedTuple):
    """The constants of a format, as the argument LAYOUT of kernels.

    K and V have constants of their own where their head sizes differ. Where these are
    equal, kernels share what they compute from them.

    Triton 3.6 takes an attribute for a plain number, which is no constexpr for a device
    function. It has to be assigned to a name annotated as ``tl.constexpr`` first.

    Attributes:
        value_codes_offset: Bytes in a tile before V's codes; K's are at 0.
        key_scales_offset: Bytes before K's scales.
        value_scales_offset: Bytes before V's scales.
        tile_bytes: Bytes of a tile.
        key_coefficients: ``format.Codebook.coefficients`` of K.
        value_coefficients: ``format.Codebook.coefficients`` of V.
        key_bits: Bits of a code of K.
        value_bits: Bits of a code of V.
        scale_words: ``format.ScaleWords`` of K as a tuple.
        head_size: D of K.
        columns: Coordinates of a step, before padding to a power of two.
        block_c: Coordinates of a step, padded.
        block_d: D, padded likewise.
        scale_words_v: ``scale_words`` of V. So are the others with a ``_v``.
        head_size_v: D of V.
        columns_v: Coordinates of a step.
        block_c_v: Coordinates of a step, padded.
        block_d_v: D, padded.

    """

    value_codes_offset: int
    key_scales_offset: int
    value_scales_offset: int
    tile_bytes: int
    key_coefficients: tuple[float, float]
    value_coefficients: tuple[float, float]
    key_bits: int
    value_bits: int
    scale_words: tuple[int, ...]
    head_size: int
    columns: int
    block_c: int
    block_d: int
    scale_words_v: tuple[int, ...]
    head_size_v: int
    columns_v: int
    block_c_v: int
    block_d_v: int


def _columns(num_units: int) -> int:
    """Coordinates of a step: whole units, and no fewer than a dot takes."""
    return num_units * max(1, MIN_DOT_SIZE // num_units)


@cache
def tile_layout(layout: TurboFormat) -> TileLayout:
    """The constants of kernels that read or write pages."""
    columns, columns_v = _columns(layout.num_units), _columns(layout.num_units_v)
    return TileLayout(
        layout.value_codes_offset,
        layout.key_scales_offset,
        layout.value_scales_offset,
        layout.tile_bytes,
        layout.key_codebook.coefficients,
        layout.value_codebook.coefficients,
        layout.key_bits,
        layout.value_bits,
        tuple(layout.scale_words),
        layout.head_size,
        columns,
        triton.next_power_of_2(columns),
        triton.next_power_of_2(layout.head_size),
        tuple(layout.scale_words_v),
        layout.head_size_v,
        columns_v,
        triton.next_power_of_2(columns_v),
        triton.next_power_of_2(layout.head_size_v),
    )


@cache
def block_divisor(block_size: int) -> dict[str, int]:
    """The kernel arguments that divide a number of tiles by the tiles of a block.

    Kernels are not compiled for a block size. It is not known before the cache is
    planned, which is after the kernels' first launch, and hybrid models may have any
    multiple of 16.

    Args:
        block_size: Tokens of a block.

    Returns:
        By the parameters' names: tiles of a block; log2 of that, rounded up; and
        2 ** (28 + log2) over the tiles, rounded up, which is exact for positions below
        2**31 (Granlund and Montgomery, doi:10.1145/178243.178249).

    """
    assert block_size > 0 and block_size % fmt.TILE_TOKENS == 0, block_size
    tiles = block_size // fmt.TILE_TOKENS
    shift = (tiles - 1).bit_length()
    return {
        "tiles_per_block": tiles,
        "block_shift": shift,
        "block_multiplier": cdiv(1 << (28 + shift), tiles),
    }


@triton.jit
def divide_by_block(
    tile,  # int32, not negative
    tiles_per_block,
    block_shift,
    block_multiplier,
):
    """Indices of a sequence's tiles in the block table, and within their blocks.

    The last three arguments are from ``block_divisor``.
    """
    # The high half of 16 * tile * multiplier is tile * multiplier / 2**28.
    place = tl.umulhi(tile * 16, block_multiplier) >> block_shift
    return place, tile - place * tiles_per_block


@triton.jit
def tile_pointers(
    page_ptr,  # [N] uint8 pointers to the (block, head) regions
    position,  # [N] position in the block
    TILE_BYTES: tl.constexpr,
):
    """Pointers to the tokens' tiles, and the tokens' indices in them."""
    return page_ptr + position // TILE * TILE_BYTES, position % TILE
