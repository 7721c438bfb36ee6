# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="no-redef"
"""The kernels of ``triton.store``."""

from typing import NamedTuple

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.triton.encode import encode_vectors
from vllm.v1.attention.ops.turbo.triton.offset import offset_row
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
def _offset_rows(
    key_offset,  # ``KeyOffset``
    t,  # [T]
    num_seqs,
    num_steps,
    num_offsets,
    OFFSET_SEGMENT: tl.constexpr,
):
    """The offset's rows of tokens, [T], by a binary search for their sequences."""
    first = tl.zeros_like(t)
    last = first + num_seqs
    for _ in range(num_steps):
        middle = (first + last) // 2
        begins = tl.load(key_offset.query_start_loc + middle) <= t
        first = tl.where(begins, middle, first)
        last = tl.where(begins, last, middle)
    first = tl.minimum(first, num_seqs - 1)
    behind = tl.load(key_offset.query_start_loc + first + 1) - t
    place = tl.load(key_offset.seq_lens + first) - behind
    return offset_row(place, num_offsets, OFFSET_SEGMENT)


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
    ]
)
def store_kernel(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    query_ptr,  # [B, Hq, D]
    kv_cache_ptr,  # [num_blocks, H, N, C] uint8
    slot_mapping_ptr,  # [T]
    matrix_ptr,  # [D, D] fp16
    rotated_query,  # ``RotatedQuery``: [B, Hq, D] fp16 and [B, Hq] fp32
    scratch_ptr,  # [T, 2 * H, D] fp32, or None
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
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Program (i, j): tokens [i * BLOCK_T, ...) of head j of K, V, then q."""
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size
    BLOCK_D: tl.constexpr = LAYOUT.block_d
    TILE_BYTES: tl.constexpr = LAYOUT.tile_bytes
    SCALE_WORDS: tl.constexpr = LAYOUT.scale_words
    KEY_BITS: tl.constexpr = LAYOUT.key_bits
    KEY_SCALES_OFFSET: tl.constexpr = LAYOUT.key_scales_offset
    VALUE_BITS: tl.constexpr = LAYOUT.value_bits
    VALUE_CODES_OFFSET: tl.constexpr = LAYOUT.value_codes_offset
    VALUE_SCALES_OFFSET: tl.constexpr = LAYOUT.value_scales_offset
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
            row_ptr = scratch_ptr + (o_t * (2 * NUM_KV_HEADS) + head) * HEAD_SIZE
            TRELLIS_FOLD: tl.constexpr = FOLD
        if head < NUM_KV_HEADS:
            x_ptr = key_ptr + o_t * strides.key_token + kv_head * strides.key_head
            if key_offset is None:
                own_offset_ptr = None
            else:
                row = _offset_rows(
                    key_offset, o_t, num_seqs, num_steps, num_offsets, OFFSET_SEGMENT
                )
                row = row * NUM_KV_HEADS + kv_head
                own_offset_ptr = key_offset.table + row * HEAD_SIZE
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
                KEY_SCALES_OFFSET,
                SCALE_WORDS,
                HEAD_SIZE,
                BLOCK_D,
                BLOCK_U,
                FOLD if KEY_BITS == 4 else TRELLIS_FOLD,
                own_offset_ptr,
            )
        else:
            x_ptr = value_ptr + o_t * strides.value_token + kv_head * strides.value_head
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
                VALUE_CODES_OFFSET,
                VALUE_SCALES_OFFSET,
                SCALE_WORDS,
                HEAD_SIZE,
                BLOCK_D,
                BLOCK_U,
                FOLD if VALUE_BITS == 4 else TRELLIS_FOLD,
            )
