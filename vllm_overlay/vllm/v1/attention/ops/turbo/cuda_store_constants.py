# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the CUDA store takes from the format: its constants and its rotation."""

import struct
from functools import cache

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import Codebook, TurboFormat
from vllm.v1.attention.ops.turbo.reference import inverse_sqrt
from vllm.v1.attention.ops.turbo.reference_codec import fp32
from vllm.v1.attention.ops.turbo.rotation import (
    hadamard,
    rotation_matrix,
    rotation_signs,
)

_HALF = fmt.NUM_LEVELS // 2
# Rows and columns of a product of tensor cores, and lanes of a warp.
_MMA_ROWS = 16
_MMA_COLUMNS = 8
_WARP_LANES = 32
# floor(x) of small x is the lowest bits of x + _MAGIC, rounded down.
_MAGIC = 12582912
# Exponents of what a lookup makes of bytes: such that a scale, times what brings it
# back, is a normal number.
_LOOKUP_EXPONENTS = range(-110, 60)


def _guess(thresholds: tuple[float, ...]) -> float:
    """A factor c such that floor(c * x) is the index of x's interval, or one less."""
    low = max(k / t for k, t in enumerate(thresholds))
    high = min((k + 1) / t for k, t in enumerate(thresholds))
    assert 1.02 * low < high, (low, high)
    return (low * high) ** 0.5


def _word(values: list[int]) -> str:
    return f"0x{int.from_bytes(bytes(values), 'little'):08X}u"


def _float(value: float) -> str:
    assert fp32(value) == value, value
    return f"{value.hex()}f"


def _fp32(value: float) -> str:
    return f"{fp32(value).hex()}f"


class _Lookup:
    """What prmt makes of a byte x: sign * (zero + x * ulp), a float."""

    def __init__(self, fill: int) -> None:
        bits = fill * 0x01010100
        self.exponent = (bits >> 23 & 0xFF) - 127
        self.sign = -1.0 if bits >> 31 else 1.0
        self.zero = abs(struct.unpack("<f", struct.pack("<I", bits))[0])
        self.ulp = 2.0 ** (self.exponent - 23)

    def constants(self, offset: int, unit: float) -> tuple[str, str]:
        """Z and U such that (lookup - Z) * U is (x - offset) * unit."""
        zero = self.sign * (self.zero + offset * self.ulp)
        return _float(zero), _float(self.sign / self.ulp * unit)


def _key_tables(codebook: Codebook) -> dict[str, str]:
    """Tables of bytes of a key codebook, and how to read what is looked up."""
    levels = [round(m * fmt.KEY_LEVEL_UNIT) for m in codebook.magnitudes]
    thresholds = [low + high for low, high in zip(levels, levels[1:])]
    offset = 0xFF - levels[-1]
    level_bytes = [m + offset for m in levels]
    assert level_bytes[0] >= 0x80, "the sign of each byte is to make 0xFF"
    # The last is not used: the index of the highest level needs no threshold.
    threshold_bytes = [*thresholds, 0]
    for fill in range(_HALF - 1):
        lookups = _Lookup(threshold_bytes[fill]), _Lookup(level_bytes[fill])
        if all(lookup.exponent in _LOOKUP_EXPONENTS for lookup in lookups):
            break
    else:
        raise AssertionError((threshold_bytes, level_bytes))
    base = _MAGIC + fill * 0x1110
    zero, unit = lookups[0].constants(0, 0.5 / fmt.KEY_LEVEL_UNIT)
    level_zero, level_unit = lookups[1].constants(offset, 1 / fmt.KEY_LEVEL_UNIT)
    return {
        "KEY_INDEX_MAGIC": _float(float(base)),
        "KEY_INDEX_BASE": f"0x{0x4B000000 + base - 0x800000:08X}",
        "KEY_THRESHOLDS_LOW": _word(threshold_bytes[:4]),
        "KEY_THRESHOLDS_HIGH": _word(threshold_bytes[4:]),
        "KEY_THRESHOLD_ZERO": zero,
        "KEY_THRESHOLD_UNIT": unit,
        "KEY_LEVELS_LOW": _word(level_bytes[:4]),
        "KEY_LEVELS_HIGH": _word(level_bytes[4:]),
        "KEY_LEVEL_ZERO": level_zero,
        "KEY_LEVEL_UNIT": level_unit,
    }


