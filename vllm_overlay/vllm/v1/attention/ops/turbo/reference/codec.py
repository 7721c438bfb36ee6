# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scales and levels of rotated vectors in PyTorch.

It is the executable form of ``format``'s codebooks, and ``bytes`` is that of its words.
Shapes: D the head size, G = D / 16 scale groups. Most functions take a vector by group,
(..., G, 16): coordinate r is at index ``r // G`` of group ``r % G``, which is a
trellis's order.
"""

import math
from functools import cache

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import Codebook, ScaleWords, fp32


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


def _trellis(
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


def _encode(
    y: torch.Tensor, scale: torch.Tensor, normaliser: torch.Tensor, codebook: Codebook
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the levels of each vector, and the error of each group.

    Arguments and results are those of ``_trellis``.
    """
    if codebook.trellis:
        return _trellis(y, scale, normaliser, codebook)
    index = _nearest(y, scale, codebook)
    error = (y - levels_of(index, codebook) * scale) * normaliser
    return index, _rounded_square(error).sum(-1)


def _normaliser(y: torch.Tensor) -> torch.Tensor:
    """Powers of two, (..., 1, 1), that bring vectors (..., G, 16) near 1."""
    exponent = exponent_of(y.abs().amax((-2, -1), keepdim=True)).clamp(
        min=-fmt.ERROR_MAX_EXPONENT, max=126
    )
    return power_of_two(-exponent)


