# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Records how tests launch Triton's kernels in the interpreter.

It is a plugin for pytest: `-p vllm_turbo_cpu_standins.launches`. Each process writes a
file of different launches to the folder $TURBO_LAUNCHES. `ci/lower_kernels.py` reads
them: the interpreter takes what Triton's compiler refuses. Kernels count whose module's
name begins with $TURBO_LAUNCHES_OF (turbo's).
"""

import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.runtime import interpreter

TURBO = "vllm.v1.attention.ops.turbo."
# Triton compiles another kernel for the number 1, for multiples of 16, and for numbers
# of more than 32 bits.
ORDINARY, ALIGNED, LARGE = 7, 16, 1 << 40


class Tensor(NamedTuple):
    """A tensor in a launch."""

    dtype: torch.dtype


class Launch(NamedTuple):
    """A kernel, by module and name, and what it is compiled for.

    Attributes:
        arguments: By position. Those that the compiler does not know have other values
            than in the launch, which lead to the same code.
        options: By name, others than a kernel's arguments among them.

    """

    module: str
    name: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


def of_run_time(value: Any) -> Any:
    """A value that Triton compiles the same code for."""
    if isinstance(value, torch.Tensor):
        return Tensor(value.dtype)
    if isinstance(value, tuple):
        fields = map(of_run_time, value)
        return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float):
        return 0.5
    if value == 1 or value >= 1 << 31:
        return min(value, LARGE)
    return ORDINARY if value % ALIGNED else ALIGNED


def launch_of(
    function: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Launch:
    """A launch, so that those of the same code are equal."""
    annotations = function.fn.__annotations__
    of_kernel = {x for x in function.arg_names if annotations.get(x) != tl.constexpr}
    by_position = zip(function.arg_names, arguments)
    return Launch(
        function.fn.__module__,
        function.fn.__qualname__,
        tuple(of_run_time(x) if name in of_kernel else x for name, x in by_position),
        tuple(
            (name, of_run_time(value) if name in of_kernel else value)
            for name, value in sorted(options.items())
        ),
    )


class Recorder:
    """Takes down the launches of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launches: dict[Launch, None] = {}
        run = interpreter.InterpretedFunction.run
        modules = os.environ.get("TURBO_LAUNCHES_OF", TURBO)

        def run_recorded(
            function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any
        ) -> Any:
            if not warmup and function.fn.__module__.startswith(modules):
                self.launches[launch_of(function, arguments, options)] = None
            return run(function, *arguments, grid=grid, warmup=warmup, **options)

        interpreter.InterpretedFunction.run = run_recorded

    def pytest_sessionfinish(self) -> None:
        if self.launches:
            path = self.folder / f"{os.getpid()}.pickle"
            path.write_bytes(pickle.dumps(list(self.launches)))


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Recorder(Path(os.environ["TURBO_LAUNCHES"])))
