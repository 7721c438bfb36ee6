# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The store kernel: all bytes of the cache are the reference's."""

import pytest
import torch

from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import StoreCall

from .store_checks import (
    check_bytes,
    check_many_tokens,
    check_page_beyond_4_gib,
    check_rotated_query,
    check_strides_of_the_cache,
    random_slots,
)
from .utils import (
    BF16,
    DEVICE,
    FP16,
    KERNEL_CASES,
    ON_GPU,
    PACKINGS,
    all_pages,
    all_presets,
    gaussian,
    requires_triton,
)

pytestmark = requires_triton

NUM_TOKENS = 200 if ON_GPU else 24
# Triton compiles an instance for codes of three bits for a minute. So most head sizes
# have one dtype with these.
FP16_SIZES = (80, 112, 512)
STORED = [
    (name, size, dtype)
    for name in PACKINGS
    for size, dtype in KERNEL_CASES
    if name == "turbo4" or size == 128 or (dtype == FP16) == (size in FP16_SIZES)
]
# The rotation of queries does not depend on the codes.
ROTATED = [("turbo4", size, dtype) for size, dtype in KERNEL_CASES]
ROTATED += [(name, 128, BF16) for name in ("k4v3", "turbo3")]


def store(call: StoreCall, **kwargs) -> None:
    from vllm.v1.attention.ops.turbo.triton import store as triton_store

    triton_store.store(call, **kwargs)


@pytest.mark.parametrize("name, head_size, dtype", STORED)
def test_bytes_equal_the_reference(name, head_size, dtype):
    layout = TurboFormat.from_cache_dtype(name, head_size)
    check_many_tokens(store, layout, dtype, NUM_TOKENS, 2)


@pytest.mark.parametrize("head_size", [80, 96])
def test_smallest_vectors(head_size):
    """Padded columns of a word's groups do not affect the choice of its scales."""
    layout = TurboFormat.from_cache_dtype("turbo4", head_size)
    magnitude = torch.logspace(-6, -4, 32, device=DEVICE)[:, None, None]
    key, value = (
        (gaussian(32, 2, head_size, dtype=torch.float32, seed=seed) * magnitude).to(
            torch.bfloat16
        )
        for seed in (0, 1)
    )
    check_bytes(store, layout, key, value, torch.arange(32, device=DEVICE))


# All strides use the same instance. With --dist loadgroup one process compiles it.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(f"strides of {name}"))
        for name in TURBO_PRESETS
    ],
)
@all_pages
def test_strides_of_the_cache(name, cache_layout, block_size):
    layout = TurboFormat.from_cache_dtype(name, 80)
    check_strides_of_the_cache(store, layout, cache_layout, block_size)


@all_presets
def test_strided_inputs(name):
    """K and V are views of one tensor."""
    layout = TurboFormat.from_cache_dtype(name, 64)
    qkv = gaussian(20, 8, 64, dtype=torch.bfloat16)
    _, key, value = qkv.split([4, 2, 2], 1)
    assert not key.is_contiguous()
    check_bytes(store, layout, key, value, random_slots(20, 32))


@pytest.mark.parametrize("name, head_size, dtype", ROTATED)
def test_rotated_query(name, head_size, dtype):
    layout = TurboFormat.from_cache_dtype(name, head_size)
    check_rotated_query(store, layout, dtype, 15)


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17])
def test_number_of_tokens(num_tokens):
    layout = TurboFormat.from_cache_dtype("turbo4", 64)
    key = gaussian(20, 1, 64, dtype=torch.bfloat16)
    check_bytes(store, layout, key, key, torch.arange(num_tokens, device=DEVICE))


@pytest.mark.parametrize("name", ["turbo4", "turbo3"])
def test_page_beyond_4_gib(name):
    check_page_beyond_4_gib(store, name)
