# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The choice of kernels for MLA, the modules built for them, and refused launches."""

import threading
from pathlib import Path

import pytest
import torch

from vllm.config import VllmConfig
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
from vllm.v1.attention.backends.mla import turbo_mla
from vllm.v1.attention.backends.mla.turbo_mla import TurboMLAImpl
from vllm.v1.attention.ops.turbo import choose
from vllm.v1.attention.ops.turbo.cuda import family as cuda_family
from vllm.v1.attention.ops.turbo.cuda import latent_decode, latent_gather, latent_store
from vllm.v1.attention.ops.turbo.cuda.build import LaunchRefused
from vllm.v1.attention.ops.turbo.cuda.family import (
    ARCHITECTURES,
    Demand,
    ServingModule,
    load_instance,
    modules_for,
)
from vllm.v1.attention.ops.turbo.cuda.latent_decode import LATENT_DECODE
from vllm.v1.attention.ops.turbo.cuda.latent_gather import GATHER
from vllm.v1.attention.ops.turbo.cuda.latent_modules import (
    LATENT_FAMILIES,
    all_latent_modules,
)
from vllm.v1.attention.ops.turbo.cuda.latent_plans import plan_for, plans_of
from vllm.v1.attention.ops.turbo.cuda.latent_store import LATENT_STORE
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS
from vllm.v1.attention.ops.turbo.interface import CUDA, TRITON
from vllm.v1.attention.ops.turbo.latent import choose as latent_choose
from vllm.v1.attention.ops.turbo.latent import warm_up as latent_warm_up
from vllm.v1.attention.ops.turbo.latent.choose import LatentSource
from vllm.v1.attention.ops.turbo.latent.format import LATENT_SIZES, LatentFormat
from vllm.v1.attention.ops.turbo.latent.runner import LatentRunner
from vllm.v1.attention.ops.turbo.layer.launching import warm_up
from vllm.v1.attention.ops.turbo.triton.latent_kernels import TritonLatentKernels

from ..build_utils import TIMEOUT_S
from ..utils import DEVICE, FP16, ON_GPU, requires_triton
from .latent_utils import latent_presets
from .mla_utils import make_mla_config, make_mla_layer

LAYOUT = LatentFormat.from_cache_dtype("turbo4", 576)
SOURCE = LatentSource(LAYOUT, 16, 1)
GPU = torch.device("cuda", 0)
REFUSED = "no kernel image is available for execution on the device"
CUDA_BUILD_ERROR = choose.cuda_build_error

cpu_layers = pytest.mark.skipif(ON_GPU, reason="the tests' layers are for CPUs")


class Device(Platform):
    """A GPU of a compute capability, or none. It is no CPU either."""

    _enum = PlatformEnum.UNSPECIFIED

    def __init__(self, capability: tuple[int, int] | None) -> None:
        self.capability = capability

    def is_cuda(self) -> bool:
        return self.capability is not None

    def get_device_capability(self) -> DeviceCapability:
        assert self.capability is not None
        return DeviceCapability(*self.capability)


def set_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None
) -> None:
    """Have the choice see a GPU of a compute capability, or none."""
    for module in (choose, latent_choose):
        monkeypatch.setattr(module, "current_platform", Device(capability))


@pytest.fixture
def config(rank_config: VllmConfig, folder: Path) -> VllmConfig:
    return make_mla_config(folder, "turbo4", FP16)


