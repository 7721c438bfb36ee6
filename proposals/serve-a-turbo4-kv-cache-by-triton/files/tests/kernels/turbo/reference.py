# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stored format of turbo4 in PyTorch: the executable form of ``format``.

The kernels are tested against it, bit for bit where bytes are written. Shapes: D the
head size, G = D / 16 scale groups. Most functions take a vector by group, (..., G, 16):
coordinate r is at index ``r // G`` of group ``r % G``.
"""

import math

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import Codebook, ScaleWords, TurboFormat, fp32
from vllm.v1.attention.ops.turbo.rotation import inverse_sqrt, rotation_matrix

_FP32_MAX = torch.finfo(torch.float32).max


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
    # The exponent and three mantissa bits, with the bias of fp16.
    normal = (largest.view(torch.int32) >> 20) - ((127 - 15) << 3)
    subnormal = (largest * 2.0**17).to(torch.int32)
    return torch.where(largest < 2.0**-14, subnormal, normal)


def by_group(x: torch.Tensor) -> torch.Tensor:
    """Vectors (..., D) as (..., G, 16)."""
    return x.unflatten(-1, (fmt.SCALE_GROUP, -1)).transpose(-1, -2)


def from_groups(x: torch.Tensor) -> torch.Tensor:
    """Inverse of ``by_group``."""
    return x.transpose(-1, -2).flatten(-2)


def levels_of(index: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """The levels with these indices, fp32 of the same shape."""
    upper = torch.tensor(codebook.magnitudes, device=index.device)
    return torch.cat([-upper.flip(0), upper])[index.long()]


def _nearest(y: torch.Tensor, scale: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """The index of the nearest of all levels, int64 of y's shape."""
    thresholds = torch.tensor(codebook.thresholds, device=y.device)
    above = (y.abs()[..., None] > thresholds * scale[..., None]).sum(-1)
    half = fmt.NUM_LEVELS // 2
    return torch.where(y < 0, half - 1 - above, half + above)


def _errors(
    y: torch.Tensor, scale: torch.Tensor, normaliser: torch.Tensor, codebook: Codebook
) -> torch.Tensor:
    """Errors of groups, fp32 (..., G), in units that make their sums exact."""
    level = levels_of(_nearest(y, scale, codebook), codebook)
    square = ((y - level * scale) * normaliser).square().clamp(max=fmt.ERROR_MAX)
    return torch.round(square * 2.0**fmt.ERROR_FRACTION_BITS).sum(-1)


def _normaliser(y: torch.Tensor) -> torch.Tensor:
    """Powers of two, (..., 1, 1), that bring vectors (..., G, 16) near 1."""
    exponent = exponent_of(y.abs().amax((-2, -1), keepdim=True))
    exponent = exponent.clamp(min=-fmt.ERROR_MAX_EXPONENT, max=126)
    return power_of_two(-exponent)


