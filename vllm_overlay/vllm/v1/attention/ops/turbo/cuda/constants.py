# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The C++ header of constants that a module of CUDA kernels is compiled with.

Each number of the format has one name in it, and comes from ``format.py``. Constants
that follow from the head size alone are a separate part, because the merge has no
layout.
"""

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.cuda.store_tables import search_constants
from vllm.v1.attention.ops.turbo.format import ScaleWords, TurboFormat, fp32, half2_bits
from vllm.v1.attention.ops.turbo.formats.rotation import inverse_sqrt, rotation_signs
from vllm.v1.attention.ops.turbo.formats.tail import MAX_CODE, MAX_ROWS
from vllm.v1.attention.ops.turbo.interface import LOG2_E, MAX_KV_SPLITS, PLAIN, Variant
from vllm.v1.attention.ops.turbo.latent import format as latent_fmt
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import LATENT_MAX_SPLITS

# Bits of a trellis code in the plane of branches; the path has one more.
_BRANCH_BITS = 2
_WORD_BITS = 32
# The bias that turns levels of K into unsigned bytes.
_KEY_BYTE_BIAS = 128

_Constants = dict[str, int | str]


def _float(value: float) -> str:
    """An fp32 number as a C++ literal."""
    assert fp32(value) == value, value
    return f"{value.hex()}f"


def _half2(value: float) -> str:
    return f"{half2_bits(value)}u"


def _bytes(values: list[int]) -> str:
    """A C++ literal of a word with four bytes, the first one lowest."""
    return "0x" + bytes(v & 0xFF for v in reversed(values)).hex().upper() + "u"


def _of_head_size(head_size: int) -> _Constants:
    signs = (rotation_signs(head_size) < 0).long()
    padding = torch.zeros(-head_size % _WORD_BITS, dtype=torch.long)
    bits = torch.cat([signs, padding]).view(-1, _WORD_BITS)
    words = (bits << torch.arange(_WORD_BITS)).sum(1).tolist()
    return {
        "HEAD_SIZE": head_size,
        "SCALE_GROUP": fmt.SCALE_GROUP,
        "MAX_SPLITS": MAX_KV_SPLITS,
        "LOG2_E": _float(fp32(LOG2_E)),
        "OFFSET_SEGMENT": interface.OFFSET_SEGMENT,
        "TAIL_MAX_ROWS": MAX_ROWS,
        "TAIL_MAX_CODE": MAX_CODE,
        "INVERSE_SQRT": _float(inverse_sqrt(head_size)),
        "ROTATION_SIGNS": ", ".join(f"0x{word:08X}u" for word in words),
    }


def _of_scales(words: ScaleWords) -> _Constants:
    return {
        "SCALE_WORD_BYTES": words.word_bytes,
        "SCALE_WORD_GROUPS": words.word_groups,
        "SCALE_DELTA_BITS": words.delta_bits,
        "SCALE_DELTA_STEP": words.delta_step,
        "SCALE_SHIFT": fmt.SCALE_SHIFT,
        "SCALE_CODE_MAX": fmt.SCALE_CODE_MAX,
        "SCALE_MAX": _float(fmt.SCALE_MAX),
        "SMALLEST_SCALE": _float(fmt.SMALLEST_SCALE),
    }


def _of_pages(layout: TurboFormat) -> _Constants:
    """The layout of codes and scales, and the coding of scales."""
    key_row_bits = _BRANCH_BITS if layout.key_codebook.trellis else layout.key_bits
    return {
        "IS_LATENT": 0,
        "NUM_GROUPS": layout.num_groups,
        "NUM_UNITS": layout.num_units,
        "NUM_LEVELS": fmt.NUM_LEVELS,
        "NUM_SUBSETS": fmt.NUM_SUBSETS,
        "KEY_BITS": layout.key_bits,
        "VALUE_BITS": layout.value_bits,
        "TILE_TOKENS": fmt.TILE_TOKENS,
        "TILE_BYTES": layout.tile_bytes,
        # Bytes of a token's codes of K, or of their branches.
        "KEY_ROW_BYTES": layout.head_size * key_row_bits // 8,
        # The same with the path.
        "KEY_CODE_BYTES": layout.key_code_bytes,
        # Bytes from the branches of a tile's K or V to its path bits.
        "PATHS_OFFSET": fmt.TILE_TOKENS * layout.head_size * _BRANCH_BITS // 8,
        "VALUE_CODES_OFFSET": layout.value_codes_offset,
        "KEY_SCALES_OFFSET": layout.key_scales_offset,
        "VALUE_SCALES_OFFSET": layout.value_scales_offset,
        "SCALE_BYTES": layout.scale_words.num_bytes,
        **_of_scales(layout.scale_words),
    }


def _of_latent_pages(layout: LatentFormat) -> _Constants:
    """The same for MLA, and the levels of its codes: see latent/tile.cuh."""
    linear, quadratic = layout.codebook.coefficients
    return {
        "LATENT_BITS": layout.bits,
        "LATENT_RANK": layout.rank,
        "ROPE_SIZE": layout.rope,
        "TILE_TOKENS": fmt.TILE_TOKENS,
        "TILE_BYTES": layout.tile_bytes,
        "PATHS_OFFSET": layout.path_bits_offset,
        "ROPE_OFFSET": layout.rope_offset,
        "LATENT_SCALES_OFFSET": layout.scales_offset,
        "ROPE_SCALES_OFFSET": layout.rope_scales_offset,
        **_of_scales(layout.scale_words),
        "VALUE_LINEAR": _half2(linear),
        "VALUE_QUADRATIC": _half2(quadratic),
        "LATENT_GAIN": _float(fp32(layout.codebook.gain)),
        "LATENT_LINEAR": _float(linear),
        "LATENT_QUADRATIC": _float(quadratic),
        "LATENT_MAX_SPLITS": LATENT_MAX_SPLITS,
        "NUM_LEVELS": fmt.NUM_LEVELS,
    }


def _key_byte_tables(levels: list[int]) -> tuple[list[int], list[int]]:
    """Tables of bytes ``level + 128`` for table_coordinates of common/key_tables.cuh.

    The index is a code rotated left by a bit in the first table, and its complement in
    the second. An entry of the second table is inverted if the upper bit is set in the
    first table's byte for the same code without bit 2.
    """
    places = [(place >> 1) | (place & 1) << 3 for place in range(len(levels))]
    biased = [levels[code] + _KEY_BYTE_BIAS for code in places]
    half = len(levels) // 2
    second = [x ^ 0xFF if x >= _KEY_BYTE_BIAS else x for x in biased[half:]]
    return biased[:half], second[::-1]


def _turned_byte_tables(levels: list[int]) -> tuple[list[int], list[int]]:
    """Tables of bytes for decode/key_codes.cuh, whose codes have the branch lowest.

    Code ``8 * b + 4 * a + c`` has the level ``4 * c + 2 * a + b``. The first table has
    codes below eight, the second the others, backwards. A lookup also adds the sign of
    the other table's entry, which each entry compensates.
    """
    pairs = [levels[4 * (code % 4) + 2 * (code // 4) :][:2] for code in range(8)]
    first = [low + (high < 0) for low, high in pairs]
    second = [high + (low < 0) for low, high in pairs]
    return first, second[::-1]


def _of_decoding(layout: TurboFormat) -> _Constants:
    """Constants from which attention computes levels.

    common/value_levels.cuh, common/key_tables.cuh and decode/key_codes.cuh use them.
    """
    unit = fmt.KEY_LEVEL_UNIT
    integers = [round(m * unit) for m in layout.key_codebook.magnitudes]
    negative = [-m for m in reversed(integers)]
    positive = [m + 1 for m in reversed(integers)]
    first, second = _key_byte_tables([*negative, *integers])
    turned_first, turned_second = _turned_byte_tables([*negative, *integers])
    value_linear, value_quadratic = layout.value_codebook.coefficients
    return {
        "KEY_NEGATIVE_LOW": _bytes(negative[:4]),
        "KEY_NEGATIVE_HIGH": _bytes(negative[4:]),
        "KEY_POSITIVE_LOW": _bytes(positive[:4]),
        "KEY_POSITIVE_HIGH": _bytes(positive[4:]),
        "KEY_TURNED_FIRST_LOW": _bytes(turned_first[:4]),
        "KEY_TURNED_FIRST_HIGH": _bytes(turned_first[4:]),
        "KEY_TURNED_SECOND_LOW": _bytes(turned_second[:4]),
        "KEY_TURNED_SECOND_HIGH": _bytes(turned_second[4:]),
        "KEY_LEVEL_UNIT": f"{float(unit)}f",
        "KEY_FIRST_LOW": _bytes(first[:4]),
        "KEY_FIRST_HIGH": _bytes(first[4:]),
        "KEY_SECOND_LOW": _bytes(second[:4]),
        "KEY_SECOND_HIGH": _bytes(second[4:]),
        # A scale times this is the offset of keys, whose bytes are the low bytes of
        # fp16 numbers from 8 on.
        "KEY_BYTE_OFFSET": _half2(-8.0 - _KEY_BYTE_BIAS / unit),
        "VALUE_LINEAR": _half2(value_linear),
        "VALUE_QUADRATIC": _half2(value_quadratic),
    }


def _of_direction(head_size: int) -> _Constants:
    """Constants by which the store makes keys' errors orthogonal to a direction."""
    step = 2.0**-fmt.DIRECTION_FRACTION_BITS / head_size
    return {
        "DIRECTION_SEGMENT": interface.DIRECTION_SEGMENT,
        "DIRECTED_MOVES": fmt.DIRECTED_MOVES,
        "DIRECTION_FRACTION_BITS": fmt.DIRECTION_FRACTION_BITS,
        "DIRECTION_PULL": _float(fmt.direction_pull(head_size)),
        # A direction's part in a vector, for a product of one.
        "DIRECTION_STEP": _float(fp32(step)),
    }


