# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment"
"""Decoded K and V as operands of a dot, for Triton's decode kernel.

V's codes of tokens 2 * i and 2 * i + 1 share 32-bit words, so the even and the odd
tokens of a block are separate operands.

On NVIDIA GPUs PTX decodes two codes at a time. Triton has no type of two fp16 numbers,
and the compiler joins few instructions of single ones.
"""

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import half2_bits
from vllm.v1.attention.ops.turbo.triton.codec import (
    key_coordinates,
    load,
    value_coordinates,
)

_USE_PTX = tl.constexpr(
    current_platform.is_cuda() and not triton.knobs.runtime.interpret
)
_TILE = tl.constexpr(fmt.TILE_TOKENS)
_WORD_HALVES = tl.constexpr(2)
# Steps that a word of a unit has codes for.
_WORD_STEPS = tl.constexpr(4)
_EVEN_BITS = tl.constexpr(0x55555555)
# All bits but the highest of each half.
_INSIDE_HALVES = tl.constexpr(0x7FFF7FFF)
_UPPER = tl.constexpr(~0x33333333)
_LOWER = tl.constexpr(0x33333333)


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
            # 16 + code / 4, as in step_positions.
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
def key_operands(
    word,  # [N, C] int32, from ``triton.codec.load_units``
    scale,  # [N, C] fp16, in units of the key levels
    same_column,  # [1, C], from ``as_loaded``
    COEFFICIENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """K's coordinates of each step, a tuple of fp16 [N, C]."""
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
                key = key_coordinates(_position(bits), scale, COEFFICIENTS)
                operands = operands + (key,)
    return operands


@triton.jit
def value_places(
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
    group, place, parity = value_places(column, COLUMNS, HEAD_SIZE)
    place += STEP % NUM_WORDS
    code = STEP // NUM_WORDS * 2 + parity
    return code * NUM_UNITS + place * (NUM_UNITS // 2) + group


@triton.jit
def load_value_pairs(
    codes_ptr,  # [1, N] uint8 pointers to V's code plane
    pair,  # [1, N], index of a pair of tokens in the tile
    column,  # [C, 1]
    same_column,  # the same numbers, from ``as_loaded``
    mask,  # [C, N] or None
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Load the codes of pairs of tokens: a tuple of int32 [C, N].

    Token 2 * pair is in the lower half. There is a word for each unit of a group, or
    one word if different columns have the units. Code 2 * k + parity is in bits
    4 * k + 2 to 4 * k + 5, modulo 16, of both halves.
    """
    NUM_GROUPS: tl.constexpr = HEAD_SIZE // 16
    FOLD: tl.constexpr = COLUMNS // (2 * NUM_GROUPS)
    group, place, parity = value_places(column, COLUMNS, HEAD_SIZE)
    PAIR_BYTES: tl.constexpr = 16 if BITS == 4 else 8
    row = pair // 4 * (4 * NUM_GROUPS) + group * 4 + pair % 4
    p_word = (codes_ptr + row * PAIR_BYTES).to(tl.pointer_type(tl.int32)) + parity
    if BITS == 4:
        words = (load(p_word + place * 2, mask),)
        if FOLD == 1:
            words = words + (load(p_word + 2, mask),)
        return words

    branch = load(p_word, mask)
    paths_ptr = codes_ptr + _TILE * (HEAD_SIZE // 4)
    path = load((paths_ptr + row * 4).to(tl.pointer_type(tl.int32)), mask)
    # Bit e of a path belongs to code e // 2 of unit e % 2.
    differs = path ^ (path << 2) & ~0x00030003
    _, same_place, same_parity = value_places(same_column, COLUMNS, HEAD_SIZE)
    words = ()
    for i in tl.static_range(3 - FOLD):
        same_place += i
        own = _EVEN_BITS << same_place
        # A code's subset: the bit that differs, above the path bit before it.
        low = differs & own | path & ~own & (_INSIDE_HALVES | -same_place)
        low = low << (3 - 2 * same_parity - same_place)
        high = branch >> (2 - 2 * same_place)
        words = words + (low & _UPPER | high & _LOWER,)
    return words


@triton.jit
def value_operands(
    words,  # int32 [C, N] each, from load_value_pairs
    linear,  # [C, N] fp16, the tokens' scales * a
    quadratic,  # [C, N] fp16, the tokens' scales * b
    TOKEN: tl.constexpr,
):
    """V's coordinates of each step, a tuple of fp16 [C, N].

    They are of even tokens with TOKEN 0, and of odd ones with TOKEN 1.
    """
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
                codes = codes + (value_coordinates(v, linear, quadratic),)
        by_word = by_word + (codes,)
    operands = ()
    for k in tl.static_range(_WORD_STEPS):
        for word in tl.static_range(len(words)):
            operands = operands + (by_word[word][k],)
    return operands
