# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention sinks: each query head's logit, which takes weight and has no value."""

from pathlib import Path

import pytest
import torch

from vllm.v1.attention.ops.turbo.planning import prefill as planning

from .backend_utils import (
    KERNELS,
    Batch,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    set_path,
    set_scratch,
    with_drafts,
)
from .utils import BF16, DEVICE, FP16, ON_GPU, gaussian, requires_triton

# Sinks of four heads that get none, hardly any, some and nearly all of the weight. A
# head that tensor parallelism pads has none.
SINKS = [float("-inf"), -20.0, 2.0, 20.0]
# Decodes, and prefills after several pieces of context, after few tokens, and alone.
REQUESTS = [(1, 0), (1, 40), (1, 130), (20, 150), (5, 14), (33, 0)]
DRAFTED = [(3, 31), (3, 0), (2, 130), (1, 95)]
paths = pytest.mark.parametrize("path", ["torch", *KERNELS])
windows = pytest.mark.parametrize("window", [None, 17])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    set_scratch(monkeypatch, piece_tokens=64)
    monkeypatch.setattr(planning, "LEAST_TOKENS", 48)


@requires_triton
@prefill_modes
@windows
@pytest.mark.parametrize("dtype", [BF16] + [FP16] * ON_GPU)
@paths
def test_batches(tmp_path: Path, mode, window, dtype, path):
    """Sinks have the model's dtype."""
    config = make_vllm_config(
        tmp_path, "turbo4", dtype, mode, max_num_batched_tokens=512
    )
    sinks = torch.tensor(SINKS, dtype=dtype, device=DEVICE)
    impl = make_impl(config, sliding_window=window, sinks=sinks)
    set_path(impl, path)
    batch = Batch.make(impl, REQUESTS)
    metadata = make_builder(config, impl).build(0, batch.common)
    output = batch.run(impl, metadata, path)
    batch.check(impl, output)
    # The check fails without sinks.
    impl.runner.sinks = None
    with pytest.raises(AssertionError, match="allowed"):
        batch.check(impl, output)


@requires_triton
@windows
@paths
def test_drafts(tmp_path: Path, window, path):
    config = with_drafts(make_vllm_config(tmp_path, "turbo4", FP16))
    sinks = torch.tensor(SINKS, device=DEVICE)
    impl = make_impl(config, sliding_window=window, sinks=sinks)
    set_path(impl, path)
    batch = Batch.make(impl, DRAFTED)
    metadata = make_builder(config, impl).build(0, batch.common)
    batch.check(impl, batch.run(impl, metadata, path))


@requires_triton
@windows
@prefill_modes
@paths
def test_beside_an_offset_of_k(tmp_path: Path, window, mode, path):
    """An offset that all keys lack changes no softmax, but changes a sink's share."""
    config = make_vllm_config(
        tmp_path, "turbo4", BF16, mode, max_num_batched_tokens=512
    )
    sinks = torch.tensor(SINKS, device=DEVICE)
    impl = make_impl(config, sliding_window=window, sinks=sinks)
    impl.runner.key_offset = gaussian(1, 2, 64, seed=5)
    set_path(impl, path)
    batch = Batch.make(impl, REQUESTS)
    metadata = make_builder(config, impl).build(0, batch.common)
    batch.check(impl, batch.run(impl, metadata, path))


@requires_triton
@kernel_paths
def test_padded_rows_stay_zero(tmp_path: Path, path):
    """Padded sequences of a CUDA graph have no tokens, and zeros as output."""
    config = make_vllm_config(tmp_path, "turbo4", BF16)
    impl = make_impl(config, sinks=torch.tensor(SINKS, device=DEVICE))
    set_path(impl, path)
    batch = Batch.make(impl, [(1, 40), (1, 0)])
    batch.common.seq_lens[1] = 0
    batch.common.slot_mapping[1] = -1
    metadata = make_builder(config, impl).build(0, batch.common)
    output = batch.run(impl, metadata, path)
    assert (output[1] == 0).all() and (output[0] != 0).any()
