# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Extends whose raw tokens go to FlashAttention; the merge only adds its result."""

from typing import Any

import pytest
import torch

from vllm.config import VllmConfig
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.cuda.merge import MAX_MERGED_TOKENS
from vllm.v1.attention.ops.turbo.layer import runner as layer_runner
from vllm.v1.attention.ops.turbo.layer.flash import FlashAttn
from vllm.v1.attention.ops.turbo.planning.decode import MAX_CALL_TOKENS

from ..backend_utils import (
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    prefill_modes,
    set_path,
    set_scratch,
)
from ..batch_utils import Batch
from ..utils import BF16, DEVICE, gaussian, requires_cuda
from .extend_layers import (
    LONGEST,
    ExtendLayer,
    break_raw_tokens,
    scoring_options,
    scorings,
)

pytestmark = requires_cuda

FEW = MAX_MERGED_TOKENS
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


@pytest.fixture(autouse=True)
def long_extends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_runner, "max_extend_len", lambda *_: LONGEST)


class Layer(ExtendLayer):
    """A layer whose record has the arguments of FlashAttention's calls for extends."""

    def __init__(self, config: VllmConfig, **options: Any) -> None:
        super().__init__(config, **options)
        # ``extend_outputs`` would attend to raw tokens itself.
        self.runner.kernels = self.runner.kernels._replace(extend_outputs=None)
        flash_attn = self.runner.flash_attn

        def record(**arguments: Any) -> object:
            self.calls.append(arguments)
            return flash_attn.function(**arguments)

        self.runner.flash_attn = FlashAttn(record)

    def run(self, batch: Batch) -> torch.Tensor:
        output = super().run(batch)
        if self.step.prefill is not None:
            del self.calls[-len(self.step.prefill.slices) :]
        return output

    @property
    def lens(self) -> list[int]:
        return [call["max_seqlen_q"] for call in self.calls]


@pytest.mark.parametrize("requests, lens", BATCHES.values(), ids=BATCHES)
def test_batches(folder, requests, lens):
    layer = Layer.make(folder)
    layer.check(requests)
    assert layer.lens == lens
    assert all(call["causal"] for call in layer.calls)


def test_in_bf16(folder):
    """In bf16 rounding also affects the result of attention to raw tokens."""
    layer = Layer.make(folder, dtype=BF16)
    layer.check([(33, 40), (2, 33)])
    assert layer.lens == [33]


@scorings
def test_rules_for_scores(folder, scoring):
    """Windows, caps and sinks hold for raw tokens as well, and sinks count once."""
    options = scoring_options(scoring)
    layer = Layer.make(folder, **options)
    layer.check([(1, 31), (33, 40), (2, 33), (17, 5)])
    (call,) = layer.calls
    window = options.get("sliding_window")
    assert call.get("window_size") == (window and [window - 1, 0])
    assert call.get("softcap") == options.get("logits_soft_cap")


def test_offset_of_keys(folder, monkeypatch):
    """Raw keys still have their offset, and cached keys get it back."""
    monkeypatch.setattr(interface, "OFFSET_SEGMENT", 2048)
    layer = Layer.make(folder)
    offset = gaussian(1, NUM_KV_HEADS, HEAD_SIZE, seed=5).to(DEVICE)
    layer.runner.set_key_offset(offset)
    set_path(layer.impl, "cuda")
    layer.check([(1, 31), (33, 40), (2, 33)])


@pytest.mark.parametrize("num_drafts", [2, FEW + 3])
def test_beside_drafts(folder, num_drafts):
    """Any number of drafts are decodes, because only the device has their lengths."""
    layer = Layer.beside_drafts(folder, num_drafts, num_drafts + 40)
    assert layer.lens == [num_drafts + 40]


@pytest.mark.parametrize("broken", [0, 1])
def test_broken_neighbours(folder, broken):
    """FlashAttention's tiles also hold the next request's tokens."""
    layer = Layer.make(folder)

    def break_batch(batch: Batch) -> None:
        assert layer.lens == [20]
        break_raw_tokens(batch, broken)

    assert layer.check_broken(break_batch, broken).isnan().all()
    assert layer.lens == [20]


def test_query_tokens_from_the_cache(folder):
    """Query tokens in the cache are attended to with all others there."""
    layer = Layer.make(folder, "stored")
    layer.check([(1, 31), (33, 40), (2, 33)])
    assert layer.calls == Layer.sharing_a_cache(folder).calls == []


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("partials", [None, 64, 600])
def test_scratch_is_reserved(folder, partials, monkeypatch):
    """The profile run also reserves scratch for calls that are cut, which fill the room
    for partial results.
    """
    set_scratch(monkeypatch, partials=partials)
    layer = Layer.make(folder)
    counts: list[int] = []

    def attend(query, call, partials) -> None:
        batch, output, raw = call.batch, call.output, call.raw
        num_tokens = query.vectors.shape[0]
        assert num_tokens == raw.query.shape[0] == output.shape[0]
        assert int(batch.query_start_loc[0]) == 0
        assert int(batch.query_start_loc[-1]) == num_tokens
        assert batch.num_query_slots <= max(MAX_CALL_TOKENS, num_tokens)
        assert int(batch.query_start_loc.diff().max()) == batch.query_len
        few = FEW * (1 + (batch.num_seqs == 1))
        assert (raw.attended is None) == (batch.query_len <= few)
        if raw.attended is not None:
            result, lse = raw.attended
            assert result.shape == output.shape and lse.shape == (NUM_HEADS, num_tokens)
        partials.lse.fill_(0.0)
        counts.append(num_tokens)

    layer.run_steps(monkeypatch, counts, extend_attention=attend)


@prefill_modes
def test_warm_up_attends_to_raw_tokens(folder, mode, monkeypatch):
    from vllm.v1.attention.ops.turbo.layer import warm_up

    layer = Layer.make(folder, mode)
    planned = [
        plan.num_raw_tokens
        for step in warm_up.steps(layer.runner, 32, torch.device(DEVICE))
        for plan in step.decode_plans.values()
    ]
    assert max(planned) == (LONGEST if mode == "raw" else 0)
