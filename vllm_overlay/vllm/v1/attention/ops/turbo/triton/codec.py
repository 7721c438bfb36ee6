# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="no-redef"
"""Unpacking and levels of the turbo format, for Triton kernels.

A kernel sees a vector of D coordinates as D / 8 units of eight codes (see
``format.TurboFormat``) and works on columns: column c of step i is coordinate
``i * COLUMNS + c``. COLUMNS is a multiple of the number of units, so that one
load of a unit serves every step. It is at least 16, the least depth of a dot.
"""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.triton.pages import TILE

_SCALE_SHIFT = tl.constexpr(fmt.SCALE_SHIFT)
_KEY_LEVEL = tl.constexpr(1 / fmt.KEY_LEVEL_UNIT)
_SCALE_UNIT = tl.constexpr(1 << fmt.SCALE_SHIFT)
# Masks of every nibble of an int32: the lowest bit, the lower two, every other one.
_LOWEST = tl.constexpr(0x11111111)
_LOWER = tl.constexpr(0x33333333)
_EVEN = tl.constexpr(0x55555555)


@triton.jit
def load(pointer, mask):
    """Load; zero where the mask is false. Without a mask, load everything."""
    if mask is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0)


@triton.jit
def rotate_halves(word, BITS: tl.constexpr):
    """Rotate both halves of int32 words to the left."""
    LOWER: tl.constexpr = ((1 << BITS) - 1) * 0x00010001
    return (word << BITS) & ~LOWER | (word >> (16 - BITS)) & LOWER


@triton.jit
def nibble_of(index, IS_VALUE: tl.constexpr):
    """The nibble of a code in its unit's word. V's even codes are in the lower half."""
    return index // 2 + index % 2 * 4 if IS_VALUE else index


