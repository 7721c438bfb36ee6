# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The turbo KV cache in PyTorch: the executable form of ``format``.

The kernels are tested against this module, bit for bit where bytes are
written, and CPU tensors are served by it. Shapes: T tokens, H KV heads, D the
head size, G scale groups and S bytes of scales a vector. Rotated vectors are in
the order of coordinates r that ``TurboFormat`` defines.
"""

import math
from functools import cache

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import Codebook, ScaleWords, TurboFormat
from vllm.v1.attention.ops.turbo.rotation import rotation_matrix

_FP32_MAX = torch.finfo(torch.float32).max


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent as fp32, exact, for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def _exponent(x: torch.Tensor) -> torch.Tensor:
    """floor(log2(x)) as int32 for positive normal fp32 x; -127 at zero."""
    return (x.view(torch.int32) >> 23) - 127


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate vectors as the store kernels do: in block fixed point.

    NaN counts as zero, infinities as the largest fp32 number.

    Args:
        x: (..., D), any floating dtype.

    Returns:
        (..., D) fp32, ``H (s * x) / sqrt(D)`` with x rounded to 1/2048 of the
        vector's largest magnitude.

    """
    head_size = x.shape[-1]
    x = torch.nan_to_num(x.float(), 0.0, _FP32_MAX, -_FP32_MAX)
    largest = x.abs().amax(-1, keepdim=True)
    exponent = _exponent(largest).clamp(min=fmt.MIN_INPUT_EXPONENT)
    integers = torch.floor(x * _power_of_two(fmt.ROTATION_EXPONENT - exponent) + 0.5)
    matrix = rotation_matrix(head_size, x.device, torch.float32)
    unit = _power_of_two(exponent - fmt.ROTATION_EXPONENT)
    return integers @ matrix * (unit * inverse_sqrt(head_size))


def inverse_rotate(y: torch.Tensor) -> torch.Tensor:
    """Rotate back: (..., D) to (..., D), both fp32."""
    head_size = y.shape[-1]
    matrix = rotation_matrix(head_size, y.device, torch.float32)
    return y.float() @ matrix.T * inverse_sqrt(head_size)


def fp32(value: float) -> float:
    """The nearest fp32 number."""
    # By name: there may be a default device, whose item() would wait for it.
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


@cache
def inverse_sqrt(head_size: int) -> float:
    """1 / sqrt(D), rounded to fp32."""
    return fp32(1 / math.sqrt(head_size))


def scale_values(scale_codes: torch.Tensor) -> torch.Tensor:
    """Values of E5M3 scale codes: uint8 to fp32, any shape."""
    bits = scale_codes.to(torch.int16) << fmt.SCALE_SHIFT
    return bits.view(torch.float16).float()


def scale_floor(largest: torch.Tensor) -> torch.Tensor:
    """Code (int32) of the largest E5M3 number not above fp32 ``largest``."""
    shift = 20  # leaves the exponent and three mantissa bits
    bias = (127 - 15) << 3
    normal = (largest.view(torch.int32) >> shift) - bias
    subnormal = (largest * 2.0**17).to(torch.int32)
    return torch.where(largest < 2.0**-14, subnormal, normal)


