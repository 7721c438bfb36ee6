# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The choice of kernels, CUDA's or Triton's. Both read the same bytes."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.distributed import ProcessGroup

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo.cuda.module_builds import ModuleBuilds
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import CUDA, PLAIN, Variant
from vllm.v1.attention.ops.turbo.layer.kernels import Kernels, KernelSet
from vllm.v1.attention.ops.turbo.planning.extend_limits import max_extend_len

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.cuda.family import ServingModule

logger = init_logger(__name__)


KernelsT = TypeVar("KernelsT", bound=Kernels)


class ChosenKernels(Generic[KernelsT]):
    """The kernels of all layers of a shape, which may still change.

    Attributes:
        kernels: The kernels; None where PyTorch serves. They change once, before the
            first request, if a launch is refused or another rank cannot run them.
        triton: Makes Triton's kernels, which serve then, from a reason.

    """

    def __init__(
        self,
        kernels: KernelsT | None,
        triton: Callable[[str], KernelsT] | None = None,
    ) -> None:
        self.kernels = kernels
        self.triton = triton


# The reason why this process does not launch CUDA's kernels although they are built.
_launch_refusal: str | None = None
_chosen: list[ChosenKernels[Any]] = []


def triton_kernels(reason: str = "") -> KernelSet:
    """Triton's kernels, for any GPU."""
    from vllm.v1.attention.ops.turbo.triton.kernels import TritonKernels

    return TritonKernels(reason)


def cuda_kernels(
    layout: TurboFormat, reason: str = "", capability: int | None = None
) -> KernelSet:
    """CUDA's kernels, for layouts without a ``cuda_unsupported_reason``.

    Args:
        layout: The cache's format.
        reason: Why these kernels serve: a part of a sentence, for users.
        capability: The GPU's compute capability, such as 90; None for the kernels that
            all GPUs have.

    """
    from vllm.v1.attention.ops.turbo.cuda.extend_mma import EXTEND_MMA
    from vllm.v1.attention.ops.turbo.cuda.extend_wgmma import OUTPUTS, extend_outputs
    from vllm.v1.attention.ops.turbo.cuda.kernels import CudaKernels

    kernels = CudaKernels(reason)
    if EXTEND_MMA.unsupported_reason(layout, capability):
        return kernels._replace(extend_attention=None)
    if OUTPUTS.unsupported_reason(layout, capability) is None:
        return kernels._replace(extend_outputs=extend_outputs)
    return kernels


def current_capability() -> int | None:
    """The compute capability of the current GPU, such as 90; None if it has none."""
    capability = current_platform.get_device_capability()
    return None if capability is None else capability.to_int()


def cuda_unsupported_reason(layout: TurboFormat) -> str | None:
    """The reason why this device and layout have no CUDA kernels; None if they do."""
    if not (current_platform.is_cuda() and current_platform.has_device_capability(80)):
        return "the CUDA kernels need an NVIDIA GPU of compute capability 8.0 or later"
    from vllm.v1.attention.ops.turbo.cuda.decode import DECODE

    return DECODE.unsupported_reason(layout, current_capability())


@cache
def cuda_builds(
    layout: TurboFormat,
    num_queries_per_kv: int,
    query_len: int = 1,
    variant: Variant = PLAIN,
) -> ModuleBuilds:
    """Begin to build and load the CUDA kernels of a shape's layers, in parallel.

    The result is cached, so that a build fails only once for all layers.

    Args:
        layout: The cache's format.
        num_queries_per_kv: Query heads a KV head.
        query_len: The most query tokens of a decode request.
        variant: The layer's variant.

    """

    def modules() -> list["ServingModule"]:
        from vllm.v1.attention.ops.turbo.cuda.family import Demand, modules_for
        from vllm.v1.attention.ops.turbo.cuda.modules import FAMILIES

        capability = current_capability()
        most = max_extend_len(layout.head_size, num_queries_per_kv, capability)
        demand = Demand(num_queries_per_kv, query_len, most, capability, variant)
        return modules_for(FAMILIES, layout, demand)

    return ModuleBuilds(modules)


def cuda_build_error(layout: TurboFormat, *more: Any) -> str | None:
    """Build and load the CUDA kernels; the reason if that failed, else None.

    Args:
        layout: The cache's format.
        more: The further arguments of ``cuda_builds``.

    """
    return cuda_builds(layout, *more).error


def start_builds(choice: str, layout: TurboFormat, *more: Any) -> None:
    """Begin to build CUDA's kernels if ``choose_kernels`` will wait for them.

    Args:
        choice: ``attention_config.turbo_kernel``: auto, cuda or triton.
        layout: The cache's format.
        more: The further arguments of ``cuda_builds``.

    """
    start_to_build(
        choice,
        lambda: cuda_unsupported_reason(layout),
        lambda: cuda_builds(layout, *more),
    )


