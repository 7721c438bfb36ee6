# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="assignment"
"""The encoder of the turbo format: from vectors to the bytes of a tile.

Rotated vectors come in steps: column f * BLOCK_U + c of step i is code i * FOLD + f of
the unit of column c, in the order of ``triton.scales``. CODEBOOK is ``constants`` of a
codebook of four bits, or ``trellis.trellis_constants`` of one of three bits.
"""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import Codebook, fp32
from vllm.v1.attention.ops.turbo.latent.format import LATENT_CODEBOOKS
from vllm.v1.attention.ops.turbo.triton.codec import (
    nibble_of,
    rotate_halves,
    scale_value,
    store_halves,
    value_pointers,
    value_rows,
)
from vllm.v1.attention.ops.turbo.triton.rotate import load_integers, rotate_integers
from vllm.v1.attention.ops.turbo.triton.scales import (
    choose_scales,
    normaliser_of,
    store_scales,
    unfold,
    unit_of_column,
)
from vllm.v1.attention.ops.turbo.triton.trellis import (
    choose_path,
    choose_trellis_scales,
    store_trellis,
    trellis_constants,
)
from vllm.v1.attention.ops.turbo.triton.unbiased import (
    code_to_move,
    directed_indices,
    magnitude_of,
    nearest_index,
    square_of,
    unbiasing_factor,
)

_HALF = tl.constexpr(fmt.NUM_LEVELS // 2)
_STEPS = tl.constexpr(fmt.SCALE_GROUP)
_SCALE_MAX = tl.constexpr(fmt.SCALE_MAX)


def constants(codebook: Codebook) -> tuple:
    """Magnitudes, the thresholds between them, and the gain of products; 0 without."""
    gain = fp32(codebook.gain * (1 << fmt.PRODUCT_FRACTION_BITS))
    gain = gain if codebook.unbiased else 0.0
    return codebook.magnitudes, codebook.thresholds, gain


# Globals, because each argument makes a launch slower.
_KEYS_4 = tl.constexpr(constants(fmt.KEY_CODEBOOKS[4]))
_KEYS_3 = tl.constexpr(trellis_constants(fmt.KEY_CODEBOOKS[3]))
_VALUES_4 = tl.constexpr(constants(fmt.VALUE_CODEBOOKS[4]))
_VALUES_3 = tl.constexpr(trellis_constants(fmt.VALUE_CODEBOOKS[3]))
_LATENTS_4 = tl.constexpr(constants(LATENT_CODEBOOKS[4]))
_LATENTS_3 = tl.constexpr(trellis_constants(LATENT_CODEBOOKS[3]))


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
    unit,  # [C], of each column
    CODEBOOK: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    BLOCK_U: tl.constexpr,
    FOLD: tl.constexpr,
    IS_VALUE: tl.constexpr,
    direction_ptr,  # [T] fp16 pointers to directions, or None
    token_mask,  # [T]
):
    """The words of the units, int32 [T, U], in the order of ``nibble_of``."""
    UNBIASED: tl.constexpr = CODEBOOK[2] > 0
    if UNBIASED:
        largest = magnitude_of(y[0])
        for i in tl.static_range(1, len(y)):
            largest = tl.maximum(largest, magnitude_of(y[i]))
        normaliser = normaliser_of(tl.max(largest, 1))[:, None]
        square = square_of(y, normaliser)
        factor, rest = unbiasing_factor(y, scale, normaliser, square, CODEBOOK)
        if direction_ptr is None:
            chosen = code_to_move(
                y,
                scale,
                normaliser,
                square,
                factor,
                rest,
                unit,
                CODEBOOK,
                NUM_UNITS,
                BLOCK_U,
                FOLD,
            )
            outwards = tl.where(rest > 0, 1, -1)[:, None]
        else:
            indices = directed_indices(
                y,
                scale,
                normaliser,
                square,
                factor,
                rest,
                unit,
                direction_ptr,
                token_mask,
                CODEBOOK,
                NUM_UNITS,
                BLOCK_U,
                FOLD,
            )
    word = tl.zeros(scale.shape, tl.int32)
    fold = tl.arange(0, FOLD * BLOCK_U) // BLOCK_U
    for i in tl.static_range(len(y)):
        magnitude = magnitude_of(y[i])
        if direction_ptr is not None:
            index = indices >> (4 * i) & 15
        elif UNBIASED:
            index = nearest_index(magnitude * factor[:, None], scale, CODEBOOK)
            coordinate = (i * FOLD + fold) * NUM_UNITS + unit
            index += tl.where(coordinate[None, :] == chosen[:, None], outwards, 0)
        else:
            index = nearest_index(magnitude, scale, CODEBOOK)
        code = tl.where(y[i] < 0, -index + (_HALF - 1), index + _HALF)
        word |= code << (nibble_of(i * FOLD + fold, IS_VALUE) * 4)[None, :]
    return _fold_sum(word, FOLD)


