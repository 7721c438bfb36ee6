# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="no-redef"
"""The kernels of ``triton.store``."""

from typing import NamedTuple

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.triton.encode import encode_vectors
from vllm.v1.attention.ops.turbo.triton.offset import direction_row, offset_row
from vllm.v1.attention.ops.turbo.triton.pages import tile_pointers
from vllm.v1.attention.ops.turbo.triton.rotate import load_integers, rotate_integers


class StoreStrides(NamedTuple):
    """Strides between tokens or blocks, and between heads of one, in elements."""

    key_token: int
    key_head: int
    value_token: int
    value_head: int
    query_token: int
    query_head: int
    cache_block: int
    cache_head: int


class ValueRotation(NamedTuple):
    """The rotation of V where its head size is not that of K and q.

    Attributes:
        matrix: [D, D] fp16, entries +-1.
        inverse_sqrt_d: 1 / sqrt(D), fp32.

    """

    matrix: torch.Tensor
    inverse_sqrt_d: float


@triton.jit
def _rotate_query(
    query_ptr,  # [B, Hq, D]
    rotated_query,  # ``RotatedQuery``, written
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
):
    BLOCK_C: tl.constexpr = BLOCK_D if BLOCK_D < 64 else 64
    mask = t < num_queries
    x_ptr = query_ptr + t * stride_query_token + head * stride_query_head
    integers, _, unit_size = load_integers(x_ptr, mask, HEAD_SIZE, BLOCK_D, True)
    row = t * NUM_HEADS + head
    tl.store(rotated_query.scale + row, unit_size * query_factor, mask=mask)
    for start in tl.static_range(0, HEAD_SIZE, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        inside = c < HEAD_SIZE
        rotated = rotate_integers(integers, matrix_ptr, c, inside, HEAD_SIZE, BLOCK_D)
        p_rotated = rotated_query.vectors + (row * HEAD_SIZE)[:, None] + c[None, :]
        rotated = (rotated * inverse_sqrt_d).to(tl.float16)
        tl.store(p_rotated, rotated, mask=mask[:, None] & inside[None, :])


@triton.jit
def _positions(
    key_offset,  # ``KeyOffset``, or None
    query_direction,  # ``QueryDirection``, or None
    t,  # [T]
    num_seqs,
    num_steps,
):
    """Positions of tokens, [T], by a binary search for their sequences.

    Both have the same sequences. With neither, positions have no meaning.
    """
    position = t
    if key_offset is not None or query_direction is not None:
        by_place = query_direction if key_offset is None else key_offset
        first = tl.zeros_like(t)
        last = first + num_seqs
        for _ in range(num_steps):
            middle = (first + last) // 2
            begins = tl.load(by_place.query_start_loc + middle) <= t
            first = tl.where(begins, middle, first)
            last = tl.where(begins, last, middle)
        first = tl.minimum(first, num_seqs - 1)
        behind = tl.load(by_place.query_start_loc + first + 1) - t
        position = tl.load(by_place.seq_lens + first) - behind
    return position


@triton.jit(do_not_specialize=["num_queries"])
def rotate_query_kernel(
    query_ptr,  # [B, Hq, D]
    rotated_query,  # ``RotatedQuery``: [B, Hq, D] fp16 and [B, Hq] fp32
    matrix_ptr,  # [D, D] fp16
    num_queries,
    query_factor,
    inverse_sqrt_d,
    stride_query_token,
    stride_query_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (i, j): tokens [i * BLOCK_T, ...) of query head j."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    _rotate_query(
        query_ptr,
        rotated_query,
        t,
        tl.program_id(1),
        matrix_ptr,
        num_queries,
        query_factor,
        inverse_sqrt_d,
        stride_query_token,
        stride_query_head,
        NUM_HEADS,
        HEAD_SIZE,
        BLOCK_D,
    )


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_queries",
        "num_seqs",
        "num_steps",
        "num_offsets",
        "num_directions",
    ]
)
def store_kernel(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D of V]
    query_ptr,  # [B, Hq, D]
    kv_cache_ptr,  # [num_blocks, H, N, C] uint8
    slot_mapping_ptr,  # [T]
    matrix_ptr,  # [D, D] fp16
    rotated_query,  # ``RotatedQuery``: [B, Hq, D] fp16 and [B, Hq] fp32
    scratch_ptr,  # [T, 2 * H, the larger D] fp32, or None
    key_offset,  # ``KeyOffset``: [G, H, D] fp32, [R] and [R + 1]; or None
    num_seqs,
    num_steps,
    num_offsets,
    num_tokens,
    num_queries,
    query_factor,
    inverse_sqrt_d,
    block_size,
    strides,  # ``StoreStrides``
    value_rotation,  # ``ValueRotation``, or None if K and V have one head size
    query_direction,  # ``QueryDirection``: [G, H, D] fp16, [R] and [R + 1]; or None
    num_directions,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_U_V: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Program (i, j): tokens [i * BLOCK_T, ...) of head j of K, V, then q."""
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size
    BLOCK_D: tl.constexpr = LAYOUT.block_d
    TILE_BYTES: tl.constexpr = LAYOUT.tile_bytes
    HEAD_SIZE_V: tl.constexpr = LAYOUT.head_size_v
    BLOCK_D_V: tl.constexpr = LAYOUT.block_d_v
    ROW_SIZE: tl.constexpr = HEAD_SIZE if HEAD_SIZE > HEAD_SIZE_V else HEAD_SIZE_V
    SCALE_WORDS: tl.constexpr = LAYOUT.scale_words
    SCALE_WORDS_V: tl.constexpr = LAYOUT.scale_words_v
    KEY_BITS: tl.constexpr = LAYOUT.key_bits
    VALUE_BITS: tl.constexpr = LAYOUT.value_bits
    head = tl.program_id(1)
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    if head >= 2 * NUM_KV_HEADS:
        # Nested, because the second condition is not a constant.
        if NUM_HEADS > 0:  # noqa: SIM102
            if tl.program_id(0) * BLOCK_T < num_queries:
                _rotate_query(
                    query_ptr,
                    rotated_query,
                    o_t,
                    head - 2 * NUM_KV_HEADS,
                    matrix_ptr,
                    num_queries,
                    query_factor,
                    inverse_sqrt_d,
                    strides.query_token,
                    strides.query_head,
                    NUM_HEADS,
                    HEAD_SIZE,
                    BLOCK_D,
                )
    else:
        slot = tl.load(slot_mapping_ptr + o_t, mask=o_t < num_tokens, other=-1)
        slot = slot.to(tl.int64)
        m_t = slot >= 0
        slot = tl.where(m_t, slot, 0)
        kv_head = head % NUM_KV_HEADS
        page_ptr = kv_cache_ptr + slot // block_size * strides.cache_block
        page_ptr += kv_head.to(tl.int64) * strides.cache_head
        tile_ptr, token = tile_pointers(page_ptr, slot % block_size, TILE_BYTES)
        # Three-bit codes need either a step for each code, or the scratch.
        if scratch_ptr is None:
            row_ptr = scratch_ptr
            TRELLIS_FOLD: tl.constexpr = 1
        else:
            row_ptr = scratch_ptr + (o_t * (2 * NUM_KV_HEADS) + head) * ROW_SIZE
            TRELLIS_FOLD: tl.constexpr = FOLD
        if head < NUM_KV_HEADS:
            x_ptr = key_ptr + o_t * strides.key_token + kv_head * strides.key_head
            position = _positions(key_offset, query_direction, o_t, num_seqs, num_steps)
            if key_offset is None:
                own_offset_ptr = None
            else:
                row = offset_row(position, num_offsets, OFFSET_SEGMENT) * NUM_KV_HEADS
                own_offset_ptr = key_offset.table + (row + kv_head) * HEAD_SIZE
            if query_direction is None:
                direction_ptr = None
            else:
                row = direction_row(position, num_directions) * NUM_KV_HEADS
                direction_ptr = query_direction.table + (row + kv_head) * HEAD_SIZE
            encode_vectors(
                x_ptr,
                tile_ptr,
                token,
                m_t,
                matrix_ptr,
                row_ptr,
                inverse_sqrt_d,
                True,
                KEY_BITS,
                0,
                LAYOUT.key_scales_offset,
                SCALE_WORDS,
                HEAD_SIZE,
                BLOCK_D,
                BLOCK_U,
                FOLD if KEY_BITS == 4 else TRELLIS_FOLD,
                own_offset_ptr,
                direction_ptr=direction_ptr,
            )
        else:
            x_ptr = value_ptr + o_t * strides.value_token + kv_head * strides.value_head
            if value_rotation is not None:
                matrix_ptr = value_rotation.matrix
                inverse_sqrt_d = value_rotation.inverse_sqrt_d
            encode_vectors(
                x_ptr,
                tile_ptr,
                token,
                m_t,
                matrix_ptr,
                row_ptr,
                inverse_sqrt_d,
                False,
                VALUE_BITS,
                LAYOUT.value_codes_offset,
                LAYOUT.value_scales_offset,
                SCALE_WORDS_V,
                HEAD_SIZE_V,
                BLOCK_D_V,
                BLOCK_U_V,
                FOLD if VALUE_BITS == 4 else TRELLIS_FOLD,
            )