def scales_in_reach(
    codes: torch.Tensor, errors: torch.Tensor, words: ScaleWords
) -> torch.Tensor:
    """The best scale codes that a word can hold, int32 (..., G).

    Bases are tried at ``BASE_OFFSETS`` from the largest of the groups' best codes. With
    each, a group takes the best of its candidates in reach, or else the lowest code
    above its best, with the error of its largest candidate. The base of least error,
    and the first of equal ones, is taken. Both arguments' last axis is of candidates.
    """
    step, reach = words.delta_step, ((1 << words.delta_bits) - 1) * words.delta_step
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
        above = base - ((base - best) // step).clamp(max=reach // step) * step
        chosen = torch.where(below, above, chosen)
        error = torch.where(below, errors[..., -1:], error).sum(-2, keepdim=True)
        result = torch.where(error < least, chosen, result)
        least = torch.minimum(error, least)
    return result.flatten(-3)


def choose_scales(y: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """The codes of the scales, uint8 (..., G), for fp32 (..., G, 16)."""
    largest = y.abs().amax(-1, keepdim=True)
    floor, normaliser = scale_floor(largest), _normaliser(y)
    codes, errors = [], []
    for offset in fmt.SCALE_OFFSETS:
        code = (floor + offset).clamp(0, fmt.SCALE_CODE_MAX)
        errors.append(_errors(y, scale_values(code), normaliser, codebook))
        codes.append(code[..., 0])
    words = fmt.scale_words(fmt.SCALE_GROUP * y.shape[-2])
    chosen = scales_in_reach(torch.stack(codes, -1), torch.stack(errors, -1), words)
    return chosen.to(torch.uint8)


def unbiased(y: torch.Tensor, scale: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Indices of levels whose product with a vector is nearly the vector's square.

    Let x be the vector, and q(f) the decoded codes of f * x times the gain. The factor
    f is stepped by (<x, x> - <q(f), x>) / <x, x>, and the one that leaves the smallest
    difference is kept. Then one code may move to the next level, if the smaller error
    along x outweighs the larger error across x, by ``BIAS_WEIGHT``.
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
        index = _nearest(y * factor, scale, codebook)
        rest = square - products(index).sum((-2, -1), keepdim=True)
        better = rest.abs() < best_rest.abs()
        best_index = torch.where(better, index, best_index)
        best_rest = torch.where(better, rest, best_rest)
        factor = factor + rest / square.clamp(min=1)
        factor = factor.clamp(1 - fmt.UNBIAS_LIMIT, 1 + fmt.UNBIAS_LIMIT)

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
        decoded = levels_of(index, codebook) * scale * normaliser
        return (x * unit - decoded * gain).square()

    across = (error(moved) - error(best_index)) / unit * square
    cost = rest * rest * fmt.BIAS_WEIGHT + across
    cost = from_groups(cost.masked_fill(~possible, math.inf))
    first = cost.argmin(-1, keepdim=True)
    worth = cost.gather(-1, first) < (best_rest * best_rest * fmt.BIAS_WEIGHT)[..., 0]
    here = torch.zeros_like(cost, dtype=torch.bool).scatter(-1, first, worth)
    return torch.where(by_group(here), moved, best_index)


def quantize(y: torch.Tensor, codebook: Codebook) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels, (..., D), and scale codes, (..., G), of rotated vectors, both uint8."""
    y = by_group(y).clamp(-fmt.SCALE_MAX, fmt.SCALE_MAX)
    scale_codes = choose_scales(y, codebook)
    scale = scale_values(scale_codes)[..., None]
    choose = unbiased if codebook.unbiased else _nearest
    return from_groups(choose(y, scale, codebook)).to(torch.uint8), scale_codes


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate (..., D) as the store kernel does, in block fixed point, to fp32."""
    x = torch.nan_to_num(x.float(), 0.0, _FP32_MAX, -_FP32_MAX)
    exponent = exponent_of(x.abs().amax(-1, keepdim=True))
    exponent = exponent.clamp(min=fmt.MIN_INPUT_EXPONENT)
    integers = torch.floor(x * power_of_two(fmt.ROTATION_EXPONENT - exponent) + 0.5)
    matrix = rotation_matrix(x.shape[-1], x.device, torch.float32)
    unit = power_of_two(exponent - fmt.ROTATION_EXPONENT)
    return integers @ matrix * (unit * inverse_sqrt(x.shape[-1]))


def inverse_rotate(y: torch.Tensor) -> torch.Tensor:
    """Rotate back: (..., D) to (..., D), both fp32."""
    matrix = rotation_matrix(y.shape[-1], y.device, torch.float32)
    return y.float() @ matrix.T * inverse_sqrt(y.shape[-1])


def pack_scales(scale_codes: torch.Tensor, words: ScaleWords) -> torch.Tensor:
    """The bytes of a vector's scales: (..., G) to (..., S), both uint8."""
    codes = scale_codes.long().unflatten(-1, (words.num_words, words.word_groups))
    base = codes.amax(-1)
    deltas = (base[..., None] - codes) // words.delta_step
    shifts = 8 + words.delta_bits * torch.arange(words.word_groups)
    word = base + (deltas << shifts.to(codes.device)).sum(-1)
    return to_bytes(word, words.word_bytes)


def unpack_scales(packed: torch.Tensor, words: ScaleWords) -> torch.Tensor:
    """Inverse of ``pack_scales``."""
    word = from_bytes(packed, words.word_bytes)[..., None]
    shifts = 8 + words.delta_bits * torch.arange(words.word_groups)
    deltas = word >> shifts.to(packed.device) & ((1 << words.delta_bits) - 1)
    codes = (word & 0xFF) - deltas * words.delta_step
    return codes.flatten(-2).to(torch.uint8)


def to_bytes(word: torch.Tensor, word_bytes: int) -> torch.Tensor:
    """Little-endian bytes of int64 words: (..., n) to (..., n * word_bytes)."""
    shifts = 8 * torch.arange(word_bytes, device=word.device)
    return (word[..., None] >> shifts & 0xFF).flatten(-2).to(torch.uint8)


def from_bytes(packed: torch.Tensor, word_bytes: int) -> torch.Tensor:
    """Inverse of ``to_bytes``."""
    shifts = 8 * torch.arange(word_bytes, device=packed.device)
    return (packed.long().unflatten(-1, (-1, word_bytes)) << shifts).sum(-1)


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    """16-bit words, as int64, rotated left."""
    return word << bits & 0xFFFF | word >> 16 - bits


def pack_codes(index: torch.Tensor, is_value: bool) -> torch.Tensor:
    """The bytes of a vector's codes, by units: (..., D) to uint8 (..., D / 2)."""
    units = index.long().unflatten(-1, (fmt.UNIT_CODES, -1)).transpose(-1, -2)
    shifts = 4 * torch.arange(fmt.UNIT_CODES, device=index.device)
    if not is_value:
        return to_bytes((units << shifts).sum(-1), 4)
    halves = units.unflatten(-1, (-1, 2)).transpose(-1, -2) << shifts[:4]
    return to_bytes(_rotated(halves.sum(-1), 2).flatten(-2), 2)


def unpack_codes(packed: torch.Tensor, is_value: bool) -> torch.Tensor:
    """Inverse of ``pack_codes``: uint8 (..., D)."""
    shifts = 4 * torch.arange(fmt.UNIT_CODES, device=packed.device)
    if is_value:
        halves = _rotated(from_bytes(packed, 2), 14).unflatten(-1, (-1, 2))
        units = (halves[..., None, :] >> shifts[:4, None] & 0xF).flatten(-2)
    else:
        units = from_bytes(packed, 4)[..., None] >> shifts & 0xF
    return units.transpose(-1, -2).flatten(-2).to(torch.uint8)


def tile_addresses(layout: TurboFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The addresses of tokens' bytes in a tile, codes before scales: K's and V's."""
    n = torch.arange(fmt.TILE_TOKENS)[:, None]

    def rows(start: int, width: int) -> torch.Tensor:
        return start + n * width + torch.arange(width)

    # The first unit of each group, then the second ones.
    unit, group = torch.arange(2)[:, None, None, None], torch.arange(layout.num_groups)
    word, byte = 4 * torch.arange(2)[:, None], torch.arange(2)
    of_token = n // 8 * (64 * layout.num_groups) + n % 8 // 2 * 16 + n % 2 * 2
    of_unit = (8 * unit + 64 * group[:, None, None] + word + byte).flatten()
    values = layout.value_codes_offset + of_token + of_unit
    scales = (layout.key_scales_offset, layout.value_scales_offset)
    key_scales, value_scales = (rows(x, layout.scale_bytes) for x in scales)
    keys = rows(0, layout.code_bytes)
    return torch.cat([keys, key_scales], 1), torch.cat([values, value_scales], 1)


def _rows(
    kv_cache: torch.Tensor, slots: torch.Tensor, addresses: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The indices of slots' bytes in (num_blocks, H, N * C)."""
    _, num_kv_heads, block_size, slot_size = kv_cache.shape
    position = slots % block_size
    rows = addresses.to(slots.device)[position % fmt.TILE_TOKENS]
    rows = rows + (position // fmt.TILE_TOKENS * fmt.TILE_TOKENS * slot_size)[:, None]
    heads = torch.arange(num_kv_heads, device=slots.device)[None, :, None]
    return (slots // block_size)[:, None, None], heads, rows[:, None, :]


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """``triton.store.store`` in PyTorch."""
    layout = TurboFormat(key.shape[-1])
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    for x, addresses in zip((key, value), tile_addresses(layout)):
        codebook = fmt.VALUE_CODEBOOK if x is value else fmt.KEY_CODEBOOK
        index, scales = quantize(rotate(x[kept]), codebook)
        parts = pack_codes(index, x is value), pack_scales(scales, layout.scale_words)
        where = _rows(kv_cache, slot_mapping[kept], addresses)
        kv_cache.flatten(2)[where] = torch.cat(parts, -1)


def load(
    kv_cache: torch.Tensor, slots: torch.Tensor, layout: TurboFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantise slots' K, without the gain, and V in rotated space: (T, H, D) fp32."""
    sides = []
    for is_value, addresses in enumerate(tile_addresses(layout)):
        codebook = fmt.VALUE_CODEBOOK if is_value else fmt.KEY_CODEBOOK
        packed = kv_cache.flatten(2)[_rows(kv_cache, slots, addresses)]
        index = unpack_codes(packed[..., : layout.code_bytes], bool(is_value))
        scales = unpack_scales(packed[..., layout.code_bytes :], layout.scale_words)
        levels = by_group(levels_of(index, codebook))
        sides.append(from_groups(levels * scale_values(scales)[..., None]))
    return sides[0], sides[1]
