# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Extends by ``extend_outputs`` in the backend. The kernel attends to query tokens with
all others and writes outputs, so that nothing is merged.
"""

import math
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda import extend_mma, extend_wgmma
from vllm.v1.attention.ops.turbo.format import TILE_TOKENS, TurboFormat
from vllm.v1.attention.ops.turbo.formats.output_scratch import OutputScratch
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_signs
from vllm.v1.attention.ops.turbo.interface import AttentionCall, StoreCall, offset_rows
from vllm.v1.attention.ops.turbo.layer import runner as layer_runner
from vllm.v1.attention.ops.turbo.layer.context_parallel import ContextParallel
from vllm.v1.attention.ops.turbo.layer.forward import forward
from vllm.v1.attention.ops.turbo.layer.warm_up import small_tails
from vllm.v1.attention.ops.turbo.planning import decode as decode_plan
from vllm.v1.attention.ops.turbo.planning import largest_batch
from vllm.v1.attention.ops.turbo.planning.requests import RequestSpan

from .. import backend_utils
from ..backend_utils import (
    BLOCK_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    prefill_modes,
    set_scratch,
)
from ..batch_utils import Batch, pad_to_graph
from ..rank_utils import RankGroup, Ranks
from ..sequences import directions
from ..utils import (
    BF16,
    DEVICE,
    FP16,
    SEGMENT,
    gaussian,
    model_dtypes,
    requires_hopper,
    slots_of,
)
from .extend_layers import (
    LONGEST,
    ExtendLayer,
    break_raw_tokens,
    break_tokens,
    scoring_options,
    scorings,
)

pytestmark = requires_hopper

HEAD_SIZE = 128
LAYOUT = TurboFormat.from_cache_dtype("turbo4", HEAD_SIZE)
GROUP = NUM_HEADS // NUM_KV_HEADS
# Query tokens and context of requests, decodes first.
BATCHES = {
    "beside decodes": [(1, 31), (1, 64), (33, 40), (2, 33), (64, 5)],
    "without context": [(20, 0), (18, 40), (16, 0)],
    "before a prefill": [(1, 9), (17, 64), (LONGEST + 1, 0)],
    "one": [(130, 7)],
    "a step's end": [(16, 64), (32, 48), (48, 63)],
}


@pytest.fixture(autouse=True)
def long_heads_and_extends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have heads and extends that ``extend_outputs`` serves."""
    monkeypatch.setattr(backend_utils, "HEAD_SIZE", HEAD_SIZE)
    monkeypatch.setattr(backend_utils, "SCALE", HEAD_SIZE**-0.5)
    monkeypatch.setattr(layer_runner, "max_extend_len", lambda *_: LONGEST)


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("another kernel is to serve")


class Layer(ExtendLayer):
    """A layer on Hopper whose extends no kernel but ``extend_outputs`` may serve.

    Its record has the numbers of tokens and sequences of each call.
    """

    def __init__(self, config: VllmConfig, **options: Any) -> None:
        super().__init__(config, **options)
        # So few multiprocessors that one request's passes are enough.
        self.runner.num_sms = 1

        def extend(call: AttentionCall, scratch: OutputScratch) -> None:
            assert call.query is not None
            self.calls.append((call.query.shape[0], call.batch.num_seqs))
            extend_wgmma.extend_outputs(call, scratch)

        self.runner.kernels = self.runner.kernels._replace(
            extend_outputs=extend, extend_attention=refuse
        )


@model_dtypes
@prefill_modes
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_batches(folder, requests, mode, dtype):
    layer = Layer.make(folder, mode, dtype)
    layer.check(requests)
    extends = [length for length, _ in requests if 1 < length <= LONGEST]
    assert layer.calls == [(sum(extends), len(extends))]


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_queries_are_rotated_once(folder, requests):
    """The store rotates queries of decodes, and the kernel those of extends."""
    layer = Layer.make(folder)
    runner = layer.runner
    store, rotated = runner.kernels.store, []

    def noting(call: StoreCall) -> None:
        rotated.append(call.query.shape[0])
        store(call)

    runner.kernels = runner.kernels._replace(store=noting)
    layer.check(requests)
    assert rotated == [sum(length == 1 for length, _ in requests)]


@scorings
def test_rules_for_scores(folder, scoring):
    layer = Layer.make(folder, **scoring_options(scoring))
    layer.check([(1, 31), (33, 40), (2, 33), (17, 5)])


def make_offset(num_offsets: int) -> torch.Tensor:
    """Offsets of norm 400 that differ by 20, except the first, far from the others."""
    shape = (NUM_KV_HEADS, HEAD_SIZE)
    table = 400 * directions(*shape, seed=5) + 20 * directions(9, *shape, seed=6)
    table[0] = 400 * directions(*shape, seed=7)
    return table[:num_offsets].contiguous()


# Chunks that begin, end and are in other segments than the last cached token. Some have
# no context, or that of a first token alone.
OFFSET_REQUESTS = [
    (20, 0),
    (18, 1),
    (33, SEGMENT - 20),
    (2, SEGMENT),
    (17, SEGMENT + 1),
    (190, 2 * SEGMENT - 5),
]


