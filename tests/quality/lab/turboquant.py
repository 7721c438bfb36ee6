# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""TurboQuant as its paper has it (Zandieh et al., arXiv:2504.19874).

Algorithm 1 minimises the squared error of a vector, Algorithm 2 gives unbiased inner
products. Vectors are unit vectors, (..., d); the caller keeps their norms.
"""

import math
from functools import cache

import torch

GRID_POINTS = 1 << 16
# Density beyond this many standard deviations is below 1e-17.
GRID_SIGMAS = 8.5


@cache
def coordinate_density(head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Density of a coordinate of a random point of the unit sphere (Lemma 1).

    ``f(x) = G(d/2) / (sqrt(pi) G((d-1)/2)) (1 - x^2)^((d-3)/2)``, on a grid of
    midpoints that covers all but a negligible part of [-1, 1].

    Returns:
        Grid points and the probability of their cells, float64, summing to one.

    """
    reach = min(1.0, GRID_SIGMAS / math.sqrt(head_size))
    cell = 2 * reach / GRID_POINTS
    points = -reach + cell * (torch.arange(GRID_POINTS, dtype=torch.float64) + 0.5)
    logarithm = (head_size - 3) / 2 * torch.log1p(-points * points)
    constant = math.lgamma(head_size / 2) - math.lgamma((head_size - 1) / 2)
    density = torch.exp(logarithm + constant) / math.sqrt(math.pi)
    mass = density * cell
    return points, mass / mass.sum()


@cache
def lloyd_max(bits: int, head_size: int) -> tuple[torch.Tensor, float]:
    """The scalar quantiser of a coordinate: the minimum of Eq. (4).

    Lloyd's iteration on the density itself, so there is no sample to depend on.

    Returns:
        The 2**bits levels, float64 and ascending, and the squared error of a unit
        vector: d times that of a coordinate.

    """
    points, mass = coordinate_density(head_size)
    zero = torch.zeros(1, dtype=torch.float64)
    mass_below = torch.cat([zero, mass.cumsum(0)])
    moment_below = torch.cat([zero, (mass * points).cumsum(0)])
    quantiles = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    levels = points[torch.searchsorted(mass_below[1:], quantiles)]
    for _ in range(10_000):
        thresholds = (levels[1:] + levels[:-1]) / 2
        inner = torch.searchsorted(points, thresholds)
        edges = torch.cat([torch.tensor([0]), inner, torch.tensor([GRID_POINTS])])
        updated = moment_below[edges].diff() / mass_below[edges].diff()
        change = (updated - levels).abs().max()
        levels = updated
        if change < 1e-10 / math.sqrt(head_size):
            break
    codes = torch.bucketize(points, (levels[1:] + levels[:-1]) / 2)
    error = (mass * (points - levels[codes]) ** 2).sum()
    return levels, head_size * error.item()


def random_rotation(head_size: int, generator: torch.Generator) -> torch.Tensor:
    """A rotation uniform among all: QR of a Gaussian matrix, R's diagonal positive."""
    gaussian = torch.randn(head_size, head_size, generator=generator).double()
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()


class TurboQuantMse:
    """Algorithm 1: rotate, then quantise every coordinate by itself.

    Args:
        head_size: d.
        bits: Bits a coordinate; zero decodes to the zero vector.
        seed: Seed of the rotation.

    """

    def __init__(self, head_size: int, bits: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.rotation = random_rotation(head_size, generator).float()
        self.levels = lloyd_max(bits, head_size)[0].float()
        self.thresholds = (self.levels[1:] + self.levels[:-1]) / 2

    def quantize(self, x: torch.Tensor) -> torch.Tensor:
        """Codes (..., d) of unit vectors (..., d)."""
        return torch.bucketize(x @ self.rotation.T, self.thresholds)

    def dequantize(self, codes: torch.Tensor) -> torch.Tensor:
        return self.levels[codes] @ self.rotation

    def round_trip(self, x: torch.Tensor) -> torch.Tensor:
        return self.dequantize(self.quantize(x))


class TurboQuantProd:
    """Algorithm 2: one bit fewer for Algorithm 1, and QJL signs of what it left.

    The inner product of the result with any vector is right on average over the
    sketch (Theorem 2).

    Args:
        head_size: d.
        bits: Bits a coordinate, at least one.
        seed: Seed of the rotation and the sketch.

    """

    def __init__(self, head_size: int, bits: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed + 1_000_003)
        self.mse = TurboQuantMse(head_size, bits - 1, seed)
        self.sketch = torch.randn(head_size, head_size, generator=generator)
        self.factor = math.sqrt(math.pi / 2) / head_size

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Codes, signs of the sketched residual, and the residual's norm."""
        codes = self.mse.quantize(x)
        residual = x - self.mse.dequantize(codes)
        signs = torch.where(residual @ self.sketch.T < 0, -1.0, 1.0)
        return codes, signs, residual.norm(dim=-1, keepdim=True)

    def dequantize(
        self, codes: torch.Tensor, signs: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor:
        residual = self.factor * norm * (signs @ self.sketch)
        return self.mse.dequantize(codes) + residual

    def round_trip(self, x: torch.Tensor) -> torch.Tensor:
        return self.dequantize(*self.quantize(x))
