# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The variants of the Triton kernels that have been compiled, or would have been."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeAlias

import torch

from vllm.triton_utils import triton

PACKAGE = "vllm.v1.attention.ops.turbo"
# A kernel's name, and the specialisation that it is compiled for.
Variant: TypeAlias = tuple[str, str]


def _kernels(kind: type) -> Iterator[Any]:
    """The kernels and device functions of the package's loaded modules."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith(PACKAGE):
            for value in vars(module).values():
                if isinstance(value, kind) and value.fn.__module__ == name:
                    yield value


def compiled_variants() -> set[Variant]:
    """The variants that Triton has compiled in this process for the current GPU."""
    device = torch.accelerator.current_device_index()
    return {
        (kernel.fn.__name__, str(key))
        for kernel in _kernels(triton.runtime.jit.JITFunction)
        if device in kernel.device_caches
        for key in kernel.device_caches[device][0]
    }


@cache
def _binder(kernel: Any) -> Any:
    """Triton's function that specialises a launch's arguments when it compiles."""
    options = {
        name: kernel.kwargs.get(name)
        for name in ("do_not_specialize", "do_not_specialize_on_alignment")
    }
    compiled = triton.runtime.jit.JITFunction(kernel.fn, **options)
    backend = triton.compiler.compiler.make_backend(
        triton.backends.compiler.GPUTarget("cuda", 90, 32)
    )
    return triton.runtime.jit.create_function_from_signature(
        compiled.signature, compiled.params, backend
    )


class RecordedVariants:
    """The variants that Triton would have compiled for the interpreter's launches.

    The package's kernels do not run, because no launch depends on another's output.

    Attributes:
        found: The variants so far.

    """

    def __init__(self, monkeypatch) -> None:
        self.found: set[Variant] = set()
        # Imported only by processes whose kernels it runs.
        interpreter = importlib.import_module("triton.runtime.interpreter")
        run = interpreter.InterpretedFunction.run

        def record(kernel: Any, *args, grid, warmup, **kwargs):
            if kernel.fn.__module__.startswith(PACKAGE):
                names = inspect.signature(kernel.fn).parameters
                options = {k: v for k, v in kwargs.items() if k not in names}
                own = {k: v for k, v in kwargs.items() if k in names}
                _, variant, _ = _binder(kernel)(*args, **own)
                self.found.add((kernel.fn.__name__, f"{variant} {options}"))
                return None
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        monkeypatch.setattr(interpreter.InterpretedFunction, "run", record)

    def __call__(self) -> set[Variant]:
        return set(self.found)
