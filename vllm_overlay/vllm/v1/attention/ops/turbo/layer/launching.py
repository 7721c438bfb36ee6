# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The first run of kernels, which decides on the kernels that all ranks can launch."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

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
from vllm.v1.attention.ops.turbo.layer.base import Runner

RunnerT = TypeVar("RunnerT", bound=Runner[Any])
# Keys of layers whose kernels have run in this process.
_warm: set[tuple[object, ...]] = set()


def _share_choice(runner: Runner[Any]) -> None:
    """Make all ranks that share this layer run the same kernels."""
    # Pipeline ranks have different layers, and data parallel ranks different requests.
    if not model_parallel_is_initialized() or get_tp_group().world_size == 1:
        return
    reason = refusal_of_other_ranks(runner.entry_points, get_tp_group().cpu_group)
    if reason is None:
        return
    if runner.kernel_choice == "cuda":
        raise ValueError(cuda_refusal(reason))
    fall_back_to_triton(reason)


def warm_up(
    runner: RunnerT, device: torch.device, run: Callable[[RunnerT, torch.device], None]
) -> None:
    """Run a layer's kernels, unless a layer that launches the same ones has run.

    The workspace has to be reserved before. If the driver refuses to launch a CUDA
    kernel, on this rank or another, Triton's kernels run, and serve from now on.

    Args:
        runner: The layer's runner.
        device: The kernels' device.
        run: Launches each of the runner's current kernels, with zeros.

    Raises:
        ValueError: If the user asks for CUDA's kernels and they are refused.

    """
    key = (*runner.launch_key, device)
    if key in _warm:
        return
    before = runner.kernels
    try:
        run(runner, device)
    except LaunchRefused as error:
        reason = f"the driver refused to launch a CUDA kernel ({error})"
        if runner.kernel_choice == "cuda":
            raise ValueError(cuda_refusal(reason)) from error
        fall_back_to_triton(reason)
    _share_choice(runner)
    if runner.kernels is not before:
        run(runner, device)
    # After the kernels: a rank whose driver refuses one would let other ranks wait.
    runner.run_collectives(device)
    _warm.add(key)
