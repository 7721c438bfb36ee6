# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scales and levels of rotated vectors in PyTorch.

It chooses scales as ``format`` says, and levels by ``levels`` and ``unbias``. ``bytes``
is the executable form of ``format``'s words. Shapes: D the head size, G = D / 16 scale
groups. Most functions take a vector by group, (..., G, 16): coordinate r is at index
``r // G`` of group ``r % G``, which is a trellis's order.
"""

import math

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import Codebook, ScaleWords
from vllm.v1.attention.ops.turbo.reference.levels import (
    by_group,
    encode,
    from_groups,
    levels_of,
    normaliser_of,
    scale_floor,
    scale_values,
)
from vllm.v1.attention.ops.turbo.reference.unbias import unbiased


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
    floor, normaliser = scale_floor(largest), normaliser_of(y)
    codes, errors = [], []
    for offset in fmt.SCALE_OFFSETS:
        code = (floor + offset).clamp(0, fmt.SCALE_CODE_MAX)
        errors.append(encode(y, scale_values(code), normaliser, codebook)[1])
        codes.append(code[..., 0])
    words = fmt.scale_words(fmt.SCALE_GROUP * y.shape[-2])
    chosen = scales_in_reach(torch.stack(codes, -1), torch.stack(errors, -1), words)
    return chosen.to(torch.uint8)


def quantize_groups(
    grouped: torch.Tensor, codebook: Codebook, direction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels and scales of rotated vectors that are split into groups.

    Args:
        grouped: (..., G, 16) fp32, finite.
        codebook: The codebook of the vectors.
        direction: See ``quantize``; here (..., G, 16).

    Returns:
        index: (..., G, 16) uint8, indices of the levels.
        scale_codes: (..., G) uint8, E5M3.

    """
    grouped = grouped.clamp(-fmt.SCALE_MAX, fmt.SCALE_MAX)
    scale_codes = choose_scales(grouped, codebook)
    scale = scale_values(scale_codes)[..., None]
    if codebook.unbiased:
        index = unbiased(grouped, scale, codebook, direction)
    else:
        index = encode(grouped, scale, normaliser_of(grouped), codebook)[0]
    return index.to(torch.uint8), scale_codes


def dequantize_groups(
    index: torch.Tensor, scale_codes: torch.Tensor, codebook: Codebook
) -> torch.Tensor:
    """Rotated vectors, fp32, from levels (..., G, 16) and scales (..., G)."""
    return levels_of(index, codebook) * scale_values(scale_codes)[..., None]


def quantize(
    y: torch.Tensor, codebook: Codebook, direction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels and scales of rotated vectors.

    Args:
        y: (..., D) fp32, finite.
        codebook: The codebook of keys if y is keys, or else of values.
        direction: (..., D), rotated, with y's leading shape or one that broadcasts: the
            direction that errors of keys shall be orthogonal to, as long as sqrt(D);
            None for none.

    Returns:
        index: (..., D) uint8, indices of the levels.
        scale_codes: (..., G) uint8, E5M3.

    """
    if direction is not None:
        direction = by_group(direction.float())
    index, scale_codes = quantize_groups(by_group(y), codebook, direction)
    return from_groups(index), scale_codes


def dequantize(
    index: torch.Tensor, scale_codes: torch.Tensor, codebook: Codebook
) -> torch.Tensor:
    """Rotated vectors, (..., D) fp32, from levels (..., D) and scales (..., G)."""
    return from_groups(dequantize_groups(by_group(index), scale_codes, codebook))
