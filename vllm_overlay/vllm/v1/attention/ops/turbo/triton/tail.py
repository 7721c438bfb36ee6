# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tail: one launch counts and writes its rows, after the store's launch.

The rows equal those of ``reference.tail`` bit for bit. ``formats.tail`` has their
layout.
"""

import torch

from vllm.triton_utils import triton
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.pages import check_pages
from vllm.v1.attention.ops.turbo.formats.tail import MAX_ROWS
from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail, TailUpdate
from vllm.v1.attention.ops.turbo.interface import KeyOffset
from vllm.v1.attention.ops.turbo.triton.pages import tile_layout
from vllm.v1.attention.ops.turbo.triton.tail_kernel import (
    KeyWords,
    RowPlanes,
    RowStrides,
    tail_kernel,
)

# The most words that a program compares at a time.
_MAX_COMPARED = 8192


def check_tail(tail: Tail, layout: TurboFormat, num_kv_heads: int) -> None:
    """Check the kernels' preconditions on a tail of a layer with a cache's format."""
    pages, blocks, packed_lens, tail_format, num_tokens = tail
    check_pages(pages, tail_format.layout)
    assert tail_format.layout == layout, (tail_format, layout)
    assert pages.shape[1] == num_kv_heads, (pages.shape, num_kv_heads)
    assert pages.shape[2] == tail_format.block_size, (pages.shape, tail_format)
    assert 0 <= num_tokens < MAX_ROWS, num_tokens
    for x in (blocks, packed_lens):
        assert x.dtype == torch.int32 and x.is_contiguous(), (x.dtype, x.stride())


def update_tail(
    update: TailUpdate,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TurboFormat,
    key_offset: KeyOffset | None = None,
) -> None:
    """Count the valid rows, and write the rows of a step's tokens.

    Args:
        update: The tails of the step's R sequences; ``packed_lens`` is written.
        kv_cache: (num_blocks, H, N, C) uint8, in which the step's tokens are stored;
            see ``check_pages``.
        slot_mapping: (T,) int64, slots of the tokens; a token with -1 has no row.
        key: (>= T, H, D) bf16 or fp16, last axis contiguous.
        value: (>= T, H, D), likewise.
        layout: The cache's format.
        key_offset: The offset that is taken off K; None for none.

    """
    tail, block_table, seq_lens, query_start_loc = update
    num_seqs, num_kv_heads = query_start_loc.shape[0] - 1, key.shape[1]
    check_pages(kv_cache, layout)
    check_tail(tail, layout, num_kv_heads)
    assert kv_cache.shape[1] == num_kv_heads, (kv_cache.shape, num_kv_heads)
    assert block_table.stride(1) == key.stride(2) == value.stride(2) == 1
    lengths = [len(x) for x in (seq_lens, tail.blocks, tail.packed_lens)]
    assert min(lengths) >= num_seqs, (lengths, num_seqs)
    if num_seqs == 0:
        return
    table = None if key_offset is None else key_offset.table
    assert table is None or table.is_contiguous() and table.shape[1:] == key.shape[1:]
    tail_format = tail.format
    word_bytes = 4 if layout.key_code_bytes % 4 == 0 else 2
    num_words = layout.key_code_bytes // word_bytes
    block_w = triton.next_power_of_2(num_words)
    block_h = max(1, _MAX_COMPARED // (MAX_ROWS * block_w))
    _, *planes = tail_format.plane_offsets
    tail_kernel[(num_seqs, num_kv_heads + 1)](
        key,
        value,
        kv_cache,
        tail.pages,
        slot_mapping,
        block_table,
        seq_lens,
        query_start_loc,
        tail.blocks,
        tail.packed_lens,
        table,
        slot_mapping.shape[0],
        0 if table is None else table.shape[0],
        tail.num_tokens,
        tail_format.num_rows,
        kv_cache.shape[2],
        RowPlanes(*planes),
        RowStrides(*key.stride()[:2], *value.stride()[:2]),
        *kv_cache.stride()[:2],
        *tail.pages.stride()[:2],
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        LAYOUT=tile_layout(layout),
        OFFSET_SEGMENT=interface.OFFSET_SEGMENT,
        WORDS=KeyWords(word_bytes, num_words, block_w),
        BLOCK_H=min(block_h, triton.next_power_of_2(num_kv_heads)),
        num_warps=4,
        # A fused multiply-add would change the stored bytes.
        enable_fp_fusion=False,
    )