def start_to_build(
    choice: str,
    unsupported_reason: Callable[[], str | None],
    build: Callable[[], ModuleBuilds],
) -> None:
    """Begin to build CUDA's kernels if ``choose_between`` would wait for them.

    Args:
        choice: ``attention_config.turbo_kernel``: auto, cuda or triton.
        unsupported_reason: Gives the reason why there are no CUDA kernels, or None.
        build: Begins to build CUDA's kernels.

    """
    if choice != "triton" and not _launch_refusal and not unsupported_reason():
        build()


def cuda_refusal(reason: str) -> str:
    """The message for CUDA kernels that a user asks for and cannot have."""
    return (
        f"attention_config.turbo_kernel=cuda cannot be used, because {reason}. "
        "Use auto or triton instead."
    )


def choose_kernels(
    choice: str,
    layout: TurboFormat,
    num_queries_per_kv: int,
    query_len: int = 1,
    variant: Variant = PLAIN,
) -> KernelSet:
    """Choose and build the kernels of a layer, before the first request.

    Args:
        choice: ``attention_config.turbo_kernel``: auto, cuda or triton.
        layout: The cache's format.
        num_queries_per_kv: Query heads a KV head.
        query_len: The most query tokens of a decode request.
        variant: The layer's variant.

    Raises:
        ValueError: If the user asks for CUDA's kernels and cannot have them.

    """
    return choose_between(
        choice,
        lambda: cuda_unsupported_reason(layout),
        lambda: cuda_build_error(layout, num_queries_per_kv, query_len, variant),
        lambda reason: cuda_kernels(layout, reason, current_capability()),
        triton_kernels,
    )


def choose_between(
    choice: str,
    unsupported_reason: Callable[[], str | None],
    build: Callable[[], str | None],
    cuda: Callable[[str], KernelsT],
    triton: Callable[[str], KernelsT],
) -> KernelsT:
    """CUDA's kernels, built, or Triton's.

    Args:
        choice: ``attention_config.turbo_kernel``: auto, cuda or triton.
        unsupported_reason: Gives the reason why there are no CUDA kernels, or None.
        build: Builds CUDA's kernels; returns the reason if that failed, else None.
        cuda: Makes CUDA's kernels from a reason.
        triton: Makes Triton's kernels from a reason.

    Raises:
        ValueError: If the user asks for CUDA's kernels and cannot have them.

    """
    asked_for = f"turbo_kernel is {choice}"
    if choice == "triton":
        return triton(asked_for)
    unsupported = unsupported_reason() or _launch_refusal
    error = None if unsupported else build()
    reason = unsupported or error
    if reason is None:
        return cuda("they could be loaded" if choice == "auto" else asked_for)
    if choice == "cuda":
        raise ValueError(cuda_refusal(reason))
    if unsupported:
        return triton(unsupported)
    # A warning, because the CUDA kernels are faster and the user can get them here.
    logger.warning_once("Turbo KV cache: Triton kernels, because %s.", error)
    return triton("the CUDA kernels could not be built")


@cache
def share_kernels(
    choice: str,
    layout: TurboFormat,
    num_queries_per_kv: int,
    query_len: int = 1,
    variant: Variant = PLAIN,
) -> ChosenKernels[KernelSet]:
    """The choice of ``choose_kernels``, for a shape's layers and their builders."""
    kernels = choose_kernels(choice, layout, num_queries_per_kv, query_len, variant)
    return may_fall_back(kernels, triton_kernels)


def may_fall_back(
    kernels: KernelsT, triton: Callable[[str], KernelsT]
) -> ChosenKernels[KernelsT]:
    """Register kernels that ``fall_back_to_triton`` replaces with Triton's."""
    chosen = ChosenKernels(kernels, triton)
    _chosen.append(chosen)
    return chosen


def fall_back_to_triton(reason: str) -> None:
    """Make Triton's kernels serve all layers of this process, before any request.

    Args:
        reason: Why CUDA's kernels, which are built, cannot serve: a part of a sentence.

    """
    global _launch_refusal
    logger.warning_once("Turbo KV cache: Triton kernels, because %s.", reason)
    _launch_refusal = reason
    for chosen in _chosen:
        if chosen.kernels is not None and chosen.kernels.name == CUDA:
            assert chosen.triton is not None
            chosen.kernels = chosen.triton(reason)


def refusal_of_other_ranks(kernels: Kernels, group: ProcessGroup) -> str | None:
    """The reason why another rank's kernels are not CUDA's while this rank's are.

    A step waits for its slowest rank, so nothing is lost if all run the same kernels.

    Args:
        kernels: This rank's kernels.
        group: The ranks with the same layers, which all call this; on the host.

    """
    choices: list[tuple[str, str]] = [("", "")] * group.size()
    torch.distributed.all_gather_object(
        choices, (kernels.name, kernels.reason), group=group
    )
    if kernels.name != CUDA:
        return None
    for rank, (name, reason) in enumerate(choices):
        if name != CUDA:
            rank = torch.distributed.get_global_rank(group, rank)
            return f"rank {rank} runs {name} kernels, because {reason}"
    return None
