# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Building the CUDA kernels, and what is chosen where that fails."""

import errno
import logging
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import regex as re
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl
from vllm.v1.attention.ops.turbo import kernel_choice as kernels
from vllm.v1.attention.ops.turbo import runtime
from vllm.v1.attention.ops.turbo.cuda import build as cuda_build
from vllm.v1.attention.ops.turbo.cuda import built as cuda_built
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import extend as cuda_extend
from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.cuda.build import CudaModule, build, build_and_load
from vllm.v1.attention.ops.turbo.format import TurboFormat

from .backend_utils import make_vllm_config
from .utils import ON_GPU, requires_triton

LAYOUT = TurboFormat.from_cache_dtype("turbo4", 128)
DEVICE = torch.device("cuda", 0)
# Of what ends in a moment on a machine that is not busy.
TIMEOUT_S = 1800
# What loads each kernel's modules.
LOADERS = (
    (cuda_store, "load"),
    (cuda_decode, "load_instance"),
    (cuda_extend, "load_instance"),
    (cuda_merge, "load"),
)
MODULE = CudaModule("decode", "turbo4_128", "#define A 1\n", ("-DB",))


class FlashInfer:
    """The part of FlashInfer's JIT that is used, whose compiler copies the header.

    Attributes:
        folder: Its cache.
        tools: The programs on PATH.
        error: What a build raises.
        builds: The names of the modules that were built.

    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tools = {"nvcc", "ninja"}
        self.error: Exception | None = None
        self.builds: list[str] = []
        self.flags: list[str] = []

    def gen_jit_spec(
        self,
        name: str,
        sources: list[Path],
        extra_cuda_cflags: list[str],
        extra_include_paths: list[Path],
        use_fast_math: bool,
    ) -> "FlashInfer.Spec":
        assert not use_fast_math
        assert all(source.is_file() for source in sources)
        self.flags = extra_cuda_cflags
        return self.Spec(self, name, extra_include_paths[-1])

    class Spec:
        def __init__(self, jit: "FlashInfer", name: str, header_dir: Path) -> None:
            self.jit, self.name, self.header_dir = jit, name, header_dir
            self.jit_library_path = jit.folder / name / f"{name}.so"

        @property
        def lock_path(self) -> Path:
            self.jit.folder.mkdir(parents=True, exist_ok=True)
            return self.jit.folder / f"{self.name}.lock"

        def build(self) -> None:
            if self.jit.error is not None:
                raise self.jit.error
            self.jit.builds.append(self.name)
            self.jit_library_path.parent.mkdir(exist_ok=True)
            (header,) = self.header_dir.iterdir()
            shutil.copy(header, self.jit_library_path)

    def modules(self) -> dict[str, ModuleType]:
        names = ("flashinfer", "flashinfer.jit", "flashinfer.jit.cpp_ext")
        modules: list[Any] = [ModuleType(name) for name in names]
        package, jit, cpp_ext = modules
        package.jit, jit.cpp_ext = jit, cpp_ext
        jit.env = ModuleType("flashinfer.jit.env")
        jit.env.FLASHINFER_GEN_SRC_DIR = self.folder / "generated"
        jit.gen_jit_spec = self.gen_jit_spec
        jit.MissingJITCacheError = type("MissingJITCacheError", (RuntimeError,), {})
        cpp_ext.get_cuda_path = lambda: "/toolkit"
        return dict(zip(names, modules))


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FlashInfer:
    """FlashInfer, and a GPU to build for."""
    # Of any release, for any architectures.
    jit = FlashInfer(tmp_path / ".cache" / "flashinfer" / "0.1" / "80" / "cached_ops")
    jit.folder.parent.mkdir(parents=True)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(cuda_built, "PREBUILT_DIR", tmp_path / "prebuilt")
    for name, module in jit.modules().items():
        monkeypatch.setitem(sys.modules, name, module)

    def which(tool: str) -> str | None:
        return tool if Path(tool).name in jit.tools else None

    monkeypatch.setattr(shutil, "which", which)
    monkeypatch.delenv("FLASHINFER_NVCC", raising=False)
    set_platform(monkeypatch, "cuda", DeviceCapability(9, 0))
    return jit


def set_platform(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: DeviceCapability | None
) -> None:
    for other in ("cuda", "rocm", "cpu"):
        found = name == other
        monkeypatch.setattr(
            current_platform, f"is_{other}", lambda found=found: found, raising=False
        )
    monkeypatch.setattr(
        current_platform, "get_device_capability", lambda *_, **__: capability
    )
    monkeypatch.setattr(
        current_platform,
        "has_device_capability",
        lambda number, *_, **__: capability and capability.to_int() >= number,
    )


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Levels and texts of what is logged, repeats too."""
    records: list[tuple[int, str]] = []

    def recorder(level: int) -> Callable[..., None]:
        return lambda text, *args, **_: records.append((level, text % args))

    for logger in (kernels.logger, cuda_build.logger, cuda_built.logger):
        for name, level in (("info", logging.INFO), ("warning", logging.WARNING)):
            monkeypatch.setattr(logger, name, recorder(level))
            monkeypatch.setattr(logger, f"{name}_once", recorder(level), raising=False)
    return records