def _of_encoding(layout: TurboFormat | LatentFormat) -> _Constants:
    """Constants by which the store rotates and chooses scales and codes.

    Latents have K's encoder.
    """
    if isinstance(layout, LatentFormat):
        codebook, size = layout.codebook, layout.rank
    else:
        codebook, size = layout.key_codebook, layout.head_size
    offsets = fmt.SCALE_OFFSETS
    assert offsets == tuple(range(offsets[0], offsets[-1] + 1))
    assert all(offset == -i for i, offset in enumerate(fmt.BASE_OFFSETS))
    assert fmt.ERROR_MAX == 1.0, "squares are saturated"
    product_unit = 1 << fmt.PRODUCT_FRACTION_BITS
    search = search_constants(layout)
    return {
        "ROTATION_EXPONENT": fmt.ROTATION_EXPONENT,
        "MIN_INPUT_EXPONENT": f"({fmt.MIN_INPUT_EXPONENT})",
        "FIRST_SCALE_OFFSET": f"({offsets[0]})",
        "NUM_SCALE_CANDIDATES": len(offsets),
        "NUM_BASE_OFFSETS": len(fmt.BASE_OFFSETS),
        "ERROR_FRACTION_BITS": fmt.ERROR_FRACTION_BITS,
        "ERROR_MAX_EXPONENT": fmt.ERROR_MAX_EXPONENT,
        "UNBIAS_ROUNDS": fmt.UNBIAS_ROUNDS,
        "UNBIAS_LIMIT": _float(fmt.UNBIAS_LIMIT),
        "PRODUCT_FRACTION_BITS": fmt.PRODUCT_FRACTION_BITS,
        "BIAS_WEIGHT": _float(fmt.BIAS_WEIGHT),
        "KEY_GAIN": _float(fp32(codebook.gain * product_unit)),
        **_of_direction(size),
        "FOLD_ROWS": search.fold_rows,
        "KEY_FOLD_STEP": _float(fp32(search.key_fold_step)),
        "VALUE_FOLD_STEP": _float(fp32(search.value_fold_step)),
        "KEY_TRELLIS_GUESS": _float(fp32(search.key_trellis_guess)),
        "VALUE_TRELLIS_GUESS": _float(fp32(search.value_trellis_guess)),
    }