def scales_in_reach(
    codes: torch.Tensor, errors: torch.Tensor, words: ScaleWords
) -> torch.Tensor:
    """The best scale codes that a word can hold.

    Bases are tried at ``BASE_OFFSETS`` from the largest of the groups' best codes. With
    each base, a group takes the best of its candidates that the base reaches. If all
    are too far below the base, the group takes the lowest code above its best that the
    base reaches, with the error of its largest candidate. The base of least error is
    taken, and the first among equal ones.

    Args:
        codes: (..., G, candidates) int32, ascending.
        errors: (..., G, candidates) fp32; the first among equal ones is the best.
        words: The words that scales are stored in.

    Returns:
        (..., G) int32.

    """
    step, reach = words.delta_step, words.max_delta * words.delta_step
    shape = (words.num_words, words.word_groups)
    codes, errors = codes.unflatten(-2, shape), errors.unflatten(-2, shape)
    best = codes.gather(-1, errors.argmin(-1, keepdim=True))
    largest = best.amax(-2, keepdim=True)
    result = torch.zeros_like(best)
    least = torch.full_like(errors[..., :1, :1], math.inf)
    for offset in fmt.BASE_OFFSETS:
        base = (largest + offset).clamp(min=0)
        steps = base - codes
        reached = (steps >= 0) & (steps <= reach) & (steps % step == 0)
        in_reach = errors.masked_fill(~reached, math.inf)
        chosen = codes.gather(-1, in_reach.argmin(-1, keepdim=True))
        error = in_reach.amin(-1, keepdim=True)
        below = ~reached.any(-1, True) & (best < base)
        above = base - ((base - best) // step).clamp(max=words.max_delta) * step
        chosen = torch.where(below, above, chosen)
        error = torch.where(below, errors[..., -1:], error).sum(-2, keepdim=True)
        result = torch.where(error < least, chosen, result)
        least = torch.minimum(error, least)
    return result.flatten(-3)


def choose_scales(y: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """The codes of the scales: uint8 (..., G).

    Each group tries ``SCALE_OFFSETS`` for the scale of least squared error, among the
    scales that its word can hold.

    Args:
        y: (..., G, 16) fp32, of magnitudes up to SCALE_MAX.
        codebook: The codebook of keys if the vectors are keys, or else of values.

    """
    largest = y.abs().amax(-1, keepdim=True)
    floor, normaliser = scale_floor(largest), _normaliser(y)
    codes, errors = [], []
    for offset in fmt.SCALE_OFFSETS:
        code = (floor + offset).clamp(0, fmt.SCALE_CODE_MAX)
        errors.append(_encode(y, scale_values(code), normaliser, codebook)[1])
        codes.append(code[..., 0])
    words = fmt.scale_words(fmt.SCALE_GROUP * y.shape[-2])
    chosen = scales_in_reach(torch.stack(codes, -1), torch.stack(errors, -1), words)
    return chosen.to(torch.uint8)


def _unbiased(y: torch.Tensor, scale: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Levels whose product with a vector is nearly the vector's square.

    Let x be the vector, and q(f) the decoded codes of f * x times the gain. The factor
    f is stepped by (<x, x> - <q(f), x>) / <x, x>, as if the product were linear in f.
    The factor that leaves the smallest difference is kept. Without a trellis, one code
    may then move to the next level, if the smaller error along x outweighs the larger
    error across x, by ``BIAS_WEIGHT``.

    Args:
        y: (..., G, 16) fp32, of magnitudes up to SCALE_MAX.
        scale: (..., G, 1) fp32.
        codebook: The codebook of keys, which has a gain.

    Returns:
        Indices of the levels, int64 (..., G, 16).

    """
    normaliser = _normaliser(y)
    unit = 2.0**fmt.PRODUCT_FRACTION_BITS
    gain = fp32(codebook.gain * unit)
    x = y * normaliser
    square = torch.round(x * x * unit).sum((-2, -1), keepdim=True)

    def products(index: torch.Tensor) -> torch.Tensor:
        decoded = levels_of(index, codebook) * scale * normaliser
        return torch.round(x * decoded * gain)

    factor = torch.ones_like(square)
    best_index = torch.zeros_like(y, dtype=torch.int64)
    best_rest = torch.full_like(square, math.inf)
    for _ in range(fmt.UNBIAS_ROUNDS + 1):
        index = _encode(y * factor, scale, normaliser, codebook)[0]
        rest = square - products(index).sum((-2, -1), keepdim=True)
        better = rest.abs() < best_rest.abs()
        best_index = torch.where(better, index, best_index)
        best_rest = torch.where(better, rest, best_rest)
        factor = factor + rest / square.clamp(min=1)
        factor = factor.clamp(1 - fmt.UNBIAS_LIMIT, 1 + fmt.UNBIAS_LIMIT)
    if codebook.trellis:
        return best_index

    # A code moves away from zero if the product is too small. Otherwise it moves
    # towards zero, but not across it.
    outwards = torch.where(y < 0, -1, 1) * torch.where(best_rest > 0, 1, -1)
    moved = best_index + outwards
    half = fmt.NUM_LEVELS // 2
    possible = (moved >= 0) & (moved < fmt.NUM_LEVELS)
    possible &= (moved < half) == (best_index < half)
    moved = torch.where(possible, moved, best_index)
    rest = best_rest - (products(moved) - products(best_index))

    def error(index: torch.Tensor) -> torch.Tensor:
        difference = x * unit - levels_of(index, codebook) * scale * normaliser * gain
        return difference * difference

    cost = rest * rest * fmt.BIAS_WEIGHT
    cost = cost + (error(moved) - error(best_index)) / unit * square
    cost = from_groups(cost.masked_fill(~possible, math.inf))
    first = cost.argmin(-1, keepdim=True)
    worth = cost.gather(-1, first) < (best_rest * best_rest * fmt.BIAS_WEIGHT)[..., 0]
    here = torch.zeros_like(cost, dtype=torch.bool).scatter(-1, first, worth)
    return torch.where(by_group(here), moved, best_index)


def quantize_groups(
    grouped: torch.Tensor, codebook: Codebook
) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels and scales of rotated vectors that are split into groups.

    Args:
        grouped: (..., G, 16) fp32, finite.
        codebook: The codebook of the vectors.

    Returns:
        index: (..., G, 16) uint8, indices of the levels.
        scale_codes: (..., G) uint8, E5M3.

    """
    grouped = grouped.clamp(-fmt.SCALE_MAX, fmt.SCALE_MAX)
    scale_codes = choose_scales(grouped, codebook)
    scale = scale_values(scale_codes)[..., None]
    if codebook.unbiased:
        index = _unbiased(grouped, scale, codebook)
    else:
        index = _encode(grouped, scale, _normaliser(grouped), codebook)[0]
    return index.to(torch.uint8), scale_codes


def dequantize_groups(
    index: torch.Tensor, scale_codes: torch.Tensor, codebook: Codebook
) -> torch.Tensor:
    """Rotated vectors, fp32, from levels (..., G, 16) and scales (..., G)."""
    return levels_of(index, codebook) * scale_values(scale_codes)[..., None]


def quantize(y: torch.Tensor, codebook: Codebook) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels and scales of rotated vectors.

    Args:
        y: (..., D) fp32, finite.
        codebook: The codebook of keys if y is keys, or else of values.

    Returns:
        index: (..., D) uint8, indices of the levels.
        scale_codes: (..., G) uint8, E5M3.

    """
    index, scale_codes = quantize_groups(by_group(y), codebook)
    return from_groups(index), scale_codes


def dequantize(
    index: torch.Tensor, scale_codes: torch.Tensor, codebook: Codebook
) -> torch.Tensor:
    """Rotated vectors, (..., D) fp32, from levels (..., D) and scales (..., G)."""
    return from_groups(dequantize_groups(by_group(index), scale_codes, codebook))
