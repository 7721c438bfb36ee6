# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Levels of keys in PyTorch, whose errors are orthogonal to what matters.

These are the key itself and, where one is given, the direction in which queries look.
Shapes are those of ``codec``.
"""

import math

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import Codebook, fp32
from vllm.v1.attention.ops.turbo.reference.levels import (
    by_group,
    encode,
    from_groups,
    levels_of,
    normaliser_of,
)


class Products:
    """Products of rotated vectors' errors, in units that make their sums exact.

    Terms of products with the vectors are in units of 2**-PRODUCT_FRACTION_BITS, those
    with a direction in units of 2**-DIRECTION_FRACTION_BITS, of vectors that are
    normalised.

    Attributes:
        x: (..., G, 16) fp32, the normalised vectors.
        square: (..., 1, 1), of the vectors.
        pull: (..., 1, 1), the weight of a squared product with the direction, beside 1
            for a squared error times ``square``; None without a direction.

    """

    def __init__(
        self,
        y: torch.Tensor,
        scale: torch.Tensor,
        codebook: Codebook,
        direction: torch.Tensor | None,
    ) -> None:
        self.codebook = codebook
        self.normaliser = normaliser_of(y)
        self.scale = scale
        self.unit = 2.0**fmt.PRODUCT_FRACTION_BITS
        self.gain = fp32(codebook.gain * self.unit)
        self.x = y * self.normaliser
        self.square = self.sum(torch.round(self.x * self.x * self.unit))
        self.direction = self.pull = None
        if direction is not None:
            shift = fmt.DIRECTION_FRACTION_BITS - fmt.PRODUCT_FRACTION_BITS
            self.direction = direction * 2.0**shift
            self.pull = self.square * fmt.direction_pull(fmt.SCALE_GROUP * y.shape[-2])

    @staticmethod
    def sum(terms: torch.Tensor) -> torch.Tensor:
        return terms.sum((-2, -1), keepdim=True)

    def decoded(self, index: torch.Tensor) -> torch.Tensor:
        return levels_of(index, self.codebook) * self.scale * self.normaliser

    def with_vector(self, index: torch.Tensor) -> torch.Tensor:
        """Terms of the decoded vector's product with the vector."""
        return torch.round(self.x * self.decoded(index) * self.gain)

    def error(self, index: torch.Tensor) -> torch.Tensor:
        return self.x * self.unit - self.decoded(index) * self.gain

    def with_direction(self, index: torch.Tensor) -> torch.Tensor:
        """Terms of the error's product with the direction."""
        assert self.direction is not None
        return torch.round(self.error(index) * self.direction)

    def rest(self, index: torch.Tensor) -> torch.Tensor:
        """The error's product with the vector."""
        return self.square - self.sum(self.with_vector(index))

    def along(self, index: torch.Tensor) -> torch.Tensor:
        """The error's product with the direction; zero without one."""
        if self.direction is None:
            return torch.zeros_like(self.square)
        return self.sum(self.with_direction(index))

    def cost(self, rest: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
        """The cost of such products."""
        cost = rest * rest * fmt.BIAS_WEIGHT
        return cost if self.pull is None else cost + along * along * self.pull


def unbiased(
    y: torch.Tensor,
    scale: torch.Tensor,
    codebook: Codebook,
    direction: torch.Tensor | None = None,
) -> torch.Tensor:
    """Levels whose error is nearly orthogonal to the vector, and to a direction.

    Let x be the vector, and q(f) the decoded codes of f * x times the gain. The factor
    f is stepped by (<x, x> - <q(f), x>) / <x, x>, as if the product were linear in f.
    The factor that leaves the smallest difference is kept. Without a trellis, codes may
    then move to the next level: see ``_moved``.

    With a trellis and a direction u, q also has a part p of it: codes are those of
    f * x + p * u, p is stepped by the error's part of u, and the least cost is kept.

    Args:
        y: (..., G, 16) fp32, of magnitudes up to SCALE_MAX.
        scale: (..., G, 1) fp32.
        codebook: The codebook of keys, which has a gain.
        direction: (..., G, 16) fp32, as long as the root of the head size; None for
            none.

    Returns:
        Indices of the levels, int64 (..., G, 16).

    """
    products = Products(y, scale, codebook, direction)
    square = products.square
    searched = direction if codebook.trellis else None
    if searched is not None:
        searched = searched * (1 / products.normaliser)
    step = 2.0**-fmt.DIRECTION_FRACTION_BITS / (fmt.SCALE_GROUP * y.shape[-2])
    factor, part = torch.ones_like(square), torch.zeros_like(square)
    best_index = torch.zeros_like(y, dtype=torch.int64)
    least = torch.full_like(square, math.inf)
    for _ in range(fmt.UNBIAS_ROUNDS + 1):
        wanted = y * factor
        if searched is not None:
            wanted = wanted + searched * part
        index = encode(wanted, scale, products.normaliser, codebook)[0]
        rest = products.rest(index)
        cost = rest.abs()
        if searched is not None:
            along = products.along(index)
            cost = products.cost(rest, along)
            part = part + along * fp32(step)
        better = cost < least
        best_index = torch.where(better, index, best_index)
        least = torch.where(better, cost, least)
        factor = factor + rest / square.clamp(min=1)
        factor = factor.clamp(1 - fmt.UNBIAS_LIMIT, 1 + fmt.UNBIAS_LIMIT)
    if codebook.trellis:
        return best_index
    for _ in range(1 if direction is None else fmt.DIRECTED_MOVES):
        best_index = _moved(y, best_index, products)
    return best_index


def _moved(y: torch.Tensor, index: torch.Tensor, products: Products) -> torch.Tensor:
    """Levels after one code of each vector moved to the next level, if that pays.

    The cost of an error is its square, and the weighted squares of its parts along the
    vector and along a direction. A code moves in the way that lowers these two, but not
    across zero. The code of least cost is moved, and the first among equal ones.

    Args:
        y: (..., G, 16) fp32.
        index: (..., G, 16) int64.
        products: The products of ``y``.

    """
    rest, along = products.rest(index), products.along(index)
    slope = rest * fmt.BIAS_WEIGHT * products.x.abs()
    if products.direction is not None:
        sign = torch.where(y < 0, -1.0, 1.0)
        slope = slope + along * products.pull * (products.direction * sign)
    outwards = torch.where(y < 0, -1, 1) * torch.where(slope > 0, 1, -1)
    moved = index + outwards
    half = fmt.NUM_LEVELS // 2
    possible = (moved >= 0) & (moved < fmt.NUM_LEVELS)
    possible &= (moved < half) == (index < half)
    moved = torch.where(possible, moved, index)

    own_rest = rest - (products.with_vector(moved) - products.with_vector(index))
    cost = own_rest * own_rest * fmt.BIAS_WEIGHT
    error, own_error = products.error(index), products.error(moved)
    squares = own_error * own_error - error * error
    cost = cost + squares / products.unit * products.square
    if products.direction is not None:
        mended = products.with_direction(moved) - products.with_direction(index)
        own_along = along + mended
        cost = cost + own_along * own_along * products.pull
    cost = from_groups(cost.masked_fill(~possible, math.inf))
    first = cost.argmin(-1, keepdim=True)
    worth = cost.gather(-1, first) < products.cost(rest, along)[..., 0]
    here = torch.zeros_like(cost, dtype=torch.bool).scatter(-1, first, worth)
    return torch.where(by_group(here), moved, index)
