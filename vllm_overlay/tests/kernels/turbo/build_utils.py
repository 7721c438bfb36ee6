# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for FlashInfer's JIT and for a GPU, for tests of builds."""

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.ops.turbo.cuda import built as cuda_built

DEVICE = torch.device("cuda", 0)
# The limit of processes that take a moment on an idle machine.
TIMEOUT_S = 1800


class FlashInfer:
    """The part of FlashInfer's JIT that turbo uses. Its compiler copies the header.

    Attributes:
        folder: The folder of its cache.
        tools: The programs on PATH.
        error: The exception that a build raises; None: it succeeds.
        builds: The names of the modules that were built.
        flags: The flags of the last build.

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


def set_flashinfer(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FlashInfer:
    """Have FlashInfer with a cache in the folder, and a GPU of capability 9.0."""
    # The release and the architecture are arbitrary.
    jit = FlashInfer(folder / ".cache" / "flashinfer" / "0.1" / "80" / "cached_ops")
    jit.folder.parent.mkdir(parents=True)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(folder))
    monkeypatch.setattr(cuda_built, "PREBUILT_DIR", folder / "prebuilt")
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
