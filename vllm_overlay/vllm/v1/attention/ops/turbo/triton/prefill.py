# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefill: rotates queries and outputs, and dequantises cached context."""

from typing import TYPE_CHECKING

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.pages import check_pages
from vllm.v1.attention.ops.turbo.formats.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.triton.codec import (
    key_coordinates,
    key_scale,
    load_side,
    step_positions,
    value_coordinates,
)
from vllm.v1.attention.ops.turbo.triton.offset import offset_row
from vllm.v1.attention.ops.turbo.triton.pages import (
    TILE,
    block_divisor,
    divide_by_block,
    tile_layout,
)
from vllm.v1.attention.ops.turbo.triton.rotate import load_integers, rotate_integers

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.planning.tokens import CachedPiece


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_rows_kernel(
    x_ptr,  # [T, H, D]
    output_ptr,  # [T, H, D]
    matrix_ptr,  # [D, D] fp16
    num_rows,
    factor,
    stride_x_token,
    stride_x_head,
    stride_output_token,
    stride_output_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Program i: rows [i * BLOCK_T, ...) of the (token, head) pairs."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    row_mask = row < num_rows
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    x_ptrs = x_ptr + token * stride_x_token + head * stride_x_head
    integers, rest, unit_size = load_integers(
        x_ptrs, row_mask, HEAD_SIZE, BLOCK_D, True
    )
    unit_size = (unit_size * factor)[:, None]
    offset = token * stride_output_token + head * stride_output_head
    for start in tl.static_range(0, HEAD_SIZE, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        inside = c < HEAD_SIZE
        rotated = rotate_integers(integers, matrix_ptr, c, inside, HEAD_SIZE, BLOCK_D)
        # Integers alone are coarser than fp16, above all for small coordinates.
        fraction = rotate_integers(rest, matrix_ptr, c, inside, HEAD_SIZE, BLOCK_D)
        rotated += fraction * (1 / 2048)
        rotated = (rotated * unit_size).to(output_ptr.dtype.element_ty)
        mask = row_mask[:, None] & inside[None, :]
        tl.store(output_ptr + offset[:, None] + c[None, :], rotated, mask=mask)


def rotate_rows(
    x: torch.Tensor, output: torch.Tensor, inverse: bool = False, gain: float = 1.0
) -> None:
    """Rotate vectors to or, with ``inverse``, from rotated space.

    Args:
        x: (T, H, D), last axis contiguous.
        output: (T, H, D) of any floating dtype, written; may be ``x``.
        inverse: Whether to rotate back.
        gain: A further factor of the vectors.

    """
    num_tokens, num_heads, head_size = x.shape
    assert x.stride(2) == output.stride(2) == 1
    if num_tokens == 0:
        return
    block_d = triton.next_power_of_2(head_size)
    block_t = 64 if head_size <= 256 else 16  # fits into shared memory
    num_rows = num_tokens * num_heads
    _rotate_rows_kernel[(triton.cdiv(num_rows, block_t),)](
        x,
        output,
        rotation_matrix(head_size, x.device, inverse=inverse),
        num_rows,
        inverse_sqrt(head_size) * gain,
        x.stride(0),
        x.stride(1),
        output.stride(0),
        output.stride(1),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        BLOCK_C=min(block_d, 64),
        num_warps=4,
    )


def rotated_offset(table: torch.Tensor, layout: TurboFormat) -> torch.Tensor:
    """An offset of K in the space of ``gather_context``, of the same shape and dtype.

    Args:
        table: (G, H, D) fp32, contiguous: see ``KeyOffset``.
        layout: The cache's format.

    """
    rotated = torch.empty_like(table)
    rotate_rows(table, rotated, gain=1 / layout.key_codebook.gain)
    return rotated


@triton.jit(
    do_not_specialize=[
        "num_offsets",
        "tiles_per_block",
        "block_shift",
        "block_multiplier",
        "stride_block_table",
        "max_blocks",
    ],
    # A slice may begin at any request of the batch.
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "starts_ptr",
        "cu_lens_ptr",
        "lens_ptr",
    ],
)
def _gather_kernel(
    kv_cache_ptr,  # [num_blocks, H, N, C] uint8
    block_table_ptr,  # [R, max_blocks]
    starts_ptr,  # [R] first position of each request's piece
    cu_lens_ptr,  # [R + 1] where the pieces begin in the output
    lens_ptr,  # [R] lengths of the pieces, or None if they follow each other
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D of V]
    offset_ptr,  # [G, H, D] fp32, in the space of the keys, or None
    num_offsets,
    stride_cache_block: tl.int64,
    stride_cache_head: tl.int64,
    stride_block_table,
    max_blocks,
    tiles_per_block,
    block_shift,
    block_multiplier,
    NUM_KV_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (i, r, h): tokens [i * BLOCK_N, ...) of request r's piece."""
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size
    COEFFICIENTS: tl.constexpr = LAYOUT.key_coefficients
    COLUMNS: tl.constexpr = LAYOUT.columns
    HEAD_SIZE_V: tl.constexpr = LAYOUT.head_size_v
    COLUMNS_V: tl.constexpr = LAYOUT.columns_v
    request = tl.program_id(1)
    head = tl.program_id(2)
    begin = tl.load(cu_lens_ptr + request)
    if lens_ptr is None:
        length = tl.load(cu_lens_ptr + request + 1) - begin
    else:
        length = tl.load(lens_ptr + request)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if tl.program_id(0) * BLOCK_N >= length:
        return
    inside = n < length
    position = tl.load(starts_ptr + request) + n
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_block_table
    place, tile = divide_by_block(
        position // TILE, tiles_per_block, block_shift, block_multiplier
    )
    # Requests of vLLM's dummy batches may be longer than the block table.
    block = tl.load(table_ptr + place, mask=inside & (place < max_blocks), other=0)
    page_ptr = kv_cache_ptr + block.to(tl.int64) * stride_cache_block
    page_ptr += head.to(tl.int64) * stride_cache_head
    tile_ptr = (page_ptr + tile * LAYOUT.tile_bytes)[:, None]
    token = (position % TILE)[:, None]
    column = tl.arange(0, LAYOUT.block_c)[None, :]
    inside = inside[:, None]
    mask = inside & (column < COLUMNS)
    row = (begin + n).to(tl.int64) * NUM_KV_HEADS + head
    place = (row * HEAD_SIZE)[:, None] + column

    if offset_ptr is not None:
        # Rows do not descend, and a block's tokens are of two at most.
        tl.static_assert(BLOCK_N <= OFFSET_SEGMENT)
        start = tl.load(starts_ptr + request)
        last_row = offset_row(start + length - 1, num_offsets, OFFSET_SEGMENT)
        own_row = offset_row(position, num_offsets, OFFSET_SEGMENT)
        first_row = offset_row(
            start + tl.program_id(0) * BLOCK_N, num_offsets, OFFSET_SEGMENT
        )
        next_row = tl.minimum(first_row + 1, last_row)
        is_first = (own_row == first_row)[:, None]
        head_ptr = offset_ptr + head * HEAD_SIZE
        p_first = head_ptr + first_row * (NUM_KV_HEADS * HEAD_SIZE) + column
        p_next = head_ptr + next_row * (NUM_KV_HEADS * HEAD_SIZE) + column
        p_last = head_ptr + last_row * (NUM_KV_HEADS * HEAD_SIZE) + column
    word, scale = load_side(tile_ptr, token, inside, column, column, LAYOUT, False)
    scale = key_scale(scale)
    for i in tl.static_range(HEAD_SIZE // COLUMNS):
        v = step_positions(word, column, i, False, COLUMNS, HEAD_SIZE)
        key = key_coordinates(v, scale, COEFFICIENTS)
        if offset_ptr is not None:
            key = key.to(tl.float32)
            if first_row < last_row:
                m_column = column < COLUMNS
                first = tl.load(p_first + i * COLUMNS, mask=m_column, other=0.0)
                own = tl.load(p_next + i * COLUMNS, mask=m_column, other=0.0)
                own = tl.where(is_first, first, own)
                own -= tl.load(p_last + i * COLUMNS, mask=m_column, other=0.0)
                key += own
        key = key.to(key_ptr.dtype.element_ty)
        tl.store(key_ptr + place + i * COLUMNS, key, mask=mask)

    if HEAD_SIZE_V != HEAD_SIZE:
        column = tl.arange(0, LAYOUT.block_c_v)[None, :]
        mask = inside & (column < COLUMNS_V)
        place = (row * HEAD_SIZE_V)[:, None] + column
    word, scale = load_side(tile_ptr, token, inside, column, column, LAYOUT, True)
    linear = scale * LAYOUT.value_coefficients[0]
    quadratic = scale * LAYOUT.value_coefficients[1]
    for i in tl.static_range(HEAD_SIZE_V // COLUMNS_V):
        v = step_positions(word, column, i, True, COLUMNS_V, HEAD_SIZE_V)
        value = value_coordinates(v, linear, quadratic).to(value_ptr.dtype.element_ty)
        tl.store(value_ptr + place + i * COLUMNS_V, value, mask=mask)


def gather_context(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    piece: "CachedPiece",
    layout: TurboFormat,
    key: torch.Tensor,
    value: torch.Tensor,
    key_offset: torch.Tensor | None = None,
) -> None:
    """Dequantise one piece of each request's cached tokens, in rotated space.

    With an offset of K, all keys of a request lack the offset of its last token in the
    piece. A key gets the difference from the offset that was taken off it, which is
    short between segments. Only the first token's is far from the others', so that a
    piece's last token keeps its length out of all other keys.

    Args:
        kv_cache: (num_blocks, H, N, C) uint8; a (block, head) contiguous.
        block_table: (R, max_blocks) int32; later tokens are read from block 0.
        piece: The tokens, and where they lie in ``key`` and ``value``, at most T.
        layout: The cache's format.
        key: (T, H, D) contiguous; the pieces' rows are written. The codebook's gain is
            not in them.
        value: (T, H, D of V) contiguous; the pieces' rows are written.
        key_offset: (G, H, D) fp32 contiguous, the offset that was taken off the cached
            keys, from ``rotated_offset``; None to leave keys as they are cached.

    """
    num_kv_heads, block_size = kv_cache.shape[1:3]
    num_requests = piece.starts.shape[0]
    cu_lens, max_len, num_tokens = piece.lens
    check_pages(kv_cache, layout)
    assert key.is_contiguous() and value.is_contiguous()
    assert value.shape[2] == layout.head_size_v, (value.shape, layout)
    assert num_tokens <= min(key.shape[0], value.shape[0]), (num_tokens, key.shape)
    if num_requests == 0 or max_len == 0:
        return
    num_offsets = 0
    if key_offset is not None:
        assert piece.cached_lens is None and key_offset.is_contiguous()
        num_offsets = key_offset.shape[0]
    block_n = 32
    _gather_kernel[(triton.cdiv(max_len, block_n), num_requests, num_kv_heads)](
        kv_cache,
        block_table,
        piece.starts,
        cu_lens,
        piece.cached_lens,
        key,
        value,
        key_offset,
        num_offsets,
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        block_table.shape[1],
        **block_divisor(block_size),
        NUM_KV_HEADS=num_kv_heads,
        LAYOUT=tile_layout(layout),
        OFFSET_SEGMENT=interface.OFFSET_SEGMENT,
        BLOCK_N=block_n,
        num_warps=2,
    )
