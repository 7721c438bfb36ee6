# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Store: rotate and quantise K and V into their pages, rotate q, in one launch."""

from typing import NamedTuple

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.reference import fp32, inverse_sqrt
from vllm.v1.attention.ops.turbo.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.triton_codec import (
    LOG2_E,
    MIN_OUTPUT_COLUMNS,
    scale_value,
    tile_pointers,
)
from vllm.v1.attention.ops.turbo.triton_scales import (
    choose_scales,
    exponent_of,
    nearest_level,
    power_of_two,
    round_to_integer,
    store_scales,
    unfold,
    unit_of_column,
)


class StoreTuning(NamedTuple):
    """How the store kernel is launched.

    Attributes:
        block_t: Tokens a program; tensor cores take 16 rows a warp.
        fold: Codes of a unit that a step encodes, each in a column of its own.
            More columns are more work for warps to share.
        num_warps: Warps a program.

    """

    block_t: int
    fold: int
    num_warps: int


# Up to this many tokens a launch is tuned for latency.
SMALL_BATCH = 1024


def default_tuning(num_tokens: int, head_size: int) -> StoreTuning:
    """Launch parameters, chosen on an H200 at head size 128.

    A program is a chain of steps, so few tokens take few steps by many warps;
    many tokens fill the GPU anyway, and then a step for each code repeats
    least. Larger heads take more steps, for a step's part of the rotation has
    to fit into shared memory.
    """
    if num_tokens > SMALL_BATCH or head_size > 256:
        return StoreTuning(block_t=64 if head_size <= 256 else 16, fold=1, num_warps=4)
    return StoreTuning(block_t=16, fold=8 if head_size <= 128 else 4, num_warps=8)


_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_TILE = tl.constexpr(fmt.TILE_TOKENS)
_SCALE_MAX = tl.constexpr(fmt.SCALE_MAX)
_ROTATION_EXPONENT = tl.constexpr(fmt.ROTATION_EXPONENT)
_MIN_INPUT_EXPONENT = tl.constexpr(fmt.MIN_INPUT_EXPONENT)
_ERROR_MAX_EXPONENT = tl.constexpr(fmt.ERROR_MAX_EXPONENT)
_PRODUCT_UNIT = float(1 << fmt.PRODUCT_FRACTION_BITS)
_SQUARE_FACTOR = tl.constexpr(_PRODUCT_UNIT)
_UNBIAS_ROUNDS = tl.constexpr(fmt.UNBIAS_ROUNDS)
_UNBIAS_LIMIT = tl.constexpr(fmt.UNBIAS_LIMIT)
# Not arguments: a launch takes time for each of those.
_KEY_THRESHOLDS_4 = tl.constexpr(fmt.KEY_CODEBOOKS[4].thresholds)
_KEY_THRESHOLDS_3 = tl.constexpr(fmt.KEY_CODEBOOKS[3].thresholds)
_KEY_MAGNITUDES_4 = tl.constexpr(fmt.KEY_CODEBOOKS[4].magnitudes)
_KEY_MAGNITUDES_3 = tl.constexpr(fmt.KEY_CODEBOOKS[3].magnitudes)
_VALUE_THRESHOLDS_4 = tl.constexpr(fmt.VALUE_CODEBOOKS[4].thresholds)
_VALUE_THRESHOLDS_3 = tl.constexpr(fmt.VALUE_CODEBOOKS[3].thresholds)
_VALUE_MAGNITUDES_4 = tl.constexpr(fmt.VALUE_CODEBOOKS[4].magnitudes)
_VALUE_MAGNITUDES_3 = tl.constexpr(fmt.VALUE_CODEBOOKS[3].magnitudes)
_KEY_GAIN_4 = tl.constexpr(fp32(fmt.KEY_CODEBOOKS[4].gain * _PRODUCT_UNIT))
_KEY_GAIN_3 = tl.constexpr(fp32(fmt.KEY_CODEBOOKS[3].gain * _PRODUCT_UNIT))
_SCALE_OFFSETS_4 = tl.constexpr(fmt.SCALE_OFFSETS[4])
_SCALE_OFFSETS_3 = tl.constexpr(fmt.SCALE_OFFSETS[3])


