# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The first run of a layer's kernels, in the profile run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm.v1.attention.ops.turbo import warm_up as module
from vllm.v1.attention.ops.turbo.kernels import triton_kernels
from vllm.v1.attention.ops.turbo.warm_up import small_batch
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

from .backend_utils import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_HEADS,
    Batch,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    set_path,
    with_drafts,
)
from .utils import DEVICE, FP16, ON_GPU, requires_triton


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """VLLM's workspace as in the profile run, and nothing is warm."""
    monkeypatch.setattr(module, "_warm", set())
    if not ON_GPU:
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    init_workspace_manager(DEVICE)
    yield
    reset_workspace_manager()


def profile(impl, monkeypatch: pytest.MonkeyPatch) -> list:
    """Returns what batches the profile run of a layer has run."""
    batches = []
    forward = impl._forward_kernels

    def record(query, key, value, cache, metadata, output):
        batches.append(metadata)
        forward(query, key, value, cache, metadata, output)
        assert (output == 0).all()  # of values that are zero

    monkeypatch.setattr(impl, "_forward_kernels", record)
    x = torch.empty(1, NUM_HEADS, HEAD_SIZE, device=DEVICE)
    impl.forward(None, x, x, x, None, None, x)
    return batches


@requires_triton
@prefill_modes
@kernel_paths
def test_layers_alike_run_once(tmp_path: Path, profiled, mode, path, monkeypatch):
    config = with_drafts(make_vllm_config(tmp_path, "turbo4", FP16, mode), 2)
    layers = [make_impl(config), make_impl(config)]
    for impl in layers:
        set_path(impl, path)
    first, second = (profile(impl, monkeypatch) for impl in layers)
    assert [batch.decode_query_len for batch in first] == [1, 3] and second == []
    for batch in first:
        assert batch.num_decodes == 1 and len(batch.prefill.slices[0].groups) == 1
        extends = layers[0].kernels.extend_attention is not None
        assert len(batch.extends) == extends
    other = make_impl(make_vllm_config(tmp_path, "turbo3", FP16, mode))
    set_path(other, path)
    assert len(profile(other, monkeypatch)) == 1


@requires_triton
@prefill_modes
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_batch_is_as_the_builder_makes_it(tmp_path: Path, mode, num_drafts):
    config = make_vllm_config(tmp_path, "turbo4", FP16, mode)
    if num_drafts:
        config = with_drafts(config, num_drafts)
    impl = make_impl(config)
    impl.kernels = triton_kernels()
    query_len = 1 + num_drafts
    # Longer than a decode, or it would be one.
    requests = [(query_len, 16), (2 + num_drafts, 16), (2 + num_drafts, 0)]
    wanted = make_builder(config, impl).build(0, Batch.make(impl, requests).common)
    found = small_batch(impl, BLOCK_SIZE, query_len, DEVICE)
    for name in ("num_decodes", "num_decode_tokens", "decode_query_len", "extends"):
        assert getattr(found, name) == getattr(wanted, name), name
    for name in ("slot_mapping", "seq_lens", "block_table"):
        tensors = getattr(found, name), getattr(wanted, name)
        assert tensors[0].dtype == tensors[1].dtype, name
        assert tensors[0].ndim == tensors[1].ndim, name
    pages = found.slot_mapping // BLOCK_SIZE
    assert found.slot_mapping.unique().numel() == found.num_actual_tokens
    assert torch.isin(pages, found.block_table).all()
    assert found.prefill is not None and wanted.prefill is not None
    kinds = [
        [(part.raw is None, len(part.groups)) for part in prefill.slices]
        for prefill in (found.prefill, wanted.prefill)
    ]
    assert kinds[0] == kinds[1]
