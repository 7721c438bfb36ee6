# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks of every store kernel: its bytes are the reference's."""

import math
from collections.abc import Callable

import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import RotatedQuery, StoreCall
from vllm.v1.kv_cache_layout import KVCacheLayout

from .utils import DEVICE, gaussian, layer_caches, spread_pages

Store = Callable[..., None]


def vectors(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Gaussian vectors from tiny to huge, with NaN, Inf, zeros and denormal numbers."""
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


def check_bytes(
    store: Store,
    layout: TurboFormat,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    num_blocks: int | None = None,
    block_size: int = 16,
    cache_layout: KVCacheLayout = KVCacheLayout.LBHNC,
) -> None:
    """Store into caches of 0xFF with kernel and reference, and compare all bytes.

    Three layers share a buffer, with interleaved pages. Only one layer's bytes may
    change.
    """
    if num_blocks is None:
        num_blocks = slots.shape[0] // 8 + 3
    shape = (layout, num_blocks, key.shape[1], block_size, cache_layout)
    expected_buffer, expected = layer_caches(*shape)
    buffer, caches = layer_caches(*shape)
    reference.store(StoreCall(expected[1], slots, key, value, layout))
    store(StoreCall(caches[1], slots, key, value, layout))
    assert torch.equal(buffer, expected_buffer)
    num_stored = int((slots >= 0).sum())
    num_written = int((buffer != 0xFF).sum())
    assert num_written <= num_stored * key.shape[1] * layout.slot_size
    assert (num_written > 0) == (num_stored > 0)
    assert (caches[0] == 0xFF).all() and (caches[2] == 0xFF).all()


def check_many_tokens(
    store: Store,
    layout: TurboFormat,
    dtype: torch.dtype,
    num_tokens: int,
    num_kv_heads: int,
) -> None:
    """Store many tokens a page in one launch, some with slot -1, from padded inputs."""
    shape = (num_tokens + 3, num_kv_heads, layout.head_size)
    key = vectors(shape, dtype, seed=1)
    value = vectors(shape, dtype, seed=2).flip(0)
    slots = random_slots(num_tokens, 2 * num_tokens)
    slots[[0, 13, num_tokens - 1]] = -1
    check_bytes(store, layout, key, value, slots)


def check_strides_of_the_cache(
    store: Store, layout: TurboFormat, cache_layout: KVCacheLayout, block_size: int
) -> None:
    """Store into a cache with any order of layers, blocks and heads."""
    size = layout.head_size
    key, value = gaussian(15, 2, size).half(), gaussian(15, 2, size, seed=1).half()
    slots = random_slots(15, 4 * block_size)
    check_bytes(store, layout, key, value, slots, 4, block_size, cache_layout)


def check_rotated_query(
    store: Store,
    layout: TurboFormat,
    dtype: torch.dtype,
    num_tokens: int,
    nan_row: tuple[int, int] | None = None,
) -> None:
    """Check that a row times its scale is the rotated query for a base-2 softmax.

    Args:
        store: The store under test.
        layout: The cache's format.
        dtype: The model's dtype.
        num_tokens: Number of tokens to store, at most 48.
        nan_row: Token and head of a query that gets a NaN. Its scale must become NaN,
            and no other scale may.

    """
    shape = (layout, 5, 2, 16)
    _, (cache, *_) = layer_caches(*shape)
    _, (expected_cache, *_) = layer_caches(*shape)
    key = gaussian(num_tokens, 2, layout.head_size, dtype=dtype)
    query = vectors((num_tokens + 9, 5, layout.head_size), dtype, seed=3)[12:]
    if nan_row is not None:
        query[nan_row][2] = math.nan
    rotated = torch.full(query.shape, math.nan, dtype=torch.float16, device=DEVICE)
    query_scale = torch.full(query.shape[:2], math.nan, device=DEVICE)
    slots = random_slots(num_tokens, 48)
    store(
        StoreCall(
            cache,
            slots,
            key,
            key,
            layout,
            query,
            RotatedQuery(rotated, query_scale),
            0.3,
        )
    )
    reference.store(StoreCall(expected_cache, slots, key, key, layout))
    assert torch.equal(cache, expected_cache)
    factor = 0.3 * math.log2(math.e) * layout.key_codebook.gain
    expected = reference.rotate(query) * factor
    nan_rows = [] if nan_row is None else [list(nan_row)]
    assert query_scale.isnan().nonzero().tolist() == nan_rows
    error = (rotated.float() * query_scale[..., None] - expected).abs()
    largest = expected.abs().amax(-1, keepdim=True)
    allowed = 2.0**-10 * expected.abs() + 2.0**-20 * largest
    assert ((error <= allowed) | query_scale.isnan()[..., None]).all()


def check_page_beyond_4_gib(store: Store, name: str) -> None:
    """Store into pages at byte offsets beyond 2**31 and 2**32."""
    layout = TurboFormat.from_cache_dtype(name, 128)
    _, (expected, *_) = layer_caches(layout, 3, 2, 16)
    cache, blocks = spread_pages(expected)
    key = gaussian(6, 2, 128, dtype=torch.bfloat16)
    position = torch.tensor([0, 15, 3, 7, 1, 14], device=DEVICE)
    block = torch.tensor([0, 1, 2, 0, 1, 2], device=DEVICE)
    reference.store(StoreCall(expected, block * 16 + position, key, key, layout))
    store(StoreCall(cache, blocks[block] * 16 + position, key, key, layout))
    assert torch.equal(cache[blocks], expected)
