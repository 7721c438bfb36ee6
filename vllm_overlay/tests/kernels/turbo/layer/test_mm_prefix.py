# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tokens of an image, which see each other: multimodal prefix ranges."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vllm
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.planning.prefill_plan import (
    PrefillPlan,
    PrefillSlice,
)
from vllm.v1.attention.ops.turbo.planning.spans import find_spans, plan_spans

from ..backend_utils import (
    HEAD_SIZE,
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
from ..batch_utils import Batch, Ranges
from ..flash_utils import masked_attention
from ..utils import BF16, DEVICE, FP16, ON_GPU, function_of, gaussian, requires_triton
from .test_backend_extends import give_extends

# Requests, and ranges by request. A first chunk has a range, or is all of one. After
# context there are two ranges, of which the first begins before the chunk, and one that
# ends after it. Ranges of one token, of past tokens and of later tokens change nothing.
CASES: dict[str, tuple[list[tuple[int, int]], Ranges]] = {
    "first chunks": ([(40, 0), (33, 0)], {0: [(3, 18)], 1: [(0, 32)]}),
    "one first chunk": ([(70, 0)], {0: [(3, 18), (19, 40), (68, 69)]}),
    "behind context": (
        [(1, 40), (40, 150), (20, 40), (10, 64)],
        {0: [(2, 30)], 1: [(140, 155), (160, 170)], 2: [(50, 70)], 3: []},
    ),
    "none to see": (
        [(1, 40), (20, 40), (21, 0)],
        {0: [(30, 50)], 1: [(2, 9), (59, 70), (80, 90)], 2: [(4, 4)]},
    ),
    "short prompts": (
        [(1, 40), (4, 64), (5, 30), (4, 31)],
        {2: [(32, 34)]},
    ),
}
WINDOWS = [None, 17, 128]
KERNEL_CASES = [
    ("first chunks", "raw", None),
    ("first chunks", "stored", 17),
    ("one first chunk", "raw", 17),
    ("one first chunk", "stored", None),
    ("behind context", "raw", None),
    ("behind context", "stored", None),
    ("behind context", "raw", 17),
    ("behind context", "raw", 128),
    ("none to see", "raw", None),
    ("short prompts", "raw", None),
]
if ON_GPU:
    KERNEL_CASES = [
        (c, m, w) for c in CASES for m in ("raw", "stored") for w in WINDOWS
    ]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have slices, and parts of windows, that cut ranges."""
    set_scratch(monkeypatch, slice_tokens=24, piece_tokens=140, least_tokens=12)


def check(
    config: VllmConfig, case: str, window: int | None, path: str, **rules: Any
) -> None:
    requests, ranges = CASES[case]
    impl = make_impl(config, path=path, sliding_window=window, **rules)
    batch = Batch.make(impl, requests)
    batch.common.mm_req_doc_ranges = ranges
    if window is not None:
        batch.free_hidden_blocks(window)
    builder = make_builder(config, impl)
    builder.unclamped_window = None
    output = batch.serve(impl, builder.build(0, batch.common))
    if case != "none to see":
        batch.check_fails_without(impl, output, "ranges")


@requires_triton
@pytest.mark.parametrize("case", CASES)
@prefill_modes
@pytest.mark.parametrize("window", WINDOWS)
def test_batches_in_pytorch(folder, case, mode, window):
    config = make_vllm_config(folder, "turbo4", FP16, mode, max_num_batched_tokens=512)
    check(config, case, window, "torch")


@pytest.mark.parametrize("case, mode, window", KERNEL_CASES)
@kernel_paths
def test_batches(folder, case, mode, window, path, small_buffers):
    config = make_vllm_config(folder, "turbo4", FP16, mode, max_num_batched_tokens=512)
    check(config, case, window, path)


@pytest.mark.parametrize(
    "case, mode, window",
    [
        ("first chunks", "raw", None),
        ("first chunks", "stored", None),
        ("behind context", "raw", 17),
    ],
)
@all_paths
def test_sinks(folder, case, mode, window, path, small_buffers):
    """Sinks are weighed against all tokens that are seen, later ones included."""
    config = make_vllm_config(folder, "turbo4", BF16, mode, max_num_batched_tokens=512)
    sinks = torch.tensor([float("-inf"), -20.0, 2.0, 20.0], device=DEVICE)
    check(config, case, window, path, sinks=sinks)


@pytest.mark.parametrize(
    "mode, window", [("raw", None), ("stored", None), ("raw", 128)]
)
@all_paths
def test_key_offset(folder, mode, window, path, small_buffers, short_segments):
    """Scores of later tokens include the offset, for cached and for raw tokens."""
    config = make_vllm_config(folder, "turbo4", BF16, mode, max_num_batched_tokens=512)
    offset = 0.5 * gaussian(9, NUM_KV_HEADS, HEAD_SIZE, seed=5)
    check(config, "behind context", window, path, key_offset=offset)


@pytest.mark.parametrize("window", [None, 17])
@all_paths
def test_drafts(folder, window, path):
    """Prompts as short as a request with drafts are decodes. Their tokens in ranges see
    each other nevertheless.
    """
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16))
    requests: list[tuple[int, int]] = [(3, 31), (3, 40), (2, 64), (3, 9)]
    ranges: Ranges = {0: [(2, 9)], 1: [(38, 41)], 2: [(60, 70)]}
    impl = make_impl(config, sliding_window=window, path=path)
    batch = Batch.make(impl, requests)
    batch.common.mm_req_doc_ranges = ranges
    metadata = batch.build(config, impl)
    assert metadata.num_decodes == 4 and metadata.prefill is None
    assert [first for first, _ in metadata.span_prefills] == [3, 6]
    output = batch.serve(impl, metadata)
    batch.check_fails_without(impl, output, "ranges")


@kernel_paths
def test_short_prompts_are_prefilled(folder, path):
    """Short prompts are prefilled from the first image on: extends are causal."""
    config = make_vllm_config(folder, "turbo4", FP16)
    requests, ranges = CASES["short prompts"]
    impl = make_impl(config)
    give_extends(impl, path)
    batch = Batch.make(impl, requests)
    batch.common.mm_req_doc_ranges = ranges
    metadata = batch.build(config, impl)
    assert [extend.num_requests for extend in metadata.extends] == [1]
    assert metadata.num_packed_tokens == 5
    batch.serve(impl, metadata)


def code_of_gemma_4(name: str) -> Callable[..., None]:
    """A method of the model. Its module needs torchvision."""
    path = Path(vllm.__file__).parent / "model_executor/models/gemma4_mm.py"
    return function_of(path, name)


@pytest.mark.parametrize("window", [None, 128])
@all_paths
def test_layers_of_gemma_4_that_see_no_images(folder, window, path):
    """Gemma 4's own code changes the metadata of layers without a window."""
    config = make_vllm_config(folder, "turbo4", FP16, max_num_batched_tokens=512)
    requests, ranges = CASES["behind context"]
    impl = make_impl(config, sliding_window=window, path=path)
    batch = Batch.make(impl, requests)
    batch.common.mm_req_doc_ranges = ranges
    metadata = batch.build(config, impl)
    assert metadata.mm_prefix_range == ranges
    model = nn.Module()
    model._full_attn_layer_idxs = {0}
    # Without the hybrid cache manager, all layers share one metadata object.
    with set_forward_context({"model.layers.0.attn": metadata}, config):
        code_of_gemma_4("_clear_mm_prefix_for_full_attn_layers")(model)
    seen = None if window is None else ranges
    batch.check(impl, batch.run(impl, metadata), seen)


def test_ranges_beyond_a_window(folder):
    """Gemma 3's window hides no token of an image; Gemma 4's hides as always."""
    config = make_vllm_config(folder, "turbo4", FP16)
    impl = make_impl(config, sliding_window=16)
    register(config, impl)
    layer = config.compilation_config.static_forward_context["layers.0.attn"]
    batch = Batch.make(impl, [(40, 0)])
    for clamped in (False, True):
        layer.mm_prefix_clamp_sliding_window = clamped
        builder = make_builder(config, impl)
        batch.common.mm_req_doc_ranges = {0: [(2, 17)]}
        builder.build(0, batch.common)
        batch.common.mm_req_doc_ranges = {0: [(2, 18)]}
        words = "turbo4.*beyond a sliding window"
        refused = pytest.raises(NotImplementedError, match=words)
        with nullcontext() if clamped else refused:
            builder.build(0, batch.common)


@requires_triton
def test_ranges_beyond_a_drafters_window(folder):
    """Gemma 4's drafter has layers in the groups of the layers whose caches it reads.

    Its layers do not clamp ranges, which is allowed because drafts are verified.
    """
    config = make_vllm_config(folder, "turbo4", FP16, max_num_batched_tokens=512)
    impls = [make_impl(config, path="triton", sliding_window=16) for _ in range(2)]
    names = ["layers.0.attn", "draft_model.layers.0.attn"]
    for name, impl in zip(names, impls):
        register(config, impl, name)
    layers = config.compilation_config.static_forward_context
    layers[names[0]].mm_prefix_clamp_sliding_window = True
    layers[names[1]].is_draft_layer = True
    layers[names[1]].kv_sharing_target_layer_name = names[0]
    batch = Batch.make(impls[0], [(60, 0)])
    batch.common.mm_req_doc_ranges = {0: [(2, 50)]}
    metadata = make_builder(config, impls[0], names).build(0, batch.common)
    for impl in impls:
        batch.serve(impl, metadata)


def test_drafters_see_no_images(folder):
    """Drafters get no ranges: Gemma 4's code clears none of its drafter's layers."""
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16))
    impl = make_impl(config)
    register(config, impl)
    layer = config.compilation_config.static_forward_context["layers.0.attn"]
    batch = Batch.make(impl, [(40, 0)])
    batch.common.mm_req_doc_ranges = {0: [(2, 17)]}
    for is_draft in (False, True):
        layer.is_draft_layer = is_draft
        metadata = batch.build(config, impl)
        assert (metadata.mm_prefix_range is None) == is_draft
        assert (metadata.prefill.spans is None) == is_draft


