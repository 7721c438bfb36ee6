# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Queries of the device, and bounds of scratch, are for all steps, not each batch."""

from pathlib import Path

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.attention.backends import turbo_attn
from vllm.v1.attention.ops.turbo import choose as kernels
from vllm.v1.attention.ops.turbo.layer import runner as layer_runner

from .backend_utils import make_impl, make_vllm_config, with_drafts
from .utils import FP16, requires_triton


def test_multiprocessors_are_those_of_the_current_device(tmp_path: Path, monkeypatch):
    """The current device is a rank's own, and need not be the host's first."""
    asked: list[tuple] = []

    def num_compute_units(*device: int) -> int:
        asked.append(device)
        return 7

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(layer_runner, "num_compute_units", num_compute_units)
    for module in (layer_runner, turbo_attn):
        monkeypatch.setattr(module, "get_flash_attn", lambda head_size: print)
    make_impl(make_vllm_config(tmp_path, dtype=FP16))
    assert asked == [(3,)]


@requires_triton
@pytest.mark.parametrize("name", ["cuda", "triton"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_largest_batch_is_a_closed_bound(
    tmp_path: Path, monkeypatch, name, num_drafts
):
    """The bound needs no search over batches, which would ask for each one's splits.

    The model runner asks for it in every forward pass without metadata.
    """

    def num_splits(*batch: int) -> int:
        raise AssertionError(f"asked for the splits of {batch}")

    config = make_vllm_config(tmp_path, dtype=FP16)
    impl = make_impl(with_drafts(config, num_drafts) if num_drafts else config)
    layout = impl.runner.layout
    is_cuda = name == "cuda"
    own = kernels.cuda_kernels(layout) if is_cuda else kernels.triton_kernels()
    impl.runner.kernels = own._replace(
        num_decode_splits=num_splits, num_extend_splits=num_splits
    )
    assert impl.runner.workspace_bytes > 0
