# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A soft cap of attention logits as in Gemma 2, cap * tanh(s / cap), through the
backend.
"""

import math
from itertools import product
from pathlib import Path

import pytest
import torch

from vllm.config import VllmConfig
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.interface import LOG2_E, StoreCall
from vllm.v1.attention.ops.turbo.planning import prefill as planning
from vllm.v1.attention.ops.turbo.triton.soft_cap import capped, in_base_2

from .backend_utils import (
    KERNELS,
    Batch,
    Ranges,
    make_builder,
    make_impl,
    make_vllm_config,
    set_path,
    set_scratch,
    with_drafts,
)
from .test_mm_prefix import CASES as SPANS
from .utils import BF16, DEVICE, FP16, ON_GPU, requires_triton

# Factors of the queries by cap. A cap of 2 hardly tells scores of up to +-12 apart. A
# cap as large as models' bends them.
CAPS = {2.0: 3.0, 50.0: 12.0}
# Decodes, and prefills after several pieces of context, after few tokens, and alone.
REQUESTS = [(1, 0), (1, 40), (1, 130), (20, 150), (5, 14), (33, 0)]
DRAFTED = {
    "uniform": [(3, 31), (3, 0), (3, 130), (3, 95)],
    "ragged": [(3, 31), (1, 130), (2, 15), (3, 0), (7, 64)],
}
MODES, WINDOWS = ("raw", "stored"), (None, 17)


def cases(names: str, every: list[tuple], some: list[tuple]) -> pytest.MarkDecorator:
    """Each path with its cases: PyTorch and GPUs get all, and the interpreter, which
    takes a second for each, some.
    """
    found = [(path, *case) for path in KERNELS for case in (every if ON_GPU else some)]
    found += [("torch", *case) for case in every]
    return pytest.mark.parametrize(f"path, {names}", found)


@triton.jit
def bound_scores(scores_ptr, output_ptr, soft_cap, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(output_ptr + i, capped(tl.load(scores_ptr + i), soft_cap))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    set_scratch(monkeypatch, piece_tokens=64)
    monkeypatch.setattr(planning, "LEAST_TOKENS", 48)


def check(
    impl: TurboAttentionImpl,
    config: VllmConfig,
    requests: list[tuple[int, int]],
    path: str,
    ranges: Ranges | None = None,
) -> None:
    """Compare to attention with the cap, and fail without it."""
    set_path(impl, path)
    batch = Batch.make(impl, requests)
    if impl.runner.shares_cache:
        tokens = batch.common.slot_mapping, batch.key, batch.value
        reference.store(StoreCall(batch.cache, *tokens, impl.runner.layout))
    cap = impl.runner.logits_soft_cap
    batch.query *= CAPS[cap]
    batch.common.mm_req_doc_ranges = ranges
    builder = make_builder(config, impl)
    builder.unclamped_window = None
    output = batch.run(impl, builder.build(0, batch.common), path)
    batch.check(impl, output, ranges)
    impl.runner.logits_soft_cap = None
    with pytest.raises(AssertionError, match="allowed"):
        batch.check(impl, output, ranges)
    impl.runner.logits_soft_cap = cap


@requires_triton
@cases(
    "mode, window, cap",
    list(product(MODES, WINDOWS, CAPS)),
    [("raw", None, 2.0), ("stored", 17, 2.0), ("stored", None, 50.0)],
)
def test_batches(tmp_path: Path, mode, window, cap, path):
    config = make_vllm_config(
        tmp_path, "turbo4", FP16, mode, max_num_batched_tokens=512
    )
    impl = make_impl(config, sliding_window=window, logits_soft_cap=cap)
    check(impl, config, REQUESTS, path)


@requires_triton
@cases(
    "mode, window, kind",
    list(product(MODES, WINDOWS, DRAFTED)),
    [("raw", None, "ragged"), ("raw", 17, "uniform"), ("stored", 17, "ragged")],
)
def test_drafts(tmp_path: Path, mode, window, kind, path):
    config = with_drafts(make_vllm_config(tmp_path, "turbo4", FP16, mode))
    impl = make_impl(config, sliding_window=window, logits_soft_cap=2.0)
    check(impl, config, DRAFTED[kind], path)


@requires_triton
@cases(
    "mode, window",
    list(product(MODES, WINDOWS)),
    [("raw", None), ("stored", 17)],
)
def test_beside_sinks(tmp_path: Path, mode, window, path):
    """A sink is weighed against capped scores, and has no cap itself."""
    config = make_vllm_config(
        tmp_path, "turbo4", BF16, mode, max_num_batched_tokens=512
    )
    sinks = torch.tensor([float("-inf"), -20.0, 2.0, 20.0], device=DEVICE)
    impl = make_impl(config, sliding_window=window, sinks=sinks, logits_soft_cap=2.0)
    check(impl, config, REQUESTS, path)


@requires_triton
@cases(
    "mode, window",
    list(product(MODES, (*WINDOWS, 128))),
    [("stored", None), ("raw", 128)],
)
def test_spans(tmp_path: Path, mode, window, path):
    """Later tokens of an image, which are attended to apart, have capped scores."""
    config = make_vllm_config(
        tmp_path, "turbo4", FP16, mode, max_num_batched_tokens=512
    )
    impl = make_impl(config, sliding_window=window, logits_soft_cap=2.0)
    requests, ranges = SPANS["behind context"]
    check(impl, config, requests, path, ranges)


@requires_triton
@cases("window", [(window,) for window in WINDOWS], [(None,)])
def test_shared_cache(tmp_path: Path, window, path):
    """A layer that reads another layer's cache has capped scores."""
    config = make_vllm_config(tmp_path, "turbo4", FP16, max_num_batched_tokens=512)
    impl = make_impl(
        config,
        sliding_window=window,
        kv_sharing_target_layer_name="layers.0.attn",
        logits_soft_cap=2.0,
    )
    check(impl, config, REQUESTS, path)


@pytest.mark.parametrize("cap, served", [(50.0, 50.0), (30, 30.0), (0.0, None)])
def test_argument_of_layers(tmp_path: Path, cap, served):
    """Models pass zero for no cap."""
    impl = make_impl(make_vllm_config(tmp_path), logits_soft_cap=cap)
    assert impl.runner.logits_soft_cap == served


@requires_triton
@pytest.mark.parametrize("cap", [2.0, 50.0])
def test_capped_scores(cap):
    """Capped scores are exact to 2**-21 of the cap, near zero and far beyond the cap.

    NaN stays NaN.
    """
    scores = LOG2_E * torch.linspace(-4 * cap, 4 * cap, 4096, dtype=torch.float64)
    scores = scores.float().to(DEVICE)
    scores[0], scores[1], scores[2] = math.inf, -math.inf, math.nan
    found = torch.empty_like(scores)
    bound = in_base_2(cap)
    assert bound is not None
    bound_scores[(1,)](scores, found, bound, BLOCK=4096)
    assert found[2].isnan()
    exact = bound * torch.tanh(scores.double() / bound)
    error = (found - exact).nan_to_num().abs().max()
    assert error <= 2**-21 * bound
