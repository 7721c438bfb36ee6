# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests of few query tokens, which attend to packed context as it is."""

from pathlib import Path

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionImpl,
    TurboMetadataBuilder,
)
from vllm.v1.attention.ops.turbo import kernel_choice as kernels
from vllm.v1.attention.ops.turbo import metadata
from vllm.v1.attention.ops.turbo.kernel_choice import MAX_EXTEND_LEN
from vllm.v1.attention.ops.turbo.metadata import plan_extends
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.workspace import (
    init_workspace_manager,
    lock_workspace,
    reset_workspace_manager,
)

from .backend_utils import (
    BLOCK_SIZE,
    HEAD_SIZE,
    KERNELS,
    NUM_HEADS,
    NUM_KV_HEADS,
    Batch,
    add_layer,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    set_path,
)
from .utils import DEVICE, FP16, ON_GPU, cache_spec, requires_triton

TOO_LONG = MAX_EXTEND_LEN + 1
# Requests, and the requests and query tokens of each call. Decodes come first.
BATCHES = {
    "hits": ([(4, 64), (2, 33)], [(2, 4)]),
    "beside decodes": ([(1, 31), (1, 64), (3, 65), (4, 31)], [(2, 4)]),
    "before a prefill": ([(1, 9), (2, 64), (3, 0), (TOO_LONG, 33)], [(2, 3)]),
    "in several calls": (
        [(2, 64), (3, 40), (8, 33), (1, 70)],
        [(2, 3), (1, 8), (1, 1)],
    ),
    "no context": ([(1, 31), (2, 0), (3, 0)], []),
    "behind a prefill": ([(TOO_LONG, 33), (2, 64)], []),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def give_extends(impl: TurboAttentionImpl, path: str) -> None:
    """Have the path's kernels; Triton's decode attention serves as an extend, too."""
    set_path(impl, path)
    if path == "triton":
        impl.kernels = impl.kernels._replace(
            extend_attention=impl.kernels.decode_attention,
            num_extend_splits=impl.kernels.num_kv_splits,
        )


@requires_triton
@prefill_modes
@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("requests, calls", BATCHES.values(), ids=BATCHES)
def test_batches(folder, requests, calls, path, mode, monkeypatch):
    monkeypatch.setattr(metadata, "MAX_CALL_TOKENS", 8)
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    impl = make_impl(config)
    give_extends(impl, path)
    batch = Batch.make(impl, requests)
    built = make_builder(config, impl).build(0, batch.common)
    assert [(e.num_requests, e.query_len) for e in built.extends] == calls
    num_short = built.num_decodes + sum(count for count, _ in calls)
    assert (built.prefill is None) == (num_short == len(requests))
    batch.check(impl, batch.run(impl, built, path))


def test_plan():
    assert plan_extends([3, 4, 33, 2], [9, 0, 9, 9], 32) == [(0, 2)]
    assert plan_extends([3, 4], [0, 0], 32) == []
    assert plan_extends([3, 4, 50], [0, 0, 9], 32) == []
    assert plan_extends([33], [9], 32) == plan_extends([], [], 32) == []
    assert plan_extends([3], [9], 0) == []
    # 1024 tokens a call, if each request had as many as its longest; 2048 in all.
    assert plan_extends([16] * 100, [9] * 100, 32) == [(0, 64), (64, 100)]
    assert plan_extends([8] * 100 + [32], [9] * 101, 32) == [(0, 100), (100, 101)]
    assert plan_extends([32] * 100, [9] * 100, 32) == [(0, 32), (32, 64)]


def test_longest_extends():
    """By queries of a KV head, and by tokens where heads are few."""
    found = [kernels.max_extend_len(group) for group in (1, 4, 8, 64, 1000)]
    assert found == [MAX_EXTEND_LEN, MAX_EXTEND_LEN, MAX_EXTEND_LEN // 2, 3, 1]


@requires_triton
@pytest.mark.parametrize("path", KERNELS)
def test_profile_run_reserves_extends(folder, path, monkeypatch):
    config = make_vllm_config(
        folder, dtype=FP16, max_num_seqs=4, max_num_batched_tokens=48
    )
    impl = make_impl(config)
    impl.num_sms = 4
    give_extends(impl, path)
    builder = make_builder(config, impl)
    if not ON_GPU:
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    init_workspace_manager(DEVICE)
    try:
        output = torch.full((48, NUM_HEADS, HEAD_SIZE), 7.0, device=DEVICE)
        impl.forward(None, output, output, output, None, None, output)
        lock_workspace()
        for requests in (
            [(32, 40)],
            [(12, 40)] * 4,
            [(1, 40), (2, 9), (3, 40), (40, 9)],
        ):
            batch = Batch.make(impl, requests)
            built = builder.build(0, batch.common)
            assert built.extends
            batch.check(impl, batch.run(impl, built, path))
    finally:
        reset_workspace_manager()


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no kernels to choose")
@pytest.mark.parametrize("path", KERNELS)
def test_builder_asks_the_kernels(folder, path):
    """Those of the layers, by the configuration alone."""
    config = make_vllm_config(folder)
    config.attention_config.turbo_kernel = path
    add_layer(config, "layers.0.attn")
    builder = make_builder(config, make_impl(config))
    spec = builder.kv_cache_spec
    assert isinstance(spec, AttentionSpec)
    assert spec.num_kv_heads == NUM_KV_HEADS
    found = builder._find_max_extend_len(spec)
    has_extends = getattr(kernels, f"{path}_kernels")().extend_attention is not None
    assert found == (MAX_EXTEND_LEN if has_extends else 0)


def test_builder_asks_for_the_heads_of_its_layers(folder, monkeypatch):
    """A drafter's are others than the target's: each has kernels of its own."""
    config = make_vllm_config(folder)
    for name, num_heads in (("target", NUM_HEADS), ("draft", 4 * NUM_HEADS)):
        add_layer(config, name, num_heads, is_draft=name == "draft")
    spec = cache_spec(make_impl(config).layout, NUM_KV_HEADS, BLOCK_SIZE)
    asked = []

    def choose(choice, layout, group, query_len):
        asked.append(group)
        chosen = kernels.triton_kernels()
        chosen = chosen._replace(extend_attention=print if group < 8 else None)
        return kernels.ChosenKernels(chosen)

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(metadata, "share_kernels", choose)
    found = [
        TurboMetadataBuilder(spec, [name], config, DEVICE).max_extend_len
        for name in ("target", "draft")
    ]
    assert found == [MAX_EXTEND_LEN, 0]
    assert asked == [NUM_HEADS // NUM_KV_HEADS, 4 * NUM_HEADS // NUM_KV_HEADS]
