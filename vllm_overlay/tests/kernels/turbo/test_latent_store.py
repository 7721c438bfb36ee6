# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The store kernel of MLA: all bytes of the cache are the reference's."""

import pytest
import torch

from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import LatentStoreCall, LatentStoreFn
from vllm.v1.attention.ops.turbo.reference import codec
from vllm.v1.attention.ops.turbo.reference import latent as reference

from .latent_utils import latent_cache, latent_presets, latent_vectors
from .store_checks import random_slots, vectors
from .utils import BF16, DEVICE, FP16, ON_GPU, requires_triton, spread_pages

pytestmark = requires_triton

NUM_TOKENS = 200 if ON_GPU else 24
CASES = [(576, BF16), (576, FP16), (320, FP16)]
if ON_GPU:
    CASES += [(320, BF16), (512, BF16), (256, FP16)]


def check_latent_bytes(
    layout: LatentFormat,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor | None,
    slots: torch.Tensor,
    block_size: int = 16,
    store: LatentStoreFn | None = None,
) -> None:
    """Store into caches of 0xFF with the reference and with a kernel, and compare all
    bytes. Without ``store`` the kernel is Triton's.
    """
    if store is None:
        from vllm.v1.attention.ops.turbo.triton import latent_store

        store = latent_store.store
    num_blocks = slots.shape[0] * 2 // block_size + 3
    cache, expected = (latent_cache(layout, num_blocks, block_size) for _ in range(2))
    reference.store(LatentStoreCall(expected, slots, kv_c, k_pe, layout))
    store(LatentStoreCall(cache, slots, kv_c, k_pe, layout))
    # The bytes between the blocks count as well.
    whole, expected_whole = (x._base for x in (cache, expected))
    assert whole is not None and torch.equal(whole, expected_whole)
    num_stored = int((slots >= 0).sum())
    assert ((cache != 0xFF).sum() > 0) == (num_stored > 0)


@latent_presets
@pytest.mark.parametrize("head_size, dtype", CASES)
def test_bytes_equal_the_reference(name, head_size, dtype):
    """Many tokens a page in one launch, some with slot -1, from padded and strided
    inputs with tiny, huge and broken vectors.
    """
    layout = LatentFormat.from_cache_dtype(name, head_size)
    rows = vectors((NUM_TOKENS + 3, 1, head_size), dtype, seed=1)[:, 0]
    slots = random_slots(NUM_TOKENS, 2 * NUM_TOKENS)
    slots[[0, 13, NUM_TOKENS - 1]] = -1
    k_pe = rows[:, layout.rank :] if layout.rope else None
    if k_pe is not None and dtype == BF16 and not ON_GPU:
        # The interpreter reads subnormal numbers as zeros, although they have a scale.
        k_pe[9] = 0
    check_latent_bytes(layout, rows[:, : layout.rank], k_pe, slots)


@latent_presets
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_number_of_tokens(name, num_tokens):
    layout = LatentFormat.from_cache_dtype(name, 256)
    slots = torch.arange(num_tokens, device=DEVICE)
    check_latent_bytes(layout, *latent_vectors(layout, 20), slots, 48)


def test_scales_of_rope_are_the_smallest_that_hold():
    """A group's largest magnitude is at, above or below the most of each scale."""
    layout = LatentFormat.from_cache_dtype("turbo4", 320)
    held = 127 * codec.scale_values(torch.arange(0xF8, dtype=torch.uint8))
    held = held[held < 60000].half()
    above = torch.nextafter(held, torch.full_like(held, torch.inf))
    below = torch.nextafter(held[1:], torch.zeros_like(held[1:]))
    magnitudes = torch.cat([held, above, below, held.new_tensor([3e-7, 65504])])
    magnitudes = torch.nn.functional.pad(magnitudes, (0, -len(magnitudes) % 4))
    k_pe = torch.zeros(magnitudes.numel() // 4, 4, 16, dtype=FP16)
    k_pe[:, :, 5] = magnitudes.view(-1, 4)
    k_pe[:, :, 7] = -magnitudes.view(-1, 4) / 3
    k_pe = k_pe.flatten(1).to(DEVICE)
    kv_c = torch.zeros(len(k_pe), 256, dtype=FP16, device=DEVICE)
    check_latent_bytes(layout, kv_c, k_pe, torch.arange(len(k_pe), device=DEVICE))


def test_page_beyond_4_gib():
    """Store into pages at byte offsets beyond 2**31 and 2**32."""
    from vllm.v1.attention.ops.turbo.triton.latent_store import store

    layout = LatentFormat.from_cache_dtype("turbo4", 256)
    expected = torch.full((3, 16, layout.slot_size), 0xFF, dtype=torch.uint8)
    expected = expected.to(DEVICE)
    cache, blocks = spread_pages(expected[:, None])
    kv_c, _ = latent_vectors(layout, 6)
    position = torch.tensor([0, 15, 3, 7, 1, 14], device=DEVICE)
    block = torch.tensor([0, 1, 2, 0, 1, 2], device=DEVICE)
    reference.store(
        LatentStoreCall(expected, block * 16 + position, kv_c, None, layout)
    )
    store(
        LatentStoreCall(cache[:, 0], blocks[block] * 16 + position, kv_c, None, layout)
    )
    assert torch.equal(cache[blocks, 0], expected)
