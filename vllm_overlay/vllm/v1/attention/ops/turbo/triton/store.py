# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="no-redef"
"""Store: rotate and quantise K and V into their pages, rotate q, in one launch."""

from typing import NamedTuple

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    KeyOffset,
    RotatedQuery,
    WindowUpdate,
    check_pages,
    score_factor,
)
from vllm.v1.attention.ops.turbo.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.triton.encode import encode_vectors
from vllm.v1.attention.ops.turbo.triton.pages import MIN_OUTPUT_COLUMNS, tile_pointers
from vllm.v1.attention.ops.turbo.triton.rotate import load_integers, rotate_integers
from vllm.v1.attention.ops.turbo.triton.window import update_window


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
    return StoreTuning(block_t=16, fold=8 if head_size <= 128 else 4, num_warps=4)


def store_sizes(layout: TurboFormat, num_kv_heads: int) -> list[int]:
    """Numbers of tokens of which each takes other launch parameters."""
    return [1, SMALL_BATCH + 1]


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


@triton.jit
def _offset_segment(
    seq_lens_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    t,  # [T]
    num_seqs,
    num_steps,
    num_segments,
    OFFSET_SEGMENT: tl.constexpr,
):
    """Which segment's offset tokens have, [T]: by a search for their sequence."""
    first = tl.zeros_like(t)
    last = first + num_seqs
    for _ in range(num_steps):
        middle = (first + last) // 2
        begins = tl.load(query_start_loc_ptr + middle) <= t
        first = tl.where(begins, middle, first)
        last = tl.where(begins, last, middle)
    first = tl.minimum(first, num_seqs - 1)
    behind = tl.load(query_start_loc_ptr + first + 1) - t
    place = tl.load(seq_lens_ptr + first) - behind
    # Padding may lie anywhere.
    place = tl.maximum(place, 0)
    return tl.minimum(place // OFFSET_SEGMENT, num_segments - 1)


@triton.jit(do_not_specialize=["num_queries"])
def _rotate_query_kernel(
    query_ptr,  # [B, Hq, D]
    rotated_query_ptr,  # [B, Hq, D] fp16
    query_scale_ptr,  # [B, Hq] fp32
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
    BLOCK_C: tl.constexpr,
):
    """Program (i, j): tokens [i * BLOCK_T, ...) of query head j."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    _rotate_query(
        query_ptr,
        rotated_query_ptr,
        query_scale_ptr,
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
        BLOCK_C,
    )


def _rotate_queries(
    query: torch.Tensor,
    rotated_query: RotatedQuery,
    layout: TurboFormat,
    scale: float,
) -> None:
    """What ``store`` does for queries alone."""
    num_queries, num_heads, head_size = query.shape
    block_d = triton.next_power_of_2(head_size)
    tuning = default_tuning(num_queries, head_size)
    _rotate_query_kernel[(triton.cdiv(num_queries, tuning.block_t), num_heads)](
        query,
        *rotated_query,
        rotation_matrix(head_size, query.device),
        num_queries,
        score_factor(layout, scale),
        inverse_sqrt(head_size),
        query.stride(0),
        query.stride(1),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_T=tuning.block_t,
        BLOCK_D=block_d,
        BLOCK_C=min(block_d, 64),
        num_warps=tuning.num_warps,
        enable_fp_fusion=False,
    )


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_queries",
        "num_seqs",
        "num_steps",
        "num_segments",
    ]
)
def _store_kernel(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    query_ptr,  # [B, Hq, D]
    kv_cache_ptr,  # [num_blocks, H, N, C] uint8
    slot_mapping_ptr,  # [T]
    matrix_ptr,  # [D, D] fp16
    rotated_query_ptr,  # [B, Hq, D] fp16
    query_scale_ptr,  # [B, Hq] fp32
    scratch_ptr,  # [T, 2 * H, D] fp32, or None
    offset_ptr,  # [G, H, D] fp32, taken off K first, or None
    seq_lens_ptr,  # [R], with an offset
    query_start_loc_ptr,  # [R + 1], with an offset
    num_seqs,
    num_steps,
    num_segments,
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
    SCALE_WORDS: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
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
        # Codes of three bits need a step for each code, or the scratch.
        if scratch_ptr is None:
            row_ptr = scratch_ptr
            TRELLIS_FOLD: tl.constexpr = 1
        else:
            row_ptr = scratch_ptr + (t * (2 * NUM_KV_HEADS) + head) * HEAD_SIZE
            TRELLIS_FOLD: tl.constexpr = FOLD
        if head < NUM_KV_HEADS:
            x_ptr = key_ptr + t * stride_key_token + kv_head * stride_key_head
            if offset_ptr is None:
                own_offset_ptr = offset_ptr
            else:
                segment = _offset_segment(
                    seq_lens_ptr,
                    query_start_loc_ptr,
                    t,
                    num_seqs,
                    num_steps,
                    num_segments,
                    OFFSET_SEGMENT,
                )
                row = segment * NUM_KV_HEADS + kv_head
                own_offset_ptr = offset_ptr + row * HEAD_SIZE
            encode_vectors(
                x_ptr,
                tile_ptr,
                token,
                mask,
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
            x_ptr = value_ptr + t * stride_value_token + kv_head * stride_value_head
            encode_vectors(
                x_ptr,
                tile_ptr,
                token,
                mask,
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


def store(
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TurboFormat,
    query: torch.Tensor | None = None,
    rotated_query: RotatedQuery | None = None,
    scale: float = 1.0,
    key_offset: KeyOffset | None = None,
    window: WindowUpdate | None = None,
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
        rotated_query: Of the B queries, written: each vector divided by a power of
            two, and a factor that holds ``scale``, log2(e) and the keys' gain.
        scale: Softmax scale.
        key_offset: What is taken off K first; None to take nothing.
        window: Where the newest tokens are kept in 8 bits, too; None if nowhere.
        tuning: Launch parameters; None to choose by the number of tokens.

    """
    num_tokens = slot_mapping.shape[0]
    num_kv_heads, head_size = key.shape[1], layout.head_size
    num_queries = num_heads = 0
    if query is not None:
        assert num_tokens == 0 or query.shape[0] <= num_tokens, query.shape
        assert rotated_query is not None
        num_queries, num_heads = query.shape[:2]
        assert all(tensor.is_contiguous() for tensor in rotated_query)
    assert kv_cache.shape[1] == num_kv_heads, (kv_cache.shape, num_kv_heads)
    check_pages(kv_cache, layout)
    assert key.stride(2) == value.stride(2) == 1
    table = seq_lens = query_start_loc = None
    num_seqs = num_segments = 0
    if key_offset is not None:
        table, seq_lens, query_start_loc = key_offset
        assert table.shape[1:] == key.shape[1:] and table.is_contiguous()
        num_segments, num_seqs = table.shape[0], query_start_loc.shape[0] - 1
        assert seq_lens.shape[0] == num_seqs > 0, (seq_lens.shape, num_seqs)
    if num_tokens == 0:
        if query is not None and rotated_query is not None and num_queries > 0:
            _rotate_queries(query, rotated_query, layout, scale)
        return
    block_d = triton.next_power_of_2(head_size)
    if tuning is None:
        tuning = default_tuning(num_tokens, head_size)
    scratch = None
    if num_tokens <= SMALL_BATCH and 3 in (layout.key_bits, layout.value_bits):
        shape = (num_tokens, 2 * num_kv_heads, head_size)
        scratch = torch.empty(shape, dtype=torch.float32, device=kv_cache.device)
    grid = (triton.cdiv(num_tokens, tuning.block_t), 2 * num_kv_heads + num_heads)
    _store_kernel[grid](
        key,
        value,
        query if query is not None else key,
        kv_cache,
        slot_mapping,
        rotation_matrix(head_size, kv_cache.device),
        *(rotated_query or (None, None)),
        scratch,
        table,
        seq_lens,
        query_start_loc,
        num_seqs,
        num_seqs.bit_length(),
        num_segments,
        num_tokens,
        num_queries,
        score_factor(layout, scale),
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
        SCALE_WORDS=tuple(layout.scale_words),
        OFFSET_SEGMENT=interface.OFFSET_SEGMENT,
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
    if window is not None:
        update_window(window, kv_cache, slot_mapping, key, value, layout, key_offset)
