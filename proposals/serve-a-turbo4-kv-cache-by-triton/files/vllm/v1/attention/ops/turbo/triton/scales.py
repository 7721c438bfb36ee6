# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment"
"""Scales of the turbo format: their choice and their words, for the encoder.

A tensor of columns has, for each of F codes of a unit, a column for each unit. A
column's group is its index on the last of the axes [T, C / G, G], so that a reshape
gathers groups. SCALE_WORDS is ``format.ScaleWords`` as a tuple. CODEBOOK has the
magnitudes of a codebook, and the thresholds between them.
"""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.triton.codec import scale_value

_SCALE_CODE_MAX = tl.constexpr(fmt.SCALE_CODE_MAX)
_SCALE_MAX = tl.constexpr(fmt.SCALE_MAX)
_ERROR_UNIT = tl.constexpr(float(1 << fmt.ERROR_FRACTION_BITS))
_ERROR_MAX = tl.constexpr(fmt.ERROR_MAX)
_ERROR_MAX_EXPONENT = tl.constexpr(fmt.ERROR_MAX_EXPONENT)
_SCALE_OFFSETS = tl.constexpr(fmt.SCALE_OFFSETS)
_BASE_OFFSETS = tl.constexpr(fmt.BASE_OFFSETS)
_NUM_BASES = tl.constexpr(len(fmt.BASE_OFFSETS))
_NUM_CANDIDATES = tl.constexpr(len(fmt.SCALE_OFFSETS))
_LAST = tl.constexpr(fmt.NUM_LEVELS // 2 - 1)


@triton.jit
def exponent_of(x):
    """floor(log2(x)) of non-negative fp32 numbers; -127 at zero."""
    return (x.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def unfold(x, COLUMNS: tl.constexpr):
    """Repeat the value of each group in its columns, [T, G] to [T, C]."""
    BLOCK_G: tl.constexpr = x.shape[1]
    shape: tl.constexpr = [x.shape[0], COLUMNS // BLOCK_G, BLOCK_G]
    return tl.reshape(tl.broadcast_to(x[:, None, :], shape), [x.shape[0], COLUMNS])


@triton.jit
def nearest_level(
    magnitude,  # [T, C] fp32
    scale,  # [T, C] fp32
    CODEBOOK: tl.constexpr,
):
    """The nearest level of the upper half, fp32 [T, C]."""
    MAGNITUDES: tl.constexpr = CODEBOOK[0]
    THRESHOLDS: tl.constexpr = CODEBOOK[1]
    level = tl.full(scale.shape, MAGNITUDES[0], tl.float32)
    for j in tl.static_range(_LAST):
        above = magnitude > scale * THRESHOLDS[j]
        level = tl.where(above, MAGNITUDES[j + 1], level)
    return level


@triton.jit
def round_to_integer(x):
    """Nearest integers of fp32 numbers below 2**22."""
    return x + 12582912.0 - 12582912.0


@triton.jit
def rounded_square(error):
    """Squares of normalised errors, in units that make their sums exact."""
    return round_to_integer(tl.minimum(error * error, _ERROR_MAX) * _ERROR_UNIT)


@triton.jit
def _squared_error(
    y,  # NUM_STEPS of [T, C] fp32
    scale,  # [T, C] fp32
    normaliser,  # [T, 1] fp32
    CODEBOOK: tl.constexpr,
):
    """Squared error of quantising each column with a scale, fp32 [T, C]."""
    total = tl.zeros_like(scale)
    for i in tl.static_range(len(y)):
        magnitude = tl.minimum(tl.abs(y[i]), _SCALE_MAX)
        level = nearest_level(magnitude, scale, CODEBOOK)
        total += rounded_square((magnitude - level * scale) * normaliser)
    return total


@triton.jit
def scales_in_reach(
    codes,  # int32 [T, G] for each candidate
    errors,  # fp32 [T, G] for each candidate
    SCALE_WORDS: tl.constexpr,
):
    """``reference.codec.scales_in_reach``: codes of scales, int32 [T, G]."""
    best_code = codes[0]
    best_error = errors[0]
    for i in tl.static_range(1, len(codes)):
        better = errors[i] < best_error
        best_error = tl.where(better, errors[i], best_error)
        best_code = tl.where(better, codes[i], best_code)
    DELTA_BITS: tl.constexpr = SCALE_WORDS[3]
    STEP: tl.constexpr = SCALE_WORDS[4]
    REACH: tl.constexpr = ((1 << DELTA_BITS) - 1) * STEP
    largest = _of_words(best_code, SCALE_WORDS, True)
    result = best_code
    least = tl.full(best_error.shape, float("inf"), tl.float32)
    for i in tl.static_range(_NUM_BASES):
        base = tl.maximum(largest + _BASE_OFFSETS[i], 0)
        chosen = base - tl.minimum((base - best_code) // STEP * STEP, REACH)
        error = tl.full(best_error.shape, float("inf"), tl.float32)
        for j in tl.static_range(len(codes)):
            steps = base - codes[j]
            reached = (steps >= 0) & (steps <= REACH) & (steps % STEP == 0)
            better = reached & (errors[j] < error)
            error = tl.where(better, errors[j], error)
            chosen = tl.where(better, codes[j], chosen)
        below = (error == float("inf")) & (best_code < base)
        error = tl.where(below, errors[len(codes) - 1], error)
        error = _of_words(error, SCALE_WORDS, False)
        result = tl.where(error < least, chosen, result)
        least = tl.minimum(error, least)
    return result


@triton.jit
def _of_words(x, SCALE_WORDS: tl.constexpr, LARGEST: tl.constexpr):
    """The largest of each word's groups, or their sum, for each group, [T, G]."""
    by_word = _by_word(x, SCALE_WORDS)
    result = tl.max(by_word, 2) if LARGEST else tl.sum(by_word, 2)
    result = tl.broadcast_to(result[:, :, None], by_word.shape)
    return tl.reshape(result, x.shape)


@triton.jit
def _by_word(x, SCALE_WORDS: tl.constexpr):
    """[T, G] as [T, W, places of a word]."""
    PLACES: tl.constexpr = SCALE_WORDS[2]
    return tl.reshape(x, [x.shape[0], x.shape[1] // PLACES, PLACES])


@triton.jit
def scale_floor(largest):
    """Codes of the largest scales not above non-negative fp32 numbers, int32.

    Above SCALE_MAX a result is larger than any code.
    """
    normal = (largest.to(tl.int32, bitcast=True) >> 20) - 896
    subnormal = (largest * 131072.0).to(tl.int32)
    return tl.where(largest < 6.103515625e-05, subnormal, normal)


@triton.jit
def scale_candidates(
    largest,  # [T, G] fp32, at most SCALE_MAX
):
    """The codes that a group tries, ascending, int32 [T, G] each."""
    floor = scale_floor(largest)
    codes = ()
    for candidate in tl.static_range(_NUM_CANDIDATES):
        code = floor + _SCALE_OFFSETS[candidate]
        codes = codes + (tl.minimum(tl.maximum(code, 0), _SCALE_CODE_MAX),)
    return codes


@triton.jit
def at(values, index):
    """The element of a tuple at an index that is not a constant."""
    result = values[0]
    for i in tl.static_range(1, len(values)):
        result = tl.where(index == i, values[i], result)
    return result


@triton.jit
def no_errors(like):
    """Infinite errors for all candidates, fp32, before any is tried.

    Candidates are tried in a loop that is not unrolled: unrolled, it would take most of
    a minute to compile.
    """
    worst = tl.full(like.shape, float("inf"), tl.float32)
    errors = ()
    for _ in tl.static_range(_NUM_CANDIDATES):
        errors = errors + (worst,)
    return errors


@triton.jit
def with_error(errors, candidate, error):
    """The errors, with a candidate's replaced."""
    updated = ()
    for i in tl.static_range(_NUM_CANDIDATES):
        updated = updated + (tl.where(candidate == i, error, errors[i]),)
    return updated


@triton.jit
def normaliser_of(largest):
    """Powers of two that bring magnitudes near 1."""
    return power_of_two(-tl.maximum(exponent_of(largest), -_ERROR_MAX_EXPONENT))


@triton.jit
def choose_scales(
    y,  # NUM_STEPS of [T, FOLD * U] fp32
    CODEBOOK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
):
    """``reference.codec.choose_scales``: codes of scales, int32 [T, G]."""
    COLUMNS: tl.constexpr = y[0].shape[1]
    largest = tl.abs(y[0])
    for i in tl.static_range(1, len(y)):
        largest = tl.maximum(largest, tl.abs(y[i]))
    largest = tl.max(_by_group(tl.minimum(largest, _SCALE_MAX), BLOCK_G), 1)
    codes = scale_candidates(largest)
    normaliser = normaliser_of(tl.max(largest, 1))[:, None]
    errors = no_errors(largest)
    for candidate in range(_NUM_CANDIDATES):
        scale = scale_value(at(codes, candidate)).to(tl.float32)
        scale = unfold(scale, COLUMNS)
        error = _squared_error(y, scale, normaliser, CODEBOOK)
        error = tl.sum(_by_group(error, BLOCK_G), 1)
        errors = with_error(errors, candidate, error)
    return scales_in_reach(codes, errors, SCALE_WORDS)


@triton.jit
def _by_group(x, BLOCK_G: tl.constexpr):
    """[T, C] as [T, columns of a group, G]."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // BLOCK_G, BLOCK_G])


@triton.jit
def store_scales(
    scale_code,  # [T, G] int32
    scales_ptr,  # [T] uint8 pointers to K's or V's scale plane
    token,  # [T] index in the tile
    token_mask,  # [T]
    SCALE_WORDS: tl.constexpr,
):
    """Pack scales into their words and write them."""
    NUM_WORDS: tl.constexpr = SCALE_WORDS[0]
    WORD_BYTES: tl.constexpr = SCALE_WORDS[1]
    DELTA_BITS: tl.constexpr = SCALE_WORDS[3]
    code = _by_word(scale_code, SCALE_WORDS)
    base = tl.max(code, 2)  # [T, W]
    place = tl.arange(0, code.shape[2])[None, None, :]
    delta = (base[:, :, None] - code) // SCALE_WORDS[4]
    word = base + tl.sum(delta << (place * DELTA_BITS + 8), 2)

    WORD: tl.constexpr = tl.int32 if WORD_BYTES == 4 else tl.int16
    row_ptr = (scales_ptr + token * (NUM_WORDS * WORD_BYTES)).to(tl.pointer_type(WORD))
    p_word = row_ptr[:, None] + tl.arange(0, NUM_WORDS)[None, :]
    tl.store(p_word, word.to(WORD), mask=token_mask[:, None])
