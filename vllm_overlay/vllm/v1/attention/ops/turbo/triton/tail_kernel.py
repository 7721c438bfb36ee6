# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# mypy: disable-error-code="no-redef"
"""The kernel of ``triton.tail``.

Names of blocks of values begin with ``b_``, of indices with ``o_``, of masks with
``m_``.
"""

from typing import NamedTuple

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.format import SCALE_GROUP
from vllm.v1.attention.ops.turbo.formats.tail import MAX_CODE, MAX_ROWS
from vllm.v1.attention.ops.turbo.triton.offset import offset_row
from vllm.v1.attention.ops.turbo.triton.pages import TILE, tile_pointers
from vllm.v1.attention.ops.turbo.triton.scales import round_to_integer

# Coordinates that share a scale.
GROUP = tl.constexpr(SCALE_GROUP)
_MAX_CODE = tl.constexpr(float(MAX_CODE))
_MAX_ROWS = tl.constexpr(MAX_ROWS)
_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
# Rows that a program writes at a time.
_BLOCK_T = tl.constexpr(8)


class RowPlanes(NamedTuple):
    """Bytes in a page before each plane of rows; K's codes are at 0."""

    value: int
    key_scale: int
    value_scale: int
    tag: int
    position: int


class RowStrides(NamedTuple):
    """Strides between tokens, and between heads of a token, in elements."""

    key_token: int
    key_head: int
    value_token: int
    value_head: int


class KeyWords(NamedTuple):
    """The words that a token's packed K codes are compared by.

    Attributes:
        num_bytes: Bytes of a word.
        num_words: Words of a token.
        block: ``num_words``, padded to a power of two.

    """

    num_bytes: int
    num_words: int
    block: int


@triton.jit
def _store_rows(
    x,  # [T, G, 16] fp32
    codes_ptr,  # uint8 pointer to a plane of codes
    scales_ptr,  # uint8 pointer to a plane of scales
    row,  # [T]
    mask,  # [T, G]
    o_group,  # [G]
    HEAD_SIZE: tl.constexpr,
):
    """Quantise vectors to 8 bits, as ``reference.tail.quantize_rows`` does."""
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
    p_code = p_code[:, None, None] + (o_group * GROUP)[None, :, None]
    p_code += tl.arange(0, GROUP)[None, None, :]
    tl.store(p_code, code.to(tl.int32).to(tl.int8), mask=tl.expand_dims(mask, 2))
    p_scale = scales_ptr.to(tl.pointer_type(tl.bfloat16)) + row * NUM_GROUPS
    tl.store(p_scale[:, None] + o_group[None, :], scale, mask=mask)


@triton.jit
def _as_words(ptr, WORDS: tl.constexpr):
    """Pointers to bytes as pointers to words."""
    if WORDS.num_bytes == 4:
        return ptr.to(tl.pointer_type(tl.int32))
    else:
        return ptr.to(tl.pointer_type(tl.int16))


