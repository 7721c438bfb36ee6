# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="no-redef"
"""The recent window: its rows are counted and written in one launch, after the store's.

What is written equals ``reference.window`` bit for bit. Rows lie as ``window_format``
has them.
"""

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo import window_format as wf
from vllm.v1.attention.ops.turbo.format import SCALE_GROUP, TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    KeyOffset,
    RecentWindow,
    WindowUpdate,
    check_pages,
)
from vllm.v1.attention.ops.turbo.triton.pages import TILE, tile_pointers
from vllm.v1.attention.ops.turbo.triton.scales import round_to_integer

# Coordinates with one scale.
GROUP = tl.constexpr(SCALE_GROUP)
_MAX_CODE = tl.constexpr(float(wf.MAX_CODE))
_MAX_ROWS = tl.constexpr(wf.MAX_ROWS)
_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
# Rows that a program writes at a time.
_BLOCK_T = 8
# Words that a program compares at a time.
_MAX_COMPARED = 8192


def check_window(window: RecentWindow, head_size: int, num_kv_heads: int) -> None:
    """Check what kernels take for granted of a window, of a layer of H KV heads."""
    pages, blocks, packed_lens, window_format, num_tokens = window
    check_pages(pages, window_format.layout)
    assert window_format.layout.head_size == head_size, (window_format, head_size)
    assert pages.shape[1] == num_kv_heads, (pages.shape, num_kv_heads)
    assert pages.shape[2] == window_format.block_size, (pages.shape, window_format)
    assert 0 <= num_tokens < wf.MAX_ROWS, num_tokens
    for x in (blocks, packed_lens):
        assert x.dtype == torch.int32 and x.is_contiguous(), (x.dtype, x.stride())


@triton.jit
def _store_rows(
    x,  # [T, G, 16] fp32
    codes_ptr,  # uint8 pointer to a plane
    scales_ptr,  # likewise
    row,  # [T]
    mask,  # [T, G]
    group,  # [G]
    HEAD_SIZE: tl.constexpr,
):
    """Quantise vectors to 8 bits: ``reference.window.quantize_rows``."""
    NUM_GROUPS: tl.constexpr = HEAD_SIZE // GROUP
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, -_FP32_MAX), _FP32_MAX)
    largest = tl.max(tl.abs(x), 2)
    scale = tl.div_rn(largest, _MAX_CODE).to(tl.bfloat16)
    unit = tl.expand_dims(scale.to(tl.float32), 2)
    # Where the scale is zero, so are the codes.
    x = tl.where(unit > 0, x, 0.0)
    code = round_to_integer(tl.div_rn(x, tl.where(unit > 0, unit, 1.0)))
    code = tl.minimum(tl.maximum(code, -_MAX_CODE), _MAX_CODE)
    p_code = (codes_ptr + row * HEAD_SIZE).to(tl.pointer_type(tl.int8))
    p_code = p_code[:, None, None] + (group * GROUP)[None, :, None]
    p_code += tl.arange(0, GROUP)[None, None, :]
    tl.store(p_code, code.to(tl.int32).to(tl.int8), mask=tl.expand_dims(mask, 2))
    p_scale = scales_ptr.to(tl.pointer_type(tl.bfloat16)) + row * NUM_GROUPS
    tl.store(p_scale[:, None] + group[None, :], scale, mask=mask)


