# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Extends: requests with few query tokens, which attend to packed context."""

import pytest
import torch

from vllm.v1.attention.backends.turbo_attn import (
    TurboAttentionImpl,
    TurboMetadataBuilder,
)
from vllm.v1.attention.ops.turbo import choose as kernels
from vllm.v1.attention.ops.turbo.format import TILE_TOKENS
from vllm.v1.attention.ops.turbo.layer import runner as layer_runner
from vllm.v1.attention.ops.turbo.planning import extend_limits
from vllm.v1.attention.ops.turbo.planning.decode import DecodePlanner, find_extends
from vllm.v1.attention.ops.turbo.planning.extend_limits import (
    MAX_EXTEND_LEN,
    max_extend_len,
)
from vllm.v1.attention.ops.turbo.planning.requests import RequestSpan
from vllm.v1.attention.ops.turbo.planning.scratch import RAW_TILE_BYTES, LayerShape

from ..backend_utils import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    add_layer,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    reserve,
    set_path,
)
from ..batch_utils import Batch
from ..utils import BF16, DEVICE, FP16, ON_GPU, cache_spec, requires_triton

TOO_LONG = MAX_EXTEND_LEN + 1
# Requests, decodes first, and each call's number of requests and longest query.
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


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have extends as long as on a GPU without measurements, on any GPU."""
    monkeypatch.setattr(extend_limits, "_MEASURED", {})
    monkeypatch.setattr(extend_limits, "_MEASURED_OUTPUTS", {})


def give_extends(impl: TurboAttentionImpl, path: str) -> None:
    """Have the path's kernels; Triton's decode attention also serves extends."""
    set_path(impl, path)
    if path == "triton":
        impl.runner.kernels = impl.runner.kernels._replace(
            extend_attention=impl.runner.kernels.decode_attention,
        )


@prefill_modes
@kernel_paths
@pytest.mark.parametrize("requests, calls", BATCHES.values(), ids=BATCHES)
def test_batches(folder, requests, calls, path, mode, monkeypatch):
    for name in ("MAX_CALL_TOKENS", "MAX_OUTPUT_CALL_TOKENS"):
        monkeypatch.setattr(layer_runner, name, 8)
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    impl = make_impl(config)
    give_extends(impl, path)
    batch = Batch.make(impl, requests)
    built = batch.build(config, impl)
    assert [(e.num_requests, e.query_len) for e in built.extends] == calls
    num_packed = built.num_decodes + sum(count for count, _ in calls)
    assert (built.prefill is None) == (num_packed == len(requests))
    batch.serve(impl, built)


def test_plan():
    assert find_extends([3, 4, 33, 2], [9, 0, 9, 9], 32, 99) == [(0, 2)]
    assert find_extends([3, 4], [0, 0], 32, 99) == []
    assert find_extends([3, 4, 50], [0, 0, 9], 32, 99) == []
    assert find_extends([33], [9], 32, 99) == find_extends([], [], 32, 99) == []
    assert find_extends([3], [9], 0, 99) == []
    # At most 1024 tokens a call, padded to its longest request, and 2048 in all.
    assert find_extends([16] * 100, [9] * 100, 32, 2048) == [(0, 64), (64, 100)]
    last = [(0, 100), (100, 101)]
    assert find_extends([8] * 100 + [32], [9] * 101, 32, 2048) == last
    assert find_extends([32] * 100, [9] * 100, 32, 2048) == [(0, 32), (32, 64)]
    # A request that is longer than half a call has a call of its own.
    alone = [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert find_extends([600] * 4, [9] * 4, 700, 2048) == alone[:3]
    assert find_extends([600] * 4, [9] * 4, 700, 4096) == alone


@pytest.mark.parametrize(
    "num_kv_heads, num_requests, query_len, calls",
    [
        # Batches of these sizes were timed, and stay one call.
        (8, 64, 128, [64]),
        (8, 32, 256, [32]),
        (8, 512, 16, [256, 256]),
        (8, 1024, 8, [342, 342, 340]),
        (128, 32, 32, [11, 11, 10]),
        (128, 5, 256, [2, 2, 1]),
        (256, 3, 128, [2, 1]),
        # One request's tiles exceed the scratch: the merge serves instead.
        (1024, 2, 256, None),
    ],
)
def test_calls_to_outputs_have_room_for_their_tokens(
    num_kv_heads, num_requests, query_len, calls
):
    shape = LayerShape(4 * num_kv_heads, num_kv_heads, 128, BF16)
    planner = DecodePlanner(
        shape,
        132,
        lambda *_: 1,
        lambda *_: 1,
        max_merged_tokens=16,
        extends_to_outputs=True,
    )
    starts = list(range(0, num_requests * query_len + 1, query_len))
    table = torch.zeros(num_requests, 1, dtype=torch.int32)
    plan = planner.plan(
        RequestSpan(0, 0, 0, 0, 1, None),
        RequestSpan.of_extends([(0, starts)], torch.device("cpu")),
        table,
        table[:, 0],
    )
    ends_in_outputs = calls is not None
    assert {call.ends_in_outputs for call in plan.calls} == {ends_in_outputs}
    assert sum(call.num_tokens for call in plan.calls) == num_requests * query_len
    tile_bytes = num_kv_heads * 2 * TILE_TOKENS * 128 * 2
    assert plan.num_raw_tiles * tile_bytes <= RAW_TILE_BYTES
    if ends_in_outputs:
        assert [call.batch.num_seqs for call in plan.calls] == calls
        tiles_of_a_request = -(-query_len // TILE_TOKENS)
        assert plan.num_raw_tiles >= max(calls) * tiles_of_a_request


def test_longest_extends():
    """The longest extend is bounded by queries of a KV head, or by tokens."""
    found = [max_extend_len(64, group) for group in (1, 4, 8, 64, 1000)]
    assert found == [MAX_EXTEND_LEN, MAX_EXTEND_LEN, MAX_EXTEND_LEN // 2, 4, 1]


def test_measured_extends(monkeypatch):
    """Measured limits hold for a GPU's kind and a number of heads.

    Between two measured numbers, the larger one's limit holds. Beyond the largest, the
    number of queries of a KV head stays the same.
    """
    measured = {90: {128: {4: 300, 8: 100}}}
    monkeypatch.setattr(extend_limits, "_MEASURED", measured)
    groups = (1, 4, 5, 8, 16, 2000)
    found = [max_extend_len(128, group, 90) for group in groups]
    assert found == [300, 300, 100, 100, 50, 1]
    for others in ((64, 4, 90), (128, 4, 80), (128, 4, None)):
        assert max_extend_len(*others) == MAX_EXTEND_LEN
    monkeypatch.setattr(extend_limits, "_MEASURED_OUTPUTS", {90: {128: {4: 500}}})
    assert max_extend_len(128, 4, 90, to_outputs=True) == 500
    assert max_extend_len(64, 4, 90, to_outputs=True) == MAX_EXTEND_LEN


@kernel_paths
@pytest.mark.usefixtures("workspace")
def test_profile_run_reserves_extends(folder, path, monkeypatch):
    config = make_vllm_config(
        folder, dtype=FP16, max_num_seqs=4, max_num_batched_tokens=48
    )
    impl = make_impl(config)
    impl.runner.num_sms = 4
    give_extends(impl, path)
    builder = make_builder(config, impl)
    reserve(impl)
    for requests in (
        [(32, 40)],
        [(12, 40)] * 4,
        [(1, 40), (2, 9), (3, 40), (40, 9)],
    ):
        batch = Batch.make(impl, requests)
        built = builder.build(0, batch.common)
        assert built.extends
        batch.serve(impl, built)


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no kernels to choose")
@kernel_paths
def test_builder_asks_the_kernels(folder, path):
    """The builder finds the layers' kernels from the configuration alone."""
    config = make_vllm_config(folder)
    config.attention_config.turbo_kernel = path
    builder = make_builder(config, make_impl(config))
    assert builder.max_extend_len == (MAX_EXTEND_LEN if path == "cuda" else 0)


@requires_triton
def test_builder_asks_for_the_heads_of_its_layers(folder):
    """A drafter has other numbers of heads than its target, and kernels of its own."""
    config = make_vllm_config(folder)
    impl = make_impl(config)
    give_extends(impl, "triton")
    for name, num_heads in (("target", NUM_HEADS), ("draft", 16 * NUM_HEADS)):
        add_layer(config, name, num_heads, is_draft=name == "draft")
        layer = config.compilation_config.static_forward_context[name]
        layer.impl.runner.kernels = impl.runner.kernels
    spec = cache_spec(impl.runner.layout, NUM_KV_HEADS, BLOCK_SIZE)
    found = [
        TurboMetadataBuilder(spec, names, config, DEVICE).max_extend_len
        for names in (["target"], ["draft"], ["target", "draft"])
    ]
    few = max_extend_len(HEAD_SIZE, 16 * NUM_HEADS // NUM_KV_HEADS)
    assert found == [MAX_EXTEND_LEN, few, few] and few < MAX_EXTEND_LEN
    layer.impl.runner.kernels = kernels.triton_kernels()
    assert TurboMetadataBuilder(spec, ["draft"], config, DEVICE).max_extend_len == 0