@triton.jit
def _key_word_pointers(
    page_ptr,  # uint8 pointers to (block, head) regions
    place,  # position in the block, of that shape
    word,  # index of a word of a key's codes; broadcasts with the others
    LAYOUT: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Pointers to words of packed keys' codes, which are in one plane or in two."""
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size
    TILE_BYTES: tl.constexpr = LAYOUT.tile_bytes
    tile_ptr, token = tile_pointers(page_ptr, place, TILE_BYTES)
    if LAYOUT.key_bits == 4:
        p_byte = tile_ptr + token * (HEAD_SIZE // 2) + word * WORDS.num_bytes
    else:
        BRANCHES: tl.constexpr = HEAD_SIZE // 4
        PATHS: tl.constexpr = HEAD_SIZE // 8
        byte = word * WORDS.num_bytes
        branch = token * BRANCHES + byte
        path = TILE * BRANCHES + token * PATHS + (byte - BRANCHES)
        p_byte = tile_ptr + tl.where(byte < BRANCHES, branch, path)
    return _as_words(p_byte, WORDS)


@triton.jit
def _count_rows(
    kv_cache_ptr,
    table_ptr,  # [max_blocks], the sequence's block table
    page_ptr,  # the sequence's page
    first_raw,
    count,
    block_size,
    num_rows,
    planes,  # ``RowPlanes``
    stride_cache_block,
    stride_cache_head,
    stride_page_head,
    NUM_KV_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The number of valid rows among the ``count`` tokens before ``first_raw``.

    It counts backwards, up to the first row that is not valid.
    """
    i = tl.arange(0, _MAX_ROWS)
    position = first_raw - 1 - i
    m_inside = i < count
    position = tl.where(m_inside, position, 0)
    row = position % num_rows
    block = tl.load(table_ptr + position // block_size, mask=m_inside, other=0)
    packed_ptr = kv_cache_ptr + block.to(tl.int64) * stride_cache_block
    place = position % block_size
    o_w = tl.arange(0, WORDS.block)
    missing = tl.zeros([_MAX_ROWS], tl.int32)
    for first_head in tl.static_range(0, NUM_KV_HEADS, BLOCK_H):
        head = first_head + tl.arange(0, BLOCK_H)
        # [H, rows]
        own_page_ptr = page_ptr + (head.to(tl.int64) * stride_page_head)[:, None]
        mask = (head < NUM_KV_HEADS)[:, None] & m_inside[None, :]
        p_position = (own_page_ptr + planes.position).to(tl.pointer_type(tl.int32))
        found = tl.load(p_position + row[None, :], mask=mask, other=0)
        missing += tl.sum((mask & (found != position[None, :] + 1)).to(tl.int32), 0)
        # [H, rows, words]
        m_word = mask[:, :, None] & (o_w < WORDS.num_words)[None, None, :]
        p_tag = _as_words(own_page_ptr + planes.tag, WORDS)
        p_tag += (row * WORDS.num_words)[None, :]
        tag = tl.load(p_tag[:, :, None] + o_w[None, None, :], mask=m_word, other=0)
        own_packed_ptr = (
            packed_ptr[None, :] + (head.to(tl.int64) * stride_cache_head)[:, None]
        )
        p_packed = _key_word_pointers(
            own_packed_ptr[:, :, None],
            place[None, :, None],
            o_w[None, None, :],
            LAYOUT,
            WORDS,
        )
        packed = tl.load(p_packed, mask=m_word, other=0)
        missing += tl.sum(tl.sum((tag != packed).to(tl.int32), 2), 0)
    valid = m_inside & (missing == 0)
    return tl.min(tl.where(valid, _MAX_ROWS, i), 0)


@triton.jit
def _write_rows(
    key_ptr,  # K of the KV head, [D] for each token
    value_ptr,  # V of the KV head, [D] for each token
    kv_cache_ptr,  # the KV head's part of the first block
    page_ptr,  # the KV head's part of the sequence's page
    slot_mapping_ptr,  # [T]
    offset_ptr,  # [G, H, D] fp32 from the KV head on, or None
    position,  # [T]
    seq_len,
    end,  # index of the sequence's last token (exclusive) among the call's
    num_tokens,
    num_offsets,
    block_size,
    num_rows,
    planes,  # ``RowPlanes``
    strides,  # ``RowStrides``
    stride_cache_block,
    NUM_KV_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Write one KV head's rows of a sequence's tokens at ``position``."""
    HEAD_SIZE: tl.constexpr = LAYOUT.head_size
    HEAD_SIZE_V: tl.constexpr = LAYOUT.head_size_v
    BLOCK_G: tl.constexpr = LAYOUT.block_d // GROUP
    token = (end - seq_len + position).to(tl.int64)
    mask = (position < seq_len) & (token < num_tokens)
    slot = tl.load(slot_mapping_ptr + token, mask=mask, other=-1).to(tl.int64)
    mask = slot >= 0
    slot = tl.where(mask, slot, 0)
    row = position % num_rows
    o_group = tl.arange(0, BLOCK_G)
    m_inside = mask[:, None] & (o_group < HEAD_SIZE // GROUP)[None, :]
    coordinate = (o_group * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    coordinate = coordinate[None, :, :]

    p_key = key_ptr + (token * strides.key_token)[:, None, None] + coordinate
    key = tl.load(p_key, mask=m_inside[:, :, None], other=0.0).to(tl.float32)
    if offset_ptr is not None:
        own_row = offset_row(position, num_offsets, OFFSET_SEGMENT)
        own_offset_ptr = offset_ptr + own_row * (NUM_KV_HEADS * HEAD_SIZE)
        p_offset = own_offset_ptr[:, None, None] + coordinate
        key -= tl.load(p_offset, mask=m_inside[:, :, None], other=0.0)
    o_value, m_value = o_group, m_inside
    if HEAD_SIZE_V != HEAD_SIZE:
        o_value = tl.arange(0, LAYOUT.block_d_v // GROUP)
        m_value = mask[:, None] & (o_value < HEAD_SIZE_V // GROUP)[None, :]
        coordinate = (o_value * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
        coordinate = coordinate[None, :, :]
    p_value = value_ptr + (token * strides.value_token)[:, None, None] + coordinate
    value = tl.load(p_value, mask=m_value[:, :, None], other=0.0).to(tl.float32)
    _store_rows(
        key, page_ptr, page_ptr + planes.key_scale, row, m_inside, o_group, HEAD_SIZE
    )
    _store_rows(
        value,
        page_ptr + planes.value,
        page_ptr + planes.value_scale,
        row,
        m_value,
        o_value,
        HEAD_SIZE_V,
    )

    o_w = tl.arange(0, WORDS.block)
    p_packed = _key_word_pointers(
        (kv_cache_ptr + slot // block_size * stride_cache_block)[:, None],
        (slot % block_size)[:, None],
        o_w[None, :],
        LAYOUT,
        WORDS,
    )
    m_word = mask[:, None] & (o_w < WORDS.num_words)[None, :]
    packed = tl.load(p_packed, mask=m_word, other=0)
    p_tag = _as_words(page_ptr + planes.tag, WORDS) + row * WORDS.num_words
    tl.store(p_tag[:, None] + o_w[None, :], packed, mask=m_word)
    p_position = (page_ptr + planes.position).to(tl.pointer_type(tl.int32)) + row
    tl.store(p_position, position + 1, mask=mask)


@triton.jit(
    # Planes begin at multiples of 16, whatever the size of a block, which is not known
    # at the kernels' first launch.
    do_not_specialize=[
        "num_tokens",
        "num_offsets",
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
def tail_kernel(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D of V]
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
    num_offsets,
    num_counted,
    num_rows,
    block_size,
    planes,  # ``RowPlanes``
    strides,  # ``RowStrides``
    stride_cache_block: tl.int64,
    stride_cache_head: tl.int64,
    stride_page_block: tl.int64,
    stride_page_head: tl.int64,
    stride_block_table,
    NUM_KV_HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
    OFFSET_SEGMENT: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (b, h): writes the rows of sequence b, KV head h. The last h counts rows.

    No program reads a row that another program writes.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + sequence)
    block = tl.load(blocks_ptr + sequence)
    end = tl.load(query_start_loc_ptr + sequence + 1)
    query_len = end - tl.load(query_start_loc_ptr + sequence)
    has_page = (block > 0) & (seq_len > 0)
    first_raw = tl.maximum(seq_len - query_len, 0)
    page_ptr = pages_ptr + block.to(tl.int64) * stride_page_block
    if head == NUM_KV_HEADS:
        count = tl.minimum(tl.minimum(num_counted, num_rows - query_len), first_raw)
        count = tl.where(has_page, count, 0)
        num_valid = 0
        if count > 0:
            num_valid = _count_rows(
                kv_cache_ptr,
                block_table_ptr + sequence * stride_block_table,
                page_ptr,
                first_raw,
                count,
                block_size,
                num_rows,
                planes,
                stride_cache_block,
                stride_cache_head,
                stride_page_head,
                NUM_KV_HEADS,
                LAYOUT,
                WORDS,
                BLOCK_H,
            )
        tl.store(packed_lens_ptr + sequence, seq_len - num_valid)
    elif has_page:
        if offset_ptr is None:
            own_offset_ptr = offset_ptr
        else:
            own_offset_ptr = offset_ptr + head * LAYOUT.head_size
        first = tl.maximum(first_raw, seq_len - num_rows)
        for start in tl.range(first, seq_len, _BLOCK_T):
            _write_rows(
                key_ptr + head * strides.key_head,
                value_ptr + head * strides.value_head,
                kv_cache_ptr + head * stride_cache_head,
                page_ptr + head * stride_page_head,
                slot_mapping_ptr,
                own_offset_ptr,
                start + tl.arange(0, _BLOCK_T),
                seq_len,
                end,
                num_tokens,
                num_offsets,
                block_size,
                num_rows,
                planes,
                strides,
                stride_cache_block,
                NUM_KV_HEADS,
                LAYOUT,
                OFFSET_SEGMENT,
                WORDS,
            )
