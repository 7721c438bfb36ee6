# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The store kernels of MLA: all bytes of the cache are the reference's, in CUDA with
one or four lanes for a scale group.
"""

import json
import math
from functools import partial

import pytest
import torch

from vllm.v1.attention.ops.turbo.latent.format import (
    LATENT_PRESETS,
    LATENT_SIZES,
    LatentFormat,
)
from vllm.v1.attention.ops.turbo.latent.interface import LatentStoreCall
from vllm.v1.attention.ops.turbo.reference import codec
from vllm.v1.attention.ops.turbo.reference import latent as reference
from vllm.v1.attention.ops.turbo.triton import latent_store as triton_store

from ..formats.test_golden import digest
from ..utils import (
    BF16,
    DEVICE,
    FP16,
    ON_GPU,
    KernelUnderTest,
    by_kernel,
    cuda_module,
    gaussian,
    random_slots,
    requires_cuda,
    requires_nvidia,
    requires_triton,
    spread_pages,
    vectors,
)
from .latent_utils import (
    latent_cache,
    latent_head_sizes,
    latent_presets,
    latent_vectors,
    long_mean,
)
from .test_latent_format import FILE, NUM_TOKENS, golden_vectors, layout_of


def store_by_cuda(call: LatentStoreCall, parts: int | None = None) -> None:
    cuda_module("latent_store").store(call, parts)


TRITON = KernelUnderTest(
    "triton", triton_store.store, (requires_triton,), 200 if ON_GPU else 24
)
REFERENCE = KernelUnderTest("reference", reference.store, ())
CUDA = KernelUnderTest("cuda", store_by_cuda, (requires_cuda,), 600 if ON_GPU else 40)
TUNED = [
    CUDA._replace(name=f"cuda-{parts}", launch=partial(CUDA.launch, parts=parts))
    for parts in (1, 4)
]
all_kernels = by_kernel("kernel", [(kernel,) for kernel in (TRITON, *TUNED)])
ranks = pytest.mark.parametrize("rank", [512, 256])
LAYOUT = layout_of("turbo4", 320)
TRITON_CASES = [(576, BF16), (576, FP16), (320, FP16)]
if ON_GPU:
    TRITON_CASES += [(320, BF16), (512, BF16), (256, FP16)]
CUDA_CASES = [(size, dtype) for size in LATENT_SIZES for dtype in (BF16, FP16)]


def check_latent_bytes(
    kernel: KernelUnderTest,
    layout: LatentFormat,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor | None,
    slots: torch.Tensor,
    block_size: int = 16,
    mean: torch.Tensor | None = None,
) -> None:
    """Store into caches of 0xFF with the reference and with a kernel, and compare all
    bytes. The reference stores latents that have lost the mean.
    """
    num_blocks = slots.shape[0] * 2 // block_size + 3
    cache, expected = (latent_cache(layout, num_blocks, block_size) for _ in range(2))
    own = kv_c if mean is None else (kv_c.float() - mean).to(kv_c.dtype)
    reference.store(LatentStoreCall(expected, slots, own, k_pe, layout))
    kernel.launch(LatentStoreCall(cache, slots, kv_c, k_pe, layout, mean))
    # The bytes between the blocks count as well.
    whole, expected_whole = (x._base for x in (cache, expected))
    assert whole is not None and torch.equal(whole, expected_whole)
    num_stored = int((slots >= 0).sum())
    assert ((cache != 0xFF).sum() > 0) == (num_stored > 0)


@by_kernel(
    "kernel, layout, dtype",
    [
        (kernel, layout_of(name, size), dtype)
        for kernel in (TRITON, *TUNED)
        for name in LATENT_PRESETS
        for size, dtype in (TRITON_CASES if kernel is TRITON else CUDA_CASES)
    ],
)
def test_bytes_equal_the_reference(kernel, layout, dtype):
    """Many tokens a page in one launch, some with slot -1, from padded and strided
    inputs with tiny, huge and broken vectors.
    """
    num_tokens = kernel.num_tokens
    rows = vectors((num_tokens + 3, 1, layout.head_size), dtype, seed=1)[:, 0]
    slots = random_slots(num_tokens, 2 * num_tokens)
    slots[[0, 13, num_tokens - 1]] = -1
    k_pe = rows[:, layout.rank :] if layout.rope else None
    if k_pe is not None and dtype == BF16 and kernel is TRITON and not ON_GPU:
        # The interpreter reads subnormal numbers as zeros, although they have a scale.
        k_pe[9] = 0
    check_latent_bytes(kernel, layout, rows[:, : layout.rank], k_pe, slots)


@by_kernel(
    "kernel, layout, dtype",
    [
        (kernel, layout_of(*layout), dtype)
        for kernel in (REFERENCE, TRITON, *TUNED)
        for layout in (("turbo4", 576), ("turbo3", 576), ("turbo4", 256))
        for dtype in (BF16, FP16)
        if kernel in TUNED or (layout[1] == 256) == (dtype == FP16)
    ],
)
def test_mean_is_taken_off(kernel, layout, dtype):
    """A mean that is much longer than most latents, and latents close to it.

    Some latents are not finite, and some lose more than the dtype can hold.
    """
    num_tokens, mean = max(kernel.num_tokens, 24), long_mean(layout)
    rows = vectors((num_tokens, 1, layout.head_size), dtype, seed=1)[:, 0]
    rows[12:, : layout.rank] += mean.to(dtype)
    rows[13, : layout.rank] = (torch.finfo(dtype).max * -mean.sign()).to(dtype)
    k_pe = rows[:, layout.rank :] if layout.rope else None
    if k_pe is not None and dtype == BF16 and kernel is TRITON and not ON_GPU:
        # The interpreter reads subnormal numbers as zeros, although they have a scale.
        k_pe[9] = 0
    slots = random_slots(num_tokens, 2 * num_tokens)
    slots[[2, 17]] = -1
    kv_c = rows[:, : layout.rank]
    check_latent_bytes(kernel, layout, kv_c, k_pe, slots, mean=mean)


@latent_presets
@all_kernels
@ranks
@pytest.mark.parametrize("exponents", [(-20, -8), (8, 40)], ids=["tiny", "huge"])
def test_ends_of_the_scales(name, kernel, rank, exponents):
    """Scales that are subnormal or zero, and scales that saturate."""
    num_tokens = kernel.num_tokens
    magnitude = torch.logspace(*exponents, num_tokens, 2.0, device=DEVICE)
    kv_c = (gaussian(num_tokens, rank) * magnitude[:, None]).to(BF16)
    slots = random_slots(num_tokens, num_tokens)
    check_latent_bytes(kernel, layout_of(name, rank), kv_c, None, slots)


@all_kernels
@ranks
def test_of_equal_costs_the_first_code_moves(kernel, rank):
    """Vectors with a few spikes, whose rotated coordinates have few magnitudes."""
    generator = torch.Generator().manual_seed(0)
    kv_c = torch.zeros(48, rank)
    for number, row in enumerate(kv_c):
        places = torch.randperm(rank, generator=generator)[: 2 + number % 6]
        row[places] = torch.randn(len(places), generator=generator).sign()
    slots = torch.arange(48, device=DEVICE)
    layout = layout_of("turbo4", rank)
    check_latent_bytes(kernel, layout, kv_c.to(DEVICE, BF16), None, slots)


@latent_presets
@latent_head_sizes
@all_kernels
def test_golden_bytes(name, head_size, kernel):
    layout = layout_of(name, head_size)
    page = torch.zeros(1, 32, layout.slot_size, dtype=torch.uint8, device=DEVICE)
    kv_c, k_pe = golden_vectors(layout)
    k_pe = None if k_pe is None else k_pe.to(DEVICE)
    slots = torch.arange(NUM_TOKENS, device=DEVICE)
    kernel.launch(LatentStoreCall(page, slots, kv_c.to(DEVICE), k_pe, layout))
    expected = json.loads(FILE.read_text())[f"{name} {head_size}"]["page"]
    assert digest(page.cpu()) == expected


@latent_presets
@all_kernels
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 17])
def test_number_of_tokens(name, kernel, num_tokens):
    """Thread blocks without latents or without rotary keys; pages of 48 tokens."""
    layout = layout_of(name, 320)
    slots = torch.arange(num_tokens, device=DEVICE) + 3
    check_latent_bytes(kernel, layout, *latent_vectors(layout, 20), slots, 48)


@all_kernels
def test_nothing_is_stored(kernel):
    """Padding: tokens of a captured graph that the batch does not have."""
    slots = torch.full((9,), -1, device=DEVICE)
    check_latent_bytes(kernel, LAYOUT, *latent_vectors(LAYOUT, 9), slots)


# The interpreter reads subnormal numbers of bf16 as zeros.
@by_kernel("kernel, dtype", [(TRITON, FP16), (TUNED[0], BF16), (TUNED[0], FP16)])
def test_scales_of_rope_are_the_smallest_that_hold(kernel, dtype):
    """A group's largest magnitude is at, above or below the most of each scale, as far
    as the dtype has such numbers, or subnormal.
    """
    held = 127 * codec.scale_values(torch.arange(0xF8, dtype=torch.uint8))
    held = held[held < 60000].to(dtype)
    above = torch.nextafter(held, torch.full_like(held, math.inf))
    below = torch.nextafter(held[1:], torch.zeros_like(held[1:]))
    limits = torch.finfo(dtype)
    ends = held.new_tensor([3e-7, limits.smallest_normal / 4, limits.max])
    magnitudes = torch.cat([held, above, below, ends])
    magnitudes = torch.nn.functional.pad(magnitudes, (0, -len(magnitudes) % 4))
    k_pe = torch.zeros(magnitudes.numel() // 4, 4, 16, dtype=dtype)
    k_pe[:, :, 5] = magnitudes.view(-1, 4)
    k_pe[:, :, 14] = -magnitudes.view(-1, 4) / 3
    k_pe = k_pe.flatten(1).to(DEVICE)
    kv_c = torch.zeros(len(k_pe), 256, dtype=dtype, device=DEVICE)
    slots = torch.arange(len(k_pe), device=DEVICE)
    check_latent_bytes(kernel, LAYOUT, kv_c, k_pe, slots)


@by_kernel(
    "kernel", [(TRITON,), *((x._replace(marks=(requires_nvidia,)),) for x in TUNED)]
)
def test_page_beyond_4_gib(kernel):
    """Store into pages at byte offsets beyond 2**31 and 2**32."""
    layout = layout_of("turbo4", 576)
    expected = torch.full((3, 16, layout.slot_size), 0xFF, dtype=torch.uint8)
    expected = expected.to(DEVICE)
    cache, blocks = spread_pages(expected[:, None])
    inputs = latent_vectors(layout, 6)
    position = torch.tensor([0, 15, 3, 7, 1, 14], device=DEVICE)
    block = torch.tensor([0, 1, 2, 0, 1, 2], device=DEVICE)
    reference.store(LatentStoreCall(expected, block * 16 + position, *inputs, layout))
    slots = blocks[block] * 16 + position
    kernel.launch(LatentStoreCall(cache[:, 0], slots, *inputs, layout))
    assert torch.equal(cache[blocks, 0], expected)
