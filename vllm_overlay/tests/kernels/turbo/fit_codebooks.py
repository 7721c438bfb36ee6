# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fits the codebooks of the turbo format to rotated vectors.

A rotated vector is close to Gaussian whatever it was, so its coordinates are samples
of N(0, 1) divided by the scales that the encoder's search picks, as far as the words of
a vector can hold them. Levels and search depend on each other: as in Lloyd's algorithm,
each is made best for the other in turn. Both sides' levels lie on an odd cubic, the
keys' rounded to (m + 1/2) / 128; its coefficients are fp16 numbers in the positions v
that kernels evaluate it at (see ``format.Codebook``).

    python tests/kernels/turbo/fit_codebooks.py    # prints what format.py holds
"""

import itertools
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo import reference

# Adding this rounds fp16 numbers below 256 to multiples of 1/2.
ROUNDING = 768.0
# Where the fit of the values' cubic starts, by bits.
START = {4: (0.37, 0.047), 3: (0.42, 0.055)}
ROUNDS = 12
HEAD_SIZE = 128
NUM_VECTORS = 7_500


class Vectors(NamedTuple):
    """Samples of vectors, by scale group.

    Attributes:
        magnitude: (N, G, D / G) fp32 magnitudes.
        floor: (N, G) int32 code of the largest scale not above a group's largest.

    """

    magnitude: torch.Tensor
    floor: torch.Tensor

    @property
    def words(self) -> fmt.ScaleWords:
        """How their scales are stored."""
        _, num_groups, scale_group = self.magnitude.shape
        return fmt.scale_words(num_groups * scale_group, scale_group)


class Quality(NamedTuple):
    """Of a codebook with its scale search.

    Attributes:
        error: Relative squared error, least squares.
        slope: E[decoded * x] / E[x * x].

    """

    error: float
    slope: float

    @property
    def unbiased_error(self) -> float:
        """Relative squared error once decoded values are divided by the slope.

        With least-squares levels it is error / slope: E[decoded**2] is then
        E[decoded * x].
        """
        energy = self.error + 2 * self.slope - 1
        return 1 - 2 + energy / self.slope**2


def gaussian_vectors(num_vectors: int, scale_group: int, seed: int = 0) -> Vectors:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_vectors, HEAD_SIZE // scale_group, scale_group)
    magnitude = torch.randn(shape, generator=generator).abs()
    return Vectors(magnitude, reference.scale_floor(magnitude.amax(-1)))


def encode(
    vectors: Vectors, levels: torch.Tensor, offsets: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises vectors with the best scales that their words can hold.

    Returns:
        index: (N, G, D / G) int64 into ``levels``.
        scale: (N, G, 1) fp32.

    """
    thresholds = (levels[1:] + levels[:-1]) / 2

    def nearest(code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = reference.scale_values(code)[..., None]
        return torch.bucketize(vectors.magnitude / scale, thresholds), scale

    codes, errors = [], []
    for offset in offsets:
        codes.append((vectors.floor + offset).clamp(0, fmt.SCALE_CODE_MAX))
        index, scale = nearest(codes[-1])
        errors.append((vectors.magnitude - levels[index] * scale).square().sum(-1))
    stacked = torch.stack(codes, -1), torch.stack(errors, -1)
    return nearest(reference.scales_in_reach(*stacked, vectors.words))


def quality(
    vectors: Vectors, levels: torch.Tensor, offsets: tuple[int, ...]
) -> Quality:
    index, scale = encode(vectors, levels, offsets)
    x = vectors.magnitude.double()
    decoded = (levels[index] * scale).double()
    energy = x.square().sum()
    error = (x - decoded).square().sum() / energy
    return Quality(error.item(), ((x * decoded).sum() / energy).item())


def half_positions(bits: int) -> torch.Tensor:
    """Positions v of the upper half's levels."""
    return (torch.arange(1 << (bits - 1)) + 0.5) / (1 << (bits - 2))


def cubic_levels(bits: int, cubic: tuple[float, float]) -> torch.Tensor:
    v = half_positions(bits)
    return cubic[0] * v + cubic[1] * v**3


def fit_cubic(
    vectors: Vectors,
    bits: int,
    offsets: tuple[int, ...],
    rounds: int = ROUNDS,
) -> tuple[float, float]:
    """Least-squares coefficients (a, b), and the codes they lead to, in turn."""
    cubic = START[bits]
    v = half_positions(bits)
    basis = torch.stack([v, v**3], -1).double()
    x = vectors.magnitude.double()
    for _ in range(rounds):
        index, scale = encode(vectors, cubic_levels(bits, cubic), offsets)
        features = (basis[index] * scale[..., None]).flatten(0, -2)
        solution = torch.linalg.lstsq(features, x.flatten()[:, None], driver="gels")
        a, b = solution.solution[:, 0].tolist()
        cubic = a, b
    return cubic


def fit_free(
    vectors: Vectors,
    levels: torch.Tensor,
    offsets: tuple[int, ...],
    rounds: int = ROUNDS,
) -> torch.Tensor:
    """Levels with no form asked of them: what the cubic is measured against."""
    for _ in range(rounds):
        index, scale = encode(vectors, levels, offsets)
        scale = scale.expand_as(vectors.magnitude).flatten()
        weights = torch.zeros_like(levels).index_add_(0, index.flatten(), scale**2)
        products = scale * vectors.magnitude.flatten()
        levels = levels.new_zeros(levels.shape).index_add_(0, index.flatten(), products)
        levels /= weights
    return levels


def as_half(cubic: tuple[float, float]) -> tuple[float, float]:
    """The nearest fp16 coefficients."""
    a, b = map(float, np.array(cubic).astype(np.float16))
    return a, b


def rounded_in_half(bits: int, a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """What kernels make of keys' cubics, whichever multiply-adds they fuse.

    Args:
        bits: Bits a code.
        a: (n, 1) fp16 linear coefficients.
        b: (n, 1) fp16 cubic coefficients.

    Returns:
        128 times the levels, fp16 (n, 2**bits / 2), for each way to fuse.

    """
    v = half_positions(bits).numpy().astype(np.float16)
    rounding = np.float16(ROUNDING)

    def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        # Exact in fp64 at these magnitudes.
        return (x.astype(np.float64) * y + z).astype(np.float16)

    totals = []
    for slope in (v * v * b + a, fused(v * v, b, a)):
        totals += [v * slope + rounding, fused(v, slope, rounding)]
    return [total - rounding for total in totals]


def key_tables(
    bits: int, cubic: tuple[float, float]
) -> dict[tuple[int, ...], tuple[float, float]]:
    """Tables m near 128 times a cubic that kernels get exactly, however they fuse.

    Returns:
        By table of 7-bit integers, the fp16 coefficients of 128 * level that lie
        closest to it.

    """
    factors_a, factors_b = np.arange(0.94, 1.06, 5e-4), np.arange(0.8, 1.25, 2e-3)
    a = (factors_a * cubic[0] * 128).repeat(len(factors_b))
    b = np.tile(factors_b * cubic[1] * 128, len(factors_a))
    a, b = (x[:, None].astype(np.float16) for x in (a, b))
    ways = rounded_in_half(bits, a, b)
    levels = ways[0].astype(np.float64)
    exact = np.all([way == ways[0] for way in ways], (0, 2))
    exact &= (levels % 1 == 0.5).all(1) & (levels[:, -1] <= 127.5)
    v = half_positions(bits).numpy()
    distance = np.abs(np.float64(a) * v + np.float64(b) * v**3 - levels).max(1)
    tables: dict[tuple[int, ...], tuple[float, float]] = {}
    for i in np.flatnonzero(exact)[distance[exact].argsort(kind="stable")]:
        table = tuple(int(level) for level in levels[i])
        tables.setdefault(table, (float(a[i, 0]), float(b[i, 0])))
    return tables


def table_levels(table: tuple[int, ...]) -> torch.Tensor:
    return (torch.tensor(table, dtype=torch.float32) + 0.5) / 128


def fit_key(
    vectors: Vectors, bits: int, offsets: tuple[int, ...], cubic: tuple[float, float]
) -> tuple[tuple[int, ...], tuple[float, float]]:
    """The best table near a cubic, and its coefficients."""
    return min(
        key_tables(bits, cubic).items(),
        key=lambda item: quality(vectors, table_levels(item[0]), offsets).error,
    )


def main() -> None:
    scale_groups = {"keys": fmt.KEY_SCALE_GROUP, "values": fmt.VALUE_SCALE_GROUP}
    for bits, scale_group in itertools.product(
        (4, 3), sorted({*scale_groups.values()})
    ):
        vectors = gaussian_vectors(NUM_VECTORS, scale_group)
        check = gaussian_vectors(4 * NUM_VECTORS, scale_group, seed=1)
        offsets = fmt.SCALE_OFFSETS[bits]
        cubic = fit_cubic(vectors, bits, offsets)
        table, key_cubic = fit_key(vectors, bits, offsets, cubic)
        value_cubic = as_half(cubic)
        free = fit_free(vectors, cubic_levels(bits, cubic), offsets)
        print(f"{bits} bits, offsets {offsets}, groups of {scale_group}")
        for name, levels in (
            (f"keys {table} cubic {key_cubic}", table_levels(table)),
            (f"values cubic {value_cubic}", cubic_levels(bits, value_cubic)),
            ("free", free),
        ):
            found = quality(check, levels, offsets)
            print(
                f"  {name}: error {found.error:.5f}, gain {1 / found.slope:.5f}, "
                f"unbiased {found.unbiased_error:.5f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