def make_batch(layer: Layer) -> Batch:
    """A batch whose new keys have the offset that the layer takes off."""
    batch = Batch.make(layer.impl, OFFSET_REQUESTS)
    places = [context + i for count, context in OFFSET_REQUESTS for i in range(count)]
    table = layer.runner.scoring.key_offset
    rows = offset_rows(torch.tensor(places), table)
    batch.key[: len(places)] += table[rows].to(batch.key.dtype)
    return batch


@model_dtypes
@prefill_modes
@pytest.mark.parametrize("num_offsets", [1, 2, 3, 9])
def test_offsets(folder, num_offsets, mode, dtype):
    """Query tokens are compared to cached ones, whose keys lack an offset."""
    layer = Layer.make(folder, mode, dtype, key_offset=make_offset(num_offsets))
    batch = make_batch(layer)
    output = layer.run(batch)
    batch.check(layer.impl, output)
    if num_offsets > 1 or mode == "raw":
        batch.check_fails_without(layer.impl, output, "key_offset")


# A window as long as the longest sequence, of 2048 tokens, would be none.
@pytest.mark.parametrize("window", [10, 30, SEGMENT - 20])
def test_offsets_in_windows(folder, window):
    """Windows hide the first token, or all cached ones, from some query tokens."""
    layer = Layer.make(folder, sliding_window=window, key_offset=make_offset(9))
    batch = make_batch(layer)
    batch.free_hidden_blocks(window)
    batch.check(layer.impl, layer.run(batch))


def test_offsets_beside_sinks(folder):
    """Sinks are compared to whole scores, also of requests without context."""
    sinks = 30 + gaussian(NUM_HEADS, seed=4)
    layer = Layer.make(folder, dtype=BF16, sinks=sinks, key_offset=make_offset(9))
    batch = make_batch(layer)
    batch.query /= 16
    output = layer.run(batch)
    batch.check(layer.impl, output)
    batch.check_fails_without(layer.impl, output, "sinks")


@pytest.mark.parametrize("num_drafts", [2, 19])
def test_beside_drafts(folder, num_drafts):
    """Any number of drafts are decodes, because only the device has their lengths."""
    layer = Layer.beside_drafts(folder, num_drafts, num_drafts + 20)
    assert layer.calls == [(num_drafts + 20, 1)]


def test_requests_without_query_tokens(folder):
    """Padded requests, after all others, have length 0 and no query tokens."""
    layer = Layer.make(folder)
    batch = Batch.make(layer.impl, [(20, 40), (2, 33)])
    expected = layer.run(batch)
    batch.common = pad_to_graph(batch.common, 4, len(expected))
    assert torch.equal(layer.run(batch), expected)


def test_beside_a_tail(folder):
    """Extends write the tail, but read packed codes, as prefills do."""
    layer = Layer.make(folder)
    runner = layer.runner
    batch = Batch.make(layer.impl, [(20, 40), (2, 33)])
    expected = layer.run(batch)
    step = layer.step
    runner.tail_wanted = 8
    _, tail = small_tails(runner, step, BLOCK_SIZE, torch.device(DEVICE))
    own = slice(0, 22)
    output = torch.zeros_like(expected)
    tokens = batch.query[own], batch.key[own], batch.value[own]
    forward(runner, *tokens, batch.cache, step, output, tail)
    assert torch.equal(output, expected) and tail.pages.any()


@pytest.mark.parametrize("where", ["own", "pages", "both"])
@pytest.mark.parametrize("broken", [0, 1])
def test_broken_neighbours(folder, broken, where):
    """NaN and infinity of a request change no bit of another's."""

    def break_batch(batch: Batch) -> None:
        if where != "pages":
            break_raw_tokens(batch, broken)
        if where != "own":
            slots = slots_of(batch.table[broken], 0, 40, BLOCK_SIZE)
            context = torch.zeros(40, NUM_KV_HEADS, HEAD_SIZE, dtype=FP16)
            break_tokens(context)
            context = context.to(DEVICE)
            reference.store(StoreCall(batch.cache, slots, context, context, LAYOUT))

    found = Layer.make(folder).check_broken(break_batch, broken)
    # Nothing that is stored is NaN.
    assert where == "pages" or found.isnan().all()


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_broken_token(folder, name, number):
    """Tokens of its request have NaN from there on, and not before it."""
    layer = Layer.make(folder)
    place, outputs = 21, []
    for is_broken in (False, True):
        batch = Batch.make(layer.impl, [(40, 40)])
        if is_broken:
            getattr(batch, name)[place, 0, 3] = number
        outputs.append(layer.run(batch))
    sound, found = outputs
    assert torch.equal(found[:place], sound[:place])
    assert torch.equal(found[:, GROUP:], sound[:, GROUP:])
    assert found[place:, :GROUP].isnan().all()


