# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA store: its bytes are the reference's, whatever shares the work."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda_store import (
    StoreTuning,
    default_tuning,
    load_library,
    store,
)
from vllm.v1.attention.ops.turbo.format import HEAD_SIZES, TurboFormat

from .test_store import random_slots, vectors
from .utils import (
    BF16,
    DEVICE,
    ON_GPU,
    all_pages,
    all_presets,
    gaussian,
    layer_caches,
    model_dtypes,
)


def can_build() -> bool:
    if not ON_GPU:
        return False
    try:
        load_library(TurboFormat.from_cache_dtype("turbo4", 128))
    except RuntimeError:
        return False
    return True


pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs a GPU, nvcc and FlashInfer"
)

NUM_TOKENS = 600
all_sizes = pytest.mark.parametrize("head_size", HEAD_SIZES)
all_parts = pytest.mark.parametrize("parts", [1, 2, 4])


def assert_bytes_equal(
    layout: TurboFormat,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    tuning: StoreTuning | None,
    block_size: int = 16,
) -> None:
    """Store into caches of 0xFF by both, and compare all layers' bytes."""
    shape = (layout, slots.shape[0] // 8 + 3, key.shape[1], block_size)
    expected_buffer, expected = layer_caches(*shape)
    buffer, caches = layer_caches(*shape)
    reference.store(expected[1], slots, key, value, layout)
    store(caches[1], slots, key, value, layout, tuning=tuning)
    assert torch.equal(buffer, expected_buffer)
    assert (slots < 0).all() or (buffer != 0xFF).any()


@all_presets
@all_sizes
@model_dtypes
@all_parts
def test_bytes_equal_the_reference(name, head_size, dtype, parts):
    """Many tokens a page in one launch, some of slot -1, and padded inputs."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    key = vectors((NUM_TOKENS + 3, 3, head_size), dtype, seed=1)
    value = vectors((NUM_TOKENS + 3, 3, head_size), dtype, seed=2).flip(0)
    slots = random_slots(NUM_TOKENS, NUM_TOKENS * 2)
    slots[[0, 13, NUM_TOKENS - 1]] = -1
    assert_bytes_equal(layout, key, value, slots, StoreTuning(parts, 64))


@all_presets
@all_sizes
@all_parts
@pytest.mark.parametrize("exponents", [(-20, -8), (8, 40)], ids=["tiny", "huge"])
def test_ends_of_the_scales(name, head_size, parts, exponents):
    """Scales that are subnormal or zero, and scales that saturate."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    magnitude = torch.logspace(*exponents, NUM_TOKENS, 2.0, device=DEVICE)
    key, value = (
        (gaussian(NUM_TOKENS, 2, head_size, seed=s) * magnitude[:, None, None]).to(BF16)
        for s in (0, 1)
    )
    slots = random_slots(NUM_TOKENS, NUM_TOKENS)
    assert_bytes_equal(layout, key, value, slots, StoreTuning(parts, 128))


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


@all_presets
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 63, 64, 65, 700, 5000])
def test_default_tuning(name, num_tokens):
    """What the number of tokens chooses, with views of a fused projection's output."""
    layout = TurboFormat.from_cache_dtype(name, 128)
    qkv = gaussian(num_tokens + 2, 8, 128, dtype=BF16)
    _, key, value = qkv.split([4, 2, 2], 1)
    assert not key.is_contiguous()
    assert default_tuning(4 * num_tokens, layout).parts in (1, 2, 4)
    assert_bytes_equal(layout, key, value, random_slots(num_tokens, num_tokens), None)


@all_presets
@all_sizes
@model_dtypes
def test_rotated_query(name, head_size, dtype):
    """A row times its scale is the rotated query, scaled for base-2 softmax."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    _, (cache, *_) = layer_caches(layout, 5, 2, 16)
    key = gaussian(40, 2, head_size, dtype=dtype)
    query = vectors((49, 5, head_size), dtype, seed=3)[12:]
    query[3, 1, 2] = math.nan
    rotated = torch.full(query.shape, math.nan, dtype=torch.float16, device=DEVICE)
    query_scale = torch.full(query.shape[:2], math.nan, device=DEVICE)
    slots = random_slots(40, 48)
    store(cache, slots, key, key, layout, query, rotated, query_scale, 0.3)
    factor = 0.3 * math.log2(math.e) * layout.key_codebook.gain
    expected = reference.rotate(query) * factor
    assert query_scale.isnan().nonzero().tolist() == [[3, 1]]
    query_scale[3, 1] = math.inf  # its row is not compared
    error = (rotated.float() * query_scale[..., None] - expected).abs()
    largest = expected.abs().amax(-1, keepdim=True)
    allowed = 2.0**-10 * expected.abs() + 2.0**-20 * largest
    allowed[3, 1] = math.inf
    assert ((error <= allowed) | allowed.isinf()).all()


@all_presets
@all_parts
@pytest.mark.parametrize("num_tokens", [5, 17])
def test_partial_blocks(name, num_tokens, parts):
    """Blocks that lack warps, or have those of queries: many, then few."""
    layout = TurboFormat.from_cache_dtype(name, 128)
    shape = (layout, 4, 1, 16)
    _, (expected, *_) = layer_caches(*shape)
    key = gaussian(num_tokens, 1, 128, dtype=BF16)
    value = gaussian(num_tokens, 1, 128, dtype=BF16, seed=1)
    query = gaussian(130, 5, 128, dtype=BF16, seed=2)
    slots = random_slots(num_tokens, 64)
    reference.store(expected, slots, key, value, layout)
    rows = []
    for num_queries in (130, 3):
        _, (cache, *_) = layer_caches(*shape)
        rotated = torch.zeros(num_queries, 5, 128, dtype=torch.float16, device=DEVICE)
        query_scale = torch.zeros(num_queries, 5, device=DEVICE)
        outputs = (query[:num_queries], rotated, query_scale)
        tuning = StoreTuning(parts, 128)
        store(cache, slots, key, value, layout, *outputs, tuning=tuning)
        assert torch.equal(cache, expected)
        rows.append((rotated, query_scale))
    assert (rows[0][0] != 0).any(-1).all() and (rows[0][1] > 0).all()
    for many, few in zip(*rows):
        assert torch.equal(many[:3], few)


@pytest.mark.parametrize("name", ["turbo4", "turbo3"])
def test_page_beyond_4_gib(name):
    """Byte offsets of pages pass 2**31 and 2**32."""
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
    key = gaussian(6, 2, 128, dtype=BF16)
    position = torch.tensor([0, 15, 3, 7, 1, 14], device=DEVICE)
    block = torch.tensor([0, 1, 2, 0, 1, 2], device=DEVICE)
    reference.store(expected, block * 16 + position, key, key, layout)
    slots = torch.tensor(blocks, device=DEVICE)[block] * 16 + position
    store(cache, slots, key, key, layout)
    assert torch.equal(cache[blocks], expected)
