# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment"
"""Reading K and V from tiles, as operands of a dot.

A kernel sees a vector of D coordinates as D / 8 units of eight codes (see
``format.TurboFormat``) and works on columns: column c of step i is coordinate
``i * COLUMNS + c`` of K, and ``value_coordinate`` of V. V's codes of tokens 2 * i and
2 * i + 1 share 32-bit words, so the even and the odd tokens of a block are separate
operands. ``columns`` has the columns of a step, [C], and the same numbers from
``as_loaded`` if the operands are read in a loop.

On NVIDIA GPUs PTX decodes two codes at a time. Triton has no type of two fp16 numbers.
"""

import struct

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt

_USE_PTX = tl.constexpr(
    current_platform.is_cuda() and not triton.knobs.runtime.interpret
)
_SCALE_SHIFT = tl.constexpr(fmt.SCALE_SHIFT)
_SCALE_UNIT = tl.constexpr(1 << fmt.SCALE_SHIFT)
_KEY_LEVEL = tl.constexpr(1 / fmt.KEY_LEVEL_UNIT)
_WORD_HALVES = tl.constexpr(2)
# Steps that a word of a unit has codes for.
_WORD_STEPS = tl.constexpr(4)


def half2_bits(value: float) -> str:
    """A number twice in fp16, as a 32-bit hexadecimal literal of PTX."""
    bits = struct.unpack("<H", struct.pack("<e", value))[0]
    return f"0x{bits:04X}{bits:04X}"


def _key_ptx(half: int) -> str:
    """PTX that decodes four codes of K for two units.

    $0 to $3 are the coordinates of codes 4 * half to 4 * half + 3, $4 and $5 the words,
    $6 the scales.
    """
    a, b = fmt.KEY_COEFFICIENTS
    lines = [
        ".reg .b32 x<4>, w, s, v, y, a, b, center, round, back;",
        f"mov.b32 a, {half2_bits(a)};",
        f"mov.b32 b, {half2_bits(b)};",
        f"mov.b32 center, {half2_bits(-16 - 15 / 8)};",
        f"mov.b32 round, {half2_bits(1536)};",
        f"mov.b32 back, {half2_bits(-1536)};",
        f"prmt.b32 w, $4, $5, {'0x7632' if half else '0x5410'};",
        # Codes 2 and 3 in the lower bytes.
        "prmt.b32 s, w, w, 0x2301;",
        "shl.b32 x0, w, 4;",
        "mov.b32 x1, w;",
        "shl.b32 x2, s, 4;",
        "mov.b32 x3, s;",
    ]
    for i in range(4):
        lines += [
            # 16 + code / 4, as in _position.
            f"lop3.b32 v, x{i}, 0x00F000F0, 0x4C004C00, 0xEA;",
            "add.rn.f16x2 v, v, center;",
            "mul.rn.f16x2 y, v, v;",
            "fma.rn.f16x2 y, y, b, a;",
            "fma.rn.f16x2 y, v, y, round;",
            "add.rn.f16x2 y, y, back;",
            f"mul.rn.f16x2 ${i}, y, $6;",
        ]
    return "{" + " ".join(lines) + "}"


def _value_ptx(token: int) -> str:
    """PTX that decodes four codes of V for the even or odd tokens of two pairs.

    $0 to $3 are the coordinates, $4 and $5 the words, $6 and $7 the scales times a and
    b.
    """
    lines = [
        ".reg .b32 w, s, v, y, center;",
        f"prmt.b32 w, $4, $5, {'0x7632' if token else '0x5410'};",
        "prmt.b32 s, w, w, 0x2301;",
    ]
    # A code is in bits 2 to 5 or 6 to 9 of an fp16 number. The bit below it is set, and
    # adds half of a code's step.
    places = (("0x003C003C", "0x54025402", -66.0), ("0x03C003C0", "0x44204420", -6.0))
    for i in range(4):
        mask, one, center = places[i % 2]
        lines += [
            f"lop3.b32 v, {'s' if i >= 2 else 'w'}, {mask}, {one}, 0xEA;",
            f"mov.b32 center, {half2_bits(center)};",
            "add.rn.f16x2 v, v, center;",
            "abs.f16x2 y, v;",
            "fma.rn.f16x2 y, y, $7, $6;",
            f"mul.rn.f16x2 ${i}, v, y;",
        ]
    return "{" + " ".join(lines) + "}"


_OUTPUTS = "=&r,=&r,=&r,=&r,"
_KEY_PTX = tl.constexpr((_key_ptx(0), _key_ptx(1)))
_VALUE_PTX = tl.constexpr((_value_ptx(0), _value_ptx(1)))
_KEY_CONSTRAINTS = tl.constexpr(_OUTPUTS + "r,r,r")
_VALUE_CONSTRAINTS = tl.constexpr(_OUTPUTS + "r,r,r,r")


