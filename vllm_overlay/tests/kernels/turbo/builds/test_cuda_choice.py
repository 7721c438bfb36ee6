# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The choice of kernels, and its reason: CUDA's, if they can be built."""

import logging
import sys
import threading
from inspect import unwrap

import pytest
import regex as re
import torch

from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.ops.turbo import choose as kernels
from vllm.v1.attention.ops.turbo.choose import TurboSource
from vllm.v1.attention.ops.turbo.cuda import build as cuda_build
from vllm.v1.attention.ops.turbo.cuda import extend_wgmma, module_builds
from vllm.v1.attention.ops.turbo.cuda import family as cuda_family
from vllm.v1.attention.ops.turbo.cuda.decode import DECODE
from vllm.v1.attention.ops.turbo.cuda.extend_wgmma import EXTEND_WGMMA, OUTPUTS
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES, load_instance
from vllm.v1.attention.ops.turbo.cuda.merge import MERGE
from vllm.v1.attention.ops.turbo.cuda.store import STORE
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import PLAIN
from vllm.v1.attention.ops.turbo.layer import base

from ..backend_utils import make_impl, make_vllm_config
from ..build_utils import (
    TIMEOUT_S,
    FlashInfer,
    all_failures,
    does_not_compile,
    set_flashinfer,
    set_platform,
)
from ..utils import ON_GPU, requires_triton

LAYOUT = TurboFormat.from_cache_dtype("turbo4", 128)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Have the choice see a GPU for which nothing has been loaded."""
    flashinfer = set_flashinfer(monkeypatch, tmp_path)
    monkeypatch.setattr(cuda_family, "load_instance", unwrap(load_instance))
    kernels.cuda_builds.cache_clear()
    module_builds._log_traceback.cache_clear()
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(cuda_family, "shared_memory", lambda _: ARCHITECTURES[90])
    yield flashinfer
    kernels.cuda_builds.cache_clear()
    module_builds._log_traceback.cache_clear()


def choose(choice: str, layout: TurboFormat = LAYOUT) -> str:
    """The name of the package of the chosen kernels."""
    chosen = kernels.choose_kernels(choice, TurboSource(layout, 4))
    functions = (chosen.store, chosen.decode_attention, chosen.num_decode_splits)
    (package,) = {function.__module__.split(".")[-2] for function in functions}
    return package


@requires_triton
@all_failures
def test_auto_falls_back_and_says_why(gpu, log, monkeypatch, fail, message):
    """The store fails in this test, because it is built first."""
    fail(gpu, monkeypatch)
    message = message.replace("decode.cu", "store.cu")
    assert choose("auto") == "triton"
    words = f"(?s)Triton kernels, because .*{message}.*\\.$"
    assert log[-1].level == logging.WARNING and re.search(words, log[-1].text)
    chosen = kernels.choose_kernels("auto", TurboSource(LAYOUT, 4))
    assert chosen.reason == "the CUDA kernels could not be built"
    with pytest.raises(ValueError, match=f"(?s)turbo_kernel=cuda.*{message}.*auto"):
        choose("cuda")


def test_pytorch_has_its_threads_before_modules_are_built(gpu, monkeypatch):
    """A forked process has none, and several threads must not make them at once."""
    done = []
    monkeypatch.setattr(torch, "set_num_threads", lambda _: done.append("threads"))
    monkeypatch.setattr(
        cuda_build, "_load_function", lambda path, name: done.append("module")
    )
    assert choose("auto") == "cuda"
    assert done.count("threads") == 1 and done[0] == "threads" and len(done) > 1


def no_filelock(jit: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "filelock", None)


def no_tvm_ffi(jit: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)


def other_arguments(jit: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a FlashInfer whose function lacks the argument ``use_fast_math``."""

    def gen_jit_spec(name, sources, extra_cuda_cflags, extra_include_paths):
        raise NotImplementedError

    flashinfer_jit = sys.modules["flashinfer.jit"]
    monkeypatch.setattr(flashinfer_jit, "gen_jit_spec", gen_jit_spec)


