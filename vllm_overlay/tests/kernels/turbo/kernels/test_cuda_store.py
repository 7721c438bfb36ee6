# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA store's blocks, tuning and stream. test_store.py has its bytes."""

import threading

import pytest
import torch

from vllm.utils import torch_utils
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda.store import default_tuning
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import RotatedQuery, StoreCall

from ..utils import (
    BF16,
    DEVICE,
    all_presets,
    by_kernel,
    gaussian,
    layer_caches,
    random_slots,
    requires_nvidia,
)
from .store_checks import CUDA, tuned


@all_presets
@by_kernel("kernel", [(kernel,) for kernel in tuned(128)])
@pytest.mark.parametrize("num_tokens", [0, 5, 17])
def test_partial_blocks(name, num_tokens, kernel):
    """Thread blocks that lack warps of tokens, beside warps of many or few queries.

    A layer that reads another's cache has queries alone.
    """
    layout = TurboFormat.from_cache_dtype(name, 128)
    shape = (layout, 4, 1, 16)
    _, (expected, *_) = layer_caches(*shape)
    key, value = (gaussian(num_tokens, 1, 128, dtype=BF16, seed=s) for s in (0, 1))
    query = gaussian(130, 5, 128, dtype=BF16, seed=2)
    slots = random_slots(num_tokens, 64)
    reference.store(StoreCall(expected, slots, key, value, layout))
    rows = []
    for num_queries in (130, 3):
        _, (cache, *_) = layer_caches(*shape)
        rotated = torch.zeros(num_queries, 5, 128, dtype=torch.float16, device=DEVICE)
        query_scale = torch.zeros(num_queries, 5, device=DEVICE)
        outputs = (query[:num_queries], RotatedQuery(rotated, query_scale))
        kernel.launch(StoreCall(cache, slots, key, value, layout, *outputs))
        assert torch.equal(cache, expected)
        rows.append((rotated, query_scale))
    assert (rows[0][0] != 0).any(-1).all() and (rows[0][1] > 0).all()
    for many, few in zip(*rows):
        assert torch.equal(many[:3], few)


@all_presets
def test_default_tuning(name):
    layout = TurboFormat.from_cache_dtype(name, 128)
    for num_tokens in (0, 1, 3, 63, 64, 65, 700, 5000):
        assert default_tuning(4 * num_tokens, layout).parts in (1, 2, 4)


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
    CUDA.launch(StoreCall(cache, torch.arange(3, device=DEVICE), key, key, layout))
    assert torch.cuda.current_stream() == stream
    assert cache.any()
