# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tensor parallel ranks that find in the profile run that their kernels differ."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl
from vllm.v1.attention.ops.turbo import choose as kernels
from vllm.v1.attention.ops.turbo.interface import CUDA, TRITON, StoreCall
from vllm.v1.attention.ops.turbo.layer import launching, warm_up
from vllm.v1.attention.ops.turbo.triton.kernels import TritonKernels

from .backend_utils import (
    HEAD_SIZE,
    NUM_HEADS,
    flash_attn_stand_in,
    make_impl,
    make_vllm_config,
)
from .utils import DEVICE, FP16, ON_GPU, requires_triton

# The global ranks of this rank's group, in a replica and stage other than the first.
GLOBAL_RANKS = [4, 5]


class Ranks:
    """A group of this rank, which has CUDA's kernels, and another rank.

    Attributes:
        other: The name of the other rank's kernels, and the reason.
        stores: Names of the kernels that have stored on this rank, in order.

    """

    def __init__(self) -> None:
        self.other = (CUDA, "they could be loaded")
        self.stores: list[str] = []

    def size(self) -> int:
        return len(GLOBAL_RANKS)

    def gather(self, choices: list, own: tuple[str, str], group: object) -> None:
        assert group is self
        choices[:] = [own, self.other]

    def global_rank(self, group: object, rank: int) -> int:
        assert group is self
        return GLOBAL_RANKS[rank]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, workspace: None) -> Iterator[Ranks]:
    """As in a new process: nothing has been chosen, and nothing is warm."""
    ranks = Ranks()

    def recording(name: str, reason: str) -> TritonKernels:
        own = TritonKernels(reason)

        def store(call: StoreCall) -> None:
            ranks.stores.append(name)
            own.store(call)

        return own._replace(store=store, name=name)

    for function, name in (("cuda", CUDA), ("triton", TRITON)):
        monkeypatch.setattr(
            kernels,
            f"{function}_kernels",
            # The reason is the last argument.
            lambda *args, name=name: recording(name, args[-1]),
        )
    monkeypatch.setattr(kernels, "_chosen", [])
    monkeypatch.setattr(kernels, "_launch_refusal", None)
    monkeypatch.setattr(kernels, "cuda_unsupported_reason", lambda *args: None)
    monkeypatch.setattr(kernels, "cuda_build_error", lambda *args: None)
    monkeypatch.setattr(warm_up, "_warm", set())
    monkeypatch.setattr(launching, "model_parallel_is_initialized", lambda: True)
    group = SimpleNamespace(world_size=ranks.size(), cpu_group=ranks)
    monkeypatch.setattr(launching, "get_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "all_gather_object", ranks.gather)
    monkeypatch.setattr(torch.distributed, "get_global_rank", ranks.global_rank)
    kernels.share_kernels.cache_clear()
    yield ranks
    kernels.share_kernels.cache_clear()


def make_gpu_impl(folder: Path) -> TurboAttentionImpl:
    """An implementation that has chosen kernels, even on a CPU."""
    impl = make_impl(make_vllm_config(folder, dtype=FP16))
    impl.runner.chosen_kernels = kernels.share_kernels("auto", impl.runner.layout, 2)
    return impl


def profile(impl: TurboAttentionImpl) -> None:
    if not ON_GPU:
        impl.runner.flash_attn = flash_attn_stand_in
    x = torch.empty(1, NUM_HEADS, HEAD_SIZE, device=DEVICE)
    impl.forward(None, x, x, x, None, None, x)


def in_turn(names: list[str]) -> list[str]:
    return [name for name, _ in groupby(names)]


@requires_triton
def test_auto_runs_what_all_ranks_can(tmp_path: Path, ranks: Ranks):
    """All ranks can run Triton's kernels, which are also warm after the profile run."""
    ranks.other = (TRITON, "it has no nvcc")
    impl = make_gpu_impl(tmp_path)
    assert impl.runner.kernels.name == "CUDA"
    profile(impl)
    assert impl.runner.kernels.name == "Triton"
    assert (
        impl.runner.kernels.reason
        == "rank 5 runs Triton kernels, because it has no nvcc"
    )
    assert in_turn(ranks.stores) == ["CUDA", "Triton"]
    assert ranks.stores.count("Triton") == ranks.stores.count("CUDA")


@requires_triton
def test_cuda_raises_for_another_rank(tmp_path: Path, ranks: Ranks):
    ranks.other = (TRITON, "it has no nvcc")
    impl = make_gpu_impl(tmp_path)
    # Set here, because a CPU refuses the setting earlier.
    impl.runner.kernel_choice = "cuda"
    words = "turbo_kernel=cuda cannot.*rank 5 runs Triton kernels.*no nvcc.*Use auto"
    with pytest.raises(ValueError, match=words):
        profile(impl)
    assert impl.runner.kernels.name == "CUDA"


@requires_triton
def test_ranks_that_agree_stay(tmp_path: Path, ranks: Ranks):
    impl = make_gpu_impl(tmp_path)
    profile(impl)
    assert impl.runner.kernels.name == "CUDA" and in_turn(ranks.stores) == ["CUDA"]
