# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds the CUDA kernels with FlashInfer's JIT: once for all processes of a host.

A module is one source of ``cuda/`` with one header of constants. What has been built
stays in FlashInfer's cache.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)

SOURCE_DIR = Path(__file__).parent / "cuda"
# Of the compiler's output, in a message.
_OUTPUT_LINES = 10
_OUTPUT_COLUMNS = 200

T = TypeVar("T")


class CudaModule(NamedTuple):
    """What a module is built from.

    Attributes:
        kernel: The source, without ``.cu``.
        instance: What it is an instance for; part of the module's name.
        header_name: The header of constants that the source includes.
        header: Its text.
        flags: For nvcc.

    """

    kernel: str
    instance: str
    header_name: str
    header: str
    flags: tuple[str, ...] = ()


def _failure(reason: str, way_out: str) -> RuntimeError:
    return RuntimeError(f"the turbo CUDA kernels cannot be built: {reason}. {way_out}")


def _not_writable(error: OSError) -> RuntimeError:
    return _failure(
        f"FlashInfer's cache cannot be written ({error})",
        "Set FLASHINFER_WORKSPACE_BASE to a folder that can be",
    )


def _last_lines(text: str) -> str:
    lines = text.rstrip(" \n.").splitlines()[-_OUTPUT_LINES:]
    return "\n".join(line[:_OUTPUT_COLUMNS] for line in lines)


def _import_jit() -> Any:
    """``flashinfer.jit``, whose import makes its cache, if the tools are there too."""
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


def _target() -> str:
    """This GPU, whatever others FlashInfer's modules are built for."""
    capability = current_platform.get_device_capability()
    assert capability is not None
    number = capability.to_int()
    return f"-gencode=arch=compute_{number},code=sm_{number}"


def module_name(module: CudaModule, flags: list[str]) -> str:
    """A name with a hash of all that goes into the module.

    FlashInfer judges what it has built by its sources' times, which say nothing after
    an installation.
    """
    digest = hashlib.sha256()
    parts = [*flags, module.header_name, module.header]
    for path in sorted(SOURCE_DIR.glob("*.cu*")):
        parts += [path.name, path.read_text()]
    for part in parts:
        digest.update(part.encode() + b"\0")
    return f"turbo_{module.kernel}_{module.instance}_{digest.hexdigest()[:16]}"


def _write_header(path: Path, text: str) -> None:
    """Write it, whole or not at all, if it differs: a new time means a new build."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{path.name}.{os.getpid()}")
    whole.write_text(text)
    whole.replace(path)


def _build(jit: Any, spec: Any, module: CudaModule) -> None:
    if not spec.jit_library_path.exists():
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


def load_tvm_module(path: str) -> Any:
    """A loader of modules that export functions of tensors through TVM-FFI."""
    import tvm_ffi

    return tvm_ffi.load_module(path)


def build_and_load(module: CudaModule, loader: Callable[[str], T]) -> T:
    """Build a module, if no process has, and load it.

    Args:
        module: What to build.
        loader: Makes of the path of a shared library what the caller calls.

    Raises:
        RuntimeError: If that cannot be done here; the message has the way out.

    """
    jit = _import_jit()
    from filelock import FileLock

    flags = [_target(), *module.flags]
    name = module_name(module, flags)
    header_dir = jit.env.FLASHINFER_GEN_SRC_DIR / name
    try:
        spec = jit.gen_jit_spec(
            name,
            [SOURCE_DIR / f"{module.kernel}.cu"],
            extra_cuda_cflags=flags,
            extra_include_paths=[SOURCE_DIR, header_dir],
            use_fast_math=False,
        )
        with FileLock(spec.lock_path, thread_local=False):
            _write_header(header_dir / module.header_name, module.header)
            _build(jit, spec, module)
    except OSError as error:
        raise _not_writable(error) from error
    path = spec.jit_library_path
    try:
        return loader(str(path))
    except (OSError, RuntimeError) as error:
        raise _failure(
            f"what was built cannot be loaded ({error})",
            f"Remove {path.parent} to have it built anew",
        ) from error
