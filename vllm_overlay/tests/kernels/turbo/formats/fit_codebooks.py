# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fits the codebooks of the turbo format to rotated vectors.

Any vector is close to Gaussian once it is rotated. Its coordinates are samples of
N(0, 1), divided by the scales that the encoder's search picks, as far as a vector's
scale words can hold these. Levels and search depend on each other: as in Lloyd's
algorithm, each is optimised for the other in turn. Codes of four and of three bits
share their levels, because the best levels of both are close and a kernel has one
table. Levels of keys are integers near a cubic. Levels of values lie on
v * (a + b * abs(v)). Kernels evaluate both at positions v, from fp16 coefficients
(see ``format.Codebook``).

    python tests/kernels/turbo/formats/fit_codebooks.py    # prints what format.py holds
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import Codebook
from vllm.v1.attention.ops.turbo.reference import codec as codec

# Adding this rounds fp16 numbers below 512 to integers.
ROUNDING = 1536.0
# The largest integer of a key table.
MAX_KEY_LEVEL = 126
WIDTHS = (4, 3)
# Number of tables that are judged by both widths.
NUM_CLOSE = 8
# The cubic's coefficients that fits start from.
START = (0.37, 0.047)
ROUNDS = 12
HEAD_SIZE = 128
NUM_VECTORS = 7_500
# Vectors that are encoded at a time. The search's intermediates fit a CPU's cache.
BATCH = 500


class Quality(NamedTuple):
    """The quality of a codebook with its scale search.

    Attributes:
        error: Relative squared error, least squares.
        slope: E[decoded * x] / E[x * x].

    """

    error: float
    slope: float

    @property
    def unbiased_error(self) -> float:
        """Relative squared error after decoded values are divided by the slope.

        With least-squares levels it is error / slope, because E[decoded**2] equals
        E[decoded * x].
        """
        energy = self.error + 2 * self.slope - 1
        return 1 - 2 + energy / self.slope**2