def load(module: CudaModule = MODULE) -> str:
    return build(module, DEVICE).read_text()


def test_builds_once_and_says_so(flashinfer, log):
    assert load() == MODULE.header
    (name,) = flashinfer.builds
    assert name.startswith("turbo_decode_turbo4_128_sm90_")
    assert flashinfer.flags == ["-gencode=arch=compute_90,code=sm_90", "-DB"]
    ((level, text),) = log
    assert level == logging.INFO
    assert "Building" in text and "decode" in text and "turbo4_128" in text
    # Another process: FlashInfer sees to it that this one compiles nothing.
    header = flashinfer.folder / "generated" / name / cuda_build.HEADER_NAME
    os.utime(header, (1, 1))
    assert load() == MODULE.header
    assert flashinfer.builds == [name, name] and len(log) == 1
    assert header.stat().st_mtime == 1, "rewriting the header compiles anew"
    assert list(header.parent.iterdir()) == [header]


def test_processes_that_start_together_build_once(flashinfer, monkeypatch, tmp_path):
    """As the ranks of one host do."""
    log = tmp_path / "builds"
    build = FlashInfer.Spec.build
    context = multiprocessing.get_context("fork")
    together = context.Barrier(2, timeout=TIMEOUT_S)

    def slow_build(spec: FlashInfer.Spec) -> None:
        # What is there is new enough, says ninja.
        if spec.jit_library_path.exists():
            return
        with log.open("a") as file:
            file.write(f"{spec.name}\n")
        # As long as the other process takes to come here, if nothing keeps it.
        time.sleep(1)
        build(spec)

    def rank() -> None:
        together.wait()
        assert load() == MODULE.header

    monkeypatch.setattr(FlashInfer.Spec, "build", slow_build)
    ranks = [context.Process(target=rank) for _ in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert len(log.read_text().splitlines()) == 1


def test_header_of_a_broken_build_is_replaced(flashinfer):
    load()
    (header,) = (flashinfer.folder / "generated").glob(f"*/{cuda_build.HEADER_NAME}")
    header.write_text("#define A")
    assert load() == MODULE.header


def test_every_part_is_in_the_name(monkeypatch, tmp_path):
    """An installation keeps no times that would tell old from new."""
    shutil.copytree(cuda_build.SOURCE_DIR, tmp_path / "cuda")
    monkeypatch.setattr(cuda_build, "SOURCE_DIR", tmp_path / "cuda")
    names = {cuda_build.module_name(MODULE, "90")}
    assert names == {cuda_build.module_name(MODULE, "90")}
    names.add(cuda_build.module_name(MODULE, "86"))
    names.add(cuda_build.module_name(MODULE._replace(flags=()), "90"))
    names.add(cuda_build.module_name(MODULE._replace(header="#define A 2"), "90"))
    names.add(cuda_build.module_name(MODULE._replace(kernel="store"), "90"))
    for source in ("decode/decode.cu", "common/format.cuh"):
        with (tmp_path / "cuda" / source).open("a") as file:
            file.write("//\n")
        names.add(cuda_build.module_name(MODULE, "90"))
    monkeypatch.setattr(cuda_build.metadata, "version", lambda name: f"other {name}")
    names.add(cuda_build.module_name(MODULE, "90"))
    assert len(names) == 8


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The libraries that are loaded, each a text that its function returns."""
    paths: list[Path] = []

    def load_function(path: Path, name: str) -> str:
        paths.append(path)
        return path.read_text()

    monkeypatch.setattr(cuda_build, "_load_function", load_function)
    return paths


@pytest.fixture
def without_tools(flashinfer: FlashInfer, monkeypatch: pytest.MonkeyPatch):
    """Takes them away: programs, FlashInfer and what locks."""

    def take() -> None:
        flashinfer.tools.clear()
        for name in ("flashinfer", "flashinfer.jit", "filelock"):
            monkeypatch.setitem(sys.modules, name, None)

    return take


@pytest.mark.parametrize("place", ["cache", "package"])
def test_what_is_built_needs_no_tools(
    flashinfer, loaded, without_tools, log, monkeypatch, tmp_path, place
):
    """Nor a root that can be written."""
    library = build(MODULE, DEVICE)
    if place == "package":
        library = shutil.copytree(library.parent, tmp_path / "prebuilt") / library.name
        shutil.rmtree(flashinfer.folder)
    without_tools()
    log.clear()

    # Permissions would not keep root from it.
    def refuse(path: Path, *args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for name in ("mkdir", "replace", "touch", "write_bytes", "write_text"):
        monkeypatch.setattr(Path, name, refuse)
    assert build_and_load(MODULE, DEVICE) == MODULE.header
    assert loaded == [library] and len(flashinfer.builds) == 1 and not log
    # Other modules, and this one for another GPU, are others.
    with pytest.raises(RuntimeError, match="FlashInfer cannot be imported"):
        build_and_load(MODULE._replace(header="#define A 2"), DEVICE)


@pytest.mark.parametrize("fault", ["not whole", "changed"])
def test_what_is_not_whole_is_not_loaded(flashinfer, loaded, without_tools, log, fault):
    library = build(MODULE, DEVICE)
    if fault == "changed":
        library.write_text("#define")
    else:
        library.with_suffix(".sha256").unlink()
    found = build_and_load(MODULE, DEVICE)
    assert found == MODULE.header and len(flashinfer.builds) == 2
    warnings = [text for level, text in log if level == logging.WARNING]
    assert len(warnings) == (fault == "changed")
    assert all(str(library) in text and "SHA-256" in text for text in warnings)
    library.with_suffix(".sha256").write_text("0")
    without_tools()
    with pytest.raises(RuntimeError, match="FlashInfer cannot be imported"):
        build_and_load(MODULE, DEVICE)


def test_what_cannot_be_loaded_is_built_anew(
    flashinfer, without_tools, log, monkeypatch, tmp_path
):
    library = build(MODULE, DEVICE)
    prebuilt = shutil.copytree(library.parent, tmp_path / "prebuilt") / library.name

    def load_function(path: Path, name: str) -> str:
        if path == prebuilt:
            raise OSError("libcudart.so.13: cannot open")
        return path.read_text()

    monkeypatch.setattr(cuda_build, "_load_function", load_function)
    assert build_and_load(MODULE, DEVICE) == MODULE.header
    level, text = log[-1]
    assert level == logging.WARNING
    assert re.search(f"{prebuilt}.*built anew.*libcudart", text)
    without_tools()
    with pytest.raises(RuntimeError, match="FlashInfer cannot be imported"):
        build_and_load(MODULE, DEVICE)


def no_flashinfer(jit: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)


def no_nvcc(jit: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.tools.remove("nvcc")


def no_toolkit(jit: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_cuda_path() -> str:
        raise RuntimeError("Could not find nvcc")

    cpp_ext = sys.modules["flashinfer.jit.cpp_ext"]
    monkeypatch.setattr(cpp_ext, "get_cuda_path", get_cuda_path)
    jit.tools.remove("nvcc")


def no_ninja(jit: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.tools.remove("ninja")


def no_folder(jit: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.folder.write_text("a file where a folder should be")


def disabled(jit: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.error = sys.modules["flashinfer.jit"].MissingJITCacheError("not found")


def does_not_compile(jit: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"line {number} {'x' * 5000}" for number in range(100)]
    jit.error = RuntimeError("\n".join([*lines, "decode.cu(7): error: no", "stopped"]))


FAILURES = {
    no_flashinfer: "FlashInfer cannot be imported.*Install flashinfer-python",
    no_nvcc: "no /toolkit/bin/nvcc.*set CUDA_HOME",
    no_toolkit: "no nvcc.*set CUDA_HOME",
    no_ninja: "no ninja.*Install ninja",
    no_folder: "cannot be written.*Set FLASHINFER_WORKSPACE_BASE",
    disabled: "is disabled.*Unset FLASHINFER_DISABLE_JIT",
    does_not_compile: r"decode.cu was not compiled.*toolkit.*\(7\): error: no",
}
all_failures = pytest.mark.parametrize(
    "fail, message", FAILURES.items(), ids=[fail.__name__ for fail in FAILURES]
)


@all_failures
def test_failures_name_the_way_out(flashinfer, monkeypatch, fail, message):
    fail(flashinfer, monkeypatch)
    with pytest.raises(RuntimeError, match=f"(?s)cannot be built: .*{message}") as e:
        load()
    assert len(str(e.value)) < 5000, "the compiler's output is cut"


@pytest.mark.parametrize(
    "error",
    [
        OSError("libcudart.so.13: cannot open"),
        AttributeError("libcudart has no decode"),
    ],
    ids=["library", "function"],
)
def test_what_is_built_may_not_load(flashinfer, monkeypatch, error):
    def load_function(path: Path, name: str) -> None:
        assert name == "decode"
        raise error

    monkeypatch.setattr(cuda_build, "_load_function", load_function)
    with pytest.raises(RuntimeError, match="libcudart.*Remove .*turbo_decode") as e:
        build_and_load(MODULE, DEVICE)
    assert e.value.__cause__ is error


def test_a_module_is_built_for_the_device_that_runs_it(flashinfer, monkeypatch):
    """Which need not be the first, nor like it."""
    capabilities = [DeviceCapability(9, 0), DeviceCapability(8, 6)]
    monkeypatch.setattr(
        current_platform, "get_device_capability", lambda index: capabilities[index]
    )
    for index, number in enumerate((90, 86)):
        build(MODULE, torch.device("cuda", index))
        assert flashinfer.flags[0] == f"-gencode=arch=compute_{number},code=sm_{number}"
    assert len(set(flashinfer.builds)) == 2


@pytest.fixture
def gpu(flashinfer, monkeypatch):
    """As far as the choice goes, a GPU, for which no process has loaded anything."""
    for module, loader in LOADERS:
        monkeypatch.setattr(module, loader, unwrap(getattr(module, loader)))
    kernels.cuda_build_error.cache_clear()
    kernels._log_traceback.cache_clear()
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    properties = SimpleNamespace(shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    yield flashinfer
    kernels.cuda_build_error.cache_clear()
    kernels._log_traceback.cache_clear()


def choose(choice: str, layout: TurboFormat = LAYOUT) -> str:
    """The package of the kernels that are chosen."""
    chosen = kernels.choose_kernels(choice, layout, 4)
    functions = (chosen.store, chosen.decode_attention, chosen.num_decode_splits)
    (package,) = {function.__module__.split(".")[-2] for function in functions}
    return package


@requires_triton
@all_failures
def test_auto_falls_back_and_says_why(gpu, log, monkeypatch, fail, message):
    """Here the store, which is built first, is what fails."""
    fail(gpu, monkeypatch)
    message = message.replace("decode.cu", "store.cu")
    assert choose("auto") == "triton"
    level, text = log[-1]
    assert level == logging.WARNING
    assert re.search(f"(?s)Triton kernels, because .*{message}.*\\.$", text)
    chosen = kernels.choose_kernels("auto", LAYOUT, 4)
    assert chosen.reason == "the CUDA kernels could not be built"
    with pytest.raises(ValueError, match=f"(?s)turbo_kernel=cuda.*{message}.*auto"):
        choose("cuda")


def test_pytorch_has_its_threads_before_modules_are_built(gpu, monkeypatch):
    """A forked process has none, and making them is not for several at once."""
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
    """As a FlashInfer whose function has no ``use_fast_math``."""

    def gen_jit_spec(name, sources, extra_cuda_cflags, extra_include_paths):
        raise NotImplementedError

    flashinfer_jit = sys.modules["flashinfer.jit"]
    monkeypatch.setattr(flashinfer_jit, "gen_jit_spec", gen_jit_spec)


def little_shared_memory(jit: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No team of warps has room; the store, which has none, can be loaded."""
    properties = SimpleNamespace(shared_memory_per_block_optin=1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(cuda_build, "_load_function", lambda path, name: print)


# What build and load raise that is no RuntimeError of theirs.
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
    # Another shape of layers, of which the traceback says nothing new.
    other = TurboFormat.from_cache_dtype("turbo4", 256)
    assert choose("auto", other) == "triton"
    warnings = [text for level, text in log if level == logging.WARNING]
    traceback, *because = warnings
    assert traceback == "The turbo CUDA kernels cannot be loaded:"
    assert len(because) == 2, "one for each choice; vLLM's logger drops the repeat"
    for text in because:
        assert re.search(f"Triton kernels, because they cannot .*{message}", text)


@requires_triton
def test_a_build_fails_once_for_all_layers(gpu, log):
    does_not_compile(gpu, None)
    for _ in range(3):
        choose("auto")
    built = [text.split()[5:8] for _, text in log if "Building" in text]
    assert sorted(f"{kernel} {instance}" for kernel, _, instance in built) == [
        "decode turbo4_128_4;",
        "extend turbo4_128_c32;",
        "extend turbo4_128_c64;",
        "merge 128;",
        "store turbo4_128;",
    ]


@requires_triton
@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_cuda_where_it_can_be_built(gpu, log, monkeypatch, choice):
    loaded: list[tuple] = []
    for module, loader in LOADERS:
        monkeypatch.setattr(module, loader, lambda *args: loaded.append(args))
    assert choose(choice) == "cuda"
    # The engine's device, by its index: the one that a cache's tensor has.
    device = torch.device("cuda", 0)
    expected: list[tuple] = [(LAYOUT, device, False, False), (128, device, False)]
    expected += [(LAYOUT, variant, device, False, False) for variant in (True, 32, 64)]
    assert sorted(loaded, key=str) == sorted(expected, key=str)
    chosen = kernels.choose_kernels(choice, LAYOUT, 4)
    reasons = {"auto": "they could be built", "cuda": "turbo_kernel is cuda"}
    assert (chosen.name, chosen.reason) == ("CUDA", reasons[choice])
    assert log == []


@requires_triton
def test_kernels_are_built_side_by_side(gpu, monkeypatch):
    at_once = threading.Barrier(5)

    def load(*args: object) -> None:
        at_once.wait(timeout=TIMEOUT_S)

    for module, loader in LOADERS:
        monkeypatch.setattr(module, loader, load)
    assert choose("cuda") == "cuda"


@requires_triton
def test_triton_builds_nothing(gpu, log):
    assert choose("triton") == "triton"
    assert gpu.builds == []
    chosen = kernels.choose_kernels("triton", LAYOUT, 4)
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
    chosen = kernels.choose_kernels("auto", layout, 4)
    assert chosen.name == "Triton" and reason in chosen.reason
    assert log == []
    with pytest.raises(ValueError, match=f"turbo_kernel=cuda.*{reason}.*Use auto"):
        choose("cuda", layout)
    assert gpu.builds == []


def make_impl(config: VllmConfig) -> TurboAttentionImpl:
    with set_current_vllm_config(config):
        return TurboAttentionImpl(4, 64, 0.125, 2, kv_cache_dtype="turbo4")


@pytest.mark.parametrize("choice", ["auto", "triton", "cuda"])
def test_cpu(monkeypatch, tmp_path, choice):
    """PyTorch, and no kernels to choose."""
    set_platform(monkeypatch, "cpu", None)
    config = make_vllm_config(tmp_path)
    config.attention_config.turbo_kernel = choice
    if choice == "cuda":
        with pytest.raises(ValueError, match="turbo_kernel=cuda.*CPU.*Use auto"):
            make_impl(config)
        return
    asked: list[tuple] = []
    monkeypatch.setattr(runtime, "share_kernels", lambda *args: asked.append(args))
    impl = make_impl(config)
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.runner.kernels is None
    assert asked == []


@requires_triton
@pytest.mark.skipif(ON_GPU, reason="shows a CPU platform as a GPU's")
def test_kernels_are_chosen_once_before_the_profile_run(monkeypatch, tmp_path):
    impl = make_impl(make_vllm_config(tmp_path))
    set_platform(monkeypatch, "cuda", DeviceCapability(9, 0))
    calls = []

    def record(*args) -> str:
        calls.append(args)
        return "kernels"

    monkeypatch.setattr(kernels, "choose_kernels", record)
    monkeypatch.setattr(kernels, "share_kernels", unwrap(kernels.share_kernels))
    monkeypatch.setattr(runtime, "share_kernels", kernels.share_kernels)
    monkeypatch.setattr(kernels, "_chosen", [])
    impl.process_weights_after_loading(torch.bfloat16)
    assert calls == [("auto", impl.runner.layout, 2, 1, False, False, False)]
    assert impl.runner.kernels == impl.runner.kernels == "kernels"
    assert len(calls) == 1
