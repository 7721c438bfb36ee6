# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA store: its bytes are the reference's, with any tuning."""

import threading
from functools import partial

import pytest
import torch

from vllm.utils import torch_utils
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES
from vllm.v1.attention.ops.turbo.cuda.store import (
    STORE,
    StoreTuning,
    default_tuning,
    store,
)
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import RotatedQuery, StoreCall

from .store_checks import (
    Store,
    check_bytes,
    check_many_tokens,
    check_page_beyond_4_gib,
    check_rotated_query,
    check_strides_of_the_cache,
    random_slots,
)
from .utils import (
    BF16,
    CAN_RUN_CUDA,
    DEVICE,
    all_pages,
    all_presets,
    gaussian,
    layer_caches,
    model_dtypes,
    requires_nvidia,
)


def can_build() -> bool:
    if not CAN_RUN_CUDA:
        return False
    try:
        STORE.load(TurboFormat.from_cache_dtype("turbo4", 128), None, DEVICE)
    except RuntimeError:
        return False
    return True


pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs a GPU, nvcc and FlashInfer"
)

NUM_TOKENS = 600
all_sizes = pytest.mark.parametrize("head_size", SUPPORTED_HEAD_SIZES)
all_parts = pytest.mark.parametrize("parts", [1, 2, 4])


def tuned(parts: int, num_threads: int) -> Store:
    """The store with a tuning of its own."""
    return partial(store, tuning=StoreTuning(parts, num_threads))


@all_presets
@all_sizes
@model_dtypes
@all_parts
def test_bytes_equal_the_reference(name, head_size, dtype, parts):
    layout = TurboFormat.from_cache_dtype(name, head_size)
    check_many_tokens(tuned(parts, 64), layout, dtype, NUM_TOKENS, 3)


@all_presets
@all_sizes
@all_parts
@pytest.mark.parametrize("exponents", [(-20, -8), (8, 40)], ids=["tiny", "huge"])
def test_ends_of_the_scales(name, head_size, parts, exponents):
    """Scales that are subnormal or zero, and scales that saturate."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    first, last = exponents
    magnitude = torch.logspace(first, last, NUM_TOKENS, 2.0, device=DEVICE)
    key, value = (
        (gaussian(NUM_TOKENS, 2, head_size, seed=s) * magnitude[:, None, None]).to(BF16)
        for s in (0, 1)
    )
    slots = random_slots(NUM_TOKENS, NUM_TOKENS)
    check_bytes(tuned(parts, 128), layout, key, value, slots)


@all_presets
@all_pages
def test_strides_of_the_cache(name, cache_layout, block_size):
    layout = TurboFormat.from_cache_dtype(name, 64)
    check_strides_of_the_cache(store, layout, cache_layout, block_size)


@all_presets
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 63, 64, 65, 700, 5000])
def test_default_tuning(name, num_tokens):
    """The tuning that the number of tokens chooses, with views of one tensor."""
    layout = TurboFormat.from_cache_dtype(name, 128)
    qkv = gaussian(num_tokens + 2, 8, 128, dtype=BF16)
    _, key, value = qkv.split([4, 2, 2], 1)
    assert not key.is_contiguous()
    assert default_tuning(4 * num_tokens, layout).parts in (1, 2, 4)
    check_bytes(store, layout, key, value, random_slots(num_tokens, num_tokens))


@all_presets
@all_sizes
@model_dtypes
def test_rotated_query(name, head_size, dtype):
    layout = TurboFormat.from_cache_dtype(name, head_size)
    check_rotated_query(store, layout, dtype, 40, nan_row=(3, 1))


@all_presets
@all_parts
@pytest.mark.parametrize("num_tokens", [0, 5, 17])
def test_partial_blocks(name, num_tokens, parts):
    """Thread blocks that lack warps of tokens, beside warps of many or few queries.

    A layer that reads another's cache has queries alone.
    """
    layout = TurboFormat.from_cache_dtype(name, 128)
    shape = (layout, 4, 1, 16)
    _, (expected, *_) = layer_caches(*shape)
    key = gaussian(num_tokens, 1, 128, dtype=BF16)
    value = gaussian(num_tokens, 1, 128, dtype=BF16, seed=1)
    query = gaussian(130, 5, 128, dtype=BF16, seed=2)
    slots = random_slots(num_tokens, 64)
    reference.store(StoreCall(expected, slots, key, value, layout))
    rows = []
    for num_queries in (130, 3):
        _, (cache, *_) = layer_caches(*shape)
        rotated = torch.zeros(num_queries, 5, 128, dtype=torch.float16, device=DEVICE)
        query_scale = torch.zeros(num_queries, 5, device=DEVICE)
        outputs = (query[:num_queries], RotatedQuery(rotated, query_scale))
        tuning = StoreTuning(parts, 128)
        store(StoreCall(cache, slots, key, value, layout, *outputs), tuning=tuning)
        assert torch.equal(cache, expected)
        rows.append((rotated, query_scale))
    assert (rows[0][0] != 0).any(-1).all() and (rows[0][1] > 0).all()
    for many, few in zip(*rows):
        assert torch.equal(many[:3], few)


@pytest.mark.parametrize("name", ["turbo4", "turbo3"])
def test_page_beyond_4_gib(name):
    check_page_beyond_4_gib(store, name)


@requires_nvidia
def test_stream_stays(monkeypatch):
    """A launch must not make vLLM switch to another stream in the middle of a step:
    PyTorch's cached memory belongs to the old stream.
    """
    monkeypatch.setattr(torch_utils, "_current_stream_tls", threading.local())
    layout = TurboFormat.from_cache_dtype("turbo4", 128)
    cache = torch.zeros(2, 1, 16, layout.slot_size, dtype=torch.uint8, device=DEVICE)
    key = gaussian(3, 1, 128, dtype=BF16)
    stream = torch.cuda.current_stream()
    store(StoreCall(cache, torch.arange(3, device=DEVICE), key, key, layout))
    assert torch.cuda.current_stream() == stream
    assert cache.any()