def test_numbers_too_large_for_fp16_when_they_are_rotated(folder):
    """Rotated values too large for fp16 become its largest number, as stored scales do.

    Rotation may gather a vector's whole length in one coordinate.
    """
    layer = Layer.make(folder)
    batch = Batch.make(layer.impl, [(20, 40)])
    signs = rotation_signs(HEAD_SIZE).to(batch.value)
    batch.value[5] = 60000 * signs
    # The query tokens from there on see hardly any other token.
    batch.key[5], batch.query[5:] = 8 * signs, 8 * signs
    output = layer.run(batch)[5:].float()
    rotated = reference.rotate(batch.value[5:6].float())
    assert rotated.abs().max() > 10 * 65504
    clamped = rotated.clamp(-65504, 65504)
    expected = reference.inverse_rotate(clamped)[0].repeat_interleave(GROUP, 0)
    assert (output - expected).abs().max() <= 2e-3 * expected.abs().max()


def test_query_tokens_from_the_cache(folder):
    """Query tokens in the cache are attended to with all others there."""
    assert Layer.sharing_a_cache(folder).calls == [(35, 2)]


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("max_call_tokens", [100, 8192])
def test_scratch_is_reserved(folder, max_call_tokens, monkeypatch):
    """The profile run reserves scratch for one call, and for several."""
    for place in (layer_runner, largest_batch):
        monkeypatch.setattr(place, "MAX_OUTPUT_CALL_TOKENS", max_call_tokens)
    # Little else is reserved.
    set_scratch(monkeypatch, partials=64, slice_tokens=64, piece_tokens=64)
    layer = Layer.make(folder)
    runner = layer.runner
    counts: list[int] = []

    def attend(call: AttentionCall, scratch: OutputScratch) -> None:
        assert call.query is not None and call.raw is not None
        batch, num_tokens = call.batch, call.query.shape[0]
        assert num_tokens == call.raw.query.shape[0] == call.output.shape[0]
        assert int(batch.query_start_loc[-1]) == num_tokens
        assert isinstance(scratch, OutputScratch)
        assert len(scratch.raw_tiles) >= num_tokens // TILE_TOKENS + batch.num_seqs
        assert scratch.partial.shape[0] == scratch.partial_lse.shape[0]
        assert scratch.partial.shape[0] >= 2 * runner.num_sms * 256
        counts.append(num_tokens)

    stand_ins = {"extend_outputs": attend, "max_merged_tokens": None}
    most = layer.run_steps(monkeypatch, counts, **stand_ins)
    assert most == 1 or max_call_tokens == 100


def test_ranks_that_share_the_context_merge(folder):
    runner = Layer.make(folder).runner
    assert runner.planner.extends_to_outputs
    runner.context_parallel = ContextParallel(RankGroup(Ranks(2), 0), 1)
    assert not runner.planner.extends_to_outputs
    assert runner.max_call_tokens == decode_plan.MAX_CALL_TOKENS


@pytest.mark.parametrize(
    "num_requests, query_len, ends_in_outputs",
    [
        (1, 32, False),
        (1, 33, False),
        (2, 32, False),
        (1, LONGEST, False),
        (32, 16, False),
        (33, 16, True),
        (8, LONGEST, True),
        # Few passes, but more tokens than a call that merges may have.
        (2, 640, True),
    ],
)
def test_few_passes_are_merged(folder, num_requests, query_len, ends_in_outputs):
    runner = Layer.make(folder).runner
    planner = runner.planner._replace(num_sms=132)
    starts = list(range(0, num_requests * query_len + 1, query_len))
    table = torch.zeros(num_requests, 1, dtype=torch.int32, device=DEVICE)
    plan = planner.plan(
        RequestSpan(0, 0, 0, 0, 1, None),
        RequestSpan.of_extends([(0, starts)], torch.device(DEVICE)),
        table,
        table[:, 0],
    )
    assert {call.ends_in_outputs for call in plan.calls} == {ends_in_outputs}
    # For a request alone in a call, the merge attends to twice as many tokens.
    is_long = query_len > runner.max_merged_tokens * (1 + (num_requests == 1))
    attends_before = {call.attends_before for call in plan.calls}
    assert attends_before == {is_long and not ends_in_outputs}


def test_few_beside_many(folder):
    """A batch of few passes runs the kernels that merge."""
    layer = Layer.make(folder)
    runner = layer.runner
    runner.num_sms = 132
    runner.kernels = runner.kernels._replace(
        extend_attention=extend_mma.extend_attention
    )
    layer.check([(1, 31), (33, 40), (2, 33)])
    assert layer.calls == []


@prefill_modes
def test_warm_up_launches_each_plan(folder, mode):
    """The warm-up also launches the extends whose results are merged."""
    from vllm.v1.attention.ops.turbo.layer import warm_up

    calls = [
        call
        for step in warm_up.steps(Layer.make(folder, mode).runner, 32, DEVICE)
        for plan in step.decode_plans.values()
        for call in plan.calls
        if call.is_extend
    ]
    plans = {
        extend_wgmma.plan_for(LAYOUT, GROUP * call.batch.query_len, with_outputs=True)
        for call in calls
        if call.ends_in_outputs
    }
    assert sorted(plan.rows for plan in plans) == [64, 128, 256]
    merged = [call.batch.query_len for call in calls if not call.ends_in_outputs]
    assert merged == [1, LONGEST]