@cache
def group_of_coordinate(head_size: int, scale_group: int) -> torch.Tensor:
    """Scale group of each coordinate: int64 (D,)."""
    num_groups = fmt.scale_words(head_size, scale_group).num_groups
    return torch.arange(head_size) % (head_size // fmt.UNIT_CODES) % num_groups


@cache
def _group_sum_matrix(head_size: int, scale_group: int) -> torch.Tensor:
    groups = group_of_coordinate(head_size, scale_group)
    return torch.nn.functional.one_hot(groups).to(torch.float32)


def _nearest(
    magnitude: torch.Tensor, scale: torch.Tensor, codebook: Codebook
) -> torch.Tensor:
    """Index of the nearest of the upper half's levels, int64, any shape."""
    thresholds = torch.tensor(codebook.thresholds, device=magnitude.device)
    return (magnitude[..., None] > thresholds * scale[..., None]).sum(-1)


def scales_in_reach(
    codes: torch.Tensor, errors: torch.Tensor, words: ScaleWords
) -> torch.Tensor:
    """The best scale codes that a word can hold.

    The base of a word is the largest of its groups' best codes. A group takes
    the best of its candidates that the base reaches or, if there is none, the
    first code above its best that it does.

    Args:
        codes: (..., G, candidates) int32.
        errors: (..., G, candidates); of equal ones the first is the best.
        words: How scales are stored.

    Returns:
        (..., G) int32.

    """
    best = codes.gather(-1, errors.argmin(-1, keepdim=True))
    by_word = best.unflatten(-2, (words.num_words, words.word_groups))
    base = by_word.amax(-2, keepdim=True).expand_as(by_word).flatten(-3, -2)
    steps, step = base - codes, words.delta_step
    reached = (steps >= 0) & (steps <= words.max_delta * step) & (steps % step == 0)
    errors = errors.masked_fill(~reached, math.inf)
    chosen = codes.gather(-1, errors.argmin(-1, keepdim=True))
    above = base - ((base - best) // step).clamp(max=words.max_delta) * step
    return torch.where(reached.any(-1, True), chosen, above)[..., 0]


def choose_scales(magnitude: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Codes of the scales: uint8 (..., G).

    Each group tries ``codebook.scale_offsets`` for the scale of least squared
    error, within what its word can hold.

    Args:
        magnitude: (..., D) fp32, at most SCALE_MAX.
        codebook: Of the side that the vectors belong to.

    """
    head_size = magnitude.shape[-1]
    groups = group_of_coordinate(head_size, codebook.scale_group).to(magnitude.device)
    members = _group_sum_matrix(head_size, codebook.scale_group).to(magnitude.device)
    largest = torch.stack(
        [magnitude[..., groups == g].amax(-1) for g in range(members.shape[1])], -1
    )
    floor = scale_floor(largest)
    exponent = _exponent(largest).clamp(min=-fmt.ERROR_MAX_EXPONENT, max=126)
    normaliser = _power_of_two(-exponent)[..., groups]
    levels = torch.tensor(codebook.magnitudes, device=magnitude.device)
    codes, errors = [], []
    for offset in codebook.scale_offsets:
        code = (floor + offset).clamp(0, fmt.SCALE_CODE_MAX)
        scale = scale_values(code)[..., groups]
        level = levels[_nearest(magnitude, scale, codebook)]
        error = (magnitude - level * scale) * normaliser
        error = (error * error).clamp(max=fmt.ERROR_MAX)
        errors.append(torch.round(error * 2.0**fmt.ERROR_FRACTION_BITS) @ members)
        codes.append(code)
    words = fmt.scale_words(head_size, codebook.scale_group)
    chosen = scales_in_reach(torch.stack(codes, -1), torch.stack(errors, -1), words)
    return chosen.to(torch.uint8)


def unbiasing_factor(
    magnitude: torch.Tensor, scale: torch.Tensor, codebook: Codebook
) -> torch.Tensor:
    """What to multiply vectors by before their codes are chosen, fp32 (..., 1).

    With x the vector and q(f) what is decoded of the codes of f * x, times the
    gain, the factor f is stepped by (<x, x> - <q(f), x>) / <x, x>, as if the
    product were linear in it; of the steps the one that leaves the smallest
    difference is kept.

    Args:
        magnitude: (..., D) fp32, at most SCALE_MAX.
        scale: (..., D) fp32, each coordinate's scale.
        codebook: Of the keys.

    """
    levels = torch.tensor(codebook.magnitudes, device=magnitude.device)
    largest = magnitude.amax(-1, keepdim=True)
    exponent = _exponent(largest).clamp(min=-fmt.ERROR_MAX_EXPONENT, max=126)
    normaliser = _power_of_two(-exponent)
    unit = 2.0**fmt.PRODUCT_FRACTION_BITS
    x = magnitude * normaliser
    square = torch.round(x * x * unit).sum(-1, keepdim=True)

    def difference(factor: torch.Tensor) -> torch.Tensor:
        level = levels[_nearest(magnitude * factor, scale, codebook)]
        product = x * (level * scale * normaliser)
        product = torch.round(product * fp32(codebook.gain * unit))
        return square - product.sum(-1, keepdim=True)

    factor = best_factor = torch.ones_like(square)
    rest = best_rest = difference(factor)
    for _ in range(fmt.UNBIAS_ROUNDS):
        factor = factor + rest / square.clamp(min=1)
        factor = factor.clamp(1 - fmt.UNBIAS_LIMIT, 1 + fmt.UNBIAS_LIMIT)
        rest = difference(factor)
        better = rest.abs() < best_rest.abs()
        best_factor = torch.where(better, factor, best_factor)
        best_rest = torch.where(better, rest, best_rest)
    return best_factor


def quantize(y: torch.Tensor, codebook: Codebook) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of rotated vectors.

    Args:
        y: (..., D) fp32, finite.
        codebook: Of the side that y belongs to.

    Returns:
        codes: (..., D) uint8, offset binary.
        scale_codes: (..., G) uint8, E5M3.

    """
    magnitude = y.abs().clamp(max=fmt.SCALE_MAX)
    scale_codes = choose_scales(magnitude, codebook)
    groups = group_of_coordinate(y.shape[-1], codebook.scale_group).to(y.device)
    scale = scale_values(scale_codes)[..., groups]
    if codebook.unbiased:
        magnitude = magnitude * unbiasing_factor(magnitude, scale, codebook)
    index = _nearest(magnitude, scale, codebook)
    half = 1 << (codebook.bits - 1)
    codes = torch.where(y < 0, half - 1 - index, half + index)
    return codes.to(torch.uint8), scale_codes


def dequantize(
    codes: torch.Tensor, scale_codes: torch.Tensor, codebook: Codebook
) -> torch.Tensor:
    """Rotated vectors, (..., D) fp32, of codes (..., D) and scales (..., G)."""
    levels = torch.tensor(codebook.levels, device=codes.device)
    groups = group_of_coordinate(codes.shape[-1], codebook.scale_group)
    scale = scale_values(scale_codes)[..., groups.to(codes.device)]
    return levels[codes.long()] * scale


def pack_scales(scale_codes: torch.Tensor, words: ScaleWords) -> torch.Tensor:
    """Bytes of a vector's scales: (..., G) to (..., S), both uint8."""
    codes = scale_codes.long().unflatten(-1, (words.num_words, words.word_groups))
    base = codes.amax(-1)
    deltas = (base[..., None] - codes) // words.delta_step
    shifts = 8 + words.delta_bits * torch.arange(words.word_groups)
    word = base + (deltas << shifts.to(codes.device)).sum(-1)
    shifts = 8 * torch.arange(words.word_bytes, device=codes.device)
    return (word[..., None] >> shifts & 0xFF).flatten(-2).to(torch.uint8)


def unpack_scales(packed: torch.Tensor, words: ScaleWords) -> torch.Tensor:
    """Inverse of ``pack_scales``."""
    by_word = packed.long().unflatten(-1, (words.num_words, words.word_bytes))
    shifts = 8 * torch.arange(words.word_bytes, device=packed.device)
    word = (by_word << shifts).sum(-1, keepdim=True)
    shifts = 8 + words.delta_bits * torch.arange(words.word_groups)
    deltas = word >> shifts.to(packed.device) & words.max_delta
    codes = (word & 0xFF) - deltas * words.delta_step
    return codes.flatten(-2).to(torch.uint8)


def _combine(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the last axis of small integers into bytes, lowest bits first."""
    per_byte = 8 // bits
    codes = codes.unflatten(-1, (-1, per_byte)).to(torch.int32)
    shifts = torch.arange(per_byte, device=codes.device) * bits
    return (codes << shifts).sum(-1).to(torch.uint8)


def _split(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of ``_combine``."""
    shifts = torch.arange(8 // bits, device=packed.device) * bits
    codes = packed[..., None].to(torch.int32) >> shifts & (1 << bits) - 1
    return codes.flatten(-2).to(torch.uint8)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes of one vector's codes, in plane order: (..., D) to (..., D*bits/8)."""
    by_unit = codes.unflatten(-1, (fmt.UNIT_CODES, -1)).transpose(-1, -2)
    if bits == 4:
        return _combine(by_unit, 4).flatten(-2)
    units = by_unit.shape[-2]
    low = _combine(by_unit[..., fmt.low_plane_units(units), :] & 3, 2)
    high = _combine(by_unit[..., fmt.high_plane_units(units), :] >> 2, 1)
    return torch.cat([low.flatten(-2), high.flatten(-2)], -1)


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of ``pack_codes``."""
    units = packed.shape[-1] // bits
    if bits == 4:
        by_unit = _split(packed.unflatten(-1, (units, 4)), 4)
    else:
        low, high = packed.split([2 * units, units], -1)
        by_unit = torch.empty(*packed.shape[:-1], units, 8, dtype=torch.uint8)
        by_unit = by_unit.to(packed.device)
        low_codes = _split(low.unflatten(-1, (units, 2)), 2)
        by_unit[..., fmt.low_plane_units(units), :] = low_codes
        high_codes = _split(high.unflatten(-1, (units, 1)), 1)
        by_unit[..., fmt.high_plane_units(units), :] |= high_codes << 2
    return by_unit.transpose(-1, -2).flatten(-2)


@cache
def tile_addresses(layout: TurboFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a token's bytes lie in its tile.

    Returns:
        For K and for V, int64 (16, packed size): row n holds the addresses of
        the codes, in the order of ``pack_codes``, then of the scales.

    """
    tokens = torch.arange(fmt.TILE_TOKENS)[:, None]

    def rows(start: int, width: int) -> torch.Tensor:
        return start + tokens * width + torch.arange(width)

    def side(codes_start: int, bits: int, scales_start: int) -> torch.Tensor:
        low_bits = 4 if bits == 4 else 2
        low_width = layout.head_size * low_bits // 8
        parts = [rows(codes_start, low_width)]
        if bits == 3:
            high_start = codes_start + fmt.TILE_TOKENS * low_width
            parts.append(rows(high_start, layout.num_units))
        parts.append(rows(scales_start, layout.scale_bytes))
        return torch.cat(parts, 1)

    return (
        side(0, layout.key_bits, layout.key_scales_offset),
        side(layout.value_codes_offset, layout.value_bits, layout.value_scales_offset),
    )


def _region(kv_cache: torch.Tensor) -> torch.Tensor:
    """(num_blocks, H, N, C) as (num_blocks, H, N * C), sharing memory."""
    num_blocks, num_kv_heads, block_size, slot_size = kv_cache.shape
    return kv_cache.view(num_blocks, num_kv_heads, block_size * slot_size)


def store(
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TurboFormat,
) -> None:
    """Quantise tokens and write them to their slots.

    Args:
        kv_cache: (num_blocks, H, N, C) uint8, a (block, head) contiguous.
        slot_mapping: (T,) block * N + position, or -1 to skip the token.
        key: (T', H, D), T' >= T.
        value: (T', H, D).
        layout: The cache's format.

    """
    region = _region(kv_cache)
    block_size = kv_cache.shape[2]
    num_tokens = slot_mapping.shape[0]
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[kept]
    position = slots % block_size
    tile = position // fmt.TILE_TOKENS * layout.tile_bytes
    blocks = (slots // block_size)[:, None, None]
    heads = torch.arange(kv_cache.shape[1], device=slots.device)[None, :, None]
    sides = ((key, layout.key_codebook), (value, layout.value_codebook))
    for (tensor, codebook), addresses in zip(sides, tile_addresses(layout)):
        codes, scales = quantize(rotate(tensor[:num_tokens][kept]), codebook)
        words = fmt.scale_words(layout.head_size, codebook.scale_group)
        parts = [pack_codes(codes, codebook.bits), pack_scales(scales, words)]
        packed = torch.cat(parts, -1)
        rows = addresses.to(slots.device)[position % fmt.TILE_TOKENS]
        region[blocks, heads, (tile[:, None] + rows)[:, None, :]] = packed


def load(
    kv_cache: torch.Tensor, slots: torch.Tensor, layout: TurboFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantise the tokens at ``slots``, in rotated space.

    Args:
        kv_cache: (num_blocks, H, N, C) uint8.
        slots: (T,) non-negative slots.
        layout: The cache's format.

    Returns:
        Rotated keys and values, each (T, H, D) fp32. Keys are not multiplied
        by the codebook's gain.

    """
    region = _region(kv_cache)
    block_size = kv_cache.shape[2]
    position = slots % block_size
    tile = position // fmt.TILE_TOKENS * layout.tile_bytes
    blocks = (slots // block_size)[:, None, None]
    heads = torch.arange(kv_cache.shape[1], device=slots.device)[None, :, None]
    sides = []
    codebooks = (layout.key_codebook, layout.value_codebook)
    for codebook, addresses in zip(codebooks, tile_addresses(layout)):
        rows = addresses.to(slots.device)[position % fmt.TILE_TOKENS]
        packed = region[blocks, heads, (tile[:, None] + rows)[:, None, :]]
        code_bytes = layout.head_size * codebook.bits // 8
        codes = unpack_codes(packed[..., :code_bytes], codebook.bits)
        words = fmt.scale_words(layout.head_size, codebook.scale_group)
        scales = unpack_scales(packed[..., code_bytes:], words)
        sides.append(dequantize(codes, scales, codebook))
    return sides[0], sides[1]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one sequence, in the dtype of its arguments.

    Args:
        query: (Q, Hq, D), the last Q positions of the sequence.
        key: (T, H, D).
        value: (T, H, D).
        scale: Factor of the scores.
        causal: Whether query i sees only the first T - Q + i + 1 tokens.

    Returns:
        Output (Q, Hq, D) and natural log-sum-exp (Q, Hq).

    """
    num_queries, num_heads, _ = query.shape
    num_tokens, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    key = key.repeat_interleave(group, 1)
    value = value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,thd->hqt", query, key) * scale
    if causal:
        last = torch.arange(num_queries, device=query.device) + num_tokens - num_queries
        hidden = torch.arange(num_tokens, device=query.device) > last[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores.float(), -1)
    weights = torch.softmax(scores, -1)
    return torch.einsum("hqt,thd->qhd", weights, value), lse.T
