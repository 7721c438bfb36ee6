# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds the CUDA kernels with FlashInfer's JIT: once for all processes of a host.

A module is one source of ``cuda/csrc/`` with one header of constants. It exports one
function of tensors through TVM-FFI. A built library stays in FlashInfer's cache, and is
found there without FlashInfer, a compiler or a lock: see built.py. As a program, this
file builds the kernels ahead of time: see prebuild.py.
"""

import hashlib
import os
import runpy
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo.cuda.built import find_built, publish, replace_text

logger = init_logger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
# Head sizes that the kernels support; decode_wgmma and extends support fewer.
SUPPORTED_HEAD_SIZES = (64, 128, 256, 512)
# The header of constants that sources include: see constants.py.
HEADER_NAME = "turbo_constants.h"
# The optimisation level of host code, which checks arguments and launches. FlashInfer's
# -O3, which comes before it, takes up to 3 s more a module. Device code has its own
# level.
_HOST_LEVEL = "-O1"
# The most lines, and columns of a line, of the compiler's output in a message.
_OUTPUT_LINES = 10
_OUTPUT_COLUMNS = 200
# The modules that this process has compiled: "KERNEL INSTANCE".
compiled_modules: list[str] = []
# The kind of error that launch.cuh throws.
_LAUNCH_REFUSED = "TurboLaunchRefused"


class LaunchRefused(RuntimeError):
    """A kernel that was built and loaded cannot be launched on this GPU.

    It has not run, and other kernels still may run. The cause is a missing image for
    the device, a driver that is too old, or too few registers or too little shared
    memory. The message begins with CUDA's name of the error. A fault of a kernel that
    ran is a plain RuntimeError.
    """


class CudaModule(NamedTuple):
    """The sources that a module is built from.

    Attributes:
        kernel: The name of the source, without ``.cu``, and of the exported function.
        instance: The name of the instance, unique among a kernel's modules for a GPU.
        header: The text of ``HEADER_NAME``: C++, with one macro a line.
        flags: Further flags of nvcc.
        folder: The folder of the source; empty if it has the kernel's name.
        is_specific: Whether it has instructions of its architecture alone, which later
            GPUs lack.

    """

    kernel: str
    instance: str
    header: str
    flags: tuple[str, ...] = ()
    folder: str = ""
    is_specific: bool = False

    @property
    def source(self) -> Path:
        """The file that is compiled."""
        return SOURCE_DIR / (self.folder or self.kernel) / f"{self.kernel}.cu"


def _failure(reason: str, way_out: str) -> RuntimeError:
    return RuntimeError(f"the turbo CUDA kernels cannot be built: {reason}. {way_out}")


def _not_writable(error: OSError) -> RuntimeError:
    return _failure(
        f"FlashInfer's cache cannot be written ({error})",
        "Set FLASHINFER_WORKSPACE_BASE to a folder that can be written",
    )


def _last_lines(text: str) -> str:
    lines = text.rstrip(" \n.").splitlines()[-_OUTPUT_LINES:]
    return "\n".join(line[:_OUTPUT_COLUMNS] for line in lines)


def _import_jit() -> Any:
    """Import ``flashinfer.jit``, which makes its cache, and check for the tools."""
    try:
        from flashinfer import jit
        from flashinfer.jit.cpp_ext import get_cuda_path
    except ImportError as error:
        raise _failure(
            f"FlashInfer cannot be imported ({error})", "Install flashinfer-python"
        ) from error
    except OSError as error:
        raise _not_writable(error) from error
    try:
        nvcc = os.environ.get("FLASHINFER_NVCC", f"{get_cuda_path()}/bin/nvcc")
    except RuntimeError:
        nvcc = "nvcc"
    if shutil.which(nvcc) is None:
        raise _failure(
            f"there is no {nvcc}", "Install the CUDA toolkit, or set CUDA_HOME to it"
        )
    if shutil.which("ninja") is None:
        raise _failure("there is no ninja on PATH", "Install ninja")
    return jit


def shared_memory(device: torch.device) -> int:
    """The most bytes of shared memory of a thread block."""
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


def capability_of(device: torch.device) -> int | None:
    """The device's compute capability, such as 90; None if it has none."""
    capability = current_platform.get_device_capability(device.index or 0)
    return None if capability is None else capability.to_int()


def _architecture(device: torch.device) -> str:
    """The device's own architecture, whatever FlashInfer builds its modules for."""
    capability = capability_of(device)
    assert capability is not None
    return str(capability)


def compiler_flags(module: CudaModule, architecture: str) -> list[str]:
    """The flags of nvcc beyond FlashInfer's own."""
    if module.is_specific:
        architecture += "a"
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    return [target, _HOST_LEVEL, *module.flags]


