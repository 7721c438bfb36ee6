# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment"
"""The encoder of the turbo format: from vectors to the bytes of a tile.

Rotated vectors come in steps: with U units, column f * U + u of step i is code
i * FOLD + f of unit u. CODEBOOK is ``constants`` of a codebook.
"""

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import Codebook, fp32
from vllm.v1.attention.ops.turbo.triton.codec import scale_value
from vllm.v1.attention.ops.turbo.triton.scales import (
    choose_scales,
    exponent_of,
    nearest_level,
    normaliser_of,
    power_of_two,
    round_to_integer,
    store_scales,
    unfold,
)

_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_ROTATION_EXPONENT = tl.constexpr(fmt.ROTATION_EXPONENT)
_MIN_INPUT_EXPONENT = tl.constexpr(fmt.MIN_INPUT_EXPONENT)
_HALF = tl.constexpr(fmt.NUM_LEVELS // 2)
_SCALE_MAX = tl.constexpr(fmt.SCALE_MAX)
_PRODUCT_UNIT = tl.constexpr(float(1 << fmt.PRODUCT_FRACTION_BITS))
# A product, because Triton divides approximately.
_INVERSE_UNIT = tl.constexpr(1.0 / (1 << fmt.PRODUCT_FRACTION_BITS))
_UNBIAS_ROUNDS = tl.constexpr(fmt.UNBIAS_ROUNDS)
_UNBIAS_LIMIT = tl.constexpr(fmt.UNBIAS_LIMIT)
_BIAS_WEIGHT = tl.constexpr(fmt.BIAS_WEIGHT)
# The index of no coordinate.
_NONE = tl.constexpr(1 << 20)


def constants(codebook: Codebook) -> tuple:
    """Magnitudes, the thresholds between them, and the gain of products; 0 without."""
    gain = fp32(codebook.gain * (1 << fmt.PRODUCT_FRACTION_BITS))
    gain = gain if codebook.unbiased else 0.0
    return codebook.magnitudes, codebook.thresholds, gain


# Globals, because each argument makes a launch slower.
_KEYS = tl.constexpr(constants(fmt.KEY_CODEBOOK))
_VALUES = tl.constexpr(constants(fmt.VALUE_CODEBOOK))


@triton.jit
def _rotate_halves(word, BITS: tl.constexpr):
    """Rotate both halves of int32 words to the left."""
    LOWER: tl.constexpr = ((1 << BITS) - 1) * 0x00010001
    return (word << BITS) & ~LOWER | (word >> (16 - BITS)) & LOWER


@triton.jit
def _nibble_of(index, IS_VALUE: tl.constexpr):
    """The nibble of a code in its unit's word. V's even codes are in the lower half."""
    return index // 2 + index % 2 * 4 if IS_VALUE else index


@triton.jit
def magnitude_of(y):
    return tl.minimum(tl.abs(y), _SCALE_MAX)


@triton.jit
def _level_of(index, CODEBOOK: tl.constexpr):
    """Magnitudes of the levels with these indices in the upper half, fp32."""
    MAGNITUDES: tl.constexpr = CODEBOOK[0]
    level = tl.full(index.shape, MAGNITUDES[0], tl.float32)
    for j in tl.static_range(1, _HALF):
        level = tl.where(index >= j, MAGNITUDES[j], level)
    return level


@triton.jit
def nearest_index(
    magnitude,  # [T, C] fp32
    scale,  # [T, C] fp32
    CODEBOOK: tl.constexpr,
):
    """Indices of the nearest levels in the upper half, int32 [T, C]."""
    THRESHOLDS: tl.constexpr = CODEBOOK[1]
    index = tl.zeros(scale.shape, tl.int32)
    for j in tl.static_range(_HALF - 1):
        index += (magnitude > scale * THRESHOLDS[j]).to(tl.int32)
    return index


@triton.jit
def unbiasing_factor(
    y,  # NUM_STEPS of [T, C] fp32
    scale,  # [T, C] fp32
    normaliser,  # [T, 1] fp32
    square,  # [T] fp32, of the vectors
    CODEBOOK: tl.constexpr,
):
    """The factor of ``reference.unbiased`` and the rest that it leaves.

    Both are fp32 [T].
    """
    factor = tl.full(square.shape, 1.0, tl.float32)
    best_factor = factor
    best_rest = tl.full(square.shape, float("inf"), tl.float32)
    for _ in range(_UNBIAS_ROUNDS + 1):
        product = tl.zeros_like(scale)
        for i in tl.static_range(len(y)):
            x = magnitude_of(y[i])
            level = nearest_level(x * factor[:, None], scale, CODEBOOK)
            product += _product(x * normaliser, level * scale * normaliser, CODEBOOK)
        rest = square - tl.sum(product, 1)
        better = tl.abs(rest) < tl.abs(best_rest)
        best_factor = tl.where(better, factor, best_factor)
        best_rest = tl.where(better, rest, best_rest)
        factor += tl.div_rn(rest, tl.maximum(square, 1.0))
        factor = tl.maximum(factor, 1.0 - _UNBIAS_LIMIT)
        factor = tl.minimum(factor, 1.0 + _UNBIAS_LIMIT)
    return best_factor, best_rest


@triton.jit
def _product(x, decoded, CODEBOOK: tl.constexpr):
    GAIN: tl.constexpr = CODEBOOK[2]
    return round_to_integer(x * decoded * GAIN)


@triton.jit
def _code_to_move(
    y,  # NUM_STEPS of [T, C] fp32
    scale,  # [T, C] fp32
    normaliser,  # [T, 1] fp32
    square,  # [T] fp32, of the vectors
    factor,  # [T] fp32
    rest,  # [T] fp32
    CODEBOOK: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    FOLD: tl.constexpr,
):
    """The coordinate whose code moves to the next level, or ``_NONE``: int32 [T].

    ``reference.unbiased`` has the rule.
    """
    GAIN: tl.constexpr = CODEBOOK[2]
    outwards = tl.where(rest > 0, 1, -1)[:, None]
    least = tl.full(scale.shape, float("inf"), tl.float32)
    first = tl.full(scale.shape, _NONE, tl.int32)
    column = tl.arange(0, FOLD * NUM_UNITS)
    for i in tl.static_range(len(y)):
        magnitude = magnitude_of(y[i])
        x = magnitude * normaliser
        index = nearest_index(magnitude * factor[:, None], scale, CODEBOOK)
        moved = index + outwards
        possible = (moved >= 0) & (moved < _HALF)
        decoded = _level_of(index, CODEBOOK) * scale * normaliser
        other = _level_of(moved, CODEBOOK) * scale * normaliser
        mended = _product(x, other, CODEBOOK) - _product(x, decoded, CODEBOOK)
        mended = rest[:, None] - mended
        error = x * _PRODUCT_UNIT - decoded * GAIN
        other_error = x * _PRODUCT_UNIT - other * GAIN
        across = (other_error * other_error - error * error) * _INVERSE_UNIT
        cost = mended * mended * _BIAS_WEIGHT + across * square[:, None]
        better = possible & (cost < least)
        least = tl.where(better, cost, least)
        coordinate = i * (FOLD * NUM_UNITS) + column
        first = tl.where(better, coordinate[None, :], first)
    best = tl.min(least, 1)
    first = tl.min(tl.where(least == best[:, None], first, _NONE), 1)
    return tl.where(best < rest * rest * _BIAS_WEIGHT, first, _NONE)


@triton.jit
def _fold_sum(x, FOLD: tl.constexpr):
    """Sum over the columns of each unit, [T, FOLD * U] to [T, U]."""
    UNITS: tl.constexpr = x.shape[1] // FOLD
    if FOLD > 1:
        x = tl.sum(tl.reshape(x, [x.shape[0], FOLD, UNITS]), 1)
    return x


@triton.jit
def _units(
    y,  # NUM_STEPS of [T, C] fp32
    scale,  # [T, C] fp32
    CODEBOOK: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    FOLD: tl.constexpr,
    IS_VALUE: tl.constexpr,
):
    """The words of the units, int32 [T, U], in the order of ``nibble_of``."""
    UNBIASED: tl.constexpr = CODEBOOK[2] > 0
    if UNBIASED:
        largest = magnitude_of(y[0])
        for i in tl.static_range(1, len(y)):
            largest = tl.maximum(largest, magnitude_of(y[i]))
        normaliser = normaliser_of(tl.max(largest, 1))[:, None]
        square = tl.zeros_like(scale)
        for i in tl.static_range(len(y)):
            x = magnitude_of(y[i]) * normaliser
            square += round_to_integer(x * x * _PRODUCT_UNIT)
        square = tl.sum(square, 1)
        factor, rest = unbiasing_factor(y, scale, normaliser, square, CODEBOOK)
        chosen = _code_to_move(
            y, scale, normaliser, square, factor, rest, CODEBOOK, NUM_UNITS, FOLD
        )
        outwards = tl.where(rest > 0, 1, -1)[:, None]
    word = tl.zeros(scale.shape, tl.int32)
    column = tl.arange(0, FOLD * NUM_UNITS)
    for i in tl.static_range(len(y)):
        magnitude = magnitude_of(y[i])
        if UNBIASED:
            index = nearest_index(magnitude * factor[:, None], scale, CODEBOOK)
            coordinate = i * (FOLD * NUM_UNITS) + column
            index += tl.where(coordinate[None, :] == chosen[:, None], outwards, 0)
        else:
            index = nearest_index(magnitude, scale, CODEBOOK)
        code = tl.where(y[i] < 0, -index + (_HALF - 1), index + _HALF)
        word |= (
            code << (_nibble_of(i * FOLD + column // NUM_UNITS, IS_VALUE) * 4)[None, :]
        )
    return _fold_sum(word, FOLD)


@triton.jit
def load_integers(
    x_ptr,  # [T] pointers to vectors
    token_mask,  # [T]
    HEAD_SIZE: tl.constexpr,
):
    """Load vectors in block fixed point. NaN counts as zero.

    Returns:
        Integers, fp16 [T, D], and their unit, fp32 [T].

    """
    p_x = x_ptr[:, None] + tl.arange(0, HEAD_SIZE)[None, :]
    x = tl.load(p_x, mask=token_mask[:, None], other=0.0).to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, -_FP32_MAX), _FP32_MAX)
    exponent = exponent_of(tl.max(tl.abs(x), 1))
    exponent = tl.maximum(exponent, _MIN_INPUT_EXPONENT)
    to_integer = power_of_two(-exponent + _ROTATION_EXPONENT)[:, None]
    integers = tl.floor(x * to_integer + 0.5)
    return integers.to(tl.float16), power_of_two(exponent - _ROTATION_EXPONENT)


@triton.jit
def rotate_integers(
    integers,  # [T, D] fp16
    matrix_ptr,  # [D, D] fp16, entries +-1
    coordinate,  # [C]
    HEAD_SIZE: tl.constexpr,
):
    """Some coordinates of H (s * x), exact, fp32 [T, C]."""
    d = tl.arange(0, HEAD_SIZE)
    matrix = tl.load(matrix_ptr + d[:, None] * HEAD_SIZE + coordinate[None, :])
    return tl.dot(integers, matrix)


@triton.jit
def encode_vectors(
    x_ptr,  # [T] pointers to vectors
    tile_ptr,  # [T] uint8 pointers to tiles
    token,  # [T] index in the tile
    token_mask,  # [T]
    matrix_ptr,  # [D, D] fp16, entries +-1
    inverse_sqrt_d,
    LAYOUT: tl.constexpr,
    IS_KEY: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Rotate and quantise vectors of K or V into their tiles."""
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size
    SCALE_WORDS: tl.constexpr = LAYOUT.scale_words
    CODES_OFFSET: tl.constexpr = 0 if IS_KEY else LAYOUT.value_codes_offset
    NUM_UNITS: tl.constexpr = HEAD_SIZE // 8
    NUM_GROUPS: tl.constexpr = HEAD_SIZE // 16
    integers, unit_size = load_integers(x_ptr, token_mask, HEAD_SIZE)
    factor = (unit_size * inverse_sqrt_d)[:, None]
    column = tl.arange(0, FOLD * NUM_UNITS)
    y = ()
    for i in tl.static_range(8 // FOLD):
        coordinate = i * (FOLD * NUM_UNITS) + column
        y = y + (rotate_integers(integers, matrix_ptr, coordinate, HEAD_SIZE) * factor,)
    CODEBOOK: tl.constexpr = _KEYS if IS_KEY else _VALUES
    scale_code = choose_scales(y, CODEBOOK, NUM_GROUPS, SCALE_WORDS)
    scale = unfold(scale_value(scale_code).to(tl.float32), FOLD * NUM_UNITS)
    word = _units(y, scale, CODEBOOK, NUM_UNITS, FOLD, not IS_KEY)
    u = tl.arange(0, NUM_UNITS)[None, :]
    mask = token_mask[:, None]
    if IS_KEY:
        row_ptr = (tile_ptr + (CODES_OFFSET + token * (HEAD_SIZE // 2)))[:, None]
        tl.store(row_ptr.to(tl.pointer_type(tl.int32)) + u, word, mask=mask)
    else:
        row = token // 8 * (4 * NUM_GROUPS) + token % 8 // 2
        row = row[:, None] + u % NUM_GROUPS * 4
        p_half = (tile_ptr + (CODES_OFFSET + token % 2 * 2))[:, None] + row * 16
        p_half = p_half.to(tl.pointer_type(tl.int16)) + u // NUM_GROUPS * 4
        # Even codes are in one word, odd codes in the next but one.
        word = _rotate_halves(word, 2)
        tl.store(p_half, word.to(tl.int16), mask=mask)
        tl.store(p_half + 2, (word >> 16).to(tl.int16), mask=mask)
    SCALES: tl.constexpr = (
        LAYOUT.key_scales_offset if IS_KEY else LAYOUT.value_scales_offset
    )
    store_scales(scale_code, tile_ptr + SCALES, token, token_mask, SCALE_WORDS)
