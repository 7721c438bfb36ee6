# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The turbo KV cache in PyTorch: the executable form of ``format``.

The kernels are tested against this package, bit for bit where bytes are written. It
also serves CPU tensors. Shapes: T tokens, H KV heads, D the head size of K or V.
Rotated vectors are in the order of coordinates r that ``TurboFormat`` defines.
"""

from functools import cache

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    KeyOffset,
    QueryDirection,
    StoreCall,
)
from vllm.v1.attention.ops.turbo.reference.bytes import (
    pack_codes,
    pack_scales,
    unpack_codes,
    unpack_scales,
)
from vllm.v1.attention.ops.turbo.reference.codec import (
    dequantize,
    quantize,
)
from vllm.v1.attention.ops.turbo.reference.rotation import rotate


def _interleaved(start: int, layout: TurboFormat) -> list[torch.Tensor]:
    """The addresses of values' codes: int64 (16, bytes of a token) for each plane."""
    n = torch.arange(fmt.TILE_TOKENS)[:, None, None, None]
    group = torch.arange(layout.num_groups_v)[:, None, None]
    word, byte = 4 * torch.arange(2)[:, None], torch.arange(2)

    def plane(pair_bytes: int, words: torch.Tensor) -> torch.Tensor:
        """The addresses in a plane whose pairs of tokens have so many bytes a group."""
        eight_tokens = 4 * pair_bytes * layout.num_groups_v
        of_token = n // 8 * eight_tokens + n % 8 // 2 * pair_bytes + n % 2 * 2
        return (of_token + 4 * pair_bytes * group + words + byte).flatten(1)

    if layout.value_bits == 4:
        # The first unit of each group, then the second ones.
        units = [plane(16, 8 * p + word) for p in range(2)]
        return [start + torch.cat(units, 1)]
    path_start = start + fmt.TILE_TOKENS * layout.head_size_v // 4
    return [start + plane(8, word), path_start + plane(4, word[:1])]


