# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Store: one launch rotates and quantises K and V into their pages, and rotates q."""

from typing import NamedTuple

import torch

from vllm.triton_utils import triton
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.pages import check_pages
from vllm.v1.attention.ops.turbo.formats.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    KeyOffset,
    QueryDirection,
    RotatedQuery,
    StoreCall,
    score_factor,
)
from vllm.v1.attention.ops.turbo.triton.pages import MIN_OUTPUT_COLUMNS, tile_layout
from vllm.v1.attention.ops.turbo.triton.store_kernel import (
    StoreStrides,
    ValueRotation,
    rotate_query_kernel,
    store_kernel,
)
from vllm.v1.attention.ops.turbo.triton.tail import update_tail


class StoreTuning(NamedTuple):
    """Launch parameters of the store kernel.

    Attributes:
        block_t: Tokens of a program; tensor cores take 16 rows a warp.
        fold: Codes of a unit that a step encodes, each in its own column. More columns
            let warps share more work.
        num_warps: Warps of a program.

    """

    block_t: int
    fold: int
    num_warps: int


# Up to this many tokens a launch is tuned for latency.
SMALL_BATCH = 1024


def default_tuning(num_tokens: int, head_size: int) -> StoreTuning:
    """The launch parameters for a number of tokens.

    A program's steps depend on each other, so few tokens take few steps of many warps.
    Many tokens fill the GPU anyway, and a step for each code repeats the least work.
    Larger heads take more steps, because a step's part of the rotation has to fit into
    shared memory.
    """
    # Tuning: heads of 128, an H200, 2026-11, `ci/gpu.py bench`.
    if num_tokens > SMALL_BATCH or head_size > 256:
        return StoreTuning(block_t=64 if head_size <= 256 else 16, fold=1, num_warps=4)
    return StoreTuning(block_t=16, fold=8 if head_size <= 128 else 4, num_warps=4)


def _block_units(num_units: int) -> int:
    """Columns of a step's units, padded to what a dot's result has."""
    return max(MIN_OUTPUT_COLUMNS, triton.next_power_of_2(num_units))


def store_sizes(layout: TurboFormat, num_kv_heads: int) -> list[int]:
    """Numbers of tokens that each have different launch parameters."""
    return [1, SMALL_BATCH + 1]


def _rotate_queries(
    query: torch.Tensor,
    rotated_query: RotatedQuery,
    layout: TurboFormat,
    scale: float,
) -> None:
    """Rotate queries without storing tokens."""
    num_queries, num_heads, head_size = query.shape
    tuning = default_tuning(num_queries, head_size)
    rotate_query_kernel[(triton.cdiv(num_queries, tuning.block_t), num_heads)](
        query,
        rotated_query,
        rotation_matrix(head_size, query.device),
        num_queries,
        score_factor(layout, scale),
        inverse_sqrt(head_size),
        query.stride(0),
        query.stride(1),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_T=tuning.block_t,
        BLOCK_D=triton.next_power_of_2(head_size),
        num_warps=tuning.num_warps,
        enable_fp_fusion=False,
    )


def _table_sizes(
    by_place: KeyOffset | QueryDirection | None, key: torch.Tensor, dtype: torch.dtype
) -> tuple[int, int]:
    """Numbers of rows and of sequences; zeros without a table."""
    if by_place is None:
        return 0, 0
    table, seq_lens, query_start_loc = by_place
    assert table.shape[1:] == key.shape[1:] and table.is_contiguous(), table.shape
    assert table.dtype == dtype, (table.dtype, dtype)
    num_rows, num_seqs = table.shape[0], query_start_loc.shape[0] - 1
    assert num_rows > 0 and seq_lens.shape[0] == num_seqs > 0, (num_rows, num_seqs)
    return num_rows, num_seqs


def store(call: StoreCall, tuning: StoreTuning | None = None) -> None:
    """Quantise K and V into their slots and, if q is given, rotate it: a ``StoreFn``.

    Args:
        call: The tokens and queries. A rotated vector is divided by a power of two, and
            its factor holds that, the softmax scale, log2(e) and the keys' gain.
        tuning: Launch parameters; None to choose by the number of tokens.

    """
    kv_cache, slot_mapping, key, value, layout = call[:5]
    query, rotated_query, key_offset = call.query, call.rotated_query, call.key_offset
    query_direction = call.query_direction
    num_tokens = slot_mapping.shape[0]
    num_kv_heads, head_size = key.shape[1], layout.head_size
    largest_size, device = max(head_size, layout.head_size_v), kv_cache.device
    num_queries = num_heads = 0
    if query is not None:
        assert num_tokens == 0 or query.shape[0] <= num_tokens, query.shape
        assert rotated_query is not None
        num_queries, num_heads = query.shape[:2]
        assert all(tensor.is_contiguous() for tensor in rotated_query)
    assert kv_cache.shape[1] == num_kv_heads, (kv_cache.shape, num_kv_heads)
    check_pages(kv_cache, layout)
    assert key.stride(2) == value.stride(2) == 1
    sizes = key.shape[2], value.shape[2]
    assert sizes == (head_size, layout.head_size_v), (sizes, layout)
    num_offsets, num_seqs = _table_sizes(key_offset, key, torch.float32)
    num_directions, num_seqs_of_direction = _table_sizes(
        query_direction, key, torch.float16
    )
    if key_offset is None:
        num_seqs = num_seqs_of_direction
    elif query_direction is not None:
        assert num_seqs == num_seqs_of_direction, (num_seqs, num_seqs_of_direction)
    if num_tokens == 0:
        if query is not None and rotated_query is not None and num_queries > 0:
            _rotate_queries(query, rotated_query, layout, call.scale)
        return
    if tuning is None:
        tuning = default_tuning(num_tokens, largest_size)
    scratch = value_rotation = None
    if num_tokens <= SMALL_BATCH and 3 in (layout.key_bits, layout.value_bits):
        shape = (num_tokens, 2 * num_kv_heads, largest_size)
        scratch = torch.empty(shape, dtype=torch.float32, device=device)
    if not layout.is_even:
        size = layout.head_size_v
        value_rotation = ValueRotation(
            rotation_matrix(size, device), inverse_sqrt(size)
        )
    grid = (triton.cdiv(num_tokens, tuning.block_t), 2 * num_kv_heads + num_heads)
    store_kernel[grid](
        key,
        value,
        query if query is not None else key,
        kv_cache,
        slot_mapping,
        rotation_matrix(head_size, device),
        rotated_query,
        scratch,
        key_offset,
        num_seqs,
        num_seqs.bit_length(),
        num_offsets,
        num_tokens,
        num_queries,
        score_factor(layout, call.scale),
        inverse_sqrt(head_size),
        kv_cache.shape[2],
        StoreStrides(
            *key.stride()[:2],
            *value.stride()[:2],
            *((0, 0) if query is None else query.stride()[:2]),
            *kv_cache.stride()[:2],
        ),
        value_rotation,
        query_direction,
        num_directions,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        LAYOUT=tile_layout(layout),
        OFFSET_SEGMENT=interface.OFFSET_SEGMENT,
        BLOCK_T=tuning.block_t,
        BLOCK_U=_block_units(layout.num_units),
        BLOCK_U_V=_block_units(layout.num_units_v),
        FOLD=tuning.fold,
        num_warps=tuning.num_warps,
        # A fused multiply-add would change the stored bytes.
        enable_fp_fusion=False,
    )
    if call.tail is not None:
        update_tail(call.tail, *call[:5], key_offset)
