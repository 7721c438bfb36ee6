# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Extends whose own tokens go to FlashAttention; the merge only adds its result."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig
from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl, TurboMetadata
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.cuda.merge import MAX_MERGED_TOKENS
from vllm.v1.attention.ops.turbo.layer import runner as layer_runner
from vllm.v1.attention.ops.turbo.planning.decode import MAX_CALL_TOKENS

from .backend_utils import (
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    Batch,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    requests_of_a_step,
    reserve_scratch,
    set_path,
    set_scratch,
    with_drafts,
)
from .utils import BF16, DEVICE, FP16, gaussian, requires_cuda

pytestmark = requires_cuda

FEW = MAX_MERGED_TOKENS
# As long as the longest extend that benchmarks measure.
LONGEST = 700
# (query length, context length) of requests, decodes first, and the longest query of
# each call of FlashAttention.
BATCHES = {
    "few": ([(1, 31), (FEW, 64), (3, 33)], []),
    "more": ([(FEW + 1, 64), (2, 33)], [FEW + 1]),
    "beside decodes": ([(1, 31), (1, 64), (33, 40), (2, 33), (64, 5)], [64]),
    "alone": ([(64, 100)], [64]),
    "without context": ([(20, 0), (18, 40)], [20]),
    # A request alone in a call.
    "few alone": ([(1, 31), (2 * FEW, 64)], []),
    "before a prefill": ([(1, 9), (33, 64), (LONGEST + 1, 0)], [33]),
    "hundreds": ([(1, 40), (200, 40)], [200]),
    "several calls": ([(200, 40), (20, 40), (630, 9), (37, 200)], [200, 630, 37]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(autouse=True)
def long_extends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_runner, "max_extend_len", lambda *_: LONGEST)


class Layer:
    """A layer that CUDA's kernels serve, with a record of FlashAttention's calls.

    Attributes:
        calls: The arguments of FlashAttention's calls for extends.

    """

    def __init__(self, config: VllmConfig, **options: Any) -> None:
        self.config = config
        self.impl: TurboAttentionImpl = make_impl(config, **options)
        set_path(self.impl, "cuda")
        runner = self.impl.runner
        # ``extend_outputs`` would attend to own tokens itself.
        runner.kernels = runner.kernels._replace(extend_outputs=None)
        self.calls: list[dict[str, Any]] = []
        flash_attn = runner.flash_attn

        def record(**arguments: Any) -> object:
            self.calls.append(arguments)
            return flash_attn(**arguments)

        runner.flash_attn = record

    def plan(self, batch: Batch) -> TurboMetadata:
        return make_builder(self.config, self.impl).build(0, batch.common)

    def run(self, batch: Batch) -> torch.Tensor:
        """The output, (T, Hq, D); ``calls`` has the calls of this run afterwards."""
        self.calls.clear()
        metadata = self.plan(batch)
        output = batch.run(self.impl, metadata, "cuda")
        if metadata.prefill is not None:
            del self.calls[-len(metadata.prefill.slices) :]
        return output

    def attend_one_by_one(self) -> None:
        kernels = self.impl.runner.kernels
        self.impl.runner.kernels = kernels._replace(max_merged_tokens=None)

    @property
    def lens(self) -> list[int]:
        return [call["max_seqlen_q"] for call in self.calls]


def make_layer(
    folder: Path, mode: str = "raw", dtype: torch.dtype = FP16, **options: Any
) -> Layer:
    config = make_vllm_config(
        folder, "turbo4", dtype, mode, max_num_batched_tokens=2048
    )
    return Layer(config, **options)


@pytest.mark.parametrize("requests, lens", BATCHES.values(), ids=BATCHES)
def test_batches(folder, requests, lens):
    layer = make_layer(folder)
    batch = Batch.make(layer.impl, requests)
    batch.check(layer.impl, layer.run(batch))
    assert layer.lens == lens
    assert all(call["causal"] for call in layer.calls)


def test_in_bf16(folder):
    """In bf16 rounding also affects the result of attention to own tokens."""
    layer = make_layer(folder, dtype=BF16)
    batch = Batch.make(layer.impl, [(33, 40), (2, 33)])
    batch.check(layer.impl, layer.run(batch))
    assert layer.lens == [33]


@pytest.mark.parametrize("name", ["window", "cap", "sinks", "all"])
def test_what_scores_are_under(folder, name):
    """Windows that are shorter and longer than the own tokens, soft caps, and sinks,
    which count once.
    """
    sinks = gaussian(NUM_HEADS, seed=4).to(DEVICE)
    options: dict[str, Any] = {
        "window": {"sliding_window": 10},
        "cap": {"logits_soft_cap": 2.0},
        "sinks": {"sinks": sinks},
        "all": {"sliding_window": 30, "logits_soft_cap": 2.0, "sinks": sinks},
    }[name]
    layer = make_layer(folder, **options)
    batch = Batch.make(layer.impl, [(1, 31), (33, 40), (2, 33), (17, 5)])
    batch.check(layer.impl, layer.run(batch))
    (call,) = layer.calls
    window = options.get("sliding_window")
    assert call.get("window_size") == (window and [window - 1, 0])
    assert call.get("softcap") == options.get("logits_soft_cap")


def test_offset_of_keys(folder, monkeypatch):
    """Own keys still have their offset, and cached keys get it back."""
    monkeypatch.setattr(interface, "OFFSET_SEGMENT", 2048)
    config = make_vllm_config(folder, "turbo4", FP16)
    layer = Layer(config)
    offset = gaussian(1, NUM_KV_HEADS, HEAD_SIZE, seed=5).to(DEVICE)
    layer.impl.runner.key_offset = offset
    set_path(layer.impl, "cuda")
    batch = Batch.make(layer.impl, [(1, 31), (33, 40), (2, 33)])
    batch.check(layer.impl, layer.run(batch))


@pytest.mark.parametrize("num_drafts", [2, FEW + 3])
def test_beside_drafts(folder, num_drafts):
    """Any number of drafts are decodes, because only the device has their lengths."""
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16), num_drafts)
    layer = Layer(config)
    lens = (num_drafts + 1, 1, num_drafts)
    requests = [(length, 40) for length in lens] + [(num_drafts + 40, 40)]
    batch = Batch.make(layer.impl, requests)
    batch.check(layer.impl, layer.run(batch))
    assert layer.lens == [num_drafts + 40]