@cache
def tile_addresses(layout: TurboFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The addresses of tokens' bytes in a tile.

    Returns:
        For K and for V, int64 (16, packed size): row n has the addresses of token n's
        codes, in the order of ``pack_codes``, and then of its scales.

    """
    tokens = torch.arange(fmt.TILE_TOKENS)[:, None]

    def rows(start: int, width: int) -> torch.Tensor:
        return start + tokens * width + torch.arange(width)

    if layout.key_bits == 4:
        keys = [rows(0, layout.head_size // 2)]
    else:
        branches = layout.head_size // 4
        paths = rows(fmt.TILE_TOKENS * branches, layout.head_size // 8)
        keys = [rows(0, branches), paths]
    keys.append(rows(layout.key_scales_offset, layout.scale_words.num_bytes))
    values = _interleaved(layout.value_codes_offset, layout)
    values.append(rows(layout.value_scales_offset, layout.scale_words_v.num_bytes))
    return torch.cat(keys, 1), torch.cat(values, 1)


def _region(kv_cache: torch.Tensor) -> torch.Tensor:
    """(num_blocks, H, N, C) as (num_blocks, H, N * C), sharing memory."""
    num_blocks, num_kv_heads, block_size, slot_size = kv_cache.shape
    return kv_cache.view(num_blocks, num_kv_heads, block_size * slot_size)


def without_offset(key: torch.Tensor, key_offset: torch.Tensor) -> torch.Tensor:
    """Keys less an offset, as the store kernels compute them.

    The difference is exact in fp32, except for keys that are far smaller than the
    offset. It is rounded to the keys' dtype, which is an error 30 dB below that of
    four-bit codes.

    Args:
        key: (T, H, D), any floating dtype.
        key_offset: (T, H, D) or (H, D) fp32.

    Returns:
        (T, H, D) of the keys' dtype.

    """
    return (key.float() - key_offset).to(key.dtype)


def _positions(by_place: KeyOffset | QueryDirection, num_tokens: int) -> torch.Tensor:
    """The position of each of a call's tokens in its sequence, (T,)."""
    starts = by_place.query_start_loc
    tokens = torch.arange(num_tokens, device=starts.device)
    rows = torch.searchsorted(starts, tokens, right=True, out_int32=True) - 1
    rows = rows.clamp(0, starts.shape[0] - 2)
    return by_place.seq_lens[rows] - (starts[rows + 1] - tokens)


def offsets_of(offset: KeyOffset, num_tokens: int) -> torch.Tensor:
    """The offset of each of a call's tokens, (T, H, D) fp32."""
    positions = _positions(offset, num_tokens)
    return offset.table[interface.offset_rows(positions, offset.table)]


def directions_of(direction: QueryDirection, num_tokens: int) -> torch.Tensor:
    """The direction for the key of each of a call's tokens, (T, H, D) fp16."""
    positions = _positions(direction, num_tokens)
    return direction.table[interface.direction_rows(positions, direction.table)]


def store(call: StoreCall) -> None:
    """Quantise tokens and write them to their slots.

    Args:
        call: The tokens, of any floating dtype, without queries and without a tail,
            which ``update_tail`` updates. A (block, head) of the cache is contiguous.

    """
    assert call.query is call.tail is None
    kv_cache, slot_mapping, key, value, layout = call[:5]
    key_offset = call.key_offset
    if key_offset is not None:
        offsets = offsets_of(key_offset, slot_mapping.shape[0])
        key = without_offset(key[: len(offsets)], offsets)
    directions = None
    if call.query_direction is not None:
        directions = directions_of(call.query_direction, slot_mapping.shape[0])
    region = _region(kv_cache)
    block_size = kv_cache.shape[2]
    num_tokens = slot_mapping.shape[0]
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[kept]
    position = slots % block_size
    tile = position // fmt.TILE_TOKENS * layout.tile_bytes
    blocks = (slots // block_size)[:, None, None]
    heads = torch.arange(kv_cache.shape[1], device=slots.device)[None, :, None]
    sides = (
        (key, layout.key_codebook, layout.scale_words, False, directions),
        (value, layout.value_codebook, layout.scale_words_v, True, None),
    )
    for side, addresses in zip(sides, tile_addresses(layout)):
        tensor, codebook, words, is_value, across = side
        rotated = rotate(tensor[:num_tokens][kept])
        across = None if across is None else across[kept]
        index, scales = quantize(rotated, codebook, across)
        codes = pack_codes(index, codebook.bits, is_value)
        packed = torch.cat([codes, pack_scales(scales, words)], -1)
        rows = addresses.to(slots.device)[position % fmt.TILE_TOKENS]
        region[blocks, heads, (tile[:, None] + rows)[:, None, :]] = packed


def load(
    kv_cache: torch.Tensor, slots: torch.Tensor, layout: TurboFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantise the tokens at ``slots``, in rotated space.

    Args:
        kv_cache: (num_blocks, H, N, C) uint8.
        slots: (T,) non-negative slots.
        layout: The cache's format.

    Returns:
        Rotated keys and values, each (T, H, D) fp32. The codebook's gain is not in
        keys.

    """
    region = _region(kv_cache)
    block_size = kv_cache.shape[2]
    position = slots % block_size
    tile = position // fmt.TILE_TOKENS * layout.tile_bytes
    blocks = (slots // block_size)[:, None, None]
    heads = torch.arange(kv_cache.shape[1], device=slots.device)[None, :, None]
    sides = []
    kinds = (
        (layout.key_codebook, layout.key_code_bytes, layout.scale_words, False),
        (layout.value_codebook, layout.value_code_bytes, layout.scale_words_v, True),
    )
    for kind, addresses in zip(kinds, tile_addresses(layout)):
        codebook, code_bytes, words, is_value = kind
        rows = addresses.to(slots.device)[position % fmt.TILE_TOKENS]
        packed = region[blocks, heads, (tile[:, None] + rows)[:, None, :]]
        codes = packed[..., :code_bytes]
        index = unpack_codes(codes, codebook.bits, is_value)
        scales = unpack_scales(packed[..., code_bytes:], words)
        sides.append(dequantize(index, scales, codebook))
    return sides[0], sides[1]