def little_shared_memory(jit: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No team of warps has room. The store needs no shared memory, and loads."""
    monkeypatch.setattr(cuda_family, "shared_memory", lambda _: 1024)
    monkeypatch.setattr(cuda_build, "_load_function", lambda path, name: print)


# Exceptions of a build or load other than its own RuntimeError.
UNFORESEEN = {
    no_filelock: "ModuleNotFoundError: .*filelock",
    no_tvm_ffi: "ModuleNotFoundError: .*tvm_ffi",
    other_arguments: "TypeError: .*use_fast_math",
    little_shared_memory: "AssertionError: .*1024",
}


@requires_triton
@pytest.mark.parametrize(
    "fail, message", UNFORESEEN.items(), ids=[fail.__name__ for fail in UNFORESEEN]
)
def test_auto_falls_back_on_any_failure(gpu, log, monkeypatch, fail, message):
    """Other releases of FlashInfer and TVM-FFI may fail in any way."""
    fail(gpu, monkeypatch)
    with pytest.raises(
        ValueError, match=f"turbo_kernel=cuda.* cannot be loaded .{message}.*Use auto"
    ):
        choose("cuda")
    assert choose("auto") == "triton"
    # Layers of another shape, for which no second traceback is logged.
    other = TurboFormat.from_cache_dtype("turbo4", 256)
    assert choose("auto", other) == "triton"
    traceback, *because = log.warnings
    assert traceback == "The turbo CUDA kernels cannot be loaded:"
    assert len(because) == 2, "one for each choice; vLLM's logger drops the repeat"
    for text in because:
        assert re.search(f"Triton kernels, because they cannot .*{message}", text)


@requires_triton
def test_a_build_fails_once_for_all_layers(gpu, log):
    does_not_compile(gpu, None)
    for _ in range(3):
        choose("auto")
    built = [text.split()[5:8] for text in log.infos if "Building" in text]
    assert sorted(f"{kernel} {instance}" for kernel, _, instance in built) == [
        "decode turbo4_128_4;",
        "extend_outputs turbo4_128_r128;",
        "extend_outputs turbo4_128_r256;",
        "extend_outputs turbo4_128_r64;",
        "extend_wgmma turbo4_128_r128;",
        "extend_wgmma turbo4_128_r64;",
        "merge 128;",
        "store turbo4_128;",
    ]


@requires_triton
@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_cuda_where_it_can_be_built(gpu, log, monkeypatch, choice):
    loaded: list[tuple] = []
    monkeypatch.setattr(cuda_family, "load_instance", lambda *args: loaded.append(args))
    assert choose(choice) == "cuda"
    # The engine's device, with its index, as a cache's tensor has it.
    device = torch.device("cuda", 0)
    asked: list[tuple] = [(STORE, LAYOUT, None), (MERGE, 128, None)]
    asked.append((DECODE, LAYOUT, 4))
    plans = [extend_wgmma.plan_for(LAYOUT, n) for n in (64, 65)]
    asked += [(EXTEND_WGMMA, LAYOUT, plan) for plan in plans]
    plans = [extend_wgmma.plan_for(LAYOUT, n, True) for n in (64, 65, 256)]
    asked += [(OUTPUTS, LAYOUT, plan) for plan in plans]
    assert set(loaded) == {(*args, device, PLAIN) for args in asked}
    assert len(loaded) == len(asked)
    chosen = kernels.choose_kernels(choice, TurboSource(LAYOUT, 4))
    reasons = {"auto": "they could be loaded", "cuda": "turbo_kernel is cuda"}
    assert (chosen.name, chosen.reason) == ("CUDA", reasons[choice])
    assert log == []


@requires_triton
def test_kernels_are_built_side_by_side(gpu, monkeypatch):
    at_once = threading.Barrier(8)

    def load(*args: object) -> None:
        at_once.wait(timeout=TIMEOUT_S)

    monkeypatch.setattr(cuda_family, "load_instance", load)
    assert choose("cuda") == "cuda"


@requires_triton
def test_triton_builds_nothing(gpu, log):
    assert choose("triton") == "triton"
    assert gpu.builds == []
    chosen = kernels.choose_kernels("triton", TurboSource(LAYOUT, 4))
    assert (chosen.name, chosen.reason) == ("Triton", "turbo_kernel is triton")
    assert log == []


@requires_triton
@pytest.mark.parametrize(
    "platform, capability, head_size, reason",
    [
        ("rocm", DeviceCapability(9, 4), 128, "NVIDIA GPU"),
        ("cuda", DeviceCapability(7, 5), 128, "capability 8.0"),
        ("cuda", DeviceCapability(9, 0), 96, "head size 96"),
    ],
)
def test_unsupported(gpu, log, monkeypatch, platform, capability, head_size, reason):
    set_platform(monkeypatch, platform, capability)
    layout = TurboFormat.from_cache_dtype("turbo4", head_size)
    assert choose("auto", layout) == "triton"
    chosen = kernels.choose_kernels("auto", TurboSource(layout, 4))
    assert chosen.name == "Triton" and reason in chosen.reason
    assert log == []
    with pytest.raises(ValueError, match=f"turbo_kernel=cuda.*{reason}.*Use auto"):
        choose("cuda", layout)
    assert gpu.builds == []


@pytest.mark.parametrize("choice", ["auto", "triton", "cuda"])
def test_cpu(monkeypatch, tmp_path, choice):
    """On a CPU PyTorch's operators run, and no kernels are chosen."""
    set_platform(monkeypatch, "cpu", None)
    config = make_vllm_config(tmp_path)
    config.attention_config.turbo_kernel = choice
    if choice == "cuda":
        with pytest.raises(ValueError, match="turbo_kernel=cuda.*CPU.*Use auto"):
            make_impl(config)
        return
    asked: list[tuple] = []
    monkeypatch.setattr(base, "share_kernels", lambda *args: asked.append(args))
    impl = make_impl(config)
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.runner.kernels is None
    assert asked == []


@requires_triton
@pytest.mark.skipif(ON_GPU, reason="the CPU platform stands in for a GPU's")
def test_kernels_are_chosen_once_when_they_are_asked_for(monkeypatch, tmp_path):
    impl = make_impl(make_vllm_config(tmp_path))
    set_platform(monkeypatch, "cuda", DeviceCapability(9, 0))
    calls, builds = [], []

    def record(*args) -> str:
        calls.append(args)
        return "kernels"

    monkeypatch.setattr(kernels, "choose_kernels", record)
    monkeypatch.setattr(kernels, "share_kernels", unwrap(kernels.share_kernels))
    monkeypatch.setattr(base, "share_kernels", kernels.share_kernels)
    monkeypatch.setattr(base, "start_builds", lambda *args: builds.append(args))
    monkeypatch.setattr(kernels, "_chosen", [])
    impl.process_weights_after_loading(torch.bfloat16)
    assert builds == [("auto", TurboSource(impl.runner.layout, 2, 1, PLAIN))]
    assert calls == []
    assert impl.runner.kernels == impl.runner.kernels == "kernels"
    assert calls == builds