@pytest.mark.parametrize("broken", [0, 1])
def test_broken_neighbours(folder, broken):
    """FlashAttention's tiles also hold the next request's tokens."""
    layer = make_layer(folder)
    requests = [(20, 40), (18, 40)]
    outputs = []
    for is_broken in (False, True):
        batch = Batch.make(layer.impl, requests)
        if is_broken:
            tokens = slice(0, 20) if broken == 0 else slice(20, 38)
            for x in (batch.query, batch.key, batch.value):
                x[tokens][0::2] = math.nan
                x[tokens][1::2] = math.inf
        outputs.append(layer.run(batch).split([20, 18]))
        assert layer.lens == [20]
    sound, found = outputs
    assert torch.equal(found[1 - broken], sound[1 - broken])
    assert found[broken].isnan().all() and sound[0].isfinite().all()


def test_what_reads_own_tokens_from_the_cache(folder):
    """Own tokens in the cache are attended to with all others there."""
    requests = [(1, 31), (33, 40), (2, 33)]
    for layer in (
        make_layer(folder, "stored"),
        make_layer(folder, kv_sharing_target_layer_name="layers.0.attn"),
    ):
        batch = Batch.make(layer.impl, requests)
        if layer.impl.runner.shares_cache:
            own = make_layer(folder, "stored")
            own.run(batch)
        batch.check(layer.impl, layer.run(batch))
        assert layer.calls == []


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("partials", [None, 64, 600])
def test_scratch_is_reserved(folder, partials, monkeypatch):
    """The profile run also reserves scratch for calls that are cut, which fill the room
    for partial results.
    """
    set_scratch(monkeypatch, partials=partials)
    layer = make_layer(folder)
    runner = layer.impl.runner

    def attend(query, call, partials) -> None:
        batch, output, newest = call.batch, call.output, call.newest
        num_tokens = query.vectors.shape[0]
        assert num_tokens == newest.query.shape[0] == output.shape[0]
        assert int(batch.query_start_loc[0]) == 0
        assert int(batch.query_start_loc[-1]) == num_tokens
        assert batch.num_query_slots <= max(MAX_CALL_TOKENS, num_tokens)
        assert int(batch.query_start_loc.diff().max()) == batch.query_len
        few = FEW * (1 + (batch.num_seqs == 1))
        assert (newest.attended is None) == (batch.query_len <= few)
        if newest.attended is not None:
            result, lse = newest.attended
            assert result.shape == output.shape and lse.shape == (NUM_HEADS, num_tokens)
        partials.lse.fill_(0.0)
        calls.append(num_tokens)

    calls: list[int] = []
    runner.kernels = runner.kernels._replace(
        store=lambda *_: None, extend_attention=attend
    )
    reserve_scratch(layer.impl, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        requests = list(requests_of_a_step(generator, LONGEST))
        batch = Batch.make(layer.impl, requests)
        calls.clear()
        batch.run(layer.impl, layer.plan(batch), "cuda")
        assert sum(calls) == sum(length for length, _ in requests)


@prefill_modes
def test_warm_up_attends_to_own_tokens(folder, mode, monkeypatch):
    from vllm.v1.attention.ops.turbo.layer import warm_up

    layer = make_layer(folder, mode)
    planned = [
        plan.num_own_tokens
        for step in warm_up.steps(layer.impl.runner, 32, torch.device(DEVICE))
        for plan in step.decode_plans.values()
    ]
    assert max(planned) == (LONGEST if mode == "raw" else 0)
