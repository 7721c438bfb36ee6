# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The store kernels: all bytes of the cache are the reference's, with any tuning."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import RotatedQuery, StoreCall

from ..utils import (
    BF16,
    CUDA_HEAD_SIZES,
    DEVICE,
    FP16,
    KERNEL_CASES,
    PACKINGS,
    UNEVEN,
    all_pages,
    by_kernel,
    gaussian,
    layer_caches,
    random_slots,
    spread_pages,
    vectors,
)
from .store_checks import CUDA, TRITON, check_bytes, tuned


def layout_of(name: str, head_size: int) -> TurboFormat:
    return TurboFormat.from_cache_dtype(name, head_size)


CUDA_LAYOUTS = [
    layout_of(name, size) for name in TURBO_PRESETS for size in CUDA_HEAD_SIZES
]
CUDA_CASES = [(layout, dtype) for layout in CUDA_LAYOUTS for dtype in (BF16, FP16)]
# Triton compiles an instance for codes of three bits for a minute. So most head sizes
# have one dtype with these.
FP16_SIZES = (80, 112, 512)
STORED = [
    (TRITON, layout_of(name, size), dtype)
    for name in PACKINGS
    for size, dtype in KERNEL_CASES
    if name == "turbo4" or size == 128 or (dtype == FP16) == (size in FP16_SIZES)
]
STORED += [(TRITON, layout, FP16) for layout in UNEVEN]
# The rotation of queries does not depend on the codes.
ROTATED = [(TRITON, layout_of("turbo4", size), dtype) for size, dtype in KERNEL_CASES]
ROTATED += [(TRITON, layout_of(name, 128), BF16) for name in ("k4v3", "turbo3")]
ROTATED += [(TRITON, layout, BF16) for layout in UNEVEN[:1]]
# All strides use the same instance. With --dist loadgroup one process compiles it.
STRIDED = [
    (TRITON._replace(marks=(*TRITON.marks, group)), layout_of(name, 80))
    for name in TURBO_PRESETS
    for group in [pytest.mark.xdist_group(f"strides of {name}")]
]


@by_kernel(
    "kernel, layout, dtype",
    STORED + [(kernel, *case) for kernel in tuned(64) for case in CUDA_CASES],
)
def test_bytes_equal_the_reference(kernel, layout, dtype):
    """Many tokens a page in one launch, some with slot -1, from padded inputs."""
    num_tokens = kernel.num_tokens
    # Triton compiles an instance for each number of heads.
    num_kv_heads = 2 if kernel is TRITON else 3
    shape = (num_tokens + 3, num_kv_heads, layout.head_size)
    key = vectors(shape, dtype, seed=1)
    value = vectors((*shape[:2], layout.head_size_v), dtype, seed=2).flip(0)
    slots = random_slots(num_tokens, 2 * num_tokens)
    slots[[0, 13, num_tokens - 1]] = -1
    check_bytes(kernel, layout, key, value, slots)


@by_kernel(
    "kernel, layout",
    [(TRITON, layout_of("turbo4", size)) for size in (80, 96)]
    + [(kernel, layout) for kernel in tuned(128) for layout in CUDA_LAYOUTS],
)
@pytest.mark.parametrize("exponents", [(-20, -8), (8, 40)], ids=["tiny", "huge"])
def test_ends_of_the_scales(kernel, layout, exponents):
    """Scales that are subnormal or zero, and scales that saturate.

    Padded columns of a word's groups do not affect the choice of its scales.
    """
    num_tokens = max(60, kernel.num_tokens)
    magnitude = torch.logspace(*exponents, num_tokens, 2.0, device=DEVICE)
    key, value = (
        gaussian(num_tokens, 2, layout.head_size, seed=seed) * magnitude[:, None, None]
        for seed in (0, 1)
    )
    slots = random_slots(num_tokens, num_tokens)
    check_bytes(kernel, layout, key.to(BF16), value.to(BF16), slots)