def _value_polynomial(codebook: Codebook) -> dict[str, str]:
    """Coefficients of a value codebook in the position u, checked to be exact."""
    a, b = codebook.coefficients
    linear, quadratic = a / 4, b / 16
    # Scales from 7 / 8 up are less than this far apart.
    pairs = zip(codebook.thresholds, codebook.thresholds[1:])
    assert all(high / low > 8 / 7 for low, high in pairs)
    for significand in range(8, 16):
        # Every scale is one of these times a power of two.
        factors = [x * significand for x in (linear, quadratic, quadratic / 4)]
        for index, level in enumerate(codebook.magnitudes):
            u = index + 0.5
            inner = factors[0] + factors[1] * u
            exact = [*factors, inner, inner * u]
            assert inner * u == level * significand
            assert all(fp32(x) == x for x in exact), (index, exact)
        for index, threshold in enumerate(codebook.thresholds):
            u = index + 1.0
            inner = factors[0] + factors[1] * u
            exact = [inner, inner * u + factors[2]]
            assert exact[1] == threshold * significand
            slope = factors[0] - factors[1]
            exact += [slope, slope + factors[1] * (u + 0.5)]
            assert all(fp32(x) == x for x in exact), (index, exact)
    return {"VALUE_LINEAR": _float(linear), "VALUE_QUADRATIC": _float(quadratic)}