@triton.jit
def load_integers(
    x_ptr,  # [T] pointers to vectors
    token_mask,  # [T]
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEEP_NAN: tl.constexpr = False,
):
    """Load vectors in block fixed point (see ``reference.rotate``).

    Returns:
        Integers, fp16 [T, D]; what rounding took from them, in 1/2048, fp16
        [T, D]; and the fp32 unit [T] that the integers are counted in. With
        KEEP_NAN the unit of a vector with a NaN is NaN; else the NaN counts as
        zero.

    """
    d = tl.arange(0, BLOCK_D)
    mask = token_mask[:, None] & (d < HEAD_SIZE)[None, :]
    x = tl.load(x_ptr[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    num_nan = tl.sum((x != x).to(tl.int32), 1)
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, -_FP32_MAX), _FP32_MAX)
    exponent = exponent_of(tl.max(tl.abs(x), 1))
    exponent = tl.maximum(exponent, _MIN_INPUT_EXPONENT)
    to_integer = power_of_two(-exponent + _ROTATION_EXPONENT)[:, None]
    x = x * to_integer
    integers = tl.floor(x + 0.5)
    rest = (x - integers) * 2048.0
    unit = power_of_two(exponent - _ROTATION_EXPONENT)
    if KEEP_NAN:
        unit = tl.where(num_nan > 0, float("nan"), unit)
    return integers.to(tl.float16), rest.to(tl.float16), unit