def _of_latent_encoding(layout: LatentFormat) -> _Constants:
    """The constants of latents under the names that the store's headers use."""
    row_bits = _BRANCH_BITS if layout.codebook.trellis else layout.bits
    return {
        "IS_LATENT": 1,
        "KEY_OFFSET": 0,
        "WITH_TAIL": 0,
        "QUERY_DIRECTION": 0,
        "NUM_GROUPS": layout.num_groups,
        "NUM_SUBSETS": fmt.NUM_SUBSETS,
        "KEY_BITS": layout.bits,
        "VALUE_BITS": layout.bits,
        "KEY_ROW_BYTES": layout.rank * row_bits // 8,
        "VALUE_CODES_OFFSET": 0,
        "KEY_SCALES_OFFSET": layout.scales_offset,
        "VALUE_SCALES_OFFSET": layout.scales_offset,
        "SCALE_BYTES": layout.scale_bytes,
        "ROPE_CODE_MAX": latent_fmt.ROPE_CODE_MAX,
        **_of_encoding(layout),
    }


def _header(*parts: _Constants) -> str:
    lines = ["#pragma once", ""]
    for part in parts:
        lines += [f"#define {name} {value}" for name, value in part.items()]
    return "\n".join(lines) + "\n"


def head_size_header(head_size: int, variant: Variant = PLAIN) -> str:
    """The constants of the merge, which follow from the head size and the variant."""
    return _header(_of_head_size(head_size), {"SOFT_CAP": int(variant.soft_cap)})


def layout_header(layout: TurboFormat, variant: Variant = PLAIN) -> str:
    """The constants of the other kernels of K and V.

    They follow from the head size, the variant and the layout.
    """
    return _header(
        _of_head_size(layout.head_size),
        {"SOFT_CAP": int(variant.soft_cap)},
        {
            "KEY_OFFSET": int(variant.key_offset),
            "WITH_TAIL": int(variant.tail),
            "QUERY_DIRECTION": int(variant.query_direction),
        },
        _of_pages(layout),
        _of_decoding(layout),
        _of_encoding(layout),
    )


def latent_header(layout: LatentFormat) -> str:
    """The constants of the kernels of MLA."""
    return _header(_of_head_size(layout.rank), _of_latent_pages(layout))


def latent_store_header(layout: LatentFormat) -> str:
    """The constants of the store of MLA."""
    return _header(
        _of_head_size(layout.rank),
        _of_latent_pages(layout),
        _of_latent_encoding(layout),
    )
