# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The store kernel: its bytes are the reference's, everywhere in the cache."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TurboFormat

from .utils import (
    DEVICE,
    ON_GPU,
    all_pages,
    all_presets,
    gaussian,
    kernel_cases,
    layer_caches,
    requires_triton,
)

pytestmark = requires_triton

NUM_TOKENS = 200 if ON_GPU else 24


def store(*args, **kwargs) -> None:
    from vllm.v1.attention.ops.turbo import triton_store

    triton_store.store(*args, **kwargs)


def vectors(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Gaussian vectors from tiny to huge, and all that an encoder must survive."""
    x = gaussian(*shape, dtype=torch.float32, seed=seed)
    magnitude = torch.logspace(-7, 4, shape[0], device=DEVICE)
    x = (x * magnitude[:, None, None]).to(dtype)
    x[1] = 0
    x[2] = 1
    x[3] = 0
    x[3, :, 3] = -1  # one spike
    x[4, :, 7] = math.nan
    x[5, 0] = math.nan
    x[6, 0, 1] = math.inf
    x[7, -1, 5] = -math.inf
    x[8] = torch.finfo(dtype).max
    x[9] = x[9].sign() * torch.finfo(dtype).smallest_normal / 16
    x[10] *= 1e30
    x[11] *= 1e-30
    return x


def random_slots(num_tokens: int, num_slots: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_slots, generator=generator)[:num_tokens].to(DEVICE)


@all_presets
@kernel_cases
def test_bytes_equal_the_reference(name, head_size, dtype):
    """Many tokens a page in one launch, some of slot -1, and padded inputs."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    num_blocks = NUM_TOKENS // 8
    expected_buffer, expected = layer_caches(layout, num_blocks, 2, 16)
    buffer, caches = layer_caches(layout, num_blocks, 2, 16)
    key = vectors((NUM_TOKENS + 3, 2, head_size), dtype, seed=1)
    value = vectors((NUM_TOKENS + 3, 2, head_size), dtype, seed=2).flip(0)
    slots = random_slots(NUM_TOKENS, num_blocks * 16)
    slots[[0, 13, NUM_TOKENS - 1]] = -1
    reference.store(expected[1], slots, key, value, layout)
    store(caches[1], slots, key, value, layout)
    assert torch.equal(buffer, expected_buffer)
    num_written = (NUM_TOKENS - 3) * 2 * layout.slot_size
    assert 0.9 * num_written < (buffer != 0xFF).sum() <= num_written


@pytest.mark.parametrize("head_size", [80, 96])
def test_smallest_vectors(head_size):
    """Columns that pad a word's groups have no part in the choice of its scales."""
    layout = TurboFormat.from_cache_dtype("turbo4", head_size)
    _, (expected, *_) = layer_caches(layout, 2, 2, 16)
    _, (cache, *_) = layer_caches(layout, 2, 2, 16)
    magnitude = torch.logspace(-6, -4, 32, device=DEVICE)[:, None, None]
    key, value = (
        (gaussian(32, 2, head_size, dtype=torch.float32, seed=seed) * magnitude).to(
            torch.bfloat16
        )
        for seed in (0, 1)
    )
    slots = torch.arange(32, device=DEVICE)
    reference.store(expected, slots, key, value, layout)
    store(cache, slots, key, value, layout)
    assert torch.equal(cache, expected)


@all_presets
@all_pages
def test_strides_of_the_cache(name, cache_layout, block_size):
    """Layers are interleaved; only one layer's bytes may change."""
    layout = TurboFormat.from_cache_dtype(name, 80)
    shape = (layout, 4, 2, block_size, cache_layout)
    expected_buffer, expected = layer_caches(*shape)
    buffer, caches = layer_caches(*shape)
    key, value = gaussian(15, 2, 80).half(), gaussian(15, 2, 80, seed=1).half()
    slots = random_slots(15, 4 * block_size)
    reference.store(expected[1], slots, key, value, layout)
    store(caches[1], slots, key, value, layout)
    assert torch.equal(buffer, expected_buffer)
    assert (caches[0] == 0xFF).all() and (caches[2] == 0xFF).all()


@all_presets
def test_strided_inputs(name):
    """K and V are views of a fused projection's output."""
    layout = TurboFormat.from_cache_dtype(name, 64)
    _, (expected, *_) = layer_caches(layout, 2, 2, 16)
    _, (cache, *_) = layer_caches(layout, 2, 2, 16)
    qkv = gaussian(20, 8, 64, dtype=torch.bfloat16)
    _, key, value = qkv.split([4, 2, 2], 1)
    assert not key.is_contiguous()
    slots = random_slots(20, 32)
    reference.store(expected, slots, key, value, layout)
    store(cache, slots, key, value, layout)
    assert torch.equal(cache, expected)


@all_presets
@kernel_cases
def test_rotated_query(name, head_size, dtype):
    """A row times its scale is the rotated query, scaled for base-2 softmax."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    _, (cache, *_) = layer_caches(layout, 3, 2, 16)
    key = gaussian(15, 2, head_size, dtype=dtype)
    query = vectors((19, 5, head_size), dtype, seed=3)[12:]
    rotated = torch.full(query.shape, math.nan, dtype=torch.float16, device=DEVICE)
    query_scale = torch.full(query.shape[:2], math.nan, device=DEVICE)
    slots = random_slots(15, 48)
    store(cache, slots, key, key, layout, query, rotated, query_scale, 0.3)
    _, (expected_cache, *_) = layer_caches(layout, 3, 2, 16)
    reference.store(expected_cache, slots, key, key, layout)
    assert torch.equal(cache, expected_cache)
    factor = 0.3 * math.log2(math.e) * layout.key_codebook.gain
    expected = reference.rotate(query) * factor
    result = rotated.float() * query_scale[..., None]
    error = (result - expected).abs()
    largest = expected.abs().amax(-1, keepdim=True)
    assert (error <= 2.0**-10 * expected.abs() + 2.0**-20 * largest).all()


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17])
def test_number_of_tokens(num_tokens):
    layout = TurboFormat.from_cache_dtype("turbo4", 64)
    expected_buffer, (expected, *_) = layer_caches(layout, 3, 1, 16)
    buffer, (cache, *_) = layer_caches(layout, 3, 1, 16)
    key = gaussian(20, 1, 64, dtype=torch.bfloat16)
    slots = torch.arange(num_tokens, device=DEVICE)
    reference.store(expected, slots, key, key, layout)
    store(cache, slots, key, key, layout)
    assert torch.equal(buffer, expected_buffer)


@pytest.mark.parametrize("name", ["turbo4", "turbo3"])
def test_page_beyond_4_gib(name):
    """Byte offsets of pages pass 2**31 and 2**32.

    Memory that is not touched is not taken on a CPU.
    """
    layout = TurboFormat.from_cache_dtype(name, 128)
    page_bytes = 2 * 16 * layout.slot_size
    num_blocks = 2**32 // page_bytes + 3
    shape = (num_blocks, 2, 16, layout.slot_size)
    cache = torch.empty(shape, dtype=torch.uint8, device=DEVICE)
    blocks = [2, 2**31 // page_bytes + 1, num_blocks - 1]
    assert blocks[-1] * page_bytes > 2**32
    _, (expected, *_) = layer_caches(layout, 3, 2, 16)
    for block in blocks:
        cache[block] = 0xFF
    key = gaussian(6, 2, 128, dtype=torch.bfloat16)
    position = torch.tensor([0, 15, 3, 7, 1, 14], device=DEVICE)
    block = torch.tensor([0, 1, 2, 0, 1, 2], device=DEVICE)
    reference.store(expected, block * 16 + position, key, key, layout)
    slots = torch.tensor(blocks, device=DEVICE)[block] * 16 + position
    store(cache, slots, key, key, layout)
    assert torch.equal(cache[blocks], expected)
