# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tables that the CUDA store reads: levels, and the rotation."""

import bisect
import math
import struct
from functools import cache
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES
from vllm.v1.attention.ops.turbo.format import Codebook, TurboFormat, fp32
from vllm.v1.attention.ops.turbo.formats.rotation import (
    hadamard,
    rotation_matrix,
    rotation_signs,
)
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat

# Rows and columns of a tensor core's product, and lanes of a warp.
_MMA_ROWS = 16
_MMA_COLUMNS = 8
_WARP_LANES = 32
# The largest quotient of neighbouring scales that are normal numbers.
_SHARED_SCALES = 9 / 8
# The largest magnitude over its group's least scale candidate.
_LARGEST_MAGNITUDE = 5 / 4
# The relative distance of a row's start from its interval's ends, because the search
# for a row has an error of a few units of fp32.
_SLACK = 1e-3
_STEPS_TRIED = 4096
# A number below half a unit in the last place of every nonzero magnitude times any
# scale.
_NEGLIGIBLE = 2.0**-50


def _guess(thresholds: tuple[float, ...]) -> float:
    """A factor c such that floor(c * x) is the index of x's interval, or one less."""
    low = max(k / t for k, t in enumerate(thresholds))
    high = min((k + 1) / t for k, t in enumerate(thresholds))
    assert 1.02 * low < high, (low, high)
    return (low * high) ** 0.5


class _Folds(NamedTuple):
    """A table of thresholds in even steps of a magnitude over its scale.

    store/levels.cuh reads it.

    Attributes:
        step: The magnitude, over the scale, of a row.
        first_rows: The first row of each threshold.
        num_rows: Rows of magnitudes up to ``_LARGEST_MAGNITUDE``.

    """

    step: float
    first_rows: tuple[int, ...]
    num_rows: int


def _row(low: float, high: float, step: float) -> int | None:
    """The row whose start is well within an interval; None if there is none."""
    row = round((low + high) / 2 / step)
    return row if low * (1 + _SLACK) < row * step < high * (1 - _SLACK) else None


@cache
def _folds(codebook: Codebook, limit: float) -> _Folds:
    """The coarsest table for scales up to ``_SHARED_SCALES`` apart, and for factors.

    Args:
        codebook: The codebook of K or V.
        limit: The most that a factor may differ from 1.

    """
    # The lowest threshold is between the two levels around zero.
    thresholds = (0.0, *codebook.thresholds)
    intervals = []
    for below, here in zip(thresholds, thresholds[1:]):
        # From half of a threshold on, a difference from it is exact in fp32.
        low = max(
            below * max(_SHARED_SCALES, 1 / (1 - limit)), here / 2 * _SHARED_SCALES
        )
        intervals.append((low, here / (1 + limit)))
    first_of_all = intervals[0][1]
    for i in range(_STEPS_TRIED):
        step = first_of_all * (1 - i / _STEPS_TRIED)
        rows = [_row(*interval, step) for interval in intervals]
        found = [row for row in rows if row is not None]
        if len(found) == len(rows):
            num_rows = math.floor(_LARGEST_MAGNITUDE / step) + 1
            return _Folds(step, (0, *found), num_rows)
    raise AssertionError(intervals)


def _bits(index: int) -> float:
    """The fp32 number with the bits of an integer."""
    return struct.unpack("<f", struct.pack("<i", index))[0]


def _fold_tables(codebook: Codebook, limit: float, num_rows: int) -> list[float]:
    """FoldTables of store/levels.cuh, checked to be exact with every scale."""
    folds = _folds(codebook, limit)
    magnitudes = codebook.magnitudes
    gaps = zip(magnitudes, magnitudes[1:])
    half_gaps = [magnitudes[0], *((high - low) / 2 for low, high in gaps)]
    for significand in range(8, 16):
        # Every scale is one of these significands times a power of two.
        numbers = [*magnitudes, *codebook.thresholds, *half_gaps]
        assert all(fp32(x * significand) == x * significand for x in numbers)
    # Zero is above the lowest threshold.
    thresholds = [-_NEGLIGIBLE, *codebook.thresholds]
    rows = [bisect.bisect(folds.first_rows, row) - 1 for row in range(num_rows)]
    table = [x for i in rows for x in (thresholds[i], half_gaps[i])]
    table += [x for i in rows for x in (thresholds[i], _bits(i - 1))]
    inwards = zip(magnitudes, (math.inf, *magnitudes))
    outwards = zip(magnitudes, (*magnitudes[1:], math.inf))
    return table + [x for move in (*inwards, *outwards) for x in move]


def _window_tables(codebook: Codebook) -> list[float]:
    """WindowTables of store/trellis.cuh."""
    levels, subsets = codebook.levels, fmt.NUM_SUBSETS
    windows = range(fmt.NUM_LEVELS - subsets + 1)
    table = [levels[w + (s - w) % subsets] for w in windows for s in range(subsets)]
    # The last window has no next one.
    thresholds = [*_window_thresholds(codebook), 0.0]
    return table + [x for t in thresholds for x in (t, 0.0, 0.0, 0.0)]


# A codebook, and the most that factors may differ from 1.
_Side = tuple[Codebook, float]


