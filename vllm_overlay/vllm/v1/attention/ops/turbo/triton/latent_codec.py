# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment"
"""Unpacking of latents and rotary keys, for Triton kernels (see ``latent.format``).

Codes of three bits become words of four-bit codes, and are decoded like these. A latent
is decoded in chunks, each of the coordinates that share a word of scales. There are no
masks: a caller with fewer tokens than a block repeats one of them.
"""

from functools import cache
from typing import NamedTuple

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import half2_bits
from vllm.v1.attention.ops.turbo.latent import format as latent_fmt
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.triton.codec import load_scales, scale_value

_USE_PTX = tl.constexpr(
    current_platform.is_cuda() and not triton.knobs.runtime.interpret
)
_WORD_CODES = tl.constexpr(latent_fmt.WORD_CODES)
_GROUP_WORDS = tl.constexpr(fmt.SCALE_GROUP // latent_fmt.WORD_CODES)
_GROUP = tl.constexpr(fmt.SCALE_GROUP)
# A power of two above the largest code.
ROPE_UNIT = tl.constexpr(float(latent_fmt.ROPE_CODE_MAX + 1))
_INVERSE_ROPE_UNIT = tl.constexpr(1 / (latent_fmt.ROPE_CODE_MAX + 1))


class LatentLayout(NamedTuple):
    """The constants of a format, as the argument LAYOUT of kernels that read pages.

    Attributes:
        bits: Bits of a code.
        coefficients: ``format.Codebook.coefficients`` times the gain.
        scale_words: ``format.ScaleWords`` of a chunk, which has one word, as a tuple.
        paths_offset: Bytes in a tile before the path bits; codes are at 0.
        rope_offset: Bytes before the rotary codes.
        scales_offset: Bytes before the latents' scales.
        rope_scales_offset: Bytes before the rotary codes' scales.
        tile_bytes: Bytes of a tile.
        rank: L, coordinates of a latent.
        chunk: Coordinates that share a word of scales.
        rope: R, coordinates of a rotary key.

    """

    bits: int
    coefficients: tuple[float, ...]
    scale_words: tuple[int, ...]
    paths_offset: int
    rope_offset: int
    scales_offset: int
    rope_scales_offset: int
    tile_bytes: int
    rank: int
    chunk: int
    rope: int


@cache
def latent_layout(layout: LatentFormat) -> LatentLayout:
    codebook = layout.codebook
    return LatentLayout(
        layout.bits,
        tuple(x * codebook.gain for x in codebook.coefficients),
        (1, *layout.scale_words[1:]),
        layout.path_bits_offset,
        layout.rope_offset,
        layout.scales_offset,
        layout.rope_scales_offset,
        layout.tile_bytes,
        layout.rank,
        layout.rank // layout.scale_words.num_words,
        layout.rope,
    )


def _word_ptx() -> str:
    """PTX that decodes a word.

    $0 to $7 are the coordinates, $8 the word, $9 and $10 its scale times the
    coefficients.
    """
    lines = [
        ".reg .b32 x, v, y, a, b, center;",
        "mov.b32 a, {$9, $9};",
        "mov.b32 b, {$10, $10};",
        f"mov.b32 center, {half2_bits(-16 - 15 / 8)};",
    ]
    shifts = ("shl.b32 x, $8, 4;", "mov.b32 x, $8;", "shr.u32 x, $8, 4;")
    for k, shift in enumerate((*shifts, "shr.u32 x, $8, 8;")):
        lines += [
            shift,
            # 16 + code / 4, as in codec.step_positions.
            "lop3.b32 v, x, 0x00F000F0, 0x4C004C00, 0xEA;",
            "add.rn.f16x2 v, v, center;",
            "abs.f16x2 y, v;",
            "fma.rn.f16x2 y, y, b, a;",
            "mul.rn.f16x2 y, v, y;",
            f"mov.b32 {{${2 * k}, ${2 * k + 1}}}, y;",
        ]
    return "{" + " ".join(lines) + "}"


_WORD_PTX = tl.constexpr(_word_ptx())
_WORD_CONSTRAINTS = tl.constexpr("=&h," * 8 + "r,h,h")


@triton.jit
def _spread(bits):
    """Move bits 2 * k of both halves of int32 to bits 4 * k."""
    bits = bits & 0x00550055
    bits = (bits | bits << 4) & 0x05050505
    return (bits | bits << 2) & 0x11111111


@triton.jit
def load_latent_words(
    tile_ptr,  # [N, 1] uint8 pointers to tiles
    token,  # [N, 1] index in the tile
    word,  # [1, W]
    LAYOUT: tl.constexpr,
):
    """Load words of four-bit codes, int32 [N, W], even codes in the lower half."""
    RANK: tl.constexpr = LAYOUT.rank
    if LAYOUT.bits == 4:
        row_ptr = tile_ptr + token * (RANK // 2)
        p_word = row_ptr.to(tl.pointer_type(tl.int32)) + word
        return tl.load(p_word)

    row_ptr = tile_ptr + token * (RANK // 4)
    p_branch = row_ptr.to(tl.pointer_type(tl.int16)) + word
    branch = tl.load(p_branch).to(tl.int32)
    row_ptr = tile_ptr + (LAYOUT.paths_offset + token * (RANK // 8))
    p_path = row_ptr.to(tl.pointer_type(tl.int16)) + word // _GROUP_WORDS
    path = tl.load(p_path).to(tl.int32) & 0xFFFF
    # Path bits of the two codes before the word, and of the word.
    path = (path << 2) >> (word % _GROUP_WORDS * _WORD_CODES)
    differs = path >> 2 ^ path
    low = path >> 1 & 0xFF | (differs & 0xFF) << 16
    even = _spread(low)
    odd = _spread(low >> 1)
    codes = even & 0xFFFF | odd << 16
    codes |= (even >> 16) << 1 | ((odd >> 16) & 0xFFFF) << 17
    return codes | (branch & 0x3333) << 2 | (branch >> 2 & 0x3333) << 18


@triton.jit
def latent_coordinates(
    word,  # [N, W] int32, from ``load_latent_words``
    scale,  # [N, W] fp16
    COEFFICIENTS: tl.constexpr,
):
    """Rotated coordinates times the gain, fp16 [N, 8 * W]."""
    scale = scale.to(tl.float32)
    linear = (scale * COEFFICIENTS[0]).to(tl.float16)
    quadratic = (scale * COEFFICIENTS[1]).to(tl.float16)
    if _USE_PTX:
        x = tl.inline_asm_elementwise(
            _WORD_PTX,
            _WORD_CONSTRAINTS,
            [word, linear, quadratic],
            dtype=(
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
            ),
            is_pure=True,
            pack=1,
        )
    else:
        x = ()
        for j in tl.static_range(_WORD_CODES):
            code = word >> (4 * (j // 2 + j % 2 * 4)) & 0xF
            v = code.to(tl.float16) * 0.25 - 15 / 8
            x = x + (v * (linear + quadratic * tl.abs(v)),)
    # Numbers that are joined last end up next to each other.
    upper = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
    lower = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
    joined = tl.join(upper, lower)
    return tl.reshape(joined, [word.shape[0], word.shape[1] * _WORD_CODES])


@triton.jit
def load_latents(
    tile_ptr,  # [N] uint8 pointers to tiles
    token,  # [N] index in the tile
    INDEX: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Load the rotated coordinates of a chunk, fp16 [N, CHUNK]."""
    CHUNK: tl.constexpr = LAYOUT.chunk
    CHUNK_WORDS: tl.constexpr = CHUNK // _WORD_CODES
    SCALE_WORDS: tl.constexpr = LAYOUT.scale_words
    COEFFICIENTS: tl.constexpr = LAYOUT.coefficients
    WORD_BYTES: tl.constexpr = SCALE_WORDS[1]
    own_word = tl.arange(0, CHUNK_WORDS)[None, :]
    word = own_word + INDEX * CHUNK_WORDS
    tile_ptr = tile_ptr[:, None]
    token = token[:, None]
    codes = load_latent_words(tile_ptr, token, word, LAYOUT)
    p_scale = tile_ptr + (LAYOUT.scales_offset + INDEX * WORD_BYTES)
    p_scale += token * (LAYOUT.rank // CHUNK * WORD_BYTES)
    group = own_word // _GROUP_WORDS
    scale = load_scales(
        p_scale, token * 0, group, group, None, None, CHUNK, SCALE_WORDS
    )
    return latent_coordinates(codes, scale, COEFFICIENTS)


@triton.jit
def load_ropes(
    tile_ptr,  # [N] uint8 pointers to tiles
    token,  # [N] index in the tile
    LAYOUT: tl.constexpr,
):
    """Load rotary coordinates in units of ROPE_UNIT, fp16 [N, ROPE].

    None is rounded: a code has 7 significant bits and a scale 4. fp16 holds both the
    largest product and the last bit of the smallest.
    """
    ROPE: tl.constexpr = LAYOUT.rope
    tl.static_assert(ROPE == _GROUP * 4)
    r = tl.arange(0, ROPE)[None, :]
    row_ptr = tile_ptr + (LAYOUT.rope_offset + token * ROPE)
    code = tl.load(row_ptr[:, None].to(tl.pointer_type(tl.int8)) + r).to(tl.float16)
    row_ptr = tile_ptr + (LAYOUT.rope_scales_offset + token * (ROPE // _GROUP))
    scale = tl.load(row_ptr[:, None].to(tl.pointer_type(tl.int32)))
    scale = scale_value(scale >> (r // _GROUP * 8) & 0xFF)
    return code * (scale * _INVERSE_ROPE_UNIT)
