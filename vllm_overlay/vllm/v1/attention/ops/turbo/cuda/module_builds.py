# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds of CUDA modules beside the rest of a start: begun early, waited for late.

The compiler runs in processes of its own, which weights that are loaded and graphs that
are compiled need not wait for.
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
    """Log that of the exception being handled, the first in this process."""
    logger.warning("The turbo CUDA kernels cannot be loaded:", exc_info=True)


def _reason(error: Exception) -> str:
    """Why modules cannot be built and loaded, of the exception being handled."""
    if isinstance(error, RuntimeError):
        return str(error)
    # Other releases of FlashInfer and TVM-FFI may fail in any way.
    _log_traceback()
    return f"they cannot be loaded ({type(error).__name__}: {error})"


def _compiled_modules() -> set[str]:
    """The modules that this process has compiled, by the names of ``ServingModule``."""
    from vllm.v1.attention.ops.turbo.cuda.build import compiled_modules

    return set(compiled_modules)


def _load(module: "ServingModule") -> float:
    """Build, if need be, and load a module; when that ended."""
    module.load()
    return time.monotonic()


class ModuleBuilds:
    """Modules that are built and loaded side by side, from now on."""

    def __init__(self, modules: Callable[[], list["ServingModule"]]) -> None:
        """Begin.

        Args:
            modules: Imports what builds them, and says which.

        """
        self._start = time.monotonic()
        self._modules: list[ServingModule] = []
        self._futures: list[Future[float]] = []
        self._refusal: str | None = None
        try:
            self._modules = modules()
            self._compiled_before = _compiled_modules()
            # In a forked process PyTorch makes its own threads anew at their first use,
            # and of threads of ours that use them at the same time all but one would
            # find none.
            torch.set_num_threads(torch.get_num_threads())
            # The compiler takes a core for each.
            pool = ThreadPoolExecutor(len(self._modules))
            self._futures = [pool.submit(_load, module) for module in self._modules]
            pool.shutdown(wait=False)
        except Exception as error:
            self._refusal = _reason(error)

    @cached_property
    def error(self) -> str | None:
        """Why they cannot be built and loaded; None if they are. Waits for that."""
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