@triton.jit
def _position(bits):
    """The position v = code / 4 - 15 / 8 of a code in bits 4 to 7, fp16, exact."""
    CENTER: tl.constexpr = 16.0 + 15 / 8
    return (bits & 0xF0 | 0x4C00).to(tl.int16).to(tl.float16, bitcast=True) - CENTER


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
def _load_scales(
    scales_ptr,  # [N, 1] or [1, N] uint8 pointers to tokens' first scale words
    column,  # [1, C] or [C, 1]
    same_column,  # the same numbers, from ``as_loaded``
    inside,  # [N, 1] or [1, N], the mask of tokens; None for all
    HEAD_SIZE: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
):
    """Load the scale of each column's unit, fp16; zero where masked.

    SCALE_WORDS is ``format.ScaleWords`` as a tuple.
    """
    NUM_UNITS: tl.constexpr = HEAD_SIZE // 8
    NUM_WORDS: tl.constexpr = SCALE_WORDS[0]
    WORD_GROUPS: tl.constexpr = SCALE_WORDS[2]
    DELTA_BITS: tl.constexpr = SCALE_WORDS[3]
    DELTA_STEP: tl.constexpr = SCALE_WORDS[4]
    WORD: tl.constexpr = tl.int32 if SCALE_WORDS[1] == 4 else tl.int16
    p_word = scales_ptr.to(tl.pointer_type(WORD))
    if NUM_WORDS > 1:
        # Otherwise one load a token serves all columns.
        p_word += column % NUM_UNITS // WORD_GROUPS % NUM_WORDS
    if inside is None:
        word = tl.load(p_word).to(tl.int32)
    else:
        word = tl.load(p_word, mask=inside, other=0).to(tl.int32)
    # A delta is shifted to the base's place in an fp16 number.
    MAX_DELTA: tl.constexpr = ((1 << DELTA_BITS) - 1) * DELTA_STEP
    place = same_column % NUM_UNITS % (NUM_WORDS * WORD_GROUPS) % WORD_GROUPS
    delta = word >> (place * DELTA_BITS + (8 - _SCALE_SHIFT - (DELTA_STEP - 1)))
    bits = ((word & 0xFF) << _SCALE_SHIFT) - (delta & (MAX_DELTA * _SCALE_UNIT))
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _key_coordinates(
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
def load_keys(
    tile_ptr,  # [N] uint8 pointers to tiles
    token,  # [N] index in the tile
    columns,
    LAYOUT: tl.constexpr,
):
    """K's coordinates of each step, without the gain: a tuple of fp16 [N, C]."""
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size
    COLUMNS: tl.constexpr = LAYOUT.columns
    COEFFICIENTS: tl.constexpr = LAYOUT.key_coefficients
    SCALE_WORDS: tl.constexpr = LAYOUT.scale_words
    column = columns[0][None, :]
    same_column = columns[1][None, :]
    codes_ptr = (tile_ptr + token * (HEAD_SIZE // 2)).to(tl.pointer_type(tl.int32))
    word = tl.load(codes_ptr[:, None] + column % (HEAD_SIZE // 8))
    scales_ptr = tile_ptr + LAYOUT.key_scales_offset + token * (HEAD_SIZE // 32)
    scale = _load_scales(
        scales_ptr[:, None], column, same_column, None, HEAD_SIZE, SCALE_WORDS
    )
    scale = scale * _KEY_LEVEL  # exact
    NUM_UNITS: tl.constexpr = HEAD_SIZE // 8
    FOLD: tl.constexpr = COLUMNS // NUM_UNITS
    if FOLD > 1:
        word = word >> same_column // NUM_UNITS * 4
    operands = ()
    for half in tl.static_range(_WORD_HALVES):
        if _USE_PTX:
            codes = tl.inline_asm_elementwise(
                _KEY_PTX[half],
                _KEY_CONSTRAINTS,
                [word, scale],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
            for i in tl.static_range(0, _WORD_STEPS, FOLD):
                operands = operands + (codes[i],)
        else:
            for i in tl.static_range(0, _WORD_STEPS, FOLD):
                NIBBLE: tl.constexpr = half * 4 + i
                bits = word >> (NIBBLE * 4 - 4) if NIBBLE > 0 else word << 4
                key = _key_coordinates(_position(bits), scale, COEFFICIENTS)
                operands = operands + (key,)
    return operands


@triton.jit
def _value_places(
    column,  # int32
    COLUMNS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """The place of a column of V in step 0: group, unit of the group, code's parity.

    Neighbouring columns have neighbouring words.
    """
    FOLD: tl.constexpr = COLUMNS // (HEAD_SIZE // 8)
    return column // (2 * FOLD), column // 2 % FOLD, column % 2


@triton.jit
def value_coordinate(
    column,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """The rotated coordinate of a column of V in a step."""
    NUM_UNITS: tl.constexpr = HEAD_SIZE // 8
    NUM_WORDS: tl.constexpr = 2 * NUM_UNITS // COLUMNS
    group, place, parity = _value_places(column, COLUMNS, HEAD_SIZE)
    place += STEP % NUM_WORDS
    code = STEP // NUM_WORDS * 2 + parity
    return code * NUM_UNITS + place * (NUM_UNITS // 2) + group


@triton.jit
def load_value_pairs(
    tile_ptr,  # [N] uint8 pointers to tiles
    pair,  # [N], index of a pair of tokens in the tile
    columns,
    LAYOUT: tl.constexpr,
):
    """Load the codes of pairs of tokens: a tuple of int32 [C, N].

    Token 2 * pair is in the lower half. There is a word for each unit of a group, or
    one word if different columns have the units. Code 2 * k + parity is in bits
    4 * k + 2 to 4 * k + 5, modulo 16, of both halves.
    """
    NUM_GROUPS: tl.constexpr = LAYOUT.head_size // 16
    FOLD: tl.constexpr = LAYOUT.columns // (2 * NUM_GROUPS)
    group, place, parity = _value_places(
        columns[0][:, None], LAYOUT.columns, LAYOUT.head_size
    )
    row = (pair // 4 * (4 * NUM_GROUPS) + pair % 4)[None, :] + group * 4
    codes_ptr = (tile_ptr + LAYOUT.value_codes_offset)[None, :]
    p_word = (codes_ptr + row * 16).to(tl.pointer_type(tl.int32)) + parity
    words = (tl.load(p_word + place * 2),)
    if FOLD == 1:
        words = words + (tl.load(p_word + 2),)
    return words


@triton.jit
def _value_coordinates(
    v,  # [C, N] fp16
    linear,  # [C, N] fp16, scale * a
    quadratic,  # [C, N] fp16, scale * b
):
    """Value coordinates, fp16: ``scale * v * (a + b * abs(v))``."""
    return v * (linear + quadratic * tl.abs(v))


@triton.jit
def load_values(
    words,  # int32 [C, N] each, from ``load_value_pairs``
    tile_ptr,  # [N] uint8 pointers to tiles
    pair,  # [N], index of a pair of tokens in the tile
    inside,  # [N], the mask of tokens; None for all
    columns,
    LAYOUT: tl.constexpr,
    TOKEN: tl.constexpr,
):
    """V's coordinates of each step, zero outside: a tuple of fp16 [C, N].

    They are of even tokens with TOKEN 0, and of odd ones with TOKEN 1.
    """
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size
    COLUMNS: tl.constexpr = LAYOUT.columns
    SCALE_WORDS: tl.constexpr = LAYOUT.scale_words
    group, _, _ = _value_places(columns[0][:, None], COLUMNS, HEAD_SIZE)
    same_group, _, _ = _value_places(columns[1][:, None], COLUMNS, HEAD_SIZE)
    scales_ptr = tile_ptr + LAYOUT.value_scales_offset
    scales_ptr += (2 * pair + TOKEN) * (HEAD_SIZE // 32)
    if inside is not None:
        inside = inside[None, :]
    scale = _load_scales(
        scales_ptr[None, :], group, same_group, inside, HEAD_SIZE, SCALE_WORDS
    )
    linear = scale * LAYOUT.value_coefficients[0]
    quadratic = scale * LAYOUT.value_coefficients[1]
    by_word = ()
    for word in tl.static_range(len(words)):
        if _USE_PTX:
            codes = tl.inline_asm_elementwise(
                _VALUE_PTX[TOKEN],
                _VALUE_CONSTRAINTS,
                [words[word], linear, quadratic],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            half = words[word] >> (16 * TOKEN)
            codes = ()
            for k in tl.static_range(_WORD_STEPS):
                if k == 0:
                    bits = half << 2
                elif k == 3:
                    bits = (half >> 10) & 0x30 | (half << 6) & 0xC0
                else:
                    bits = half >> (4 * k - 2)
                v = _position(bits)
                codes = codes + (_value_coordinates(v, linear, quadratic),)
        by_word = by_word + (codes,)
    operands = ()
    for k in tl.static_range(_WORD_STEPS):
        for word in tl.static_range(len(words)):
            operands = operands + (by_word[word][k],)
    return operands
