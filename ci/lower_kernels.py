# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Lowers Triton's kernels to IR for an NVIDIA GPU, as tests have launched them.

    lower_kernels.py FOLDER

FOLDER has the files of `vllm_turbo_cpu_standins.launches`. Launches are left out if
others have each kind of their arguments.
"""

import importlib
import multiprocessing
import pickle
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from covering import covering
from lowering import lower, pretend_to_have_a_gpu
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor
from vllm_turbo_cpu_standins.launches import Launch, Tensor


class Driver:
    """A driver of an NVIDIA GPU, which compiles and runs nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def kind_of(value: Any) -> str:
    """A value as text. Small numbers are choices, and others are sizes."""
    if isinstance(value, tuple):
        return f"({', '.join(map(kind_of, value))})"
    is_size = isinstance(value, int) and not isinstance(value, bool) and value > 4
    return "size" if is_size else repr(value)


def kinds_of(launch: Launch) -> list[tuple[str, ...]]:
    """The kinds of a launch's arguments, with its kernel and their places."""
    places = [*enumerate(launch.arguments), *launch.options]
    return [(launch.name, str(place), kind_of(value)) for place, value in places]


def given(value: Any) -> Any:
    """An argument for Triton."""
    if isinstance(value, Tensor):
        return MockTensor(value.dtype)
    if isinstance(value, tuple):
        fields = map(given, value)
        return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
    return value


def compile_nothing(
    function: Any,
    key: Any,
    signature: Any,
    device: int,
    constants: Any,
    options: Any,
    attributes: Any,
    warmup: bool,
) -> None:
    lower(ASTSource(function, signature, constants, attributes), vars(options))


def reason_of(error: BaseException) -> str:
    """The first of the errors that led to an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def failure_of(launch: Launch) -> str | None:
    """Lowers a kernel, and returns why that fails."""
    kernel = getattr(importlib.import_module(launch.module), launch.name)
    options = {name: given(value) for name, value in launch.options}
    try:
        kernel.run(*map(given, launch.arguments), grid=(1,), warmup=True, **options)
    except Exception as error:
        return f"{launch.name}: {reason_of(error)}\n{launch}"
    return None


def main() -> int:
    folder = Path(sys.argv[1])
    paths = sorted(folder.glob("*.pickle"))
    if not paths:
        print(f"lower_kernels.py: no launches in {folder}", file=sys.stderr)
        return 1
    # Kernels are taken from modules that are imported from here on.
    pretend_to_have_a_gpu()
    recorded = {x for path in paths for x in pickle.loads(path.read_bytes())}
    driver.set_active(Driver())
    JITFunction._do_compile = compile_nothing
    start = time.monotonic()
    launches = covering(sorted(recorded, key=repr), kinds_of, together=1)
    counts = Counter(launch.name for launch in launches)
    with multiprocessing.get_context("fork").Pool() as pool:
        failures = [x for x in pool.imap(failure_of, launches, chunksize=4) if x]
    print(*failures, sep="\n", end="\n" if failures else "")
    listing = ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))
    seconds = time.monotonic() - start
    of_all = f"{len(launches)} of {len(recorded)} launches"
    print(
        f"Triton {triton.__version__}: {of_all} lowered in {seconds:.0f} s: {listing}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
