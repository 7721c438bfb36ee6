# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment"
"""Codes of four bits whose errors are nearly orthogonal to their vectors.

With a direction in which queries look, errors are nearly orthogonal to that as well:
see ``interface.QueryDirection``.

Vectors come in steps, as in ``triton.encode``. Indices of levels are those of the
magnitudes, in the upper half. CODEBOOK is ``encode.constants`` of a codebook.
"""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.triton.direction import (
    cost_of,
    error_of,
    load_direction,
    pull_of,
)
from vllm.v1.attention.ops.turbo.triton.scales import nearest_level, round_to_integer

_HALF = tl.constexpr(fmt.NUM_LEVELS // 2)
_SCALE_MAX = tl.constexpr(fmt.SCALE_MAX)
_PRODUCT_UNIT = tl.constexpr(float(1 << fmt.PRODUCT_FRACTION_BITS))
# A product, because Triton divides approximately.
_INVERSE_UNIT = tl.constexpr(1.0 / (1 << fmt.PRODUCT_FRACTION_BITS))
_UNBIAS_ROUNDS = tl.constexpr(fmt.UNBIAS_ROUNDS)
_UNBIAS_LIMIT = tl.constexpr(fmt.UNBIAS_LIMIT)
_BIAS_WEIGHT = tl.constexpr(fmt.BIAS_WEIGHT)
_DIRECTED_MOVES = tl.constexpr(fmt.DIRECTED_MOVES)
# The index of no coordinate.
_NONE = tl.constexpr(1 << 20)


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
def square_of(
    y,  # NUM_STEPS of [T, C] fp32
    normaliser,  # [T, 1] fp32
):
    """The squares of vectors, fp32 [T], in the unit of products."""
    square = tl.zeros_like(y[0])
    for i in tl.static_range(len(y)):
        x = magnitude_of(y[i]) * normaliser
        square += round_to_integer(x * x * _PRODUCT_UNIT)
    return tl.sum(square, 1)


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
def _to_next_level(
    x,  # [T, C] fp32, normalised magnitudes
    index,  # [T, C] int32
    outwards,  # [T, C] or [T, 1], 1 or -1
    inside,  # [1, C], of columns with a coordinate
    scale,  # [T, C] fp32
    normaliser,  # [T, 1] fp32
    CODEBOOK: tl.constexpr,
):
    """Codes that move to the next level: whether they can, their step of the product
    with the vector, and their errors before and after. All are [T, C].
    """
    moved = index + outwards
    possible = (moved >= 0) & (moved < _HALF) & inside
    decoded = _level_of(index, CODEBOOK) * scale * normaliser
    other = _level_of(moved, CODEBOOK) * scale * normaliser
    step = _product(x, other, CODEBOOK) - _product(x, decoded, CODEBOOK)
    errors = error_of(x, decoded, CODEBOOK), error_of(x, other, CODEBOOK)
    return possible, step, errors[0], errors[1]


@triton.jit
def _cost_across(error, other_error, square):
    """The change of squared errors by a move, in the unit of costs."""
    across = other_error * other_error - error * error
    return across * _INVERSE_UNIT * square


@triton.jit
def code_to_move(
    y,  # NUM_STEPS of [T, C] fp32
    scale,  # [T, C] fp32
    normaliser,  # [T, 1] fp32
    square,  # [T] fp32, of the vectors
    factor,  # [T] fp32
    rest,  # [T] fp32
    unit,  # [C], of each column
    CODEBOOK: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    BLOCK_U: tl.constexpr,
    FOLD: tl.constexpr,
):
    """The coordinate whose code moves to the next level, or ``_NONE``: int32 [T].

    ``reference.unbiased`` has the rule.
    """
    outwards = tl.where(rest > 0, 1, -1)[:, None]
    least = tl.full(scale.shape, float("inf"), tl.float32)
    first = tl.full(scale.shape, _NONE, tl.int32)
    fold = tl.arange(0, FOLD * BLOCK_U) // BLOCK_U
    inside = (unit < NUM_UNITS)[None, :]
    for i in tl.static_range(len(y)):
        magnitude = magnitude_of(y[i])
        x = magnitude * normaliser
        index = nearest_index(magnitude * factor[:, None], scale, CODEBOOK)
        possible, step, error, other_error = _to_next_level(
            x, index, outwards, inside, scale, normaliser, CODEBOOK
        )
        mended = rest[:, None] - step
        cost = mended * mended * _BIAS_WEIGHT
        cost += _cost_across(error, other_error, square[:, None])
        better = possible & (cost < least)
        least = tl.where(better, cost, least)
        coordinate = (i * FOLD + fold) * NUM_UNITS + unit
        first = tl.where(better, coordinate[None, :], first)
    best = tl.min(least, 1)
    first = tl.min(tl.where(least == best[:, None], first, _NONE), 1)
    return tl.where(best < rest * rest * _BIAS_WEIGHT, first, _NONE)


@triton.jit
def _direction_of_step(
    p_direction,  # [T, C] fp16 pointers to the elements of step 0
    y,  # [T, C] fp32, of the step
    mask,  # [T, C]
    STEP: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Elements of directions, with the signs for magnitudes' errors, fp32 [T, C]."""
    element = load_direction(p_direction + STEP * STRIDE, mask)
    return tl.where(y < 0, -element, element)


@triton.jit
def directed_indices(
    y,  # NUM_STEPS of [T, C] fp32
    scale,  # [T, C] fp32
    normaliser,  # [T, 1] fp32
    square,  # [T] fp32, of the vectors
    factor,  # [T] fp32
    rest,  # [T] fp32
    unit,  # [C], of each column
    direction_ptr,  # [T] fp16 pointers to directions
    token_mask,  # [T]
    CODEBOOK: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    BLOCK_U: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Indices of levels, int32 [T, C]: that of step i is in bits 4 * i and above.

    Errors are nearly orthogonal to the vectors and to the directions. Codes that the
    factor gives move one after another, as by ``reference.unbias._moved``.
    """
    STRIDE: tl.constexpr = FOLD * NUM_UNITS
    # Sums stay [T, 1] here. The compiler would give [T] another layout than the codes,
    # and would convert in each move.
    square, rest = square[:, None], rest[:, None]
    pull = pull_of(square, 8 * NUM_UNITS)
    fold = tl.arange(0, FOLD * BLOCK_U) // BLOCK_U
    coordinate = fold * NUM_UNITS + unit  # of step 0
    inside = (unit < NUM_UNITS)[None, :]
    mask = token_mask[:, None] & inside
    p_direction = direction_ptr[:, None] + coordinate[None, :]
    indices = tl.zeros(scale.shape, tl.int32)
    along = tl.zeros_like(scale)
    for i in tl.static_range(len(y)):
        magnitude = magnitude_of(y[i])
        index = nearest_index(magnitude * factor[:, None], scale, CODEBOOK)
        indices |= index << (4 * i)
        u = _direction_of_step(p_direction, y[i], mask, i, STRIDE)
        decoded = _level_of(index, CODEBOOK) * scale * normaliser
        along += round_to_integer(
            error_of(magnitude * normaliser, decoded, CODEBOOK) * u
        )
    along = tl.sum(along, 1, keep_dims=True)

    for _ in range(_DIRECTED_MOVES):
        least = tl.full(scale.shape, float("inf"), tl.float32)
        # The move of least cost in each column, and what it leaves.
        first = tl.full(scale.shape, _NONE, tl.int32)
        best_rest = tl.zeros_like(scale)
        best_along = tl.zeros_like(scale)
        for i in tl.static_range(len(y)):
            x = magnitude_of(y[i]) * normaliser
            u = _direction_of_step(p_direction, y[i], mask, i, STRIDE)
            slope = rest * _BIAS_WEIGHT * x + along * pull * u
            outwards = tl.where(slope > 0, 1, -1)
            index = indices >> (4 * i) & 15
            possible, step, error, other_error = _to_next_level(
                x, index, outwards, inside, scale, normaliser, CODEBOOK
            )
            own_rest = rest - step
            own_along = round_to_integer(other_error * u) - round_to_integer(error * u)
            own_along = along + own_along
            cost = own_rest * own_rest * _BIAS_WEIGHT
            cost += _cost_across(error, other_error, square)
            cost += own_along * own_along * pull
            better = possible & (cost < least)
            least = tl.where(better, cost, least)
            move = 2 * (coordinate + i * STRIDE)[None, :] + (slope > 0).to(tl.int32)
            first = tl.where(better, move, first)
            best_rest = tl.where(better, own_rest, best_rest)
            best_along = tl.where(better, own_along, best_along)
        best = tl.min(least, 1, keep_dims=True)
        first = tl.where(least == best, first, _NONE)
        worth = best < cost_of(rest, along, pull)
        here = (first == tl.min(first, 1, keep_dims=True)) & worth
        change = (2 * (first & 1) - 1) << (first // (2 * STRIDE) * 4)
        indices += tl.where(here, change, 0)
        best_rest = tl.sum(tl.where(here, best_rest, 0.0), 1, keep_dims=True)
        best_along = tl.sum(tl.where(here, best_along, 0.0), 1, keep_dims=True)
        rest = tl.where(worth, best_rest, rest)
        along = tl.where(worth, best_along, along)
    return indices