def gaussian_vectors(num_vectors: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_vectors, HEAD_SIZE // fmt.SCALE_GROUP, fmt.SCALE_GROUP)
    return codec.from_groups(torch.randn(shape, generator=generator))


def codebook_of(bits: int, magnitudes: torch.Tensor) -> Codebook:
    """A codebook to encode with, without the coefficients for kernels."""
    return Codebook(bits, tuple(magnitudes.tolist()), (0.0, 0.0))


def quantize(x: torch.Tensor, codebook: Codebook) -> tuple[torch.Tensor, torch.Tensor]:
    """Level indices and scale codes of (N, D) vectors: see ``codec.quantize``."""
    index, scale_codes = zip(*(codec.quantize(y, codebook) for y in x.split(BATCH)))
    return torch.cat(index), torch.cat(scale_codes)


def quality(x: torch.Tensor, codebook: Codebook) -> Quality:
    decoded = codec.dequantize(*quantize(x, codebook), codebook).double()
    exact = x.double()
    energy = exact.square().sum()
    error = (exact - decoded).square().sum() / energy
    return Quality(error.item(), ((exact * decoded).sum() / energy).item())


def half_positions() -> torch.Tensor:
    """Positions v of the upper half of the levels, (8,)."""
    return (torch.arange(fmt.NUM_LEVELS // 2) + 0.5) / 4


def cubic_levels(cubic: tuple[float, float]) -> torch.Tensor:
    v = half_positions()
    return cubic[0] * v + cubic[1] * v**3


def fit_levels(
    x: torch.Tensor, bits: int, basis: torch.Tensor, rounds: int = ROUNDS
) -> torch.Tensor:
    """Fit least-squares weights of a basis of levels and the codes in turn.

    Args:
        x: (N, D) vectors.
        bits: Bits a code.
        basis: (8, n), a row for each level of the upper half. The lower half is its
            negative.
        rounds: Number of rounds.

    Returns:
        The weights, (n,) fp64.

    """
    weights = torch.linalg.lstsq(basis, cubic_levels(START).double()[:, None])
    weights = weights.solution[:, 0]
    odd = torch.cat([-basis.flip(0), basis])
    grouped = codec.by_group(x).double().flatten()
    for _ in range(rounds):
        codebook = codebook_of(bits, basis @ weights)
        index, scale_codes = quantize(x, codebook)
        scale = codec.scale_values(scale_codes).double()[..., None]
        features = odd[codec.by_group(index).long()] * scale[..., None]
        features = features.flatten(0, -2)
        moments = features.T @ features, features.T @ grouped
        weights = torch.linalg.solve(*moments)
    return weights


def fit_cubic(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The best (a, b) of a * v + b * v**3."""
    v = half_positions().double()
    return fit_levels(x, bits, torch.stack([v, v**3], -1))


def fit_quadratic(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The best (a, b) of a * v + b * v**2 in the upper half."""
    v = half_positions().double()
    return fit_levels(x, bits, torch.stack([v, v**2], -1))


def fit_free(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The best levels of any form, a baseline for levels of a given form."""
    return fit_levels(x, bits, torch.eye(fmt.NUM_LEVELS // 2, dtype=torch.float64))


def fit_values(x: torch.Tensor) -> tuple[float, float]:
    """fp16 coefficients of the values' levels: the mean of both widths' best."""
    best = torch.stack([fit_quadratic(x, bits) for bits in WIDTHS]).mean(0)
    a, b = map(float, best.numpy().astype(np.float16))
    return a, b


def rounded_in_half(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """Results of the keys' cubics in kernels, for each way to fuse multiply-adds.

    Args:
        a: (n, 1) fp16 linear coefficients.
        b: (n, 1) fp16 cubic coefficients.

    Returns:
        KEY_LEVEL_UNIT times the levels, fp16 (n, 8), for each way to fuse.

    """
    v = half_positions().numpy().astype(np.float16)
    rounding = np.float16(ROUNDING)

    def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        # Exact in fp64 at these magnitudes.
        return (x.astype(np.float64) * y + z).astype(np.float16)

    totals = []
    for slope in (v * v * b + a, fused(v * v, b, a)):
        totals += [v * slope + rounding, fused(v, slope, rounding)]
    return [total - rounding for total in totals]


def key_tables(
    cubic: torch.Tensor,
) -> dict[tuple[int, ...], tuple[float, float]]:
    """Tables of integers near a cubic that kernels compute exactly, however they fuse.

    Args:
        cubic: (a, b) of levels a * v + b * v**3.

    Returns:
        For each table, the fp16 coefficients whose cubic is closest to it. A table
        holds KEY_LEVEL_UNIT times the levels.

    """
    factors_a, factors_b = np.arange(0.94, 1.02, 1e-3), np.arange(0.9, 1.1, 4e-3)
    a_level, b_level = (cubic * fmt.KEY_LEVEL_UNIT).tolist()
    a = (factors_a * a_level).repeat(len(factors_b))
    b = np.tile(factors_b * b_level, len(factors_a))
    a, b = (x[:, None].astype(np.float16) for x in (a, b))
    ways = rounded_in_half(a, b)
    levels = ways[0].astype(np.float64)
    exact = np.all([way == ways[0] for way in ways], (0, 2))
    exact &= levels[:, -1] <= MAX_KEY_LEVEL
    v = half_positions().numpy()
    distance = np.abs(np.float64(a) * v + np.float64(b) * v**3 - levels).max(1)
    tables: dict[tuple[int, ...], tuple[float, float]] = {}
    for i in np.flatnonzero(exact)[distance[exact].argsort(kind="stable")]:
        table = tuple(int(level) for level in levels[i])
        tables.setdefault(table, (float(a[i, 0]), float(b[i, 0])))
    return tables


def table_levels(table: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.float32) / fmt.KEY_LEVEL_UNIT


def fit_keys(
    x: torch.Tensor,
) -> tuple[tuple[int, ...], tuple[float, float]]:
    """The best table of the keys and its coefficients.

    A part of the vectors selects the ``NUM_CLOSE`` best tables of four bits. The
    product of both widths' errors on all vectors selects among these.
    """
    tables = key_tables(fit_cubic(x, 4))

    def error(x: torch.Tensor, table: tuple[int, ...], bits: int) -> float:
        return quality(x, codebook_of(bits, table_levels(table))).error

    part = x[: len(x) // 8]
    close = sorted(tables, key=lambda table: error(part, table, 4))[:NUM_CLOSE]
    best = min(
        close, key=lambda table: math.prod(error(x, table, bits) for bits in WIDTHS)
    )
    return best, tables[best]


def main() -> None:
    x, others = gaussian_vectors(NUM_VECTORS), gaussian_vectors(4 * NUM_VECTORS, 1)
    table, cubic = fit_keys(x)
    values = fit_values(x)
    print(f"keys {table}, cubic {cubic}; values {values}")
    v = half_positions()
    for bits in WIDTHS:
        for name, levels in (
            ("keys", table_levels(table)),
            ("values", values[0] * v + values[1] * v**2),
            ("free", fit_free(x, bits)),
        ):
            found = quality(others, codebook_of(bits, levels))
            print(
                f"{bits} bits, {name}: error {found.error:.5f}, "
                f"gain {1 / found.slope:.5f}, unbiased {found.unbiased_error:.5f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
