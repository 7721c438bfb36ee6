# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds CUDA modules in parallel with the rest of an engine's start.

Builds begin early, and are waited for late. The compiler runs in separate processes, so
loading weights and compiling graphs need not wait for it.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.cuda.family import ServingModule

logger = init_logger(__name__)


@cache
def _log_traceback() -> None:
    """Log the current exception's traceback, once in a process."""
    logger.warning("The turbo CUDA kernels cannot be loaded:", exc_info=True)


def _reason(error: Exception) -> str:
    """The reason why modules cannot be built and loaded, from the current exception."""
    if isinstance(error, RuntimeError):
        return str(error)
    # Other releases of FlashInfer and TVM-FFI may fail in any way.
    _log_traceback()
    return f"they cannot be loaded ({type(error).__name__}: {error})"


def _compiled_modules() -> set[str]:
    """The names of modules that this process has compiled, as in ``ServingModule``."""
    from vllm.v1.attention.ops.turbo.cuda.build import compiled_modules

    return set(compiled_modules)


def _load(module: "ServingModule") -> float:
    """Load a module, and build it first if it is not built; return the time of its end.

    The time is in seconds, of ``time.monotonic``.
    """
    module.load()
    return time.monotonic()


class ModuleBuilds:
    """Modules that threads build and load in parallel."""

    def __init__(self, modules: Callable[[], list["ServingModule"]]) -> None:
        """Begin the builds.

        Args:
            modules: Imports the builder, and returns the modules.

        """
        self._start = time.monotonic()
        self._modules: list[ServingModule] = []
        self._futures: list[Future[float]] = []
        self._refusal: str | None = None
        try:
            self._modules = modules()
            self._compiled_before = _compiled_modules()
            # A forked process makes PyTorch's threads anew at their first use. If our
            # threads were the first at the same time, all but one would find none.
            torch.set_num_threads(torch.get_num_threads())
            # One thread for each module, for which the compiler takes a core.
            pool = ThreadPoolExecutor(len(self._modules))
            self._futures = [pool.submit(_load, module) for module in self._modules]
            pool.shutdown(wait=False)
        except Exception as error:
            self._refusal = _reason(error)

    @cached_property
    def error(self) -> str | None:
        """The reason why modules cannot be built and loaded; None if they are.

        It waits for the builds.
        """
        if self._refusal is not None:
            return self._refusal
        asked = time.monotonic()
        # After a failure, too, no thread may go on once others serve.
        wait(self._futures)
        try:
            ends = [future.result() for future in self._futures]
        except Exception as error:
            return _reason(error)
        compiled = _compiled_modules() - self._compiled_before
        compiled &= {module.name for module in self._modules}
        if compiled:
            logger.info(
                "Turbo KV cache: CUDA kernels: %d of %d modules were built in %.1f s, "
                "beside the rest of the start, which waited for %.1f s. The next start "
                "finds them built.",
                len(compiled),
                len(ends),
                max(ends) - self._start,
                time.monotonic() - asked,
            )
        return None
