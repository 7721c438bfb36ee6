# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scratch memory: its bound, and batches that are cut into slices because of it."""

from itertools import product

import pytest
import torch

from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends import turbo_attn
from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl
from vllm.v1.attention.ops.turbo import choose as kernels
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES
from vllm.v1.attention.ops.turbo.cuda.kernels import CudaKernels
from vllm.v1.attention.ops.turbo.layer import base, prefill_sources
from vllm.v1.attention.ops.turbo.layer import runner as layer_runner
from vllm.v1.attention.ops.turbo.planning.decode import cut_evenly
from vllm.v1.attention.ops.turbo.triton import prefill as triton_prefill

from .. import batch_utils
from ..backend_utils import (
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
    reserve,
    set_scratch,
    with_drafts,
)
from ..batch_utils import BATCHES, Batch, check_requests
from ..flash_utils import NO_FLASH_ATTN, no_kernel
from ..utils import BF16, FP16, requires_triton

MIB = 2**20
# Query heads, KV heads and head size of models without tensor parallelism.
SHAPES = [
    (heads, kv_heads, size)
    for heads, size in ((128, 128), (64, 256), (32, 512), (32, 128), (8, 64))
    for kv_heads in sorted({1, 8, heads})
]
# The most multiprocessors of a GPU, those of a full die, by compute capability.
MOST_SMS = {80: 128, 86: 84, 89: 144, 90: 144, 100: 160, 120: 192}
assert MOST_SMS.keys() == ARCHITECTURES.keys()
STEPS = [(1, 2048), (96, 8192), (1024, 131072)]


@requires_triton
@prefill_modes
@pytest.mark.parametrize("num_drafts", [0, 7])
@pytest.mark.parametrize("max_num_seqs, max_num_tokens", STEPS)
def test_bound(folder, mode, num_drafts, max_num_seqs, max_num_tokens, monkeypatch):
    """Scratch stays within 256 MiB for any model, batch and GPU."""
    config = make_vllm_config(
        folder, "turbo4", BF16, mode, max_num_seqs, max_num_tokens
    )
    with_drafts(config, num_drafts)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    for (heads, kv_heads, size), capability in product(SHAPES, (None, *ARCHITECTURES)):
        with monkeypatch.context() as patch, set_current_vllm_config(config):
            patch.setattr(current_platform, "is_cpu", lambda: True)
            impl = TurboAttentionImpl(
                heads, size, 0.1, kv_heads, kv_cache_dtype="turbo4"
            )
        impl.runner.kernels = kernels.triton_kernels()
        if capability is not None:
            impl.runner.kernels = kernels.cuda_kernels(
                impl.runner.layout, capability=capability
            )
        impl.runner.capability = capability
        impl.runner.num_sms = MOST_SMS.get(capability, 144)
        impl.runner.flash_attn = NO_FLASH_ATTN
        found = impl.runner.workspace_bytes / MIB
        assert found <= 256, (heads, kv_heads, size, capability, found)


def test_plan_of_calls():
    """A batch is cut only where a call would have too few splits a sequence."""
    assert cut_evenly(0, 1, 8, 64) == []
    assert cut_evenly(8, 1, 64, 64) == [(0, 8)]
    assert cut_evenly(16, 1, 64, 64) == [(0, 16)]
    assert cut_evenly(17, 1, 64, 64) == [(0, 9), (9, 17)]
    assert cut_evenly(64, 1, 1, 64) == [(0, 64)]
    assert cut_evenly(5, 4, 2, 16) == [(0, 2), (2, 4), (4, 5)]
    assert cut_evenly(2, 4, 8, 1) == [(0, 1), (1, 2)]


