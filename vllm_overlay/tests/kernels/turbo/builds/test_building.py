# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CUDA's kernels are built while weights load and graphs compile."""

import threading

import pytest
import torch
from transformers import PreTrainedConfig

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import turbo_attn
from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl
from vllm.v1.attention.ops.turbo import choose as kernels
from vllm.v1.attention.ops.turbo.cuda import build as cuda_build
from vllm.v1.attention.ops.turbo.cuda import family as cuda_family
from vllm.v1.attention.ops.turbo.cuda import module_builds
from vllm.v1.attention.ops.turbo.cuda.family import ServingModule
from vllm.v1.attention.ops.turbo.cuda.module_builds import ModuleBuilds
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import Variant
from vllm.v1.attention.ops.turbo.keys.offset import may_add_key_bias
from vllm.v1.attention.ops.turbo.layer import base
from vllm.v1.attention.ops.turbo.layer import runner as layer_runner

from ..backend_utils import make_vllm_config
from ..build_utils import TIMEOUT_S, set_platform
from ..utils import ON_GPU, requires_triton

LAYOUT = TurboFormat.from_cache_dtype("turbo4", 128)


class SlowModules:
    """A stand-in for ``modules_for`` whose modules finish building on request.

    Attributes:
        may_end: The event that lets builds finish.
        asked: The arguments of each call.
        error: The exception that one of the builds raises; None: all succeed.
        loaded: The names of the modules that were loaded.

    """

    def __init__(self, count: int = 3) -> None:
        self.may_end = threading.Event()
        self.asked: list[tuple] = []
        self.error: Exception | None = None
        self.loaded: list[str] = []
        self._count = count
        self._all = threading.Barrier(count + 1)

    def __call__(self, *args: object) -> list[ServingModule]:
        self.asked.append(args)
        names = [f"kernel {number}" for number in range(self._count)]
        return [
            ServingModule(name, lambda name=name: self._load(name), None)
            for name in names
        ]

    def _load(self, name: str) -> None:
        self._all.wait(TIMEOUT_S)
        assert self.may_end.wait(TIMEOUT_S)
        if self.error is not None and name == "kernel 0":
            raise self.error
        cuda_build.compiled_modules.append(name)
        self.loaded.append(name)

    def wait_for_begin(self) -> None:
        self._all.wait(TIMEOUT_S)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch):
    found = SlowModules()
    monkeypatch.setattr(cuda_family, "modules_for", found)
    monkeypatch.setattr(cuda_build, "compiled_modules", [])
    monkeypatch.setattr(kernels, "_chosen", [])
    caches = (kernels.cuda_builds, kernels.share_kernels, module_builds._log_traceback)
    for cached in caches:
        cached.cache_clear()
    set_platform(monkeypatch, "cuda", DeviceCapability(9, 0))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    yield found
    found.may_end.set()
    for cached in caches:
        cached.cache_clear()


def make_impl(
    monkeypatch: pytest.MonkeyPatch, config: VllmConfig, is_served: bool = True
) -> TurboAttentionImpl:
    """A layer of a model that a worker makes (``is_served``), or of another model."""
    monkeypatch.setattr(
        turbo_attn, "is_workspace_manager_initialized", lambda: is_served
    )
    monkeypatch.setattr(turbo_attn, "get_flash_attn", lambda _: print)
    monkeypatch.setattr(layer_runner, "get_flash_attn", lambda _: print)
    monkeypatch.setattr(base, "num_compute_units", lambda _: 132)
    with set_current_vllm_config(config):
        return TurboAttentionImpl(4, 128, 0.1, 1, kv_cache_dtype="turbo4")


on_cpu = pytest.mark.skipif(ON_GPU, reason="the CPU platform stands in for a GPU's")