def _fold_rows(sides: tuple[_Side, ...]) -> int:
    return max(_folds(*side).num_rows for side in sides)


def _sides(layout: TurboFormat | LatentFormat) -> tuple[_Side, ...]:
    """The codebooks of K and V, or of latents."""
    if isinstance(layout, LatentFormat):
        return ((layout.codebook, fmt.UNBIAS_LIMIT),)
    return (layout.key_codebook, fmt.UNBIAS_LIMIT), (layout.value_codebook, 0.0)


@cache
def level_tables(
    layout: TurboFormat | LatentFormat, device: torch.device
) -> torch.Tensor:
    """The fp32 tables of store/quantize.cuh, for K and then V, or for latents."""
    table: list[float] = []
    sides = _sides(layout)
    for codebook, limit in sides:
        if codebook.trellis:
            table += _window_tables(codebook)
        else:
            table += _fold_tables(codebook, limit, _fold_rows(sides))
    # Copied as bytes, because some numbers are the bits of integers.
    packed = bytearray(struct.pack(f"<{len(table)}f", *table))
    return torch.frombuffer(packed, dtype=torch.float32).to(device)


def _window_thresholds(codebook: Codebook) -> list[float]:
    by_branch = zip(*codebook.subset_thresholds)
    return [fp32(t) for branch in by_branch for t in branch]


def _trellis_guess(codebook: Codebook) -> float:
    """Windows to a unit of magnitude. A window has a level of each subset.

    The middle window is at zero.
    """
    thresholds = _window_thresholds(codebook)
    assert thresholds == sorted(thresholds)
    # The middle window w is at w + 1/2 windows.
    count = len(thresholds)
    unit = 1 / _guess(tuple(thresholds[count // 2 :])) * count
    positions = [count * (t / unit + 0.5) for t in thresholds]
    assert all(j < p < j + 1 for j, p in enumerate(positions)), positions
    for significand in range(8, 16):
        products = [fp32(level) * significand for level in codebook.levels]
        assert all(fp32(x) == x for x in products)
    return 1 / unit


class SearchConstants(NamedTuple):
    """The constants that look up nearest levels of K and V in ``level_tables``.

    Latents count as both.

    Attributes:
        fold_rows: Rows of the tables of four-bit codes.
        key_fold_step: The magnitude of K, over the scale, of one of these rows.
        value_fold_step: The magnitude of V, over the scale, of one of these rows.
        key_trellis_guess: Windows of three-bit codes of K to a unit of magnitude.
        value_trellis_guess: Windows of three-bit codes of V to a unit of magnitude.

    """

    fold_rows: int
    key_fold_step: float
    value_fold_step: float
    key_trellis_guess: float
    value_trellis_guess: float


def search_constants(layout: TurboFormat | LatentFormat) -> SearchConstants:
    """The constants that belong to the tables of a layout."""
    sides = _sides(layout)
    key, value = sides[0], sides[-1]
    return SearchConstants(
        _fold_rows(sides),
        _folds(*key).step,
        _folds(*value).step,
        _trellis_guess(key[0]),
        _trellis_guess(value[0]),
    )


@cache
def rotation_fragments(
    head_size: int, device: torch.device, for_query: bool = False
) -> torch.Tensor:
    """The first 16 coordinates of the rotation, as operands of tensor cores.

    For K and V, rows i and i + 8 belong to scale groups of the same lane. For q they
    are neighbours. store/rotate.cuh has the order of columns.

    Returns:
        (in blocks, 32 lanes, 8) fp16.

    """
    assert head_size in SUPPORTED_HEAD_SIZES, head_size
    matrix = rotation_matrix(head_size, torch.device("cpu"), torch.float32)
    vectors = 2 if head_size == 64 else 1
    in_blocks = vectors * head_size // _MMA_ROWS
    num_groups = head_size // fmt.SCALE_GROUP
    fragments = torch.zeros(in_blocks, _WARP_LANES, 8)
    vector_lanes = _MMA_COLUMNS // vectors
    loaders = 4 // vectors
    for lane in range(_WARP_LANES):
        for half in range(2):
            vector, place = divmod(lane // 4, vector_lanes)
            r = place + min(num_groups, _MMA_COLUMNS) * half
            if for_query:
                r = place * 2 + half
            if lane % 4 // loaders != vector:
                continue
            first = 4 * (lane % loaders)
            for block in range(in_blocks):
                d = block * (_MMA_ROWS // vectors) + first
                # Registers have rows i and i + 8 of the first pair, then of the second.
                row = fragments[block, lane]
                row[2 * half : 2 * half + 2] = matrix[d : d + 2, r]
                row[4 + 2 * half : 6 + 2 * half] = matrix[d + 2 : d + 4, r]
    return fragments.to(device=device, dtype=torch.float16)


@cache
def single_fragments(head_size: int, device: torch.device) -> torch.Tensor:
    """The rotation for a warp with a single vector, as in store/rotate_single.cuh.

    Returns:
        (32 * 8 + head_size,) fp16: a fragment of the Hadamard matrix of order 16, (32
        lanes, 8), then the signs, as 0 and -0.

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