@triton.jit
def rotate_integers(
    integers,  # [T, D] fp16
    matrix_ptr,  # [D, D] fp16, entries +-1
    coordinate,  # [C]
    coordinate_mask,  # [C]
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Some coordinates of H (s * x), exact, fp32 [T, C]."""
    d = tl.arange(0, BLOCK_D)
    p_matrix = matrix_ptr + d[:, None] * HEAD_SIZE + coordinate[None, :]
    mask = (d < HEAD_SIZE)[:, None] & coordinate_mask[None, :]
    matrix = tl.load(p_matrix, mask=mask, other=0.0)
    return tl.dot(integers, matrix)


@triton.jit
def _fold_sum(x, FOLD: tl.constexpr):
    """Sum over the columns of each unit, [T, FOLD * U] to [T, U]."""
    UNITS: tl.constexpr = x.shape[1] // FOLD
    if FOLD > 1:
        x = tl.sum(tl.reshape(x, [x.shape[0], FOLD, UNITS]), 1)
    return x


@triton.jit
def _unbiasing_factor(
    y,  # NUM_STEPS of [T, C] fp32
    scale,  # [T, C] fp32
    THRESHOLDS: tl.constexpr,
    MAGNITUDES: tl.constexpr,
    GAIN: tl.constexpr,
    BITS: tl.constexpr,
):
    """See ``reference.unbiasing_factor``: fp32 [T, 1]."""
    largest = tl.abs(y[0])
    for i in tl.static_range(1, len(y)):
        largest = tl.maximum(largest, tl.abs(y[i]))
    largest = tl.minimum(tl.max(largest, 1), _SCALE_MAX)
    exponent = tl.maximum(exponent_of(largest), -_ERROR_MAX_EXPONENT)
    normaliser = power_of_two(-exponent)[:, None]
    square = tl.zeros_like(scale)
    for i in tl.static_range(len(y)):
        x = tl.minimum(tl.abs(y[i]), _SCALE_MAX) * normaliser
        square += round_to_integer(x * x * _SQUARE_FACTOR)
    square = tl.sum(square, 1)

    factor = tl.full(square.shape, 1.0, tl.float32)
    best_factor = factor
    best_rest = tl.full(square.shape, float("inf"), tl.float32)
    for _ in tl.static_range(_UNBIAS_ROUNDS + 1):
        product = tl.zeros_like(scale)
        for i in tl.static_range(len(y)):
            magnitude = tl.minimum(tl.abs(y[i]), _SCALE_MAX)
            scaled = magnitude * factor[:, None]
            level = nearest_level(scaled, scale, THRESHOLDS, MAGNITUDES, BITS)
            decoded = level * scale * normaliser
            product += round_to_integer(magnitude * normaliser * decoded * GAIN)
        rest = square - tl.sum(product, 1)
        better = tl.abs(rest) < tl.abs(best_rest)
        best_factor = tl.where(better, factor, best_factor)
        best_rest = tl.where(better, rest, best_rest)
        factor += tl.div_rn(rest, tl.maximum(square, 1.0))
        factor = tl.maximum(factor, 1.0 - _UNBIAS_LIMIT)
        factor = tl.minimum(factor, 1.0 + _UNBIAS_LIMIT)
    return best_factor[:, None]


@triton.jit
def _encode_vectors(
    x_ptr,  # [T] pointers to vectors
    tile_ptr,  # [T] uint8 pointers to tiles
    token,  # [T] place in the tile
    token_mask,  # [T]
    matrix_ptr,
    inverse_sqrt_d,
    CODES_OFFSET: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    MAGNITUDES: tl.constexpr,
    SCALE_OFFSETS: tl.constexpr,
    GAIN: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    BITS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_U: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Encode vectors, each without bias if there is a GAIN.

    Column f * BLOCK_U + c of step i is code i * FOLD + f of the unit of column c.
    """
    NUM_UNITS: tl.constexpr = HEAD_SIZE // 8
    NUM_GROUPS: tl.constexpr = SCALE_WORDS[0] * SCALE_WORDS[2]
    BLOCK_G: tl.constexpr = BLOCK_U // ((NUM_UNITS + NUM_GROUPS - 1) // NUM_GROUPS)
    integers, _, unit_size = load_integers(x_ptr, token_mask, HEAD_SIZE, BLOCK_D)
    factor = (unit_size * inverse_sqrt_d)[:, None]
    column = tl.arange(0, FOLD * BLOCK_U)
    column_unit = unit_of_column(column % BLOCK_U, NUM_UNITS, BLOCK_G, NUM_GROUPS)
    y = ()
    for i in tl.static_range(8 // FOLD):
        coordinate = (i * FOLD + column // BLOCK_U) * NUM_UNITS + column_unit
        rotated = rotate_integers(
            integers,
            matrix_ptr,
            coordinate,
            column_unit < NUM_UNITS,
            HEAD_SIZE,
            BLOCK_D,
        )
        y = y + (rotated * factor,)
    scale_code = choose_scales(
        y, THRESHOLDS, MAGNITUDES, SCALE_OFFSETS, BITS, BLOCK_G, SCALE_WORDS
    )
    scales_ptr = tile_ptr + SCALES_OFFSET
    store_scales(scale_code, scales_ptr, token, token_mask, SCALE_WORDS)

    scale = unfold(scale_value(scale_code).to(tl.float32), FOLD * BLOCK_U)
    if GAIN > 0:
        factor = _unbiasing_factor(y, scale, THRESHOLDS, MAGNITUDES, GAIN, BITS)
    HALF: tl.constexpr = 1 << (BITS - 1)
    low = tl.zeros(scale.shape, tl.int32)
    high = tl.zeros(scale.shape, tl.int32)
    for i in tl.static_range(8 // FOLD):
        magnitude = tl.minimum(tl.abs(y[i]), _SCALE_MAX)
        if GAIN > 0:
            magnitude *= factor
        level = tl.zeros(scale.shape, tl.int32)
        for j in tl.static_range((1 << (BITS - 1)) - 1):
            level += (magnitude > scale * THRESHOLDS[j]).to(tl.int32)
        code = tl.where(y[i] < 0, -level + (HALF - 1), level + HALF)
        index = (i * FOLD + column // BLOCK_U)[None, :]
        if BITS == 4:
            low |= code << (index * 4)
        else:
            low |= (code & 3) << (index * 2)
            high |= (code >> 2) << index
    low = _fold_sum(low, FOLD)
    high = _fold_sum(high, FOLD)

    unit = unit_of_column(tl.arange(0, BLOCK_U), NUM_UNITS, BLOCK_G, NUM_GROUPS)
    mask = token_mask[:, None] & (unit < NUM_UNITS)[None, :]
    codes_ptr = tile_ptr + CODES_OFFSET
    if BITS == 4:
        row_ptr = (codes_ptr + token * (HEAD_SIZE // 2))[:, None]
        tl.store(row_ptr.to(tl.pointer_type(tl.int32)) + unit[None, :], low, mask=mask)
    else:
        # The orders of format.low_plane_units and format.high_plane_units.
        part = unit % (NUM_UNITS // 2) * 2 + unit // (NUM_UNITS // 2)
        row_ptr = (codes_ptr + token * (HEAD_SIZE // 4))[:, None]
        p_low = row_ptr.to(tl.pointer_type(tl.int16)) + part[None, :]
        tl.store(p_low, low.to(tl.int16), mask=mask)
        part = unit
        if NUM_UNITS % 4 == 0:
            part = unit % (NUM_UNITS // 4) * 4 + unit // (NUM_UNITS // 4)
        row_ptr = (codes_ptr + _TILE * (HEAD_SIZE // 4) + token * NUM_UNITS)[:, None]
        tl.store(row_ptr + part[None, :], high.to(tl.uint8), mask=mask)


@triton.jit
def _rotate_query(
    query_ptr,  # [B, Hq, D]
    rotated_query_ptr,  # [B, Hq, D] fp16
    query_scale_ptr,  # [B, Hq] fp32
    t,  # [T]
    head,
    matrix_ptr,
    num_queries,
    query_factor,
    inverse_sqrt_d,
    stride_query_token,
    stride_query_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    mask = t < num_queries
    x_ptr = query_ptr + t * stride_query_token + head * stride_query_head
    integers, _, unit_size = load_integers(x_ptr, mask, HEAD_SIZE, BLOCK_D, True)
    row = t * NUM_HEADS + head
    tl.store(query_scale_ptr + row, unit_size * query_factor, mask=mask)
    for start in tl.static_range(0, HEAD_SIZE, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        inside = c < HEAD_SIZE
        rotated = rotate_integers(integers, matrix_ptr, c, inside, HEAD_SIZE, BLOCK_D)
        p_rotated = rotated_query_ptr + (row * HEAD_SIZE)[:, None] + c[None, :]
        rotated = (rotated * inverse_sqrt_d).to(tl.float16)
        tl.store(p_rotated, rotated, mask=mask[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_queries"])
def _store_kernel(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    query_ptr,  # [B, Hq, D]
    kv_cache_ptr,  # [num_blocks, H, N, C] uint8
    slot_mapping_ptr,  # [T]
    matrix_ptr,  # [D, D] fp16
    rotated_query_ptr,  # [B, Hq, D] fp16
    query_scale_ptr,  # [B, Hq] fp32
    num_tokens,
    num_queries,
    query_factor,
    inverse_sqrt_d,
    block_size,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_query_token,
    stride_query_head,
    stride_cache_block,
    stride_cache_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_SCALE_WORDS: tl.constexpr,
    VALUE_SCALE_WORDS: tl.constexpr,
    VALUE_CODES_OFFSET: tl.constexpr,
    KEY_SCALES_OFFSET: tl.constexpr,
    VALUE_SCALES_OFFSET: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_U: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Program (i, j): tokens [i * BLOCK_T, ...) of head j of K, V, then q."""
    head = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    if head >= 2 * NUM_KV_HEADS:
        # Nested, for the second is no constant.
        if NUM_HEADS > 0:  # noqa: SIM102
            if tl.program_id(0) * BLOCK_T < num_queries:
                _rotate_query(
                    query_ptr,
                    rotated_query_ptr,
                    query_scale_ptr,
                    t,
                    head - 2 * NUM_KV_HEADS,
                    matrix_ptr,
                    num_queries,
                    query_factor,
                    inverse_sqrt_d,
                    stride_query_token,
                    stride_query_head,
                    NUM_HEADS,
                    HEAD_SIZE,
                    BLOCK_D,
                    BLOCK_C,
                )
    else:
        slot = tl.load(slot_mapping_ptr + t, mask=t < num_tokens, other=-1)
        slot = slot.to(tl.int64)
        mask = slot >= 0
        slot = tl.where(mask, slot, 0)
        kv_head = head % NUM_KV_HEADS
        page_ptr = kv_cache_ptr + slot // block_size * stride_cache_block
        page_ptr += kv_head.to(tl.int64) * stride_cache_head
        tile_ptr, token = tile_pointers(page_ptr, slot % block_size, TILE_BYTES)
        if head < NUM_KV_HEADS:
            x_ptr = key_ptr + t * stride_key_token + kv_head * stride_key_head
            _encode_vectors(
                x_ptr,
                tile_ptr,
                token,
                mask,
                matrix_ptr,
                inverse_sqrt_d,
                0,
                KEY_SCALES_OFFSET,
                _KEY_THRESHOLDS_4 if KEY_BITS == 4 else _KEY_THRESHOLDS_3,
                _KEY_MAGNITUDES_4 if KEY_BITS == 4 else _KEY_MAGNITUDES_3,
                _SCALE_OFFSETS_4 if KEY_BITS == 4 else _SCALE_OFFSETS_3,
                _KEY_GAIN_4 if KEY_BITS == 4 else _KEY_GAIN_3,
                KEY_SCALE_WORDS,
                KEY_BITS,
                HEAD_SIZE,
                BLOCK_D,
                BLOCK_U,
                FOLD,
            )
        else:
            x_ptr = value_ptr + t * stride_value_token + kv_head * stride_value_head
            _encode_vectors(
                x_ptr,
                tile_ptr,
                token,
                mask,
                matrix_ptr,
                inverse_sqrt_d,
                VALUE_CODES_OFFSET,
                VALUE_SCALES_OFFSET,
                _VALUE_THRESHOLDS_4 if VALUE_BITS == 4 else _VALUE_THRESHOLDS_3,
                _VALUE_MAGNITUDES_4 if VALUE_BITS == 4 else _VALUE_MAGNITUDES_3,
                _SCALE_OFFSETS_4 if VALUE_BITS == 4 else _SCALE_OFFSETS_3,
                0.0,
                VALUE_SCALE_WORDS,
                VALUE_BITS,
                HEAD_SIZE,
                BLOCK_D,
                BLOCK_U,
                FOLD,
            )


def store(
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TurboFormat,
    query: torch.Tensor | None = None,
    rotated_query: torch.Tensor | None = None,
    query_scale: torch.Tensor | None = None,
    scale: float = 1.0,
    tuning: StoreTuning | None = None,
) -> None:
    """Quantise K and V into their slots and, if given, rotate q for decoding.

    Args:
        kv_cache: (num_blocks, H, N, C) uint8; a (block, head) is contiguous and
            starts at a multiple of 16 bytes.
        slot_mapping: (T,) block * N + position, or -1 to skip the token.
        key: (T', H, D) fp16 or bf16, T' >= T, last axis contiguous.
        value: (T', H, D), likewise.
        layout: The cache's format.
        query: (B, Hq, D), likewise; the decode queries.
        rotated_query: (B, Hq, D) fp16 output: rotated, each row divided by a
            power of two.
        query_scale: (B, Hq) fp32 output: what scores of that row are to be
            multiplied by; it holds ``scale``, log2(e) and the keys' gain.
        scale: Softmax scale.
        tuning: Launch parameters; None to choose by the number of tokens.

    """
    num_tokens = slot_mapping.shape[0]
    num_kv_heads, head_size = key.shape[1], layout.head_size
    num_queries = num_heads = 0
    if query is not None:
        assert query.shape[0] <= num_tokens, (query.shape, num_tokens)
        assert rotated_query is not None and query_scale is not None
        num_queries, num_heads = query.shape[:2]
        assert rotated_query.is_contiguous() and query_scale.is_contiguous()
    assert kv_cache.shape[1:] == (num_kv_heads, kv_cache.shape[2], layout.slot_size)
    assert kv_cache.stride()[2:] == (layout.slot_size, 1), kv_cache.stride()
    assert key.stride(2) == value.stride(2) == 1
    if num_tokens == 0:
        return
    block_d = triton.next_power_of_2(head_size)
    if tuning is None:
        tuning = default_tuning(num_tokens, head_size)
    grid = (triton.cdiv(num_tokens, tuning.block_t), 2 * num_kv_heads + num_heads)
    _store_kernel[grid](
        key,
        value,
        query if query is not None else key,
        kv_cache,
        slot_mapping,
        rotation_matrix(head_size, kv_cache.device),
        rotated_query,
        query_scale,
        num_tokens,
        num_queries,
        scale * LOG2_E * layout.key_codebook.gain,
        inverse_sqrt(head_size),
        kv_cache.shape[2],
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        query.stride(0) if query is not None else 0,
        query.stride(1) if query is not None else 0,
        kv_cache.stride(0),
        kv_cache.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        KEY_BITS=layout.key_bits,
        VALUE_BITS=layout.value_bits,
        KEY_SCALE_WORDS=tuple(layout.key_scale_words),
        VALUE_SCALE_WORDS=tuple(layout.value_scale_words),
        VALUE_CODES_OFFSET=layout.value_codes_offset,
        KEY_SCALES_OFFSET=layout.key_scales_offset,
        VALUE_SCALES_OFFSET=layout.value_scales_offset,
        TILE_BYTES=layout.tile_bytes,
        HEAD_SIZE=head_size,
        BLOCK_T=tuning.block_t,
        BLOCK_D=block_d,
        BLOCK_C=min(block_d, 64),
        BLOCK_U=max(MIN_OUTPUT_COLUMNS, triton.next_power_of_2(layout.num_units)),
        FOLD=tuning.fold,
        num_warps=tuning.num_warps,
        # The bytes are exact: no multiply-add may be fused.
        enable_fp_fusion=False,
    )