@by_kernel(
    "kernel, layout",
    STRIDED + [(CUDA, layout_of(name, 64)) for name in TURBO_PRESETS],
)
@all_pages
def test_strides_of_the_cache(kernel, layout, cache_layout, block_size):
    """Store into a cache with any order of layers, blocks and heads."""
    shape = (15, 2, layout.head_size)
    key, value = (gaussian(*shape, dtype=FP16, seed=seed) for seed in (0, 1))
    slots = random_slots(15, 4 * block_size)
    check_bytes(kernel, layout, key, value, slots, 4, block_size, cache_layout)


@by_kernel(
    "kernel, layout, num_kv_heads, num_tokens",
    [(TRITON, layout_of("turbo4", 64), 1, count) for count in (0, 1, 15, 16, 17)]
    + [(TRITON, layout_of(name, 64), 2, 20) for name in TURBO_PRESETS]
    + [
        (CUDA, layout_of(name, 128), 2, count)
        for name in TURBO_PRESETS
        for count in (0, 1, 3, 63, 64, 65, 700, 5000)
    ],
)
def test_number_of_tokens(kernel, layout, num_kv_heads, num_tokens):
    """K and V are views of one tensor. The number of tokens chooses the tuning."""
    heads = [4, num_kv_heads, num_kv_heads]
    qkv = gaussian(num_tokens + 2, sum(heads), layout.head_size, dtype=BF16)
    _, key, value = qkv.split(heads, 1)
    assert not key.is_contiguous()
    check_bytes(kernel, layout, key, value, random_slots(num_tokens, num_tokens))


@by_kernel("kernel, layout, dtype", ROTATED + [(CUDA, *case) for case in CUDA_CASES])
def test_rotated_query(kernel, layout, dtype):
    """A row times its scale is the rotated query for a base-2 softmax.

    The scale of the one query with a NaN becomes NaN, and no other scale does.
    """
    shape = (layout, 5, 2, 16)
    _, (cache, *_) = layer_caches(*shape)
    _, (expected_cache, *_) = layer_caches(*shape)
    key = gaussian(40, 2, layout.head_size, dtype=dtype)
    query = vectors((40 + 9, 5, layout.head_size), dtype, seed=3)[12:]
    query[3, 1, 2] = math.nan
    rotated = torch.full(query.shape, math.nan, dtype=torch.float16, device=DEVICE)
    query_scale = torch.full(query.shape[:2], math.nan, device=DEVICE)
    value = key[..., : layout.head_size_v]
    call = StoreCall(expected_cache, random_slots(40, 48), key, value, layout)
    reference.store(call)
    outputs = (query, RotatedQuery(rotated, query_scale), 0.3)
    kernel.launch(StoreCall(cache, *call[1:5], *outputs))
    assert torch.equal(cache, expected_cache)
    factor = 0.3 * math.log2(math.e) * layout.key_codebook.gain
    expected = reference.rotate(query) * factor
    assert query_scale.isnan().nonzero().tolist() == [[3, 1]]
    error = (rotated.float() * query_scale[..., None] - expected).abs()
    largest = expected.abs().amax(-1, keepdim=True)
    allowed = 2.0**-10 * expected.abs() + 2.0**-20 * largest
    assert ((error <= allowed) | query_scale.isnan()[..., None]).all()


@by_kernel("kernel", [(TRITON,), (CUDA,)])
@pytest.mark.parametrize("name", ["turbo4", "turbo3"])
def test_page_beyond_4_gib(kernel, name):
    """Store into pages at byte offsets beyond 2**31 and 2**32."""
    layout = layout_of(name, 128)
    _, (expected, *_) = layer_caches(layout, 3, 2, 16)
    cache, blocks = spread_pages(expected)
    key = gaussian(6, 2, 128, dtype=BF16)
    position = torch.tensor([0, 15, 3, 7, 1, 14], device=DEVICE)
    block = torch.tensor([0, 1, 2, 0, 1, 2], device=DEVICE)
    reference.store(StoreCall(expected, block * 16 + position, key, key, layout))
    kernel.launch(StoreCall(cache, blocks[block] * 16 + position, key, key, layout))
    assert torch.equal(cache[blocks], expected)
