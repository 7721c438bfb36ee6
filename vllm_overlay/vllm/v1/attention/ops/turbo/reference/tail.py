# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tail in PyTorch: the executable form of ``formats.tail``.

Shapes: R rows of a page, H KV heads, D the head size of K or V, G = D / 16 scales of a
vector.
"""

import torch

from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.format import SCALE_GROUP, TILE_TOKENS, TurboFormat
from vllm.v1.attention.ops.turbo.formats.tail import MAX_CODE, TailFormat
from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail, TailUpdate
from vllm.v1.attention.ops.turbo.interface import KeyOffset
from vllm.v1.attention.ops.turbo.reference.cache import tile_addresses


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise vectors to 8 bits.

    Args:
        x: (..., D), any floating dtype. NaN counts as zero, as in packed codes.

    Returns:
        Codes (..., D) int8 and scales (..., G) bf16.

    """
    groups = torch.where(x.isnan(), 0, x.float()).unflatten(-1, (-1, SCALE_GROUP))
    limit = torch.finfo(torch.float32).max
    groups = groups.clamp(-limit, limit)
    scales = (groups.abs().amax(-1) / MAX_CODE).bfloat16()
    unit = scales.float()[..., None]
    codes = torch.where(unit > 0, groups / unit, 0).round()
    return codes.clamp(-MAX_CODE, MAX_CODE).to(torch.int8).flatten(-2), scales


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of ``quantize_rows``, fp32 (..., D)."""
    groups = codes.float().unflatten(-1, (-1, SCALE_GROUP))
    return (groups * scales.float()[..., None]).flatten(-2)


def planes(page: torch.Tensor, tail_format: TailFormat) -> list[torch.Tensor]:
    """Views of a page's planes.

    Args:
        page: (H, N, C) uint8; each head is contiguous.
        tail_format: The layout of the planes.

    Returns:
        K and V (H, R, D) int8, their scales (H, R, G) bf16, tags (H, R, bytes of K
        codes) uint8, and positions + 1 (H, R) int32.

    """
    flat = page.view(page.shape[0], -1)
    rows = tail_format.num_rows
    views = [
        flat[:, start : start + rows * width].unflatten(1, (rows, width))
        for start, width in zip(tail_format.plane_offsets, tail_format.row_widths)
    ]
    types = (torch.int8,) * 2 + (torch.bfloat16,) * 2 + (torch.uint8, torch.int32)
    views = [view.view(dtype) for view, dtype in zip(views, types)]
    return [*views[:-1], views[-1][..., 0]]


def key_codes(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    layout: TurboFormat,
) -> torch.Tensor:
    """The packed codes of a sequence's keys, (H, T, bytes of K codes) uint8.

    Args:
        kv_cache: (num_blocks, H, N, C) uint8.
        block_table: (max_blocks,), the sequence's blocks.
        positions: (T,), positions in the sequence.
        layout: The cache's format.

    """
    num_blocks, num_kv_heads, block_size, slot_size = kv_cache.shape
    pages = kv_cache.view(num_blocks, num_kv_heads, block_size * slot_size)
    blocks = block_table[positions // block_size].long()
    places = positions % block_size
    addresses, _ = tile_addresses(layout)
    addresses = addresses.to(kv_cache.device)[places % TILE_TOKENS]
    addresses = addresses[:, : layout.key_code_bytes]
    addresses = addresses + (places // TILE_TOKENS * layout.tile_bytes)[:, None]
    # Axes of advanced indices that are not adjacent come first in the result.
    return pages[blocks[:, None], :, addresses].movedim(-1, 0)


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
        update: The tails of the step's sequences; ``packed_lens`` is written.
        kv_cache: (num_blocks, H, N, C) uint8, in which the step's tokens are stored.
        slot_mapping: (T,), slots of the tokens; a token with -1 is not stored, and has
            no row.
        key: (>= T, H, D), any floating dtype.
        value: (>= T, H, D), likewise.
        layout: The cache's format.
        key_offset: The offset that is taken off K; None for none.

    """
    tail, device = update.tail, kv_cache.device
    starts, seq_lens = update.query_start_loc.tolist(), update.seq_lens.tolist()
    for row, (begin, end, seq_len) in enumerate(zip(starts, starts[1:], seq_lens)):
        tail.packed_lens[row] = seq_len
        block = int(tail.blocks[row])
        if block == 0 or seq_len <= 0:
            continue
        rows = planes(tail.pages[block], tail.format)
        table = update.block_table[row]
        num_rows = tail.format.num_rows
        # A padded sequence may be shorter than its query.
        first_raw = max(seq_len - (end - begin), 0)
        # Rows that the step's own tokens overwrite do not count.
        count = min(tail.num_tokens, num_rows - (end - begin), first_raw)
        if count > 0:
            # Backwards from the newest token.
            positions = first_raw - 1 - torch.arange(count, device=device)
            packed = key_codes(kv_cache, table, positions, layout)
            valid = _is_valid(rows, positions, packed)
            tail.packed_lens[row] -= int(valid.int().cumprod(0).sum())
        first = max(first_raw, seq_len - num_rows)
        positions = torch.arange(first, seq_len, device=device)
        tokens = end - seq_len + positions
        stored = slot_mapping[tokens] >= 0
        positions, tokens = positions[stored], tokens[stored]
        keys = key[tokens].float()
        if key_offset is not None:
            own = interface.offset_rows(positions, key_offset.table)
            keys = keys - key_offset.table[own]
        packed = key_codes(kv_cache, table, positions, layout)
        _write(rows, positions, keys, value[tokens], packed)


def _is_valid(
    rows: list[torch.Tensor], positions: torch.Tensor, packed: torch.Tensor
) -> torch.Tensor:
    """Whether all heads' rows of T positions belong to the packed tokens there.

    Args:
        rows: The views of ``planes``.
        positions: (T,), positions in the sequence.
        packed: (H, T, bytes of K codes) uint8, from ``key_codes``.

    """
    tags, places = (plane[:, positions % plane.shape[1]] for plane in rows[4:])
    return ((places == positions + 1) & (tags == packed).all(-1)).all(0)


def _write(
    rows: list[torch.Tensor],
    positions: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: torch.Tensor,
) -> None:
    """Write the rows of T positions, from K and V (T, H, D).

    The other arguments are those of ``_is_valid``.
    """
    keys, key_scales = quantize_rows(key.transpose(0, 1))
    values, value_scales = quantize_rows(value.transpose(0, 1))
    places = (positions + 1).int()
    for plane, new in zip(
        rows, (keys, values, key_scales, value_scales, packed, places)
    ):
        plane[:, positions % plane.shape[1]] = new


def load_tail(
    tail: Tail, row: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K less its offset, and V, from valid rows: each (T, H, D) fp32.

    Args:
        tail: The tails of several sequences.
        row: The index of one of these sequences.
        positions: (T,), positions in the sequence.

    """
    page = tail.pages[int(tail.blocks[row])]
    rows = planes(page, tail.format)
    own = positions % tail.format.num_rows
    key, value, key_scales, value_scales = (plane[:, own] for plane in rows[:4])
    return (
        dequantize_rows(key, key_scales).transpose(0, 1),
        dequantize_rows(value, value_scales).transpose(0, 1),
    )
