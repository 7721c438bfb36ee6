# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kernels that serve if CUDA's were built, but cannot be launched, or if tensor
parallel ranks find in the profile run that their kernels differ.
"""

import multiprocessing
from itertools import groupby
from pathlib import Path

import pytest
import torch

from vllm.config import VllmConfig
from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl
from vllm.v1.attention.ops.turbo import choose as kernels
from vllm.v1.attention.ops.turbo.cuda.build import LaunchRefused
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import CUDA, TRITON, StoreCall
from vllm.v1.attention.ops.turbo.layer import launching
from vllm.v1.attention.ops.turbo.triton.kernels import TritonKernels

from ..backend_utils import make_impl, make_vllm_config, run_profile
from ..batch_utils import check_requests
from ..build_utils import TIMEOUT_S
from ..flash_utils import FLASH_ATTN
from ..utils import FP16, ON_GPU, requires_triton

# The driver's messages for a launch that it refuses, and for a kernel that failed.
REFUSED = "no kernel image is available for execution on the device"
IN_FLIGHT = "an illegal memory access was encountered"


def fail(monkeypatch, message: str) -> None:
    """Have CUDA's store, which is launched first, fail with the message."""
    error = LaunchRefused if message == REFUSED else RuntimeError

    def store(*args: object) -> None:
        raise error(message)

    def cuda_kernels(
        layout: TurboFormat, reason: str, capability: int | None
    ) -> TritonKernels:
        return TritonKernels(reason)._replace(store=store, name=CUDA)

    monkeypatch.setattr(kernels, "cuda_kernels", cuda_kernels)


def make_gpu_impl(config: VllmConfig) -> TurboAttentionImpl:
    """An implementation that has chosen kernels, even on a CPU."""
    impl = make_impl(config)
    source = kernels.TurboSource(impl.runner.layout, 2)
    impl.runner.chosen_kernels = kernels.share_kernels("auto", source)
    if not ON_GPU:
        impl.runner.flash_attn = FLASH_ATTN
    return impl


@requires_triton
def test_auto_falls_back_for_all_layers(folder, nothing_chosen, monkeypatch):
    """The fallback holds for earlier layers, their builder, and later layers."""
    fail(monkeypatch, REFUSED)
    config = make_vllm_config(folder, dtype=FP16)
    layers = [make_gpu_impl(config) for _ in range(2)]
    assert [impl.runner.kernels.name for impl in layers] == ["CUDA", "CUDA"]
    run_profile(layers[1])
    layers.append(make_gpu_impl(config))
    for impl in layers:
        assert impl.runner.kernels.name == "Triton"
        assert REFUSED in impl.runner.kernels.reason
    check_requests(config, layers[0], [(1, 31), (9, 0)])


@requires_triton
@pytest.mark.parametrize(
    "turbo_kernel, message, error, words",
    [
        ("cuda", REFUSED, ValueError, f"turbo_kernel=cuda cannot.*{REFUSED}.*Use auto"),
        ("auto", IN_FLIGHT, RuntimeError, IN_FLIGHT),
    ],
)
def test_others_raise(
    folder, nothing_chosen, turbo_kernel, message, error, words, monkeypatch
):
    fail(monkeypatch, message)
    config = make_vllm_config(folder, dtype=FP16)
    impl = make_gpu_impl(config)
    # Set here, because a CPU refuses the setting earlier.
    impl.runner.kernel_choice = turbo_kernel
    with pytest.raises(error, match=words):
        run_profile(impl)
    assert impl.runner.kernels.name == "CUDA"


def serve_rank(rank: int, store: Path, reasons: multiprocessing.Queue) -> None:
    """Run one of three ranks; the last one runs Triton's kernels."""
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(str(store), 3),
        rank=rank,
        world_size=3,
    )
    own = kernels.triton_kernels("it has no nvcc")
    if rank < 2:
        own = own._replace(name="CUDA", reason="they could be loaded")
    group = torch.distributed.group.WORLD
    reasons.put((rank, kernels.refusal_of_other_ranks(own, group)))
    torch.distributed.destroy_process_group()


@requires_triton
@pytest.mark.skipif(ON_GPU, reason="a process that uses a GPU cannot be forked")
def test_ranks_run_the_same_kernels(folder):
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    ranks = [
        context.Process(target=serve_rank, args=(rank, folder / "store", found))
        for rank in range(3)
    ]
    for rank in ranks:
        rank.start()
    reasons = dict(found.get(timeout=TIMEOUT_S) for _ in ranks)
    for rank in ranks:
        rank.join(TIMEOUT_S)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    expected = "rank 2 runs Triton kernels, because it has no nvcc"
    assert reasons == {0: expected, 1: expected, 2: None}


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


def in_turn(names: list[str]) -> list[str]:
    return [name for name, _ in groupby(names)]


@requires_triton
def test_auto_runs_kernels_that_all_ranks_have(folder, ranks: OtherRank):
    """All ranks can run Triton's kernels, which are also warm after the profile run."""
    ranks.other = (TRITON, "it has no nvcc")
    impl = make_gpu_impl(make_vllm_config(folder, dtype=FP16))
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
    impl = make_gpu_impl(make_vllm_config(folder, dtype=FP16))
    # Set here, because a CPU refuses the setting earlier.
    impl.runner.kernel_choice = "cuda"
    words = "turbo_kernel=cuda cannot.*rank 5 runs Triton kernels.*no nvcc.*Use auto"
    with pytest.raises(ValueError, match=words):
        run_profile(impl)
    assert impl.runner.kernels.name == "CUDA"


@requires_triton
def test_ranks_that_agree_stay(folder, ranks: OtherRank):
    impl = make_gpu_impl(make_vllm_config(folder, dtype=FP16))
    run_profile(impl)
    assert impl.runner.kernels.name == "CUDA" and in_turn(ranks.stores) == ["CUDA"]
