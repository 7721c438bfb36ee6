# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The turbo KV cache in PyTorch: the executable form of ``format``.

The kernels are tested against this package, bit for bit where bytes are written. It
also serves CPU tensors. Shapes: T tokens, H KV heads, D the head size. Rotated vectors
are in the order of coordinates r that ``TurboFormat`` defines.
"""

from functools import cache

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import KeyOffset, StoreCall
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
    group = torch.arange(layout.num_groups)[:, None, None]
    word, byte = 4 * torch.arange(2)[:, None], torch.arange(2)

    def plane(pair_bytes: int, words: torch.Tensor) -> torch.Tensor:
        """The addresses in a plane whose pairs of tokens have so many bytes a group."""
        eight_tokens = 4 * pair_bytes * layout.num_groups
        of_token = n // 8 * eight_tokens + n % 8 // 2 * pair_bytes + n % 2 * 2
        return (of_token + 4 * pair_bytes * group + words + byte).flatten(1)

    if layout.value_bits == 4:
        # The first unit of each group, then the second ones.
        units = [plane(16, 8 * p + word) for p in range(2)]
        return [start + torch.cat(units, 1)]
    path_start = start + fmt.TILE_TOKENS * layout.head_size // 4
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

    def side(codes_start: int, bits: int, scales_start: int) -> torch.Tensor:
        if codes_start == layout.value_codes_offset:
            parts = _interleaved(codes_start, layout)
        elif bits == 4:
            parts = [rows(codes_start, layout.head_size // 2)]
        else:
            branches = layout.head_size // 4
            parts = [rows(codes_start, branches)]
            path_start = codes_start + fmt.TILE_TOKENS * branches
            parts.append(rows(path_start, layout.head_size // 8))
        parts.append(rows(scales_start, layout.scale_bytes))
        return torch.cat(parts, 1)

    return (
        side(0, layout.key_bits, layout.key_scales_offset),
        side(layout.value_codes_offset, layout.value_bits, layout.value_scales_offset),
    )


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


def offsets_of(offset: KeyOffset, num_tokens: int) -> torch.Tensor:
    """The offset of each of a call's tokens, (T, H, D) fp32."""
    starts = offset.query_start_loc
    tokens = torch.arange(num_tokens, device=starts.device)
    rows = torch.searchsorted(starts, tokens, right=True, out_int32=True) - 1
    rows = rows.clamp(0, starts.shape[0] - 2)
    places = offset.seq_lens[rows] - (starts[rows + 1] - tokens)
    return offset.table[interface.offset_rows(places, offset.table)]


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
        (key, layout.key_codebook, False),
        (value, layout.value_codebook, True),
    )
    for (tensor, codebook, is_value), addresses in zip(sides, tile_addresses(layout)):
        index, scales = quantize(rotate(tensor[:num_tokens][kept]), codebook)
        codes = pack_codes(index, codebook.bits, is_value)
        parts = [codes, pack_scales(scales, layout.scale_words)]
        packed = torch.cat(parts, -1)
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
    codebooks = (
        (layout.key_codebook, False),
        (layout.value_codebook, True),
    )
    for (codebook, is_value), addresses in zip(codebooks, tile_addresses(layout)):
        rows = addresses.to(slots.device)[position % fmt.TILE_TOKENS]
        packed = region[blocks, heads, (tile[:, None] + rows)[:, None, :]]
        code_bytes = layout.head_size * codebook.bits // 8
        codes = packed[..., :code_bytes]
        index = unpack_codes(codes, codebook.bits, is_value)
        scales = unpack_scales(packed[..., code_bytes:], layout.scale_words)
        sides.append(dequantize(index, scales, codebook))
    return sides[0], sides[1]
