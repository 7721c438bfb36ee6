# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The turbo KV cache of MLA in PyTorch: the executable form of ``latent.format``.

The kernels are tested against this module, bit for bit where bytes are written. It also
serves CPU tensors. Shapes: T tokens, L the rank of the latent, R the rotary
coordinates, G = L / 16 scale groups.
"""

from functools import cache
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.interface import TORCH, Partials, SplitsFn
from vllm.v1.attention.ops.turbo.latent import format as latent_fmt
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import (
    GatherCall,
    GatherFn,
    LatentAttentionFn,
    LatentCall,
    LatentStoreCall,
    LatentStoreFn,
)
from vllm.v1.attention.ops.turbo.reference.attention import attention
from vllm.v1.attention.ops.turbo.reference.bytes import (
    from_bytes,
    group_shifts,
    pack_scales,
    pack_trellis,
    to_bytes,
    unpack_scales,
    unpack_trellis,
)
from vllm.v1.attention.ops.turbo.reference.cache import without_offset
from vllm.v1.attention.ops.turbo.reference.codec import (
    dequantize_groups,
    quantize_groups,
)
from vllm.v1.attention.ops.turbo.reference.levels import scale_values
from vllm.v1.attention.ops.turbo.reference.rotation import inverse_rotate, rotate

_FP32_MAX = torch.finfo(torch.float32).max


def by_group(x: torch.Tensor) -> torch.Tensor:
    """Vectors (..., n) as (..., n / 16, 16): neighbours form a group."""
    return x.unflatten(-1, (-1, fmt.SCALE_GROUP))


@cache
def _word_shifts(device: torch.device) -> torch.Tensor:
    """The lowest bits of a word's four-bit codes: int64 (8,)."""
    place = torch.arange(latent_fmt.WORD_CODES, device="cpu")
    return (4 * (place // 2 + place % 2 * 4)).to(device)


def pack_latent_codes(index: torch.Tensor, bits: int) -> torch.Tensor:
    """The bytes of a latent's codes: (..., L) to uint8 (..., L * bits / 8).

    With codes of three bits, all branches come before the path bits.
    """
    if bits == 4:
        words = index.long().unflatten(-1, (-1, latent_fmt.WORD_CODES))
        return to_bytes((words << _word_shifts(index.device)).sum(-1), 4)
    return pack_trellis(by_group(index.long()), *group_shifts(index.device))


def unpack_latent_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of ``pack_latent_codes``: uint8 (..., L)."""
    if bits == 4:
        index = from_bytes(packed, 4)[..., None] >> _word_shifts(packed.device) & 0xF
    else:
        index = unpack_trellis(packed, *group_shifts(packed.device))
    return index.flatten(-2).to(torch.uint8)


def quantize_latent(
    kv_c: torch.Tensor, layout: LatentFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels (..., L) and scales (..., G), both uint8, from latents (..., L)."""
    grouped = by_group(rotate(kv_c))
    index, scale_codes = quantize_groups(grouped, layout.codebook)
    return index.flatten(-2), scale_codes


def dequantize_latent(
    index: torch.Tensor, scale_codes: torch.Tensor, layout: LatentFormat
) -> torch.Tensor:
    """Rotated latents, fp32 (..., L), from levels and scales."""
    codebook = layout.codebook
    grouped = dequantize_groups(by_group(index), scale_codes, codebook)
    return grouped.flatten(-2) * codebook.gain


@cache
def _rope_limits(device: torch.device) -> torch.Tensor:
    """The largest magnitude that each scale holds, fp32, exact."""
    codes = torch.arange(fmt.SCALE_CODE_MAX + 1, dtype=torch.uint8, device="cpu")
    return (scale_values(codes) * latent_fmt.ROPE_CODE_MAX).to(device)


def quantize_rope(k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rotary keys to 8 bits.

    NaN counts as zero, and infinity as the largest fp32 number.

    Args:
        k_pe: (..., R), any floating dtype.

    Returns:
        Codes (..., R) int8 and scales (..., R / 16) uint8, E5M3.

    """
    k_pe = torch.nan_to_num(k_pe.float(), 0.0, _FP32_MAX, -_FP32_MAX)
    grouped = by_group(k_pe)
    largest = grouped.abs().amax(-1)
    scale_codes = torch.searchsorted(_rope_limits(k_pe.device), largest)
    scale_codes = scale_codes.clamp(max=fmt.SCALE_CODE_MAX).to(torch.uint8)
    scale = scale_values(scale_codes)[..., None].clamp(min=fmt.SMALLEST_SCALE)
    codes = torch.round(grouped * (1 / scale))
    limit = latent_fmt.ROPE_CODE_MAX
    return codes.clamp(-limit, limit).to(torch.int8).flatten(-2), scale_codes


def dequantize_rope(codes: torch.Tensor, scale_codes: torch.Tensor) -> torch.Tensor:
    """Inverse of ``quantize_rope``, fp32 (..., R)."""
    return (by_group(codes.float()) * scale_values(scale_codes)[..., None]).flatten(-2)


@cache
def latent_addresses(layout: LatentFormat) -> torch.Tensor:
    """The addresses of tokens' bytes in a tile.

    Returns:
        int64 (16, C): row n has the addresses of token n's latent codes, in the order
        of ``pack_latent_codes``, of its rotary codes, and of the scales of both.

    """
    planes = [(0, layout.code_bytes)]
    if layout.bits == 3:
        branches = layout.rank // 4
        paths = (layout.path_bits_offset, layout.code_bytes - branches)
        planes = [(0, branches), paths]
    planes += [
        (layout.rope_offset, layout.rope),
        (layout.scales_offset, layout.scale_bytes),
        (layout.rope_scales_offset, layout.rope_scale_bytes),
    ]
    tokens = torch.arange(fmt.TILE_TOKENS)[:, None]
    rows = [start + tokens * width + torch.arange(width) for start, width in planes]
    return torch.cat(rows, 1)


def _rows(
    kv_cache: torch.Tensor, slots: torch.Tensor, layout: LatentFormat
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The cache as (num_blocks, N * C), and the indices of slots' bytes in it."""
    num_blocks, block_size, slot_size = kv_cache.shape
    assert slot_size == layout.slot_size, (kv_cache.shape, layout)
    position = slots % block_size
    addresses = latent_addresses(layout).to(slots.device)[position % fmt.TILE_TOKENS]
    addresses = addresses + (position // fmt.TILE_TOKENS * layout.tile_bytes)[:, None]
    pages = kv_cache.view(num_blocks, block_size * slot_size)
    return pages, ((slots // block_size)[:, None], addresses)


def store(call: LatentStoreCall) -> None:
    """A ``LatentStoreFn``, for any floating dtype."""
    kv_cache, slot_mapping, kv_c, k_pe, layout = call[:5]
    kept = slot_mapping >= 0
    num_tokens = slot_mapping.shape[0]
    kv_c = kv_c[:num_tokens][kept]
    if call.mean is not None:
        kv_c = without_offset(kv_c, call.mean)
    index, scales = quantize_latent(kv_c, layout)
    parts = [pack_latent_codes(index, layout.bits)]
    scale_parts = [pack_scales(scales, layout.scale_words)]
    if layout.rope:
        assert k_pe is not None and k_pe.shape[-1] == layout.rope
        codes, rope_scales = quantize_rope(k_pe[:num_tokens][kept])
        parts.append(codes.view(torch.uint8))
        scale_parts.append(rope_scales)
    pages, rows = _rows(kv_cache, slot_mapping[kept].long(), layout)
    pages[rows] = torch.cat(parts + scale_parts, -1)


def load(
    kv_cache: torch.Tensor, slots: torch.Tensor, layout: LatentFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantise the tokens at ``slots``.

    Args:
        kv_cache: (num_blocks, N, C) uint8.
        slots: (T,) non-negative slots.
        layout: The cache's format.

    Returns:
        Rotated latents times the gain, (T, L), and rotary keys, (T, R), both fp32.

    """
    pages, rows = _rows(kv_cache, slots.long(), layout)
    widths = [layout.code_bytes, layout.rope, layout.scale_bytes]
    widths.append(layout.rope_scale_bytes)
    codes, rope, scales, rope_scales = pages[rows].split(widths, -1)
    index = unpack_latent_codes(codes, layout.bits)
    scale_codes = unpack_scales(scales, layout.scale_words)
    latent = dequantize_latent(index, scale_codes, layout)
    return latent, dequantize_rope(rope.contiguous().view(torch.int8), rope_scales)


def decode_attention(call: LatentCall, partials: Partials | None = None) -> None:
    """A ``LatentAttentionFn`` in fp32, which needs no ``partials``."""
    if partials is not None:
        call.check(partials)
    kv_cache, batch, output, lse = call.kv_cache, call.batch, call.output, call.lse
    starts = batch.query_start_loc
    if starts is None:
        starts = torch.arange(0, batch.num_query_slots + 1, batch.query_len)
    bounds = starts.tolist()
    seq_lens = batch.seq_lens[: batch.num_seqs].tolist()
    block_size = kv_cache.shape[1]
    for row, (begin, end, seq_len) in enumerate(zip(bounds, bounds[1:], seq_lens)):
        output[begin:end] = 0
        lse[begin:end] = float("-inf")
        # The first tokens of a padded sequence may see nothing.
        begin = max(begin, end - seq_len)
        if begin >= end:
            continue
        if call.is_sparse:
            slots = batch.block_table[row, :seq_len].long()
        else:
            positions = torch.arange(seq_len, device=kv_cache.device)
            blocks = batch.block_table[row, positions // block_size].long()
            slots = blocks * block_size + positions % block_size
        latent, rope = load(kv_cache, slots, call.layout)
        queries = call.query[begin:end].float()
        if call.query_rope is not None:
            queries = torch.cat([queries, call.query_rope[begin:end].float()], -1)
        keys = torch.cat([latent, rope], -1)
        result = attention(queries, keys[:, None], latent[:, None], call.scale)
        own = result[0] if call.rotated_mean is None else result[0] + call.rotated_mean
        output[begin:end] = own.to(output.dtype)
        lse[begin:end] = result[1]


def gather(call: GatherCall) -> None:
    """A ``GatherFn``, for any floating dtype."""
    kv_cache, output, block_table, layout, cu_seq_lens, *_ = call
    num_tokens = call.num_tokens
    block_size = kv_cache.shape[1]
    seqs = call.token_to_seq[:num_tokens].long()
    positions = torch.arange(num_tokens, device=seqs.device) - cu_seq_lens[seqs]
    if call.seq_starts is not None:
        positions = positions + call.seq_starts[seqs]
    blocks = block_table[seqs, positions // block_size].long()
    latent, rope = load(kv_cache, blocks * block_size + positions % block_size, layout)
    latent = inverse_rotate(latent)
    if call.mean is not None:
        latent += call.mean
    rows = torch.cat([latent, rope], -1)
    output[:num_tokens] = rows.to(output.dtype)


def num_torch_splits(
    num_seqs: int, num_heads: int, num_sms: int, query_len: int = 1
) -> int:
    """A ``SplitsFn``: PyTorch's operators do not split sequences."""
    return 1


class TorchLatentKernels(NamedTuple):
    """The ``LatentKernels`` of a CPU: PyTorch's operators."""

    reason: str = "this is a CPU"
    name: str = TORCH
    store: LatentStoreFn = store
    decode_attention: LatentAttentionFn = decode_attention
    num_decode_splits: SplitsFn = num_torch_splits
    gather: GatherFn = gather

    def store_sizes(self, layout: LatentFormat) -> list[int]:
        return []

    def make_matrices(self, size: int, device: torch.device) -> None:
        pass
