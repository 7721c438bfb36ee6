# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where tiles lie in pages, and what kernels are compiled for of a format."""

from functools import cache
from typing import NamedTuple

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import TurboFormat

MIN_DOT_SIZE = 16
# Least number of columns of a dot's result: NVIDIA's tensor cores have 8.
MIN_OUTPUT_COLUMNS = 8 if current_platform.is_cuda() else MIN_DOT_SIZE
TILE = tl.constexpr(fmt.TILE_TOKENS)


class TileLayout(NamedTuple):
    """Constants of a format as one argument of a kernel, LAYOUT.

    To Triton 3.6 an attribute is a number, which no device function takes: it needs a
    name that is annotated as ``tl.constexpr`` first.

    Attributes:
        value_codes_offset: Where V's codes begin in a tile; K's are at 0.
        key_scales_offset: Where K's scales begin in it.
        value_scales_offset: Where V's do.
        tile_bytes: Bytes of a tile.
        key_coefficients: See ``format.Codebook``.
        value_coefficients: Likewise.
        key_bits: Bits of a code of K.
        value_bits: Likewise of V.
        scale_words: ``format.ScaleWords`` as a tuple.
        head_size: D.
        columns: Coordinates a step, before padding to a power of two.
        block_c: After it.
        block_d: D, padded likewise.

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


@cache
def tile_layout(layout: TurboFormat) -> TileLayout:
    """Constants of a kernel that reads or writes pages."""
    units = layout.num_units
    columns = units * max(1, MIN_DOT_SIZE // units)
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
    )


@cache
def block_divisor(block_size: int) -> dict[str, int]:
    """How kernels divide tiles by those of a block, by the names of their parameters.

    They are not compiled for a block size: it is known when the cache is planned, after
    the kernels have been launched for the first time, and that of hybrid models is any
    multiple of 16.

    Args:
        block_size: Tokens of a block.

    Returns:
        Tiles of a block; log2 of that, rounded up; 2 ** (28 + log2) over the tiles,
        rounded up, which is exact for positions below 2**31 (Granlund and Montgomery,
        doi:10.1145/178243.178249).

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
    """Places of a sequence's tiles in the block table, and in their blocks: see
    ``block_divisor``.
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
    """Pointers to the tokens' tiles, and the tokens' places in them."""
    return page_ptr + position // TILE * TILE_BYTES, position % TILE
