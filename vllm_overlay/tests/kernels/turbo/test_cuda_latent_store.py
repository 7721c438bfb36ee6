# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA store kernel of MLA: its bytes are the reference's, with one or four lanes
for a scale group.
"""

import json
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from vllm.v1.attention.ops.turbo.cuda import latent_store
from vllm.v1.attention.ops.turbo.latent.format import LATENT_SIZES, LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import LatentStoreCall
from vllm.v1.attention.ops.turbo.reference import codec
from vllm.v1.attention.ops.turbo.reference import latent as reference

from .compile_kernels import compile_to_ptx
from .latent_utils import (
    latent_cache,
    latent_head_sizes,
    latent_presets,
    latent_vectors,
)
from .store_checks import random_slots, vectors
from .test_cuda_architectures import (
    LET_NEXT_BEGIN,
    NVCC,
    check_overlap,
    requires_nvcc,
)
from .test_golden import digest
from .test_latent_format import FILE, NUM_TOKENS, golden_vectors
from .test_latent_store import check_latent_bytes
from .utils import (
    BF16,
    DEVICE,
    FP16,
    ON_GPU,
    gaussian,
    model_dtypes,
    requires_cuda,
    requires_nvidia,
    spread_pages,
)

MANY = 600 if ON_GPU else 40
all_parts = pytest.mark.parametrize("parts", [1, 4])
LAYOUT = LatentFormat.from_cache_dtype("turbo4", 320)


def tuned(parts: int) -> partial:
    """The store with ``parts`` lanes for a scale group."""
    return partial(latent_store.store, parts=parts)


@requires_cuda
@latent_presets
@latent_head_sizes
@model_dtypes
@all_parts
def test_bytes_equal_the_reference(name, head_size, dtype, parts):
    """Many tokens a page in one launch, some with slot -1, from padded and strided
    inputs with tiny, huge and broken vectors.
    """
    layout = LatentFormat.from_cache_dtype(name, head_size)
    rows = vectors((MANY + 3, 1, head_size), dtype, seed=1)[:, 0]
    slots = random_slots(MANY, 2 * MANY)
    slots[[0, 13, MANY - 1]] = -1
    k_pe = rows[:, layout.rank :] if layout.rope else None
    check_latent_bytes(layout, rows[:, : layout.rank], k_pe, slots, store=tuned(parts))


@requires_cuda
@latent_presets
@all_parts
@pytest.mark.parametrize("rank", [512, 256])
@pytest.mark.parametrize("exponents", [(-20, -8), (8, 40)], ids=["tiny", "huge"])
def test_ends_of_the_scales(name, parts, rank, exponents):
    """Scales that are subnormal or zero, and scales that saturate."""
    layout = LatentFormat.from_cache_dtype(name, rank)
    first, last = exponents
    magnitude = torch.logspace(first, last, MANY, 2.0, device=DEVICE)
    kv_c = (gaussian(MANY, rank, dtype=torch.float32) * magnitude[:, None]).to(BF16)
    slots = random_slots(MANY, MANY)
    check_latent_bytes(layout, kv_c, None, slots, store=tuned(parts))


@requires_cuda
@all_parts
@pytest.mark.parametrize("rank", [512, 256])
def test_of_equal_costs_the_first_code_moves(parts, rank):
    """Vectors with a few spikes, whose rotated coordinates have few magnitudes."""
    layout = LatentFormat.from_cache_dtype("turbo4", rank)
    generator = torch.Generator().manual_seed(0)
    kv_c = torch.zeros(48, rank)
    for number, row in enumerate(kv_c):
        places = torch.randperm(rank, generator=generator)[: 2 + number % 6]
        row[places] = torch.randn(len(places), generator=generator).sign()
    slots = torch.arange(48, device=DEVICE)
    kv_c = kv_c.to(DEVICE, BF16)
    check_latent_bytes(layout, kv_c, None, slots, store=tuned(parts))


@requires_cuda
@latent_presets
@latent_head_sizes
@all_parts
def test_golden_bytes(name, head_size, parts):
    layout = LatentFormat.from_cache_dtype(name, head_size)
    page = torch.zeros(1, 32, layout.slot_size, dtype=torch.uint8, device=DEVICE)
    kv_c, k_pe = golden_vectors(layout)
    k_pe = None if k_pe is None else k_pe.to(DEVICE)
    slots = torch.arange(NUM_TOKENS, device=DEVICE)
    latent_store.store(
        LatentStoreCall(page, slots, kv_c.to(DEVICE), k_pe, layout), parts
    )
    expected = json.loads(FILE.read_text())[f"{name} {head_size}"]["page"]
    assert digest(page.cpu()) == expected


@requires_cuda
@latent_presets
@all_parts
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 17])
def test_number_of_tokens(name, parts, num_tokens):
    """Thread blocks without latents or without rotary keys; pages of 48 tokens."""
    layout = LatentFormat.from_cache_dtype(name, 320)
    slots = torch.arange(num_tokens, device=DEVICE) + 3
    inputs = latent_vectors(layout, 20)
    check_latent_bytes(layout, *inputs, slots, 48, store=tuned(parts))


@requires_cuda
@all_parts
def test_nothing_is_stored(parts):
    """Padding: tokens of a captured graph that the batch does not have."""
    slots = torch.full((9,), -1, device=DEVICE)
    inputs = latent_vectors(LAYOUT, 9)
    check_latent_bytes(LAYOUT, *inputs, slots, store=tuned(parts))


@requires_nvidia
@latent_presets
@pytest.mark.parametrize("head_size", [576, 320])
@pytest.mark.parametrize("num_tokens", [63, 512, 513, 1025, 5000])
def test_default_parts(name, head_size, num_tokens):
    """The number of tokens chooses the number of lanes for a scale group."""
    layout = LatentFormat.from_cache_dtype(name, head_size)
    slots = random_slots(num_tokens, 2 * num_tokens)
    inputs = latent_vectors(layout, num_tokens)
    check_latent_bytes(layout, *inputs, slots, store=latent_store.store)


def test_parts_follow_the_sizes():
    for head_size in LATENT_SIZES:
        layout = LatentFormat.from_cache_dtype("turbo4", head_size)
        few, many = latent_store.store_sizes(layout)
        assert latent_store.default_parts(few, layout) == 4
        assert latent_store.default_parts(many - 1, layout) == 4
        assert latent_store.default_parts(many, layout) == 1


@requires_cuda
def test_scales_of_rope_are_the_smallest_that_hold():
    """A group's largest magnitude is at, above or below the most of each scale, as far
    as bf16 and fp16 have such numbers, or subnormal.
    """
    held = 127 * codec.scale_values(torch.arange(0xF8, dtype=torch.uint8))
    for dtype in (BF16, FP16):
        nearest = held[held < 60000].to(dtype)
        above = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
        below = torch.nextafter(nearest[1:], torch.zeros_like(nearest[1:]))
        smallest = torch.finfo(dtype).smallest_normal / 4
        ends = nearest.new_tensor([smallest, torch.finfo(dtype).max])
        magnitudes = torch.cat([nearest, above, below, ends])
        magnitudes = torch.nn.functional.pad(magnitudes, (0, -len(magnitudes) % 4))
        k_pe = torch.zeros(magnitudes.numel() // 4, 4, 16, dtype=dtype)
        k_pe[:, :, 5] = magnitudes.view(-1, 4)
        k_pe[:, :, 14] = -magnitudes.view(-1, 4) / 3
        k_pe = k_pe.flatten(1).to(DEVICE)
        kv_c = torch.zeros(len(k_pe), 256, dtype=dtype, device=DEVICE)
        slots = torch.arange(len(k_pe), device=DEVICE)
        check_latent_bytes(LAYOUT, kv_c, k_pe, slots, store=tuned(1))


@requires_nvidia
@all_parts
def test_page_beyond_4_gib(parts):
    """Store into pages at byte offsets beyond 2**31 and 2**32."""
    layout = LatentFormat.from_cache_dtype("turbo4", 576)
    expected = torch.full((3, 16, layout.slot_size), 0xFF, dtype=torch.uint8)
    expected = expected.to(DEVICE)
    cache, blocks = spread_pages(expected[:, None])
    inputs = latent_vectors(layout, 6)
    position = torch.tensor([0, 15, 3, 7, 1, 14], device=DEVICE)
    block = torch.tensor([0, 1, 2, 0, 1, 2], device=DEVICE)
    reference.store(LatentStoreCall(expected, block * 16 + position, *inputs, layout))
    slots = blocks[block] * 16 + position
    latent_store.store(LatentStoreCall(cache[:, 0], slots, *inputs, layout), parts)
    assert torch.equal(cache[blocks, 0], expected)


@requires_nvidia
@all_parts
def test_graph_replays_with_other_slots(parts):
    layout = LatentFormat.from_cache_dtype("turbo4", 576)
    kv_c, k_pe = latent_vectors(layout, 24)
    cache, expected = (latent_cache(layout, 5, 16) for _ in range(2))
    slots = torch.full((24,), -1, device=DEVICE)
    latent_store.store(LatentStoreCall(cache, slots, kv_c, k_pe, layout), parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        latent_store.store(LatentStoreCall(cache, slots, kv_c, k_pe, layout), parts)
    slots.copy_(random_slots(24, 80))
    graph.replay()
    reference.store(LatentStoreCall(expected, slots, kv_c, k_pe, layout))
    assert torch.equal(cache, expected)


@requires_cuda
def test_inputs_that_the_kernel_does_not_take():
    cache = latent_cache(LAYOUT, 2, 16)
    kv_c, k_pe = latent_vectors(LAYOUT, 4)
    assert k_pe is not None
    slots = torch.arange(4, device=DEVICE)

    def refused(message: str, *call: torch.Tensor | None, error=ValueError) -> None:
        store: Callable[..., None] = latent_store.store
        with pytest.raises(error, match=message):
            store(LatentStoreCall(*call, LAYOUT))

    odd = torch.empty(4, 260, dtype=BF16, device=DEVICE)
    refused("kv_c: the stride of axis 0, 260", cache, slots, odd[:, :256], k_pe)
    refused("kv_c: 255 along axis 1", cache, slots, kv_c[:, :255], k_pe)
    refused("kv_c: of 3 tokens, not 4", cache, slots, kv_c[:3], k_pe)
    refused("k_pe: 60 along axis 1", cache, slots, kv_c, k_pe[:, :60])
    refused("k_pe: the module is of 64", cache, slots, kv_c, None)
    refused("k_pe: dtype float16", cache, slots, kv_c, k_pe.half(), error=TypeError)
    refused("kv_c: dtype float32", cache, slots, kv_c.float(), k_pe, error=TypeError)
    refused(
        "slot_mapping: dtype int32", cache, slots.int(), kv_c, k_pe, error=TypeError
    )
    assert (cache == 0xFF).all()


@requires_nvcc
@pytest.mark.parametrize("name, capability", [("turbo3", 80), ("turbo4", 90)])
def test_compiles_without_spills(name, capability):
    module = latent_store.LATENT_STORE.module(
        LatentFormat.from_cache_dtype(name, 576), None
    )
    found, ptx = compile_to_ptx(module, capability, NVCC)
    # A multiprocessor has room for five blocks of 128 threads.
    assert found.spills == 0 and found.registers <= 96
    check_overlap(module.kernel, capability, ptx)
    assert (LET_NEXT_BEGIN in ptx) == (capability >= 90)
