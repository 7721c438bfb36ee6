# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A soft cap of attention logits as in Gemma 2, cap * tanh(s / cap), through the
backend.
"""

import math
from itertools import product

import pytest
import torch

from vllm.config import VllmConfig
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.interface import LOG2_E, StoreCall
from vllm.v1.attention.ops.turbo.triton.soft_cap import capped, in_base_2

from ..backend_utils import (
    KERNELS,
    make_builder,
    make_impl,
    make_vllm_config,
    with_drafts,
)
from ..batch_utils import RAGGED_DRAFTS, VARIED, Batch, Ranges
from ..utils import BF16, DEVICE, FP16, ON_GPU, requires_triton
from .test_mm_prefix import CASES as SPANS

# Factors of the queries by cap. A cap of 2 hardly tells scores of up to +-12 apart. A
# cap as large as models' bends them.
CAPS = {2.0: 3.0, 50.0: 12.0}
DRAFTED = {
    "uniform": [(3, 31), (3, 0), (3, 130), (3, 95)],
    "ragged": RAGGED_DRAFTS,
}
pytestmark = pytest.mark.usefixtures("small_pieces")
MODES, WINDOWS = ("raw", "stored"), (None, 17)


def cases(names: str, every: list[tuple], some: list[tuple]) -> pytest.MarkDecorator:
    """Each path with its cases: PyTorch and GPUs get all, and the interpreter, which
    takes a second for each, some.
    """
    found = [(path, *case) for path in KERNELS for case in (every if ON_GPU else some)]
    found += [("torch", *case) for case in every]
    found = [pytest.param(*case, marks=requires_triton) for case in found]
    return pytest.mark.parametrize(f"path, {names}", found)


@triton.jit
def bound_scores(scores_ptr, output_ptr, soft_cap, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(output_ptr + i, capped(tl.load(scores_ptr + i), soft_cap))


def check(
    impl: TurboAttentionImpl,
    config: VllmConfig,
    requests: list[tuple[int, int]],
    ranges: Ranges | None = None,
) -> None:
    """Compare to attention with the cap, and fail without it."""
    batch = Batch.make(impl, requests)
    if impl.runner.shares_cache:
        tokens = batch.common.slot_mapping, batch.key, batch.value
        reference.store(StoreCall(batch.cache, *tokens, impl.runner.layout))
    batch.query *= CAPS[impl.runner.scoring.soft_cap]
    batch.common.mm_req_doc_ranges = ranges
    builder = make_builder(config, impl)
    builder.unclamped_window = None
    output = batch.serve(impl, builder.build(0, batch.common))
    batch.check_fails_without(impl, output, "soft_cap")


@cases(
    "mode, window, cap",
    list(product(MODES, WINDOWS, CAPS)),
    [("raw", None, 2.0), ("stored", 17, 2.0), ("stored", None, 50.0)],
)
def test_batches(folder, mode, window, cap, path):
    config = make_vllm_config(folder, "turbo4", FP16, mode, max_num_batched_tokens=512)
    impl = make_impl(config, path=path, sliding_window=window, logits_soft_cap=cap)
    check(impl, config, VARIED)


@cases(
    "mode, window, kind",
    list(product(MODES, WINDOWS, DRAFTED)),
    [("raw", None, "ragged"), ("raw", 17, "uniform"), ("stored", 17, "ragged")],
)
def test_drafts(folder, mode, window, kind, path):
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16, mode))
    impl = make_impl(config, path=path, sliding_window=window, logits_soft_cap=2.0)
    check(impl, config, DRAFTED[kind])


@cases(
    "mode, window",
    list(product(MODES, WINDOWS)),
    [("raw", None), ("stored", 17)],
)
def test_beside_sinks(folder, mode, window, path):
    """A sink is weighed against capped scores, and has no cap itself."""
    config = make_vllm_config(folder, "turbo4", BF16, mode, max_num_batched_tokens=512)
    sinks = torch.tensor([float("-inf"), -20.0, 2.0, 20.0], device=DEVICE)
    rules = dict(sliding_window=window, sinks=sinks, logits_soft_cap=2.0)
    impl = make_impl(config, path=path, **rules)
    check(impl, config, VARIED)


@cases(
    "mode, window",
    list(product(MODES, (*WINDOWS, 128))),
    [("stored", None), ("raw", 128)],
)
def test_spans(folder, mode, window, path):
    """Later tokens of an image, which are attended to apart, have capped scores."""
    config = make_vllm_config(folder, "turbo4", FP16, mode, max_num_batched_tokens=512)
    impl = make_impl(config, path=path, sliding_window=window, logits_soft_cap=2.0)
    requests, ranges = SPANS["behind context"]
    check(impl, config, requests, ranges)


@cases("window", [(window,) for window in WINDOWS], [(None,)])
def test_shared_cache(folder, window, path):
    """A layer that reads another layer's cache has capped scores."""
    config = make_vllm_config(folder, "turbo4", FP16, max_num_batched_tokens=512)
    impl = make_impl(
        config,
        path=path,
        sliding_window=window,
        kv_sharing_target_layer_name="layers.0.attn",
        logits_soft_cap=2.0,
    )
    check(impl, config, VARIED)


@pytest.mark.parametrize("cap, served", [(50.0, 50.0), (30, 30.0), (0.0, None)])
def test_argument_of_layers(folder, cap, served):
    """Models pass zero for no cap."""
    impl = make_impl(make_vllm_config(folder), logits_soft_cap=cap)
    assert impl.runner.scoring.soft_cap == served


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