@pytest.fixture
def hopper(nothing_chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process with a Hopper GPU, whose kernels can be built."""
    set_device(monkeypatch, (9, 0))


def refuse_launch(*args: object) -> None:
    """A store whose launch the driver refuses."""
    raise LaunchRefused(REFUSED)


@pytest.mark.parametrize(
    "capability, words",
    [(None, "need an NVIDIA GPU"), ((7, 5), "before compute capability 8.0")],
)
def test_triton_serves_where_cuda_cannot(hopper, monkeypatch, capability, words):
    set_device(monkeypatch, capability)
    chosen = choose.share_kernels("auto", SOURCE).kernels
    assert chosen.name == TRITON and words in chosen.reason
    with pytest.raises(ValueError, match=f"turbo_kernel=cuda cannot.*{words}"):
        choose.share_kernels("cuda", SOURCE)


@requires_triton
@pytest.mark.parametrize("choice", ["auto", "cuda"])
@pytest.mark.parametrize(
    "capability, name, is_sparse, what",
    [
        ((9, 0), "turbo3", False, "turbo3"),
        ((9, 0), "turbo3", True, "lists of"),
        ((8, 9), "turbo4", True, "lists of"),
        ((12, 0), "turbo4", True, "lists of"),
    ],
)
def test_triton_decodes_pages_that_cuda_stores(
    hopper, monkeypatch, choice, capability, name, is_sparse, what
):
    """CUDA has no decode kernel for codes of three bits, and for lists of tokens only
    Hopper has one.
    """
    set_device(monkeypatch, capability)
    layout = LatentFormat.from_cache_dtype(name, 576)
    source = LatentSource(layout, 16, 1, is_sparse)
    chosen = choose.share_kernels(choice, source).kernels
    assert chosen.name == CUDA and f"Triton's decode {what}" in chosen.reason
    assert chosen.store is latent_store.store and chosen.gather is latent_gather.gather
    triton = TritonLatentKernels()
    assert chosen.decode_attention is triton.decode_attention
    assert chosen.num_decode_splits is triton.num_decode_splits


def test_what_no_cuda_kernel_decodes_is_not_built(monkeypatch):
    layout = LatentFormat.from_cache_dtype("turbo3", 576)
    with pytest.raises(RuntimeError, match="turbo3 has no CUDA decode kernel"):
        LATENT_DECODE.module(layout, plans_of(90)[0])
    for capability, count in (80, 0), (90, 1), (120, 0):
        monkeypatch.setattr(cuda_family, "capability_of", lambda _, x=capability: x)
        demand = Demand(16, 1, has_lists=True)
        assert len(modules_for([LATENT_DECODE], LAYOUT, demand, GPU)) == count


def test_lists_of_drafts_need_no_more_modules(monkeypatch):
    """Query tokens with lists share no rows of a pass."""
    monkeypatch.setattr(cuda_family, "capability_of", lambda _: 90)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    names = [x.name for x in LatentSource(LAYOUT, 16, 4, is_sparse=True).modules()]
    assert [x for x in names if "decode" in x] == [
        "latent_decode turbo4_512_64_16_listed"
    ]


def test_hoppers_lists_have_splits_of_their_own(hopper):
    """64 heads take two passes there, where pages take one."""
    chosen = choose.share_kernels("cuda", LatentSource(LAYOUT, 64, 1, True)).kernels
    assert chosen.decode_attention is latent_decode.decode_attention
    assert chosen.num_decode_splits(1, 64, 132) == 67
    assert latent_decode.num_decode_splits(1, 64, 132, plans=plans_of(90)) == 133


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_cuda_serves_where_it_can(hopper, monkeypatch, capability):
    set_device(monkeypatch, capability)
    chosen = choose.share_kernels("auto", SOURCE).kernels
    assert chosen.name == CUDA
    assert chosen.decode_attention is latent_decode.decode_attention
    assert choose.share_kernels("triton", SOURCE).kernels.name == TRITON
    choose.share_kernels.cache_clear()
    monkeypatch.setattr(choose, "cuda_build_error", lambda *args: "no nvcc")
    chosen = choose.share_kernels("auto", SOURCE).kernels
    assert chosen.name == TRITON
    with pytest.raises(ValueError, match="no nvcc"):
        choose.share_kernels("cuda", SOURCE)


@requires_triton
@cpu_layers
def test_a_refused_launch_falls_back_for_all_layers(hopper, monkeypatch, config):
    monkeypatch.setattr(
        LatentSource,
        "cuda",
        lambda _, reason: TritonLatentKernels(reason)._replace(
            store=refuse_launch, name=CUDA
        ),
    )
    monkeypatch.setattr(latent_warm_up, "batches", lambda runner: [[1, 1]])
    runners = [make_mla_layer(config).impl.runner for _ in range(2)]
    for runner in runners:
        # Set here, because layers on a CPU choose none.
        runner.chosen_kernels = choose.share_kernels("auto", LatentSource(LAYOUT, 4, 1))
        assert runner.kernels.name == CUDA
    warm_up(runners[1], DEVICE, latent_warm_up.run_kernels)
    for runner in runners:
        assert runner.kernels.name == TRITON and REFUSED in runner.kernels.reason
    chosen = choose.share_kernels("auto", LatentSource(LAYOUT, 5, 1)).kernels
    assert chosen.name == TRITON


@requires_triton
@cpu_layers
def test_a_refused_launch_is_an_error_with_turbo_kernel_cuda(
    hopper, monkeypatch, config
):
    runner = make_mla_layer(config).impl.runner
    runner.kernels = TritonLatentKernels()._replace(store=refuse_launch, name=CUDA)
    runner.kernel_choice = "cuda"
    with pytest.raises(ValueError, match=f"turbo_kernel=cuda cannot.*{REFUSED}"):
        warm_up(runner, DEVICE, latent_warm_up.run_kernels)


@requires_triton
def test_builds_go_on_until_kernels_are_asked_for(hopper, monkeypatch):
    """Builds are of the modules that will be needed; Triton's kernels need none."""
    asked, may_end = [], threading.Event()

    def modules(*args: object) -> list[ServingModule]:
        asked.append(args)
        return [ServingModule("kernel", lambda: may_end.wait(TIMEOUT_S), None)]

    monkeypatch.setattr(cuda_family, "modules_for", modules)
    monkeypatch.setattr(choose, "cuda_build_error", CUDA_BUILD_ERROR)
    choose.cuda_builds.cache_clear()
    choose.start_builds("triton", SOURCE)
    assert asked == []
    choose.start_builds("auto", SOURCE)
    assert asked == [(LATENT_FAMILIES, LAYOUT, Demand(16, 1))]
    may_end.set()
    chosen = choose.share_kernels("auto", SOURCE).kernels
    assert chosen.name == CUDA and len(asked) == 1
    choose.cuda_builds.cache_clear()


@cpu_layers
@pytest.mark.parametrize("is_served", [True, False])
def test_builds_begin_with_the_layer(monkeypatch, workspace, config, is_served):
    """Builds begin with a layer that a worker makes; others begin with the weights."""
    calls: list[str] = []
    # Only the backend's module sees this; the CPU's platform selects the backend.
    monkeypatch.setattr(turbo_mla, "current_platform", Device(None))
    monkeypatch.setattr(
        turbo_mla, "is_workspace_manager_initialized", lambda: is_served
    )
    monkeypatch.setattr(LatentRunner, "start_builds", lambda _: calls.append(stage))
    stage = "layer"
    init = TurboMLAImpl.__init__

    def initialise(*args: object, **arguments: object) -> None:
        nonlocal stage
        init(*args, **arguments)
        stage = "weights"

    monkeypatch.setattr(TurboMLAImpl, "__init__", initialise)
    make_mla_layer(config)
    assert calls == (["layer"] if is_served else []) + ["weights"]


@pytest.mark.parametrize("num_heads", [1, 8, 16, 20, 64, 128])
@pytest.mark.parametrize("max_query_len", [1, 4, 128])
@pytest.mark.parametrize("capability", ARCHITECTURES)
@latent_presets
def test_modules_that_a_step_needs_are_built(
    monkeypatch, name, capability, num_heads, max_query_len
):
    """Modules that a step needs are built at the start, and ahead of time."""
    layout = LatentFormat.from_cache_dtype(name, 576)
    asked = []
    monkeypatch.setattr(cuda_family, "capability_of", lambda _: capability)
    monkeypatch.setattr(cuda_family, "build_and_load", lambda *args: asked.append(args))
    monkeypatch.setattr(cuda_family, "shared_memory", lambda _: 0)
    load_instance.cache_clear()
    demand = Demand(num_heads, max_query_len)
    found = modules_for(LATENT_FAMILIES, layout, demand, GPU)
    for module in found:
        module.load()
    built = {module for module, _ in asked}
    assert built == {module.make(0) for module in found}
    for query_len in range(1, max_query_len + 1) if name == "turbo4" else ():
        plan = plan_for(num_heads * query_len, plans_of(capability))
        assert LATENT_DECODE.module(layout, plan) in built
    assert {x.module(layout, None) for x in (GATHER, LATENT_STORE)} <= built
    before = all_latent_modules(capability, TURBO_PRESETS, LATENT_SIZES)
    assert {m.name: m.make(0) for m in found}.items() <= before.items()
    load_instance.cache_clear()


def test_nothing_is_built_where_nothing_serves():
    assert all_latent_modules(75, TURBO_PRESETS, LATENT_SIZES) == {}
    assert all_latent_modules(90, ["k4v3"], LATENT_SIZES) == {}
    kernels = {name.split(" ")[0] for name in all_latent_modules(90, ["turbo3"], [576])}
    assert kernels == {"latent_store", "latent_gather"}
    sizes = {name.split(" ")[1] for name in all_latent_modules(90, ["turbo4"], [320])}
    assert sizes and all(size.startswith("turbo4_256_64") for size in sizes)
