# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tensor parallel ranks that find in the profile run that their kernels differ."""

from itertools import groupby
from pathlib import Path

import pytest
import torch

from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl
from vllm.v1.attention.ops.turbo import choose as kernels
from vllm.v1.attention.ops.turbo.interface import CUDA, TRITON, StoreCall
from vllm.v1.attention.ops.turbo.layer import launching
from vllm.v1.attention.ops.turbo.triton.kernels import TritonKernels

from . import test_kernel_choice
from .backend_utils import (
    make_vllm_config,
    run_profile,
)
from .utils import FP16, requires_triton

# The global ranks of this rank's group, in a replica and stage other than the first.
GLOBAL_RANKS = [4, 5]


class OtherRank:
    """A ``GroupCoordinator`` of this rank, which has CUDA's kernels, and another rank.

    Attributes:
        world_size: Number of ranks.
        other: The name of the other rank's kernels, and the reason.
        stores: Names of the kernels that have stored on this rank, in order.

    """

    def __init__(self) -> None:
        self.world_size = len(GLOBAL_RANKS)
        self.cpu_group = self
        self.other = (CUDA, "they could be loaded")
        self.stores: list[str] = []

    def size(self) -> int:
        return self.world_size

    def gather(self, choices: list, own: tuple[str, str], group: object) -> None:
        assert group is self
        choices[:] = [own, self.other]

    def global_rank(self, group: object, rank: int) -> int:
        assert group is self
        return GLOBAL_RANKS[rank]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, nothing_chosen: None) -> OtherRank:
    """A group of two ranks, of which nothing has been chosen on this one."""
    ranks = OtherRank()

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
    monkeypatch.setattr(launching, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(launching, "get_tp_group", lambda: ranks)
    monkeypatch.setattr(torch.distributed, "all_gather_object", ranks.gather)
    monkeypatch.setattr(torch.distributed, "get_global_rank", ranks.global_rank)
    return ranks


def make_gpu_impl(folder: Path) -> TurboAttentionImpl:
    """An implementation that has chosen kernels, even on a CPU."""
    return test_kernel_choice.make_gpu_impl(make_vllm_config(folder, dtype=FP16))


def in_turn(names: list[str]) -> list[str]:
    return [name for name, _ in groupby(names)]


@requires_triton
def test_auto_runs_kernels_that_all_ranks_have(folder, ranks: OtherRank):
    """All ranks can run Triton's kernels, which are also warm after the profile run."""
    ranks.other = (TRITON, "it has no nvcc")
    impl = make_gpu_impl(folder)
    assert impl.runner.kernels.name == "CUDA"
    run_profile(impl)
    assert impl.runner.kernels.name == "Triton"
    reason = "rank 5 runs Triton kernels, because it has no nvcc"
    assert impl.runner.kernels.reason == reason
    assert in_turn(ranks.stores) == ["CUDA", "Triton"]
    assert ranks.stores.count("Triton") == ranks.stores.count("CUDA")


@requires_triton
def test_cuda_raises_for_another_rank(folder, ranks: OtherRank):
    ranks.other = (TRITON, "it has no nvcc")
    impl = make_gpu_impl(folder)
    # Set here, because a CPU refuses the setting earlier.
    impl.runner.kernel_choice = "cuda"
    words = "turbo_kernel=cuda cannot.*rank 5 runs Triton kernels.*no nvcc.*Use auto"
    with pytest.raises(ValueError, match=words):
        run_profile(impl)
    assert impl.runner.kernels.name == "CUDA"


@requires_triton
def test_ranks_that_agree_stay(folder, ranks: OtherRank):
    impl = make_gpu_impl(folder)
    run_profile(impl)
    assert impl.runner.kernels.name == "CUDA" and in_turn(ranks.stores) == ["CUDA"]
