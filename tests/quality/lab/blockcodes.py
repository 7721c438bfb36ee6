# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Codes of more than one coordinate at a time: vector codebooks and trellises."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from scalar import (
    E5M3_OFFSETS,
    FIT_ROUNDS,
    FIT_VECTORS,
    ScaleRule,
    fitted,
    gaussian_vectors,
)

from vllm.v1.attention.ops.turbo.format import Codebook
from vllm.v1.attention.ops.turbo.reference import codec as reference_codec
from vllm.v1.attention.ops.turbo.reference.levels import scale_floor, scale_values

KMEANS_ROUNDS = 15
# Steps of E5M3; every other one is an E5M2 number.
E5M2_OFFSETS = (-4, -2, 0, 2)
# A computed level is the sum of the four bytes of a linear congruence, which is nearly
# Gaussian (QTIP's 1MAD, Tseng et al., arXiv:2406.11235).
MULTIPLIER, INCREMENT = 34038481, 76625530


def nearest_point(points: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Index (n,) of the point of ``codebook`` (m, d) next to each of (n, d)."""
    half_squares = codebook.square().sum(-1) / 2
    parts = points.split(1 << 14)
    return torch.cat([(p @ codebook.T - half_squares).argmax(-1) for p in parts])


@cache
def vector_codebook(bits: int, size: int, head_size: int = 128) -> torch.Tensor:
    """Points for ``size`` coordinates of ``bits`` each, (2**(bits * size), size).

    k-means over coordinates in the unit of their group's best scale, which is the
    scalar quantiser's.
    """
    count = 60 << (bits * size)  # sixty samples a point
    vectors = gaussian_vectors(max(2000, count * size // head_size), head_size, seed=7)
    grouped = vectors.unflatten(-1, (-1, 32))
    scale = fitted(bits, ScaleRule(32), head_size).scales(grouped.abs())
    samples = (grouped / scale).view(-1, size)
    start = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    codebook = samples[start[: 1 << (bits * size)]]
    weight = scale.square().expand_as(grouped).reshape(-1, size)
    for _ in range(KMEANS_ROUNDS):
        index = nearest_point(samples, codebook)
        total = torch.zeros_like(codebook).index_add(0, index, samples * weight)
        mass = torch.zeros_like(codebook).index_add(0, index, weight)
        codebook = torch.where(mass > 0, total / mass.clamp(min=1e-30), codebook)
    return codebook


def vector_round_trip(y: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Vectors (..., D) through a vector codebook, with E5M3 scales per 32."""
    codebook = vector_codebook(bits, size, y.shape[-1])
    grouped = y.unflatten(-1, (-1, 32))
    base = scale_floor(grouped.abs().amax(-1, keepdim=True))
    best = torch.zeros_like(grouped)
    best_error = torch.full_like(grouped[..., :1], torch.inf)
    for offset in E5M3_OFFSETS:
        scale = scale_values((base + offset).clamp(min=1).to(torch.uint8))
        points = (grouped / scale).reshape(-1, size)
        decoded = codebook[nearest_point(points, codebook)].view_as(grouped) * scale
        error = (decoded - grouped).square().sum(-1, keepdim=True)
        better = error < best_error
        best = torch.where(better, decoded, best)
        best_error = torch.where(better, error, best_error)
    return best.flatten(-2)


def random_levels(state_bits: int) -> torch.Tensor:
    """Gaussian quantiles in random order: a table, one level a state."""
    count = 1 << state_bits
    uniform = (torch.arange(count) + 0.5) / count
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return torch.special.ndtri(uniform.double()).float()[order]


def computed_levels(state_bits: int) -> torch.Tensor:
    """Levels that are computed from the state: no table."""
    state = torch.arange(1 << state_bits)
    word = (MULTIPLIER * state + INCREMENT) & 0xFFFFFFFF
    total = sum(word >> (8 * byte) & 0xFF for byte in range(4)).float()
    return (total - total.mean()) / total.std()


def trellis_round_trip(
    y: torch.Tensor, bits: int, levels: torch.Tensor
) -> torch.Tensor:
    """Vectors (n, D) through a bit-shift trellis, found by Viterbi's algorithm.

    The state is the last bits of the code; each coordinate shifts ``bits`` new ones
    in, and its level is the state's. The first state is free, and costs its bits.
    One fp16 scale a vector: the root mean square.
    """
    states = len(levels)
    scale = y.square().mean(-1, keepdim=True).sqrt().half().float()
    # The least error needs levels a little smaller than the source.
    levels = levels * (1 - 2.0 ** (-2 * bits)) ** 0.5
    relative = y / scale
    cost = (relative[:, :1] - levels).square()
    choices = []
    for column in relative[:, 1:].unbind(-1):
        # Predecessors of s are those whose low bits are s >> bits.
        least, choice = cost.view(len(y), 1 << bits, -1).min(1)
        choices.append(choice.to(torch.uint8))
        cost = least.repeat_interleave(1 << bits, -1)
        cost = cost + (column[:, None] - levels).square()
    state = cost.argmin(-1, keepdim=True)
    path = [state]
    for choice in reversed(choices):
        low = state >> bits
        state = low + choice.gather(1, low).long() * (states >> bits)
        path.append(state)
    return levels[torch.cat(path[::-1], -1)] * scale


@dataclass(frozen=True)
class TrellisCodebook(Codebook):
    """Levels for the format's trellis and scales at any width.

    A code chooses among half of the ``2 ** (bits + 1)`` levels, which its state allows.
    """

    @property
    def trellis(self) -> bool:
        return True


@cache
def trellis_codebook(bits: int, head_size: int = 128) -> TrellisCodebook:
    """Levels of least squared error for codes of ``bits`` on four states."""
    y = gaussian_vectors(FIT_VECTORS, head_size, seed=1)
    grouped = reference_codec.by_group(y)
    half = 1 << bits
    position = (torch.arange(half) + 0.5) / half
    # Denser in the middle, the largest near 1: where the scale search expects it.
    start = 0.7 * position + 0.3 * position**3
    codebook = TrellisCodebook(bits, tuple(start.tolist()), (0.0, 0.0))
    for _ in range(FIT_ROUNDS):
        index, scale_codes = reference_codec.quantize(y, codebook)
        index = reference_codec.by_group(index).long()
        scale = scale_values(scale_codes)[..., None].expand_as(grouped)
        upper = torch.where(index < half, half - 1 - index, index - half).flatten()
        signed = torch.where(index < half, -grouped, grouped)
        zero = torch.zeros(half)
        total = zero.index_add(0, upper, (scale * signed).flatten())
        updated = total / zero.index_add(0, upper, scale.square().flatten())
        codebook = replace(codebook, magnitudes=tuple(updated.tolist()))
    return codebook


def codebook_round_trip(y: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Rotated vectors (..., D) as the format stores them with a codebook."""
    return reference_codec.dequantize(*reference_codec.quantize(y, codebook), codebook)


@cache
def two_codebooks(bits: int, head_size: int = 128) -> torch.Tensor:
    """Magnitudes of two codebooks, (2, 2**(bits - 1)), fitted as scalar ones are."""
    magnitude = gaussian_vectors(FIT_VECTORS, head_size, seed=1).abs()
    grouped = magnitude.unflatten(-1, (-1, 32))
    peaked = torch.tensor(fitted(bits, ScaleRule(32), head_size).magnitudes)
    half = len(peaked)
    flat = (torch.arange(half) + 0.5) / (half - 0.5) * peaked[-1] * 0.9
    codebooks = torch.stack([peaked, flat])
    for _ in range(FIT_ROUNDS):
        chosen, scale, index = two_codebook_search(grouped, codebooks)
        flat_index = (chosen * half + index).flatten()
        weight = (scale * scale).expand_as(grouped).flatten()
        zero = torch.zeros(2 * half)
        total = zero.index_add(0, flat_index, (scale * grouped).flatten())
        codebooks = (total / zero.index_add(0, flat_index, weight)).view(2, half)
    return codebooks


def two_codebook_search(
    magnitude: torch.Tensor, codebooks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codebook and E5M2 scale of each group of 32, and indices, of least error.

    The bit that E5M2 frees in the scale's byte selects the codebook.

    Args:
        magnitude: (..., groups, 32).
        codebooks: (2, levels).

    Returns:
        Codebook and scale (..., groups, 1), index of the level (..., groups, 32).

    """
    base = scale_floor(magnitude.amax(-1, keepdim=True))
    errors, scales, indices = [], [], []
    for levels in codebooks:
        thresholds = (levels[1:] + levels[:-1]) / 2
        for offset in E5M2_OFFSETS:
            code = ((base + offset) & ~1).clamp(min=2)
            scale = scale_values(code.to(torch.uint8))
            index = torch.bucketize(magnitude / scale, thresholds)
            error = (levels[index] * scale - magnitude).square()
            errors.append(error.sum(-1, keepdim=True))
            scales.append(scale)
            indices.append(index)
    best = torch.stack(errors).argmin(0, keepdim=True)
    scale = torch.stack(scales).gather(0, best)[0]
    whole = best.expand(1, *magnitude.shape)
    return best[0] // len(E5M2_OFFSETS), scale, torch.stack(indices).gather(0, whole)[0]


def two_codebook_round_trip(y: torch.Tensor, bits: int) -> torch.Tensor:
    """Vectors (..., D) through the better of two codebooks a group."""
    codebooks = two_codebooks(bits, y.shape[-1])
    grouped = y.unflatten(-1, (-1, 32))
    chosen, scale, index = two_codebook_search(grouped.abs(), codebooks)
    return (codebooks[chosen, index] * scale * grouped.sign()).flatten(-2)