@triton.jit
def _key_word_pointers(
    page_ptr,  # uint8 pointers to (block, head) regions
    place,  # position in the block, of that shape
    word,  # which word of a key's codes; broadcasts with them
    KEY_BITS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WORD: tl.constexpr,
):
    """Where a packed key's codes lie, in words of type WORD: in one plane or two."""
    tile_ptr, token = tile_pointers(page_ptr, place, TILE_BYTES)
    WORD_BYTES: tl.constexpr = WORD.primitive_bitwidth // 8
    if KEY_BITS == 4:
        p_byte = tile_ptr + token * (HEAD_SIZE // 2) + word * WORD_BYTES
    else:
        BRANCHES: tl.constexpr = HEAD_SIZE // 4
        PATHS: tl.constexpr = HEAD_SIZE // 8
        byte = word * WORD_BYTES
        branch = token * BRANCHES + byte
        path = TILE * BRANCHES + token * PATHS + (byte - BRANCHES)
        p_byte = tile_ptr + tl.where(byte < BRANCHES, branch, path)
    return p_byte.to(tl.pointer_type(WORD))


@triton.jit
def _count_rows(
    kv_cache_ptr,
    table_ptr,  # [max_blocks] of the sequence
    page_ptr,  # of the sequence
    first_own,
    count,
    block_size,
    num_rows,
    tag_plane,
    position_plane,
    stride_cache_block,
    stride_cache_head,
    stride_page_head,
    NUM_KV_HEADS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WORD: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """How many of the ``count`` tokens before ``first_own`` are valid, up to the first
    that is not.
    """
    i = tl.arange(0, _MAX_ROWS)
    position = first_own - 1 - i
    inside = i < count
    position = tl.where(inside, position, 0)
    row = position % num_rows
    block = tl.load(table_ptr + position // block_size, mask=inside, other=0)
    packed_ptr = kv_cache_ptr + block.to(tl.int64) * stride_cache_block
    place = position % block_size
    w = tl.arange(0, BLOCK_W)
    missing = tl.zeros([_MAX_ROWS], tl.int32)
    for first_head in tl.static_range(0, NUM_KV_HEADS, BLOCK_H):
        head = first_head + tl.arange(0, BLOCK_H)
        # [H, rows]
        own_page_ptr = page_ptr + (head.to(tl.int64) * stride_page_head)[:, None]
        mask = (head < NUM_KV_HEADS)[:, None] & inside[None, :]
        p_position = (own_page_ptr + position_plane).to(tl.pointer_type(tl.int32))
        found = tl.load(p_position + row[None, :], mask=mask, other=0)
        missing += tl.sum((mask & (found != position[None, :] + 1)).to(tl.int32), 0)
        # [H, rows, words]
        word_mask = mask[:, :, None] & (w < NUM_WORDS)[None, None, :]
        p_tag = (own_page_ptr + tag_plane).to(tl.pointer_type(WORD))
        p_tag += (row * NUM_WORDS)[None, :]
        tag = tl.load(p_tag[:, :, None] + w[None, None, :], mask=word_mask, other=0)
        own_packed_ptr = (
            packed_ptr[None, :] + (head.to(tl.int64) * stride_cache_head)[:, None]
        )
        p_packed = _key_word_pointers(
            own_packed_ptr[:, :, None],
            place[None, :, None],
            w[None, None, :],
            KEY_BITS,
            TILE_BYTES,
            HEAD_SIZE,
            WORD,
        )
        packed = tl.load(p_packed, mask=word_mask, other=0)
        missing += tl.sum(tl.sum((tag != packed).to(tl.int32), 2), 0)
    valid = inside & (missing == 0)
    return tl.min(tl.where(valid, _MAX_ROWS, i), 0)


@triton.jit
def _write_rows(
    key_ptr,  # [D] of tokens, K of the KV head
    value_ptr,
    kv_cache_ptr,  # of the KV head
    page_ptr,  # of the sequence and the KV head
    slot_mapping_ptr,  # [T]
    offset_ptr,  # [G, H, D] fp32 from the KV head on, or None
    position,  # [T]
    seq_len,
    end,  # where the sequence's tokens end among the call's
    num_tokens,
    num_segments,
    block_size,
    num_rows,
    value_plane,
    key_scale_plane,
    value_scale_plane,
    tag_plane,
    position_plane,
    stride_key_token,
    stride_value_token,
    stride_cache_block,
    NUM_KV_HEADS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
    WORD: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Write the rows of a sequence's tokens at ``position``, of one KV head."""
    token = (end - seq_len + position).to(tl.int64)
    mask = (position < seq_len) & (token < num_tokens)
    slot = tl.load(slot_mapping_ptr + token, mask=mask, other=-1).to(tl.int64)
    mask = slot >= 0
    slot = tl.where(mask, slot, 0)
    row = position % num_rows
    group = tl.arange(0, BLOCK_G)
    inside = mask[:, None] & (group < HEAD_SIZE // GROUP)[None, :]
    coordinate = (group * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    coordinate = coordinate[None, :, :]

    p_key = key_ptr + (token * stride_key_token)[:, None, None] + coordinate
    key = tl.load(p_key, mask=inside[:, :, None], other=0.0).to(tl.float32)
    if offset_ptr is not None:
        segment = tl.minimum(position // OFFSET_SEGMENT, num_segments - 1)
        own_offset_ptr = offset_ptr + segment * (NUM_KV_HEADS * HEAD_SIZE)
        p_offset = own_offset_ptr[:, None, None] + coordinate
        key -= tl.load(p_offset, mask=inside[:, :, None], other=0.0)
    p_value = value_ptr + (token * stride_value_token)[:, None, None] + coordinate
    value = tl.load(p_value, mask=inside[:, :, None], other=0.0).to(tl.float32)
    _store_rows(
        key, page_ptr, page_ptr + key_scale_plane, row, inside, group, HEAD_SIZE
    )
    _store_rows(
        value,
        page_ptr + value_plane,
        page_ptr + value_scale_plane,
        row,
        inside,
        group,
        HEAD_SIZE,
    )

    w = tl.arange(0, BLOCK_W)
    p_packed = _key_word_pointers(
        (kv_cache_ptr + slot // block_size * stride_cache_block)[:, None],
        (slot % block_size)[:, None],
        w[None, :],
        KEY_BITS,
        TILE_BYTES,
        HEAD_SIZE,
        WORD,
    )
    word_mask = mask[:, None] & (w < NUM_WORDS)[None, :]
    packed = tl.load(p_packed, mask=word_mask, other=0)
    p_tag = (page_ptr + tag_plane).to(tl.pointer_type(WORD)) + row * NUM_WORDS
    tl.store(p_tag[:, None] + w[None, :], packed, mask=word_mask)
    p_position = (page_ptr + position_plane).to(tl.pointer_type(tl.int32)) + row
    tl.store(p_position, position + 1, mask=mask)


@triton.jit(
    # Planes begin at multiples of 16, whatever the size of a block. That is not known
    # when kernels are launched for the first time.
    do_not_specialize=[
        "num_tokens",
        "num_segments",
        "num_counted",
        "num_rows",
        "stride_block_table",
    ],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "blocks_ptr",
        "packed_lens_ptr",
    ],
)
def _window_kernel(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    kv_cache_ptr,  # [num_blocks, H, N, C] uint8
    pages_ptr,  # [num_blocks, H, N, C] uint8
    slot_mapping_ptr,  # [T]
    block_table_ptr,  # [R, max_blocks]
    seq_lens_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    blocks_ptr,  # [R]
    packed_lens_ptr,  # [R], written
    offset_ptr,  # [G, H, D] fp32, taken off K first, or None
    num_tokens,
    num_segments,
    num_counted,
    num_rows,
    block_size,
    value_plane,
    key_scale_plane,
    value_scale_plane,
    tag_plane,
    position_plane,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_cache_block: tl.int64,
    stride_cache_head: tl.int64,
    stride_page_block: tl.int64,
    stride_page_head: tl.int64,
    stride_block_table,
    NUM_KV_HEADS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
    WORD: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Program (b, h): writes the rows of sequence b, KV head h; the last h counts.

    No row is read that another program writes.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + sequence)
    block = tl.load(blocks_ptr + sequence)
    end = tl.load(query_start_loc_ptr + sequence + 1)
    query_len = end - tl.load(query_start_loc_ptr + sequence)
    has_page = (block > 0) & (seq_len > 0)
    first_own = tl.maximum(seq_len - query_len, 0)
    page_ptr = pages_ptr + block.to(tl.int64) * stride_page_block
    if head == NUM_KV_HEADS:
        count = tl.minimum(tl.minimum(num_counted, num_rows - query_len), first_own)
        count = tl.where(has_page, count, 0)
        num_valid = 0
        if count > 0:
            num_valid = _count_rows(
                kv_cache_ptr,
                block_table_ptr + sequence * stride_block_table,
                page_ptr,
                first_own,
                count,
                block_size,
                num_rows,
                tag_plane,
                position_plane,
                stride_cache_block,
                stride_cache_head,
                stride_page_head,
                NUM_KV_HEADS,
                KEY_BITS,
                TILE_BYTES,
                HEAD_SIZE,
                WORD,
                NUM_WORDS,
                BLOCK_W,
                BLOCK_H,
            )
        tl.store(packed_lens_ptr + sequence, seq_len - num_valid)
    elif has_page:
        if offset_ptr is None:
            own_offset_ptr = offset_ptr
        else:
            own_offset_ptr = offset_ptr + head * HEAD_SIZE
        first = tl.maximum(first_own, seq_len - num_rows)
        for start in tl.range(first, seq_len, BLOCK_T):
            _write_rows(
                key_ptr + head * stride_key_head,
                value_ptr + head * stride_value_head,
                kv_cache_ptr + head * stride_cache_head,
                page_ptr + head * stride_page_head,
                slot_mapping_ptr,
                own_offset_ptr,
                start + tl.arange(0, BLOCK_T),
                seq_len,
                end,
                num_tokens,
                num_segments,
                block_size,
                num_rows,
                value_plane,
                key_scale_plane,
                value_scale_plane,
                tag_plane,
                position_plane,
                stride_key_token,
                stride_value_token,
                stride_cache_block,
                NUM_KV_HEADS,
                KEY_BITS,
                TILE_BYTES,
                HEAD_SIZE,
                OFFSET_SEGMENT,
                WORD,
                NUM_WORDS,
                BLOCK_W,
                BLOCK_G,
            )


def update_window(
    update: WindowUpdate,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TurboFormat,
    key_offset: KeyOffset | None = None,
) -> None:
    """Count the rows that are valid, and write those of a step's tokens.

    Args:
        update: Of the step's R sequences; ``packed_lens`` is written.
        kv_cache: (num_blocks, H, N, C) uint8, in which the step's tokens are stored;
            see ``check_pages``.
        slot_mapping: (T,) int64, their slots; a token with -1 has no row.
        key: (>= T, H, D) bf16 or fp16, last axis contiguous.
        value: (>= T, H, D), likewise.
        layout: The cache's format.
        key_offset: What is taken off K; None for nothing.

    """
    window, block_table, seq_lens, query_start_loc = update
    num_seqs, num_kv_heads = query_start_loc.shape[0] - 1, key.shape[1]
    check_pages(kv_cache, layout)
    check_window(window, layout.head_size, num_kv_heads)
    assert window.format.layout == layout, (window.format, layout)
    assert kv_cache.shape[1] == num_kv_heads, (kv_cache.shape, num_kv_heads)
    assert block_table.stride(1) == key.stride(2) == value.stride(2) == 1
    lengths = [len(x) for x in (seq_lens, window.blocks, window.packed_lens)]
    assert min(lengths) >= num_seqs, (lengths, num_seqs)
    if num_seqs == 0:
        return
    table = None if key_offset is None else key_offset.table
    assert table is None or table.is_contiguous() and table.shape[1:] == key.shape[1:]
    window_format = window.format
    word_bytes = 4 if layout.key_code_bytes % 4 == 0 else 2
    num_words = layout.key_code_bytes // word_bytes
    block_w = triton.next_power_of_2(num_words)
    block_h = max(1, _MAX_COMPARED // (wf.MAX_ROWS * block_w))
    _, *planes = window_format.plane_offsets
    _window_kernel[(num_seqs, num_kv_heads + 1)](
        key,
        value,
        kv_cache,
        window.pages,
        slot_mapping,
        block_table,
        seq_lens,
        query_start_loc,
        window.blocks,
        window.packed_lens,
        table,
        slot_mapping.shape[0],
        0 if table is None else table.shape[0],
        window.num_tokens,
        window_format.num_rows,
        kv_cache.shape[2],
        *planes,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *kv_cache.stride()[:2],
        *window.pages.stride()[:2],
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        KEY_BITS=layout.key_bits,
        TILE_BYTES=layout.tile_bytes,
        HEAD_SIZE=layout.head_size,
        OFFSET_SEGMENT=interface.OFFSET_SEGMENT,
        WORD=tl.int32 if word_bytes == 4 else tl.int16,
        NUM_WORDS=num_words,
        BLOCK_T=_BLOCK_T,
        BLOCK_W=block_w,
        BLOCK_H=min(block_h, triton.next_power_of_2(num_kv_heads)),
        BLOCK_G=triton.next_power_of_2(layout.num_groups),
        num_warps=4,
        # The bytes are exact: no multiply-add may be fused.
        enable_fp_fusion=False,
    )
