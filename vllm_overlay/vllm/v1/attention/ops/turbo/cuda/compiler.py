# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Calls nvcc for modules of CUDA kernels, without FlashInfer and without a GPU."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import regex as re

from vllm.v1.attention.ops.turbo.cuda.build import (
    HEADER_NAME,
    SOURCE_DIR,
    CudaModule,
    compiler_flags,
)

# FlashInfer's flags that affect device code.
_FLAGS = ("-std=c++17", "-DNDEBUG", "--expt-relaxed-constexpr")
# The flags of a shared library. It uses the CUDA runtime that PyTorch has loaded, and
# keeps only the symbols that it exports.
LIBRARY_FLAGS = (
    "-shared",
    "-cudart=shared",
    "-Xcompiler=-fPIC",
    "-Xlinker=-s",
)


class CompileError(RuntimeError):
    """A module does not compile; the message is the compiler's."""


def find_nvcc() -> str | None:
    """The path of nvcc, from PATH or else from ``CUDA_HOME``."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")


def nvcc_release(nvcc: str) -> str:
    """The release of nvcc, such as 13.0."""
    text = subprocess.check_output([nvcc, "--version"], text=True)
    found = re.search(r"release (\d+\.\d+)", text)
    assert found is not None, text
    return found[1]


def include_flags() -> list[str]:
    """The flags of nvcc for TVM-FFI's headers and the kernels' own."""
    from tvm_ffi import libinfo

    system = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    flags = [x for path in system for x in ("-isystem", str(path))]
    return [*flags, f"-I{SOURCE_DIR}"]


def compile_module(
    module: CudaModule,
    capability: int,
    nvcc: str,
    output: Path,
    flags: Sequence[str] = LIBRARY_FLAGS,
) -> str:
    """Compile a module for one architecture.

    Args:
        module: The module to compile.
        capability: The architecture's compute capability.
        nvcc: The compiler.
        output: The file to write.
        flags: Flags for the kind of output, a shared library by default.

    Returns:
        The compiler's output.

    Raises:
        CompileError: If it fails.

    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / HEADER_NAME).write_text(module.header)
        command = [
            nvcc,
            *_FLAGS,
            *include_flags(),
            f"-I{folder}",
            *compiler_flags(module, str(capability)),
            *flags,
            f"-o={output}",
            str(module.source),
        ]
        result = subprocess.run(command, capture_output=True, text=True)
    words = result.stdout + result.stderr
    if result.returncode != 0:
        raise CompileError(words)
    return words