@triton.jit
def value_rows(
    ptr,  # uint8 pointers
    token,  # of that shape, index in the tile
    PLANE_OFFSET: tl.constexpr,
    PAIR_BYTES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Pointers to tokens' first words. A pair of tokens has PAIR_BYTES a group."""
    NUM_GROUPS: tl.constexpr = HEAD_SIZE // 16
    offset = token // 8 * (4 * PAIR_BYTES * NUM_GROUPS) + token % 2 * 2
    return ptr + (PLANE_OFFSET + offset + token % 8 // 2 * PAIR_BYTES)


@triton.jit
def value_pointers(
    row_ptr,  # [N, 1] or [1, N], from ``value_rows``
    group,  # [1, C] or [C, 1]
    PAIR_BYTES: tl.constexpr,
):
    """int16 pointers to groups' first words."""
    return (row_ptr + group * (4 * PAIR_BYTES)).to(tl.pointer_type(tl.int16))


@triton.jit
def _load_halves(p_half, mask):
    """Load the words of even and of odd codes as the two halves of int32."""
    even = load(p_half, mask).to(tl.int32) & 0xFFFF
    return even | load(p_half + 2, mask).to(tl.int32) << 16


@triton.jit
def store_halves(p_half, word, mask):
    """Store the halves of int32, as ``_load_halves`` loads them."""
    tl.store(p_half, word.to(tl.int16), mask=mask)
    tl.store(p_half + 2, (word >> 16).to(tl.int16), mask=mask)


@triton.jit
def _load_value_units(
    codes_ptr,  # [N, 1] or [1, N] uint8 pointers to V's code plane
    token,  # of that shape, index in the tile
    unit,  # [1, C] or [C, 1]
    same_unit,  # the same numbers, from ``as_loaded`` if a dot follows
    mask,  # [N, C] or [C, N]
    HEAD_SIZE: tl.constexpr,
    BITS: tl.constexpr,
):
    NUM_GROUPS: tl.constexpr = HEAD_SIZE // 16
    group = unit % NUM_GROUPS
    if BITS == 4:
        p_half = value_pointers(
            value_rows(codes_ptr, token, 0, 16, HEAD_SIZE), group, 16
        )
        return rotate_halves(_load_halves(p_half + unit // NUM_GROUPS * 4, mask), 14)

    p_half = value_pointers(value_rows(codes_ptr, token, 0, 8, HEAD_SIZE), group, 8)
    branch = rotate_halves(_load_halves(p_half, mask), 12)
    paths_ptr = codes_ptr + TILE * (HEAD_SIZE // 4)
    p_path = value_pointers(value_rows(paths_ptr, token, 0, 4, HEAD_SIZE), group, 4)
    path = load(p_path, mask).to(tl.int32) & 0xFFFF
    place = same_unit // NUM_GROUPS
    differs = path ^ path << 2
    # Odd codes go to the upper half.
    differs = differs & 0x3333 | (differs & 0xCCCC) << 14
    before = path << 1
    before = before & 0x3333 | (before & 0xCCCC) << 14
    word = (branch << place * 2) & ~_LOWER
    return word | ((differs >> place) & _LOWEST) << 1 | (before >> place) & _LOWEST


@triton.jit
def load_units(
    codes_ptr,  # [N, 1] or [1, N] uint8 pointers to K's or V's code plane
    token,  # of that shape, index in the tile
    column,  # [1, C] or [C, 1]
    same_column,  # the same numbers, from ``as_loaded`` if a dot follows
    mask,  # [N, C] or [C, N]
    HEAD_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    IS_VALUE: tl.constexpr,
):
    """Load each column's unit as int32: the levels of its codes, four bits each.

    ``nibble_of`` says where each code is.
    """
    NUM_UNITS: tl.constexpr = HEAD_SIZE // 8
    unit = column % NUM_UNITS
    same_unit = same_column % NUM_UNITS
    if IS_VALUE:
        return _load_value_units(
            codes_ptr, token, unit, same_unit, mask, HEAD_SIZE, BITS
        )
    if BITS == 4:
        row_ptr = codes_ptr + token * (HEAD_SIZE // 2)
        p_word = row_ptr.to(tl.pointer_type(tl.int32)) + unit
        return load(p_word, mask)

    NUM_GROUPS: tl.constexpr = HEAD_SIZE // 16
    group = unit % NUM_GROUPS
    row_ptr = codes_ptr + token * (HEAD_SIZE // 4)
    p_branch = row_ptr.to(tl.pointer_type(tl.int32)) + group
    branch = load(p_branch, mask)
    row_ptr = codes_ptr + TILE * (HEAD_SIZE // 4) + token * (HEAD_SIZE // 8)
    place = same_unit // NUM_GROUPS
    if NUM_GROUPS % 2 == 0:
        p_path = row_ptr.to(tl.pointer_type(tl.int32)) + group // 2
        path = load(p_path, mask)
        shift = same_unit % NUM_GROUPS % 2 * 2 + place
    else:
        p_path = row_ptr.to(tl.pointer_type(tl.int16)) + group
        path = load(p_path, mask).to(tl.int32) & 0xFFFF
        path = (path | path << 8) & 0x00FF00FF
        path = (path | path << 4) & 0x0F0F0F0F
        path = (path | path << 2) & _LOWER
        shift = place
    # Codes 2 * i and 2 * i + 1 of a group are neighbours in a nibble.
    before = (path << 3) & _EVEN | (path << 1) & ~_EVEN
    differs = path ^ path << 4
    word = ((branch >> place * 2) & _LOWER) << 2
    return word | ((differs >> shift) & _LOWEST) << 1 | (before >> shift) & _LOWEST


@triton.jit
def _load_scale_word(
    word_ptr,  # uint8 pointers
    mask,
    WORD_BYTES: tl.constexpr,
):
    """Load little-endian words as int32; higher bits are undefined."""
    if WORD_BYTES == 4:
        return load(word_ptr.to(tl.pointer_type(tl.int32)), mask)
    if WORD_BYTES == 2:
        p_word = word_ptr.to(tl.pointer_type(tl.int16))
        return load(p_word, mask).to(tl.int32)
    word = load(word_ptr, mask).to(tl.int32)
    for i in tl.static_range(1, WORD_BYTES):
        part = load(word_ptr + i, mask).to(tl.int32)
        word |= part << (8 * i)
    return word


@triton.jit
def load_scales(
    scales_ptr,  # [N, 1] or [1, N] uint8 pointers to K's or V's scale plane
    token,  # of that shape, index in the tile
    column,  # [1, C] or [C, 1]
    same_column,  # the same numbers, from ``as_loaded`` if a dot follows
    inside,  # [N, 1] or [1, N], the mask of tokens
    mask,  # [N, C] or [C, N]
    HEAD_SIZE: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
):
    """Load the scale of each column's unit, fp16; zero where masked.

    SCALE_WORDS is ``format.ScaleWords`` as a tuple.
    """
    NUM_UNITS: tl.constexpr = HEAD_SIZE // 8
    NUM_WORDS: tl.constexpr = SCALE_WORDS[0]
    WORD_BYTES: tl.constexpr = SCALE_WORDS[1]
    WORD_GROUPS: tl.constexpr = SCALE_WORDS[2]
    DELTA_BITS: tl.constexpr = SCALE_WORDS[3]
    DELTA_STEP: tl.constexpr = SCALE_WORDS[4]
    row_ptr = scales_ptr + token * (NUM_WORDS * WORD_BYTES)
    if NUM_WORDS == 1:
        # One load a token, not one a column.
        word = _load_scale_word(row_ptr, inside, WORD_BYTES)
    else:
        index = column % NUM_UNITS // WORD_GROUPS % NUM_WORDS
        word = _load_scale_word(row_ptr + index * WORD_BYTES, mask, WORD_BYTES)
    # A delta is shifted to the base's place in an fp16 number.
    MAX_DELTA: tl.constexpr = ((1 << DELTA_BITS) - 1) * DELTA_STEP
    place = same_column % NUM_UNITS % (NUM_WORDS * WORD_GROUPS) % WORD_GROUPS
    delta = word >> (place * DELTA_BITS + (8 - _SCALE_SHIFT - (DELTA_STEP - 1)))
    bits = ((word & 0xFF) << _SCALE_SHIFT) - (delta & (MAX_DELTA * _SCALE_UNIT))
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def load_side(
    tile_ptr,  # [N, 1] or [1, N] uint8 pointers to tiles
    token,  # of that shape, index in the tile
    inside,  # of that shape, the mask of tokens; None for all
    column,  # [1, C] or [C, 1]
    same_column,  # the same numbers, from ``as_loaded`` if a dot follows
    LAYOUT: tl.constexpr,
    IS_VALUE: tl.constexpr,
):
    """Load K's or V's units, int32, and their scales, fp16: [N, C] or [C, N]."""
    if IS_VALUE:
        codes_ptr = tile_ptr + LAYOUT.value_codes_offset
        scales_ptr = tile_ptr + LAYOUT.value_scales_offset
        BITS: tl.constexpr = LAYOUT.value_bits
        HEAD_SIZE: tl.constexpr = LAYOUT.head_size_v
        SCALE_WORDS: tl.constexpr = LAYOUT.scale_words_v
        COLUMNS: tl.constexpr = LAYOUT.columns_v
    else:
        codes_ptr = tile_ptr
        scales_ptr = tile_ptr + LAYOUT.key_scales_offset
        BITS: tl.constexpr = LAYOUT.key_bits
        HEAD_SIZE: tl.constexpr = LAYOUT.head_size
        SCALE_WORDS: tl.constexpr = LAYOUT.scale_words
        COLUMNS: tl.constexpr = LAYOUT.columns
    mask = column < COLUMNS
    if inside is not None:
        mask = inside & mask
    elif column.shape[0] * column.shape[1] == COLUMNS:
        mask = None
    word = load_units(
        codes_ptr, token, column, same_column, mask, HEAD_SIZE, BITS, IS_VALUE
    )
    scale = load_scales(
        scales_ptr,
        token,
        column,
        same_column,
        inside,
        mask,
        HEAD_SIZE,
        SCALE_WORDS,
    )
    return word, scale


@triton.jit
def as_loaded(
    x,  # int32, not negative
    ptr,  # any pointer to int32
    never,  # a scalar that is false, which the compiler does not know
):
    """x, as the result of a load.

    Triton gives a loop's loads the layout of a dot's operand, and pipelines
    them, only if the operand is made of loads and constants alone. All other
    numbers in it, such as shifts that differ between columns, have to come from
    a load: this one, whose mask is false and whose default is x.
    """
    return tl.load(ptr + x, mask=(x >= 0) & never, other=x)


@triton.jit
def scale_value(scale_code):
    """The values of E5M3 codes, fp16."""
    bits = scale_code.to(tl.int16) << _SCALE_SHIFT
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def step_positions(
    word,  # [N, C] or [C, N] int32, from load_units
    column,  # [1, C] or [C, 1]
    STEP: tl.constexpr,
    IS_VALUE: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Positions v = u / 4 of one step's levels, fp16, exact.

    The level goes to bits 4 to 7 of the fp16 number 16, where it counts quarters.
    """
    NUM_UNITS: tl.constexpr = HEAD_SIZE // 8
    FOLD: tl.constexpr = COLUMNS // NUM_UNITS
    # A shift by a constant folds into the masking.
    NIBBLE: tl.constexpr = STEP // 2 + STEP % 2 * 4 if IS_VALUE else STEP
    if FOLD == 1 and NIBBLE > 0:
        bits = (word >> (NIBBLE * 4 - 4)) & 0xF0
    elif FOLD == 1:
        bits = (word << 4) & 0xF0
    else:
        nibble = nibble_of(STEP * FOLD + column // NUM_UNITS, IS_VALUE)
        bits = ((word >> nibble * 4) << 4) & 0xF0
    CENTER: tl.constexpr = 16.0 + 15 / 8
    return (bits | 0x4C00).to(tl.int16).to(tl.float16, bitcast=True) - CENTER


@triton.jit
def key_scale(scale):
    """Scales in units of the key levels, exact."""
    return scale * _KEY_LEVEL


@triton.jit
def key_coordinates(
    v,  # [N, C] fp16
    scale,  # [N, C] fp16, in units of the key levels
    COEFFICIENTS: tl.constexpr,
):
    """Key coordinates, fp16: the scale times an integer.

    Between 1024 and 2048 fp16 has a step of 1. So adding 1536 rounds the cubic to the
    codebook's integer, whether multiply-adds are fused or not.
    """
    slope = v * v * COEFFICIENTS[1] + COEFFICIENTS[0]
    return (v * slope + 1536.0 - 1536.0) * scale


@triton.jit
def value_coordinates(
    v,  # [C, N] fp16
    linear,  # [C, N] fp16, scale * a
    quadratic,  # [C, N] fp16, scale * b
):
    """Value coordinates, fp16: ``scale * v * (a + b * abs(v))``."""
    return v * (linear + quadratic * tl.abs(v))