def test_large_heads(folder):
    """Attention with heads of 512 takes no windows; Gemma 4's have no ranges."""
    from vllm.v1.attention.ops.turbo.layer.prefill import check_image_heads

    with pytest.raises(NotImplementedError, match="turbo4.*head_size 512 .*up to 256"):
        check_image_heads(TurboFormat.from_cache_dtype("turbo4", 512))


@pytest.mark.parametrize("window", [None, 5, 9, 20])
@pytest.mark.parametrize("clamped", [False, True])
def test_the_reference_has_vllms_mask(window, clamped):
    """The reference has the mask of ``compute_kv_seq_mask``.

    A token is visible if it is causal and in the window, or in the same range. Clamped
    ranges end at the window.
    """
    ranges = [(1, 5), (6, 13), (20, 24)]
    if window is not None and not clamped:
        # vLLM drops longer ranges.
        ranges = [(a, b) for a, b in ranges if b - a + 1 <= window]
    query, key, value = (gaussian(26, 2, 16, seed=i) for i in range(3))
    q, k = torch.arange(26)[:, None], torch.arange(26)
    in_window = q - k < (window or 99)
    visible = (k <= q) & in_window
    for a, b in ranges:
        same = (q >= a) & (q <= b) & (k >= a) & (k <= b)
        visible |= same & in_window if clamped else same
    expected, expected_lse = masked_attention(query, key, value, 0.25, ~visible)
    found, lse = reference.attention(
        query,
        key,
        value,
        0.25,
        sliding_window=window,
        spans=[(a, b + 1) for a, b in ranges],
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("stored", [False, True])
def test_plan(stored):
    """Each query token has the later tokens of its range in one part, for any cut into
    slices.
    """
    draw = random.Random(0)
    for _ in range(50):
        lens = [draw.choice([1, 2, 13, 40]) for _ in range(draw.randint(1, 4))]
        contexts = [draw.choice([0, 5, 30]) for _ in lens]
        ranges: Ranges = {}
        for row, (length, context) in enumerate(zip(lens, contexts)):
            cuts = sorted(draw.sample(range(100), 4))
            ranges[row] = [(cuts[0], cuts[1] - 1), (cuts[1], cuts[1]), (cuts[2], 99)]
        starts = torch.tensor([0, *lens]).cumsum(0).int()
        seq_lens = torch.tensor([sum(x) for x in zip(lens, contexts)]).int()
        spans = find_spans(ranges, starts, seq_lens)
        total = int(starts[-1])
        cuts = sorted({0, total, *(draw.randrange(total) for _ in range(3))})
        slices = [slice(*x) for x in zip(cuts, cuts[1:])]
        table = torch.arange(len(lens), dtype=torch.int32)[:, None]
        whole = [slice(0, total)]
        # Only the slices' query tokens are read.
        parts = [PrefillSlice(tokens, None, None, []) for tokens in [*slices, *whole]]
        prefill = PrefillPlan(parts[:-1], table, starts, seq_lens, {8: parts[-1:]})
        plan = plan_spans(spans, prefill, table, stored, torch.device("cpu"))
        expected = {}
        for row, (length, context) in enumerate(zip(lens, contexts)):
            for position in range(context, context + length):
                for first, last in ranges[row]:
                    end = min(last, context + length - 1)
                    if first <= position < end:
                        place = int(starts[row]) + position - context
                        expected[place] = (row, position, end - position)
        if plan is None:
            assert not expected
            continue
        for parts, own in (
            (plan.slices, slices),
            (plan.window_slices[8], whole),
        ):
            found = {}
            assert len(parts) == len(own)
            for tokens, each in zip(own, parts):
                for part in each:
                    num_queries = part.tokens.stop - part.tokens.start
                    num_keys = part.keys.stop - part.keys.start
                    assert num_queries == part.queries.max_len > 0
                    assert num_keys == part.key_lens.max_len
                    assert part.queries.cu_lens.tolist() == [0, num_queries]
                    assert part.key_lens.cu_lens.tolist() == [0, num_keys]
                    assert (part.runs is not None) == stored
                    for i in range(num_queries):
                        place = tokens.start + part.tokens.start + i
                        row = int(part.block_table)
                        position = contexts[row] + place - int(starts[row])
                        # Positions as FlashAttention counts them.
                        shift = num_keys - num_queries
                        first = i + shift - part.window_size[0]
                        assert part.keys.start + first == place + 1
                        if part.runs is not None:
                            assert int(part.runs.cached.starts) + i == position
                            assert int(part.runs.cached.cached_lens) == num_keys
                        assert place not in found
                        found[place] = (row, position, num_keys - first)
            assert found == expected