def _trellis(key: Codebook, value: Codebook) -> dict[str, str]:
    """Levels of both sides, and thresholds between windows of a level a subset."""
    constants = {}
    for name, codebook in (("KEY", key), ("VALUE", value)):
        by_branch = zip(*codebook.subset_thresholds)
        thresholds = [fp32(t) for branch in by_branch for t in branch]
        assert thresholds == sorted(thresholds)
        # Window w, in the middle of all, is at w + 1/2 windows.
        count = len(thresholds)
        half = thresholds[count // 2 :]
        unit = 1 / _guess(tuple(half)) * count
        positions = [count * (t / unit + 0.5) for t in thresholds]
        assert all(j < p < j + 1 for j, p in enumerate(positions)), positions
        levels = [fp32(level) for level in codebook.levels]
        for significand in range(8, 16):
            products = [level * significand for level in levels]
            assert all(fp32(x) == x for x in products)
        constants[f"{name}_TRELLIS_GUESS"] = _fp32(1 / unit)
        constants[f"{name}_TRELLIS_LEVELS"] = ", ".join(map(_float, levels))
        # Of the last window there is no next.
        thresholds.append(0.0)
        constants[f"{name}_TRELLIS_THRESHOLDS"] = ", ".join(map(_float, thresholds))
    return constants


def constants_header(layout: TurboFormat) -> str:
    """The C++ header with the constants of a layout."""
    offsets = fmt.SCALE_OFFSETS
    assert offsets == tuple(range(offsets[0], offsets[-1] + 1))
    assert all(offset == -i for i, offset in enumerate(fmt.BASE_OFFSETS))
    assert fmt.ERROR_MAX == 1.0, "squares are saturated"
    words = layout.scale_words
    constants = {
        "HEAD_SIZE": layout.head_size,
        "NUM_GROUPS": layout.num_groups,
        "SCALE_GROUP": fmt.SCALE_GROUP,
        "NUM_LEVELS": fmt.NUM_LEVELS,
        "NUM_SUBSETS": fmt.NUM_SUBSETS,
        "KEY_BITS": layout.key_bits,
        "VALUE_BITS": layout.value_bits,
        "TILE_TOKENS": fmt.TILE_TOKENS,
        "TILE_BYTES": layout.tile_bytes,
        "VALUE_CODES_OFFSET": layout.value_codes_offset,
        "KEY_SCALES_OFFSET": layout.key_scales_offset,
        "VALUE_SCALES_OFFSET": layout.value_scales_offset,
        "NUM_WORDS": words.num_words,
        "WORD_BYTES": words.word_bytes,
        "WORD_GROUPS": words.word_groups,
        "DELTA_BITS": words.delta_bits,
        "DELTA_STEP": words.delta_step,
        "SCALE_SHIFT": fmt.SCALE_SHIFT,
        "SCALE_CODE_MAX": fmt.SCALE_CODE_MAX,
        "SCALE_MAX": _float(fmt.SCALE_MAX),
        "SMALLEST_SCALE": _float(fmt.SMALLEST_SCALE),
        "FIRST_SCALE_OFFSET": f"({offsets[0]})",
        "NUM_SCALE_CANDIDATES": len(offsets),
        "NUM_BASE_OFFSETS": len(fmt.BASE_OFFSETS),
        "ROTATION_EXPONENT": fmt.ROTATION_EXPONENT,
        "MIN_INPUT_EXPONENT": f"({fmt.MIN_INPUT_EXPONENT})",
        "INVERSE_SQRT": _float(inverse_sqrt(layout.head_size)),
        "ERROR_FRACTION_BITS": fmt.ERROR_FRACTION_BITS,
        "ERROR_MAX_EXPONENT": fmt.ERROR_MAX_EXPONENT,
        "UNBIAS_ROUNDS": fmt.UNBIAS_ROUNDS,
        "UNBIAS_LIMIT": _float(fmt.UNBIAS_LIMIT),
        "PRODUCT_FRACTION_BITS": fmt.PRODUCT_FRACTION_BITS,
        "BIAS_WEIGHT": _float(fmt.BIAS_WEIGHT),
        "KEY_GAIN": _fp32(layout.key_codebook.gain * (1 << fmt.PRODUCT_FRACTION_BITS)),
        "KEY_GUESS": _fp32(_guess(layout.key_codebook.thresholds)),
        "VALUE_GUESS": _fp32(_guess(layout.value_codebook.thresholds)),
        **_key_tables(layout.key_codebook),
        **_value_polynomial(layout.value_codebook),
        **_trellis(layout.key_codebook, layout.value_codebook),
    }
    lines = ["#pragma once", ""]
    lines += [f"#define {name} {value}" for name, value in constants.items()]
    return "\n".join(lines) + "\n"


@cache
def rotation_fragments(
    head_size: int, device: torch.device, for_query: bool = False
) -> torch.Tensor:
    """The rotation as the kernel's tensor-core operands.

    Row i, of 16, of output block o is a rotated coordinate. For K and V, rows i and i +
    8 belong to scale groups that a lane has; for q they are neighbours. See rotate.cuh
    for the order of columns. Sizes that are powers of two need only the first block.

    Returns:
        (out blocks, in blocks, 32 lanes, 8) fp16.

    """
    matrix = rotation_matrix(head_size, torch.device("cpu"), torch.float32)
    vectors = 2 if head_size == 64 else 1
    in_blocks = vectors * head_size // _MMA_ROWS
    num_groups = head_size // fmt.SCALE_GROUP
    lane_groups = -(-num_groups // _MMA_COLUMNS)
    out_blocks = in_blocks if for_query else lane_groups * fmt.SCALE_GROUP // 2
    if head_size & (head_size - 1) == 0:
        out_blocks = 1
    fragments = torch.zeros(out_blocks, in_blocks, _WARP_LANES, 8)
    vector_lanes = _MMA_COLUMNS // vectors
    loaders = 4 // vectors
    for out in range(out_blocks):
        for lane in range(_WARP_LANES):
            for half in range(2):
                vector, place = divmod(lane // 4, vector_lanes)
                if for_query:
                    r = (out * vector_lanes + place) * 2 + half
                elif lane_groups == 1:
                    r = (2 * out + half) * num_groups + place
                    if place >= num_groups:
                        continue
                else:
                    group = place + _MMA_COLUMNS * half
                    r = out * num_groups + group
                    if group >= num_groups:
                        continue
                if lane % 4 // loaders != vector:
                    continue
                first = 4 * (lane % loaders)
                for block in range(in_blocks):
                    d = block * (_MMA_ROWS // vectors) + first
                    # Registers: rows i and i + 8 of the first pair, then of the second.
                    row = fragments[out, block, lane]
                    row[2 * half : 2 * half + 2] = matrix[d : d + 2, r]
                    row[4 + 2 * half : 6 + 2 * half] = matrix[d + 2 : d + 4, r]
    return fragments.to(device=device, dtype=torch.float16)


@cache
def single_fragments(head_size: int, device: torch.device) -> torch.Tensor:
    """The rotation of a vector that has a warp: see rotate_single in rotate.cuh.

    Returns:
        A fragment of the Hadamard matrix of order 16, fp16 (32 lanes, 8), then the
        signs' bits, fp16 (head_size,) of 0 and -0.

    """
    order = hadamard(_MMA_ROWS).float()
    fragment = torch.zeros(_WARP_LANES, 8)
    for lane in range(_WARP_LANES):
        first = 4 * (lane % 4)
        for half in range(2):
            row = order[lane // 4 + 8 * half]
            fragment[lane, 2 * half : 2 * half + 2] = row[first : first + 2]
            fragment[lane, 4 + 2 * half : 6 + 2 * half] = row[first + 2 : first + 4]
    signs = torch.where(rotation_signs(head_size) < 0, -0.0, 0.0)
    result = torch.cat([fragment.flatten(), signs])
    return result.to(device=device, dtype=torch.float16)
