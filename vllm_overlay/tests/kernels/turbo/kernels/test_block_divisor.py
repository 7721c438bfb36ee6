# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Triton kernels' division of positions by the block size."""

from vllm.v1.attention.ops.turbo.format import TILE_TOKENS

from ..utils import requires_triton

# Tiles of a block. Hybrid models have 247 (3952 tokens) and 492 (7872 tokens).
TILES = range(1, 601)
MAX_TILES = 2**31 // TILE_TOKENS


def divide(tile: int, constants: dict[str, int]) -> int:
    """``pages.divide_by_block`` in Python's integers, with bounds of int32 checked."""
    product = tile * TILE_TOKENS
    assert 0 <= product < 2**31
    multiplier = constants["block_multiplier"]
    assert 0 < multiplier < 2**31
    return (product * multiplier >> 32) >> constants["block_shift"]


@requires_triton
def test_exact_for_every_position():
    """Checked where a quotient changes, below the largest position and its halves.

    The error grows with the position, and is largest just before a multiple.
    """
    from vllm.v1.attention.ops.turbo.triton.pages import block_divisor

    for tiles in TILES:
        constants = block_divisor(tiles * TILE_TOKENS)
        assert constants["tiles_per_block"] == tiles
        for most in (MAX_TILES >> halvings for halvings in range(12)):
            for multiple in range(most // tiles, max(most // tiles - 3, 0), -1):
                for tile in (multiple * tiles + step for step in (-1, 0, 1)):
                    if tile < MAX_TILES:
                        found = divide(tile, constants)
                        assert found == tile // tiles, (tiles, tile, found)
        for tile in range(2 * tiles):
            assert divide(tile, constants) == tile // tiles
