# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention sinks: each query head's logit, which takes weight and has no value."""

import pytest
import torch

from ..backend_utils import (
    all_paths,
    kernel_paths,
    make_impl,
    make_vllm_config,
    prefill_modes,
    with_drafts,
)
from ..batch_utils import VARIED, Batch, check_requests
from ..utils import BF16, DEVICE, FP16, ON_GPU, gaussian

# Sinks of four heads that get none, hardly any, some and nearly all of the weight. A
# head that tensor parallelism pads has none.
SINKS = [float("-inf"), -20.0, 2.0, 20.0]
windows = pytest.mark.parametrize("window", [None, 17])
pytestmark = pytest.mark.usefixtures("small_pieces")


@prefill_modes
@windows
@pytest.mark.parametrize("dtype", [BF16] + [FP16] * ON_GPU)
@all_paths
def test_batches(folder, mode, window, dtype, path):
    """Sinks have the model's dtype."""
    config = make_vllm_config(folder, "turbo4", dtype, mode, max_num_batched_tokens=512)
    sinks = torch.tensor(SINKS, dtype=dtype, device=DEVICE)
    impl = make_impl(config, sliding_window=window, sinks=sinks, path=path)
    check_requests(config, impl, VARIED, rule="sinks")


@windows
@all_paths
def test_drafts(folder, window, path):
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16))
    sinks = torch.tensor(SINKS, device=DEVICE)
    impl = make_impl(config, sliding_window=window, sinks=sinks, path=path)
    check_requests(config, impl, [(3, 31), (3, 0), (2, 130), (1, 95)])


@windows
@prefill_modes
@all_paths
def test_beside_an_offset_of_k(folder, window, mode, path):
    """An offset that all keys lack changes no softmax, but changes a sink's share."""
    config = make_vllm_config(folder, "turbo4", BF16, mode, max_num_batched_tokens=512)
    sinks = torch.tensor(SINKS, device=DEVICE)
    impl = make_impl(
        config,
        sliding_window=window,
        sinks=sinks,
        key_offset=gaussian(1, 2, 64, seed=5),
        path=path,
    )
    check_requests(config, impl, VARIED)


@kernel_paths
def test_padded_rows_stay_zero(folder, path):
    """Padded sequences of a CUDA graph have no tokens, and zeros as output."""
    config = make_vllm_config(folder, "turbo4", BF16)
    impl = make_impl(config, sinks=torch.tensor(SINKS, device=DEVICE), path=path)
    batch = Batch.make(impl, [(1, 40), (1, 0)])
    batch.common.seq_lens[1] = 0
    batch.common.slot_mapping[1] = -1
    metadata = batch.build(config, impl)
    output = batch.run(impl, metadata)
    assert (output[1] == 0).all() and (output[0] != 0).any()
