# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The first run of kernels, which decides on the kernels that all ranks can launch."""

from collections.abc import Callable
from typing import Protocol

from vllm.distributed.parallel_state import (
    get_tp_group,
    model_parallel_is_initialized,
)
from vllm.v1.attention.ops.turbo.choose import (
    cuda_refusal,
    fall_back_to_triton,
    refusal_of_other_ranks,
)
from vllm.v1.attention.ops.turbo.cuda.build import LaunchRefused
from vllm.v1.attention.ops.turbo.layer.kernels import Kernels


class Runner(Protocol):
    """The runner of a layer's kernels: ``TurboRunner`` or ``LatentRunner``."""

    kernel_choice: str

    @property
    def kernels(self) -> Kernels | None:
        """The kernels that serve."""


def _share_choice(runner: Runner) -> None:
    """Make all ranks that share this layer run the same kernels."""
    # Pipeline ranks have different layers, and data parallel ranks different requests.
    if not model_parallel_is_initialized() or get_tp_group().world_size == 1:
        return
    assert runner.kernels is not None
    reason = refusal_of_other_ranks(runner.kernels, get_tp_group().cpu_group)
    if reason is None:
        return
    if runner.kernel_choice == "cuda":
        raise ValueError(cuda_refusal(reason))
    fall_back_to_triton(reason)


def run_on_all_ranks(runner: Runner, run: Callable[[], None]) -> None:
    """Run a layer's kernels.

    If the driver refuses to launch a CUDA kernel, on this rank or another, Triton's
    kernels run, and serve from now on.

    Args:
        runner: The layer's runner.
        run: Launches each of the runner's current kernels.

    Raises:
        ValueError: If the user asks for CUDA's kernels and they are refused.

    """
    before = runner.kernels
    try:
        run()
    except LaunchRefused as error:
        reason = f"the driver refused to launch a CUDA kernel ({error})"
        if runner.kernel_choice == "cuda":
            raise ValueError(cuda_refusal(reason)) from error
        fall_back_to_triton(reason)
    _share_choice(runner)
    if runner.kernels is not before:
        run()
