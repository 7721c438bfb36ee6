# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Levels of rotated vectors in PyTorch, by a scale for each group.

It is the executable form of ``format``'s codebooks. Shapes are those of ``codec``.
"""

import math
from functools import cache

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import Codebook


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent as fp32, exact, for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def exponent_of(x: torch.Tensor) -> torch.Tensor:
    """floor(log2(x)) as int32 for positive normal fp32 x; -127 at zero."""
    return (x.view(torch.int32) >> 23) - 127


def scale_values(scale_codes: torch.Tensor) -> torch.Tensor:
    """Values of E5M3 scale codes: uint8 to fp32, any shape."""
    bits = scale_codes.to(torch.int16) << fmt.SCALE_SHIFT
    return bits.view(torch.float16).float()


def scale_floor(largest: torch.Tensor) -> torch.Tensor:
    """The codes, int32, of the largest E5M3 numbers not above fp32 ``largest``."""
    shift = 20  # leaves the exponent and three mantissa bits
    bias = (127 - 15) << 3
    normal = (largest.view(torch.int32) >> shift) - bias
    subnormal = (largest * 2.0**17).to(torch.int32)
    return torch.where(largest < 2.0**-14, subnormal, normal)


def by_group(x: torch.Tensor) -> torch.Tensor:
    """Vectors (..., D) as (..., G, 16)."""
    return x.unflatten(-1, (fmt.SCALE_GROUP, -1)).transpose(-1, -2)


def from_groups(x: torch.Tensor) -> torch.Tensor:
    """Inverse of ``by_group``."""
    return x.transpose(-1, -2).flatten(-2)


@cache
def _constant(values: tuple, device: torch.device) -> torch.Tensor:
    # Made on the CPU by name, because there may be a default device.
    return torch.tensor(values, dtype=torch.float32, device="cpu").to(device)


def levels_of(index: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """The levels with these indices, fp32 of the same shape."""
    return _constant(codebook.levels, index.device)[index.long()]


def _nearest(y: torch.Tensor, scale: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """The index of the nearest of all levels, int64 of y's shape."""
    thresholds = _constant(codebook.thresholds, y.device)
    above = (y.abs()[..., None] > thresholds * scale[..., None]).sum(-1)
    half = fmt.NUM_LEVELS // 2
    return torch.where(y < 0, half - 1 - above, half + above)


def _rounded_square(error: torch.Tensor) -> torch.Tensor:
    """Squares of normalised errors, in units that make their sums exact."""
    square = (error * error).clamp(max=fmt.ERROR_MAX)
    return torch.round(square * 2.0**fmt.ERROR_FRACTION_BITS)


def trellis(
    y: torch.Tensor, scale: torch.Tensor, normaliser: torch.Tensor, codebook: Codebook
) -> tuple[torch.Tensor, torch.Tensor]:
    """Viterbi's algorithm: the levels of least squared error that a path may have.

    A state is the last two path bits, of which b(e - 2) is the higher. If paths have
    equal errors, the one whose earlier bit is zero is taken. If final states do, the
    first is taken.

    Args:
        y: (..., G, 16) fp32.
        scale: (..., G, 1) fp32.
        normaliser: (..., 1, 1) fp32 powers of two.
        codebook: A codebook with a trellis.

    Returns:
        Indices of the levels, int64 (..., G, 16), and their errors, fp32 (..., G).

    """
    thresholds = _constant(codebook.subset_thresholds, y.device)
    z = (y * (1 / scale.clamp(min=fmt.SMALLEST_SCALE)))[..., None]
    # (..., G, 16, subset): the best level of each subset, and its error.
    subset = torch.arange(fmt.NUM_SUBSETS, device=y.device)
    index = (z[..., None] > thresholds).sum(-1) * fmt.NUM_SUBSETS + subset
    error = y[..., None] - levels_of(index, codebook) * scale[..., None]
    error = _rounded_square(error * normaliser[..., None])
    # Subset 2 * (b(e) ^ b(e - 2)) + b(e - 1).
    error = error.unflatten(-1, (2, 2))

    cost = torch.full_like(error[..., 0, :, :], math.inf)  # (..., b(e - 2), b(e - 1))
    cost[..., 0, 0] = 0
    survivors = []
    for e in range(fmt.SCALE_GROUP):
        step = error[..., e, :, :]
        # (..., b(e - 2), b(e - 1), b(e))
        paths = torch.stack([cost + step, cost + step.flip(-2)], -1)
        zero, one = paths.unbind(-3)
        survivors.append(one < zero)
        cost = torch.where(one < zero, one, zero)

    cost = cost.flatten(-2)
    state = cost.argmin(-1, keepdim=True)
    chosen = torch.empty_like(index[..., 0])
    for e in reversed(range(fmt.SCALE_GROUP)):
        before, bit = state >> 1, state & 1
        earlier = survivors[e].flatten(-2).gather(-1, state).long()
        of_subset = 2 * (bit ^ earlier) + before
        chosen[..., e : e + 1] = index[..., e, :].gather(-1, of_subset)
        state = 2 * earlier + before
    return chosen, cost.amin(-1)


def encode(
    y: torch.Tensor, scale: torch.Tensor, normaliser: torch.Tensor, codebook: Codebook
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the levels of each vector, and the error of each group.

    Arguments and results are those of ``trellis``.
    """
    if codebook.trellis:
        return trellis(y, scale, normaliser, codebook)
    index = _nearest(y, scale, codebook)
    error = (y - levels_of(index, codebook) * scale) * normaliser
    return index, _rounded_square(error).sum(-1)


def normaliser_of(y: torch.Tensor) -> torch.Tensor:
    """Powers of two, (..., 1, 1), that bring vectors (..., G, 16) near 1."""
    exponent = exponent_of(y.abs().amax((-2, -1), keepdim=True)).clamp(
        min=-fmt.ERROR_MAX_EXPONENT, max=126
    )
    return power_of_two(-exponent)