@triton.jit
def _by_trellis(
    y,  # 8 of [T, U] fp32
    BLOCK_G: tl.constexpr,
):
    """Vectors as 16 of [T, G], in a trellis's order, clamped to SCALE_MAX."""
    result = ()
    for i in tl.static_range(len(y)):
        parts = tl.reshape(_clamped(y[i]), [y[i].shape[0], 2, BLOCK_G])
        even, odd = tl.split(tl.permute(parts, 0, 2, 1))
        result = result + (even, odd)
    return result


@triton.jit
def _clamped(y):
    return tl.minimum(tl.maximum(y, -_SCALE_MAX), _SCALE_MAX)


@triton.jit
def _by_trellis_through(
    row_ptr,  # [T] fp32 pointers to room for a vector each
    y,  # NUM_STEPS of [T, C] fp32
    unit,  # [C], of each column
    token_mask,  # [T]
    HEAD_SIZE: tl.constexpr,
    BLOCK_U: tl.constexpr,
    FOLD: tl.constexpr,
):
    """``_by_trellis`` by way of memory.

    A dot's result has four elements a thread, and copies of them in idle warps. Loaded
    numbers have one element a thread, so that each has a quarter of the steps to do.
    """
    NUM_UNITS: tl.constexpr = HEAD_SIZE // 8
    NUM_GROUPS: tl.constexpr = HEAD_SIZE // 16
    fold = tl.arange(0, FOLD * BLOCK_U) // BLOCK_U
    mask = token_mask[:, None] & (unit < NUM_UNITS)[None, :]
    for i in tl.static_range(len(y)):
        coordinate = (i * FOLD + fold) * NUM_UNITS + unit
        p_y = row_ptr[:, None] + coordinate[None, :]
        tl.store(p_y, _clamped(y[i]), mask=mask)
    tl.debug_barrier()
    group = tl.arange(0, BLOCK_U // 2)
    mask = token_mask[:, None] & (group < NUM_GROUPS)[None, :]
    result = ()
    for e in tl.static_range(_STEPS):
        p_y = row_ptr[:, None] + (e * NUM_GROUPS + group)[None, :]
        result = result + (tl.load(p_y, mask=mask, other=0.0),)
    return result


@triton.jit
def encode_vectors(
    x_ptr,  # [T] pointers to vectors
    tile_ptr,  # [T] uint8 pointers to tiles
    token,  # [T] index in the tile
    token_mask,  # [T]
    matrix_ptr,  # [D, D] fp16, entries +-1
    scratch_ptr,  # [T] fp32 pointers to room for a vector each, or None
    inverse_sqrt_d,
    IS_KEY: tl.constexpr,
    BITS: tl.constexpr,
    CODES_OFFSET: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_U: tl.constexpr,
    FOLD: tl.constexpr,
    offset_ptr=None,  # [T] pointers to fp32 vectors, taken off first
    IS_LATENT: tl.constexpr = False,
    direction_ptr=None,  # [T] fp16 pointers: ``interface.QueryDirection``
):
    """Rotate and quantise vectors of K or V, or latents, into their tiles.

    Latents have a group's coordinates side by side: coordinate r here is coordinate
    ``r % G * 16 + r // G`` of the rotated latent, and the matrix has its columns in
    this order. All else but the order of words is as for keys.
    """
    NUM_UNITS: tl.constexpr = HEAD_SIZE // 8
    NUM_GROUPS: tl.constexpr = HEAD_SIZE // 16
    BLOCK_G: tl.constexpr = BLOCK_U // 2
    integers, _, unit_size = load_integers(
        x_ptr, token_mask, HEAD_SIZE, BLOCK_D, False, offset_ptr
    )
    factor = (unit_size * inverse_sqrt_d)[:, None]
    column = tl.arange(0, FOLD * BLOCK_U)
    unit = unit_of_column(column % BLOCK_U, NUM_UNITS, BLOCK_G, NUM_GROUPS)
    y = ()
    for i in tl.static_range(8 // FOLD):
        coordinate = (i * FOLD + column // BLOCK_U) * NUM_UNITS + unit
        inside = unit < NUM_UNITS
        rotated = rotate_integers(
            integers, matrix_ptr, coordinate, inside, HEAD_SIZE, BLOCK_D
        )
        y = y + (rotated * factor,)
    if BITS == 4:
        SIDE: tl.constexpr = _KEYS_4 if IS_KEY else _VALUES_4
        CODEBOOK: tl.constexpr = _LATENTS_4 if IS_LATENT else SIDE
        scale_code = choose_scales(y, CODEBOOK, BLOCK_G, SCALE_WORDS)
        scale = unfold(scale_value(scale_code).to(tl.float32), FOLD * BLOCK_U)
        word = _units(
            y,
            scale,
            unit,
            CODEBOOK,
            NUM_UNITS,
            BLOCK_U,
            FOLD,
            not IS_KEY,
            direction_ptr,
            token_mask,
        )
        u = unit_of_column(tl.arange(0, BLOCK_U), NUM_UNITS, BLOCK_G, NUM_GROUPS)
        mask = token_mask[:, None] & (u < NUM_UNITS)[None, :]
        if IS_LATENT:
            # Half of a word has codes 0 to 3 of a unit. The same half of the next word
            # has codes 4 to 7.
            row_ptr = (tile_ptr + (CODES_OFFSET + token * (HEAD_SIZE // 2)))[:, None]
            half = u % NUM_GROUPS * 4 + u // NUM_GROUPS
            p_half = row_ptr.to(tl.pointer_type(tl.int16)) + half[None, :]
            store_halves(p_half, word, mask)
        elif IS_KEY:
            row_ptr = (tile_ptr + (CODES_OFFSET + token * (HEAD_SIZE // 2)))[:, None]
            p_word = row_ptr.to(tl.pointer_type(tl.int32)) + u[None, :]
            tl.store(p_word, word, mask=mask)
        else:
            row_ptr = value_rows(tile_ptr, token, CODES_OFFSET, 16, HEAD_SIZE)[:, None]
            p_half = value_pointers(row_ptr, (u % NUM_GROUPS)[None, :], 16)
            p_half += (u // NUM_GROUPS * 4)[None, :]
            store_halves(p_half, rotate_halves(word, 2), mask)
    else:
        SIDE: tl.constexpr = _KEYS_3 if IS_KEY else _VALUES_3
        TRELLIS: tl.constexpr = _LATENTS_3 if IS_LATENT else SIDE
        if scratch_ptr is None:
            groups = _by_trellis(y, BLOCK_G)
        else:
            groups = _by_trellis_through(
                scratch_ptr, y, unit, token_mask, HEAD_SIZE, BLOCK_U, FOLD
            )
        scale_code = choose_trellis_scales(groups, TRELLIS, SCALE_WORDS)
        scale = scale_value(scale_code).to(tl.float32)
        if direction_ptr is None:
            direction = None
        else:
            group = tl.arange(0, BLOCK_G)
            direction = (
                direction_ptr[:, None] + group[None, :],
                token_mask[:, None] & (group < NUM_GROUPS)[None, :],
            )
        path, search = choose_path(groups, scale, TRELLIS, HEAD_SIZE, direction)
        store_trellis(
            groups,
            search,
            direction,
            scale,
            path,
            tile_ptr,
            token,
            token_mask,
            CODES_OFFSET,
            IS_KEY,
            TRELLIS,
            HEAD_SIZE,
            IS_LATENT,
        )
    store_scales(scale_code, tile_ptr + SCALES_OFFSET, token, token_mask, SCALE_WORDS)