def random_requests(
    generator: torch.Generator, num_drafts: int, max_num_seqs: int, max_num_tokens: int
) -> list[tuple[int, int]]:
    """Query and context lengths of a batch's requests, decodes first."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    lens = [draw(1, num_drafts + 1) for _ in range(draw(0, max_num_seqs))]
    while len(lens) < max_num_seqs and draw(0, 3) > 0:
        lens.append(draw(num_drafts + 2, draw(num_drafts + 2, max_num_tokens)))
    while sum(lens) > max_num_tokens:
        lens.pop()
    return [(length, draw(0, 1) * draw(1, 300)) for length in lens or [1]]


@requires_triton
@prefill_modes
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.usefixtures("workspace")
def test_profile_run_reserves_random_batches(folder, mode, num_drafts, monkeypatch):
    """Random decodes, extends and prefills, cut into calls and slices."""
    set_scratch(monkeypatch, partials=64, slice_tokens=40, piece_tokens=64)
    for name in ("gather_context", "rotate_rows"):
        monkeypatch.setattr(triton_prefill, name, no_kernel)
    monkeypatch.setattr(prefill_sources, "merge_attn_states", no_kernel)
    monkeypatch.setattr(batch_utils, "fill_cache", no_kernel)
    config = make_vllm_config(folder, "turbo4", FP16, mode, 16, 256)
    with_drafts(config, num_drafts)
    impl = make_impl(config)
    impl.runner.num_sms = 4
    impl.runner.flash_attn = NO_FLASH_ATTN
    calls: list[int] = [0]  # of the profile run's first batch of all kinds

    def attend(query, call, partials) -> None:
        num_partials = partials.lse.shape[0]
        assert num_partials <= 64
        call.batch.check(call.output.shape[0])
        assert num_partials >= call.batch.num_query_slots > 0
        calls[-1] += 1

    monkeypatch.setattr(CudaKernels, "make_matrices", no_kernel)
    impl.runner.kernels = CudaKernels(
        store=no_kernel, decode_attention=attend, extend_attention=attend
    )
    builder = make_builder(config, impl)
    generator = torch.Generator().manual_seed(0)
    num_slices = []
    reserve(impl)
    for _ in range(60):
        batch = Batch.make(impl, random_requests(generator, num_drafts, 16, 256))
        metadata = builder.build(0, batch.common)
        calls.append(0)
        batch.run(impl, metadata)
        plan = metadata.prefill
        num_slices.append(0 if plan is None else len(plan.slices))
    assert max(calls) > 2 and max(num_slices) > 2


@prefill_modes
@kernel_paths
@pytest.mark.parametrize("name", ["decodes", "mixed", "context of several pieces"])
@pytest.mark.usefixtures("workspace")
def test_sliced_batches(folder, name, mode, path, monkeypatch):
    """Two requests a call and 8 query tokens a slice.

    Scratch is from vLLM's manager, so that parts that overlap overwrite each other.
    """
    set_scratch(monkeypatch, partials=8, slice_tokens=8, piece_tokens=64)
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    impl = make_impl(config, path=path)
    impl.runner.num_sms = 4
    batch = Batch.make(impl, BATCHES[name])
    metadata = batch.build(config, impl)
    if metadata.prefill is not None and path == "triton":
        assert len(metadata.prefill.slices) > 1
    batch.serve(impl, metadata)
    if name == "decodes" and path == "triton":
        (plan,) = metadata.decode_plans.values()
        assert len(plan.calls) == 2


@prefill_modes
@kernel_paths
@pytest.mark.parametrize("lens", [(3, 3, 3), (3, 1, 2)], ids=["alike", "ragged"])
def test_sliced_drafts(folder, lens, mode, path, monkeypatch):
    set_scratch(monkeypatch, partials=8)
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16, mode))
    impl = make_impl(config, path=path)
    metadata = check_requests(
        config, impl, [(length, 30 + 7 * length) for length in lens]
    )
    assert metadata.num_decodes == 3
    (plan,) = metadata.decode_plans.values()
    assert len(plan.calls) == 3


def test_multiprocessors_are_those_of_the_current_device(folder, monkeypatch):
    """The current device is a rank's own, and need not be the host's first."""
    asked: list[tuple] = []

    def num_compute_units(*device: int) -> int:
        asked.append(device)
        return 7

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(base, "num_compute_units", num_compute_units)
    for module in (layer_runner, turbo_attn):
        monkeypatch.setattr(module, "get_flash_attn", lambda head_size: print)
    make_impl(make_vllm_config(folder, dtype=FP16))
    assert asked == [(3,)]


@requires_triton
@pytest.mark.parametrize("name", ["cuda", "triton"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_largest_batch_is_a_closed_bound(folder, monkeypatch, name, num_drafts):
    """The bound needs no search over batches, which would ask for each one's splits.

    The model runner asks for it in every forward pass without metadata.
    """

    def num_splits(*batch: int) -> int:
        raise AssertionError(f"asked for the splits of {batch}")

    config = make_vllm_config(folder, dtype=FP16)
    impl = make_impl(with_drafts(config, num_drafts))
    layout = impl.runner.layout
    is_cuda = name == "cuda"
    own = kernels.cuda_kernels(layout) if is_cuda else kernels.triton_kernels()
    impl.runner.kernels = own._replace(
        num_decode_splits=num_splits, num_extend_splits=num_splits
    )
    assert impl.runner.workspace_bytes > 0