@on_cpu
@requires_triton
def test_builds_go_on_beside_the_rest_of_a_start(slow, log, monkeypatch, folder):
    """Builds begin with the first layer; a layer that needs the kernels waits."""
    config = make_vllm_config(folder)
    layers = [make_impl(monkeypatch, config) for _ in range(2)]
    slow.wait_for_begin()
    assert len(slow.asked) == 1, "all layers share a build"
    for layer in layers:
        layer.process_weights_after_loading(torch.bfloat16)
    assert slow.loaded == [] and len(slow.asked) == 1
    assert not any("built in" in line.text for line in log)
    threading.Timer(0.05, slow.may_end.set).start()
    for layer in layers:
        assert layer.runner.kernels.name == "CUDA"
        assert layer.runner.kernels.reason == "they could be loaded"
    assert len(slow.loaded) == 3 and len(slow.asked) == 1
    (line,) = log.infos
    assert "CUDA kernels: 3 of 3 modules were built in " in line
    assert "The next start finds them built." in line


@on_cpu
@requires_triton
@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_a_failure_is_reported_when_kernels_are_asked_for(
    slow, log, monkeypatch, folder, choice
):
    """All layers get the same failure, once no build is running any more."""
    slow.error = RuntimeError("kernel.cu was not compiled")
    config = make_vllm_config(folder)
    config.attention_config.turbo_kernel = choice
    layers = [make_impl(monkeypatch, config) for _ in range(2)]
    slow.wait_for_begin()
    for layer in layers:
        layer.process_weights_after_loading(torch.bfloat16)
    slow.may_end.set()
    for layer in layers:
        if choice == "cuda":
            with pytest.raises(
                ValueError, match="kernel.cu was not compiled. Use auto"
            ):
                _ = layer.runner.kernels
        else:
            assert layer.runner.kernels.name == "Triton"
    assert len(slow.loaded) == 2 and len(slow.asked) == 1
    because = "Turbo KV cache: Triton kernels, because kernel.cu was not compiled."
    assert log.warnings == [because] * (choice == "auto")


@on_cpu
@requires_triton
@pytest.mark.parametrize("why", ["triton", "unsupported", "refused", "not served"])
def test_nothing_is_built_that_will_not_be_asked_for(slow, monkeypatch, folder, why):
    config = make_vllm_config(folder)
    if why == "triton":
        config.attention_config.turbo_kernel = "triton"
    elif why == "unsupported":
        set_platform(monkeypatch, "cuda", DeviceCapability(7, 5))
    elif why == "refused":
        monkeypatch.setattr(kernels, "_launch_refusal", "no kernel image")
    impl = make_impl(monkeypatch, config, is_served=why != "not served")
    if why != "not served":
        impl.process_weights_after_loading(torch.bfloat16)
        assert impl.runner.kernels.name == "Triton"
    assert slow.asked == []


@on_cpu
@requires_triton
def test_a_bias_of_k_is_waited_for(slow, monkeypatch, folder):
    """Builds wait for the weights: with an offset, other modules are needed."""
    config = make_vllm_config(folder)
    config.model_config.hf_text_config.model_type = "qwen2"
    impl = make_impl(monkeypatch, config)
    assert slow.asked == []
    impl.runner.set_key_offset(torch.zeros(1))
    impl.process_weights_after_loading(torch.bfloat16)
    slow.wait_for_begin()
    slow.may_end.set()
    assert impl.runner.kernels.name == "CUDA"
    ((_, layout, demand),) = slow.asked
    assert layout == LAYOUT and demand.variant == Variant(key_offset=True)


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "llama", "attention_bias": False, "mlp_bias": True}, False),
        ({"model_type": "llama", "attention_bias": True}, True),
        ({"model_type": "qwen2_5_vl_text"}, True),
        ({"model_type": "qwen3"}, False),
        ({"qkv_bias": True}, True),
        ({}, False),
    ],
)
def test_models_that_may_add_a_bias_of_k(config, expected):
    assert may_add_key_bias(PreTrainedConfig(**config)) is expected


def test_modules_that_were_built_before_are_not_mentioned(log, monkeypatch):
    """No line is logged if this process has compiled no module of a set."""
    monkeypatch.setattr(cuda_build, "compiled_modules", ["kernel 0"])
    builds = ModuleBuilds(lambda: [ServingModule("kernel 0", lambda: print, None)])
    assert builds.error is None and log == []

    def compile_one() -> None:
        cuda_build.compiled_modules.append("kernel 1")

    found = [
        ServingModule("kernel 0", lambda: print, None),
        ServingModule("kernel 1", compile_one, None),
    ]
    assert ModuleBuilds(lambda: found).error is None
    (line,) = log
    assert "1 of 2 modules" in line.text
