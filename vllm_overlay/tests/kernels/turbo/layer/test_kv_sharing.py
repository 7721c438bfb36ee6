# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layers that read another layer's cache: they have only queries."""

import pytest
import torch

from vllm.config import ModelConfig, VllmConfig
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionImpl,
    TurboMetadata,
)
from vllm.v1.attention.ops.turbo.interface import StoreCall
from vllm.v1.attention.ops.turbo.serving.startup import describe_cache

from ..backend_utils import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    all_paths,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    register,
    set_scratch,
    with_drafts,
)
from ..batch_utils import BATCHES, RAGGED_DRAFTS, Batch, Ranges
from ..utils import DEVICE, FP16, gaussian, model_dtypes, requires_triton
from .test_backend_extends import give_extends

TARGET, SHARING = "layers.0.attn", "layers.1.attn"
windows = pytest.mark.parametrize("window", [None, 17])


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_scratch(monkeypatch, slice_tokens=24, piece_tokens=64, least_tokens=48)


def make_layers(
    config: VllmConfig, path: str, window: int | None = None
) -> list[TurboAttentionImpl]:
    """A layer that stores, and a layer that reads its cache."""
    impls = [
        make_impl(
            config,
            path=path,
            sliding_window=window,
            kv_sharing_target_layer_name=target,
        )
        for target in (None, TARGET)
    ]
    share_cache(config, impls)
    return impls


def share_cache(config: VllmConfig, impls: list[TurboAttentionImpl]) -> None:
    """Register the first layer, and a second that reads the first one's cache."""
    for name, impl in zip((TARGET, SHARING), impls):
        register(config, impl, name)
    layers = config.compilation_config.static_forward_context
    layers[SHARING].kv_sharing_target_layer_name = TARGET


def build(config: VllmConfig, impl: TurboAttentionImpl, batch: Batch) -> TurboMetadata:
    """The metadata that both layers share."""
    return make_builder(config, impl, (TARGET, SHARING)).build(0, batch.common)


def check(
    config: VllmConfig,
    requests: list[tuple[int, int]],
    path: str,
    window: int | None = None,
    ranges: Ranges | None = None,
) -> None:
    """Check both layers with one step's metadata.

    The layer that stores attends to raw tokens in mode raw. The layer that
    shares its cache, with other queries, attends to all tokens as stored.
    """
    target, sharing = make_layers(config, path, window)
    batch = Batch.make(target, requests)
    if window is not None:
        batch.free_hidden_blocks(window)
    batch.common.mm_req_doc_ranges = ranges
    metadata = build(config, target, batch)
    batch.serve(target, metadata)
    stored = batch.cache.clone()
    batch.query = gaussian(*batch.query.shape, dtype=batch.query.dtype, seed=9)
    output = batch.serve(sharing, metadata)
    assert torch.equal(batch.cache, stored)
    # The check fails for raw tokens.
    sharing.runner.stored = False
    with pytest.raises(AssertionError, match="allowed"):
        batch.check(sharing, output, ranges)


@requires_triton
@pytest.mark.parametrize("case", BATCHES)
@prefill_modes
@windows
def test_batches_in_pytorch(folder, case, mode, window):
    check(
        make_vllm_config(folder, "turbo4", FP16, mode), BATCHES[case], "torch", window
    )


@kernel_paths
@pytest.mark.parametrize(
    "case, mode, window",
    [
        ("decodes", "raw", None),
        ("decodes", "raw", 17),
        ("first chunks", "raw", None),
        ("first chunks", "raw", 17),
        ("mixed", "raw", None),
        ("mixed", "stored", None),
        ("mixed", "raw", 17),
        ("context of several pieces", "raw", None),
    ],
)
def test_batches(folder, case, mode, window, path):
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    check(config, BATCHES[case], path, window)


@all_paths
@windows
def test_drafts(folder, path, window):
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16))
    check(config, RAGGED_DRAFTS, path, window)


@all_paths
@windows
def test_images(folder, path, window):
    """Ranges of tokens that see each other, one of them in a decode."""
    config = with_drafts(
        make_vllm_config(folder, "turbo4", FP16, max_num_batched_tokens=512)
    )
    requests = [(3, 40), (1, 50), (40, 70), (20, 0)]
    ranges: Ranges = {0: [(40, 45)], 2: [(65, 80), (90, 100)], 3: [(1, 15)]}
    check(config, requests, path, window, ranges)


@kernel_paths
def test_spans_longer_than_a_piece(folder, path, monkeypatch):
    """A layer that shares a cache has room for a whole image. The layer that stores
    needs none, because its own tokens are raw.
    """
    monkeypatch.setattr(ModelConfig, "is_mm_prefix_lm", True)
    config = make_vllm_config(folder, "turbo4", FP16, max_num_batched_tokens=128)
    target, sharing = make_layers(config, path)
    pieces = [impl.runner.prefill_limits.piece_tokens for impl in (target, sharing)]
    assert pieces == [64, 128]
    check(config, [(1, 31), (100, 20)], path, None, {1: [(22, 118)]})


