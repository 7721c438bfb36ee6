# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Cases and caches shared by the tests of the turbo KV cache of MLA."""

import pytest
import torch

from vllm.v1.attention.ops.turbo.latent.format import (
    LATENT_PRESETS,
    LATENT_SIZES,
    LatentFormat,
)
from vllm.v1.attention.ops.turbo.latent.interface import LatentStoreCall
from vllm.v1.attention.ops.turbo.reference import latent as reference

from ..utils import BF16, DEVICE, gaussian, random_bytes, random_scales, slots_of

latent_presets = pytest.mark.parametrize("name", LATENT_PRESETS)
latent_head_sizes = pytest.mark.parametrize("head_size", LATENT_SIZES)


def latent_cache(layout: LatentFormat, num_blocks: int, block_size: int):
    """A cache (num_blocks, N, C) of bytes 0xFF, with gaps between its blocks."""
    shape = (num_blocks, 2, block_size, layout.slot_size)
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)[:, 1]


def random_latent_pages(
    layout: LatentFormat, num_blocks: int, block_size: int
) -> torch.Tensor:
    """A cache of random codes and scales; every scale is finite."""
    shape = (num_blocks, block_size // 16)
    codes = random_bytes(*shape, layout.scales_offset, seed=1)
    # An encoder never writes -128.
    rope = codes[..., layout.rope_offset :]
    rope[rope == 0x80] = 0x81
    scales = random_scales(*shape, 16, words=layout.scale_words, seed=2).flatten(-2)
    rope_scales = random_bytes(*shape, 16 * layout.rope_scale_bytes, below=0xF8, seed=3)
    pages = torch.cat([codes, scales, rope_scales], -1)
    return pages.view(num_blocks, block_size, layout.slot_size)


def long_mean(layout: LatentFormat) -> torch.Tensor:
    """A mean of latents, (L,) fp32, 30 times as long as Gaussian ones."""
    return gaussian(layout.rank, dtype=torch.float32, seed=77) * 30


def latent_vectors(
    layout: LatentFormat,
    num_tokens: int,
    dtype: torch.dtype = BF16,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Latents (T, L) and rotary keys (T, R) or None, as views of one tensor."""
    rows = gaussian(num_tokens, layout.head_size, dtype=dtype, seed=seed)
    rope = rows[:, layout.rank :] if layout.rope else None
    return rows[:, : layout.rank], rope


def fill_latent_cache(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: list[int],
    layout: LatentFormat,
    dtype: torch.dtype = BF16,
) -> None:
    """Store Gaussian vectors of every sequence with the reference."""
    for row, length in enumerate(seq_lens):
        slots = slots_of(block_table[row], 0, length, kv_cache.shape[1])
        vectors = latent_vectors(layout, length, dtype, seed=row + 100)
        reference.store(LatentStoreCall(kv_cache, slots, *vectors, layout))