def version_of_tvm_ffi() -> str:
    """The version of TVM-FFI, whose headers a library is built with; else empty."""
    try:
        return metadata.version("apache-tvm-ffi")
    except metadata.PackageNotFoundError:
        return ""


def module_name(module: CudaModule, architecture: str) -> str:
    """A name with a hash of everything that a module is built from.

    FlashInfer compares the times of sources, which mean nothing after an installation.
    """
    digest = hashlib.sha256()
    parts = [*compiler_flags(module, architecture), version_of_tvm_ffi()]
    parts += [HEADER_NAME, module.header]
    for path in sorted(SOURCE_DIR.rglob("*.cu*")):
        parts += [path.relative_to(SOURCE_DIR).as_posix(), path.read_text()]
    for part in parts:
        digest.update(part.encode() + b"\0")
    suffix = "a" if module.is_specific else ""
    words = ("turbo", module.kernel, module.instance, f"sm{architecture}{suffix}")
    return "_".join([*words, digest.hexdigest()[:16]])


def _write_header(path: Path, text: str) -> None:
    """Write a header atomically, only if it differs: a new time causes a new build."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)


def _build(jit: Any, spec: Any, module: CudaModule) -> None:
    is_new = not spec.jit_library_path.exists()
    if is_new:
        logger.info(
            "Building the turbo CUDA kernel %s for %s; it is cached afterwards.",
            module.kernel,
            module.instance,
        )
    try:
        spec.build()
    except jit.MissingJITCacheError as error:
        raise _failure(
            "FlashInfer's JIT is disabled", "Unset FLASHINFER_DISABLE_JIT"
        ) from error
    except RuntimeError as error:
        raise _failure(
            f"{module.kernel}.cu was not compiled or linked",
            "It takes a complete CUDA toolkit that knows this GPU; the compiler's "
            f"last words:\n{_last_lines(str(error))}",
        ) from error
    if is_new:
        compiled_modules.append(f"{module.kernel} {module.instance}")


def _load_function(path: Path, name: str) -> Callable[..., None]:
    import tvm_ffi

    tvm_ffi.register_error(_LAUNCH_REFUSED, LaunchRefused)
    return tvm_ffi.load_module(str(path)).get_function(name)


def build(module: CudaModule, device: torch.device) -> Path:
    """Build a module for a device, unless another process has built it.

    Returns:
        The path of the shared library.

    Raises:
        RuntimeError: If it cannot be built here; the message has the way out.

    """
    jit = _import_jit()
    from filelock import FileLock

    architecture = _architecture(device)
    name = module_name(module, architecture)
    header_dir = jit.env.FLASHINFER_GEN_SRC_DIR / name
    try:
        spec = jit.gen_jit_spec(
            name,
            [module.source],
            extra_cuda_cflags=compiler_flags(module, architecture),
            extra_include_paths=[SOURCE_DIR, header_dir],
            use_fast_math=False,
        )
        with FileLock(spec.lock_path, thread_local=False):
            _write_header(header_dir / HEADER_NAME, module.header)
            _build(jit, spec, module)
            publish(spec.jit_library_path)
    except OSError as error:
        raise _not_writable(error) from error
    return spec.jit_library_path


def find(module: CudaModule, device: torch.device) -> Path | None:
    """The shared library of a module, if it was built for such a device before."""
    return find_built(module_name(module, _architecture(device)))


def build_and_load(module: CudaModule, device: torch.device) -> Callable[..., None]:
    """Load a module, and build it first if it is not built.

    Args:
        module: The module to load.
        device: The GPU to build it for.

    Returns:
        The module's function. It launches the kernel on the current stream of its
        tensors' device. It raises ``LaunchRefused`` if the launch is impossible,
        ValueError or TypeError for tensors that the kernel does not take, and
        RuntimeError for other errors of CUDA.

    Raises:
        RuntimeError: If it cannot be built or loaded; the message has the way out.

    """
    found = find(module, device)
    if found is not None:
        try:
            return _load_function(found, module.kernel)
        except (AttributeError, OSError, RuntimeError) as error:
            logger.warning("%s cannot be loaded and is built anew: %s", found, error)
    path = build(module, device)
    try:
        return _load_function(path, module.kernel)
    except (AttributeError, OSError, RuntimeError) as error:
        raise _failure(
            f"the built library cannot be loaded ({error})",
            f"Remove {path.parent} to have it built anew",
        ) from error


if __name__ == "__main__":
    # By name, because prebuild.py imports this module.
    runpy.run_module(f"{__spec__.parent}.prebuild", run_name="__main__")