@kernel_paths
def test_extends(folder, path):
    config = make_vllm_config(folder, "turbo4", FP16)
    impls = make_layers(config, path)
    for impl in impls:
        give_extends(impl, path)
    batch = Batch.make(impls[0], [(1, 31), (3, 65), (4, 31)])
    metadata = build(config, impls[0], batch)
    assert len(metadata.extends) == 1 and metadata.prefill is None
    for impl in impls:
        batch.serve(impl, metadata)


@requires_triton
def test_a_target_that_is_named_late(folder):
    """Gemma 4's drafter gets targets after its layers are made; the builder knows."""
    config = make_vllm_config(folder, "turbo4", FP16)
    impls = [make_impl(config, path="triton") for _ in range(2)]
    share_cache(config, impls)
    builder = make_builder(config, impls[0], (TARGET, SHARING))
    assert [impl.runner.shares_cache for impl in impls] == [False, True]
    batch = Batch.make(impls[0], BATCHES["mixed"])
    metadata = builder.build(0, batch.common)
    for impl in impls:
        batch.serve(impl, metadata)


def test_targets_of_other_groups_that_are_named_late(folder, log):
    """The first builder already knows, and the log line at the start comes once."""
    config = make_vllm_config(folder, "turbo4", FP16)
    impls = [make_impl(config, sliding_window=window) for window in (None, 17) * 2]
    names = [f"layers.{i}.attn" for i in range(4)]
    for name, impl in zip(names, impls):
        register(config, impl, name)
    layers = config.compilation_config.static_forward_context
    for sharing, target in zip(names[2:], names):
        layers[sharing].kv_sharing_target_layer_name = target
    for group in (0, 1):
        make_builder(config, impls[group], names[group::2])
        shares = [impl.runner.shares_cache for impl in impls]
        assert shares == [False, False, True, True]
    lines = [line for line in log.infos if line.startswith("KV cache turbo4")]
    assert len(lines) == 2 and len(set(lines)) == 1
    assert lines[0].endswith("; 2 more read caches of these.")


@requires_triton
def test_the_profile_run_tells_that_a_cache_is_shared(folder):
    """The profile run has no builder yet: scratch is for reading all tokens packed."""
    impl = make_impl(make_vllm_config(folder, "turbo4", FP16))
    x = torch.zeros(1, NUM_HEADS, HEAD_SIZE, device=DEVICE)
    impl.forward(None, x, x[:, :2], x[:, :2], None, None, x)
    assert not impl.runner.shares_cache
    impl.forward(None, x, None, None, None, None, x)
    assert impl.runner.shares_cache and impl.runner.stored


@model_dtypes
@pytest.mark.parametrize("num_queries", [1, 33])
@kernel_paths
def test_queries_are_rotated_alone(folder, path, num_queries, dtype):
    """Queries without tokens to store are rotated as beside such tokens."""
    from vllm.v1.attention.ops.turbo.interface import RotatedQuery

    impl = make_impl(make_vllm_config(folder, "turbo4", dtype), path=path)
    query = gaussian(num_queries, NUM_HEADS, HEAD_SIZE, dtype=dtype, seed=1)
    key = gaussian(num_queries, NUM_KV_HEADS, HEAD_SIZE, dtype=dtype, seed=2)
    slot = impl.runner.layout.slot_size
    cache = torch.zeros(
        4, NUM_KV_HEADS, BLOCK_SIZE, slot, dtype=torch.uint8, device=DEVICE
    )
    slots = torch.arange(num_queries, device=DEVICE)
    found = []
    for count in (num_queries, 0):
        rotated = RotatedQuery(
            torch.full_like(query, 7, dtype=torch.float16),
            torch.full(query.shape[:2], 7.0, device=DEVICE),
        )
        impl.runner.kernels.store(
            StoreCall(
                cache,
                slots[:count],
                key[:count],
                key[:count],
                impl.runner.layout,
                query,
                rotated,
                0.125,
            )
        )
        found.append(rotated)
    for beside, alone in zip(*found):
        assert torch.equal(beside, alone)
    assert not torch.equal(found[0].vectors, torch.full_like(found[0].vectors, 7))


def test_the_line_at_the_start(folder):
    """A cache that several layers read is counted once."""
    config = make_vllm_config(folder, "turbo4", FP16)
    target, sharing = make_layers(config, "torch")
    alone, both = describe_cache([target]), describe_cache([target, sharing, sharing])
    assert "layers: 1," in both and "attends to raw K and V" in both
    assert both == alone.removesuffix(".") + "; 2 more read caches of these."
