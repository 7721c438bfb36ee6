# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which kernels store and decode: CUDA's or Triton's. Both read the same bytes."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch.distributed import ProcessGroup

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo.cuda.module_builds import ModuleBuilds
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import CUDA, PLAIN, KernelSet, Variant
from vllm.v1.attention.ops.turbo.planning.extend_limits import max_extend_len

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.cuda.family import ServingModule

logger = init_logger(__name__)


class NamedKernels(Protocol):
    """Any set of kernels, MLA's (``LatentKernels``) or others' (``KernelSet``)."""

    @property
    def name(self) -> str:
        """CUDA or Triton."""

    @property
    def reason(self) -> str:
        """Why they serve: a part of a sentence, for users."""


KernelsT = TypeVar("KernelsT", bound=NamedKernels)


class ChosenKernels(Generic[KernelsT]):
    """The kernels of all layers that are alike, which may still change.

    Attributes:
        kernels: The kernels; None where PyTorch serves. They change, once and before
            the first request, if a launch is refused or another rank cannot run them.
        triton: Makes those that serve then, for a reason.

    """

    def __init__(
        self,
        kernels: KernelsT | None,
        triton: Callable[[str], KernelsT] | None = None,
    ) -> None:
        self.kernels = kernels
        self.triton = triton


# Why CUDA's kernels, though they were built, are not launched in this process.
_launch_refusal: str | None = None
_chosen: list[ChosenKernels[Any]] = []


def triton_kernels(reason: str = "") -> KernelSet:
    """Triton's, for any GPU."""
    from vllm.v1.attention.ops.turbo.triton.kernels import TritonKernels

    return TritonKernels(reason)


def cuda_kernels(
    layout: TurboFormat, reason: str = "", capability: int | None = None
) -> KernelSet:
    """CUDA's, for layouts without a ``cuda_unsupported_reason``.

    Args:
        layout: The cache's format.
        reason: Why they serve: a part of a sentence, for users.
        capability: The GPU's compute capability, such as 90; None for none, which has
            the kernels that all GPUs have.

    """
    from vllm.v1.attention.ops.turbo.cuda.extend import EXTEND
    from vllm.v1.attention.ops.turbo.cuda.extend_rows import OUTPUTS, extend_outputs
    from vllm.v1.attention.ops.turbo.cuda.kernels import CudaKernels

    kernels = CudaKernels(reason)
    if EXTEND.unsupported_reason(layout, capability):
        return kernels._replace(extend_attention=None)
    if OUTPUTS.unsupported_reason(layout, capability) is None:
        return kernels._replace(extend_outputs=extend_outputs)
    return kernels


def current_capability() -> int | None:
    """Compute capability of the current GPU, such as 90; None if it has none."""
    capability = current_platform.get_device_capability()
    return None if capability is None else capability.to_int()


def cuda_unsupported_reason(layout: TurboFormat) -> str | None:
    """Why there are no CUDA kernels for this device and layout, if so."""
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
    """Begin to build and load the CUDA kernels of layers alike, side by side.

    Cached, so that a build that fails does so once for all layers.

    Args:
        layout: The cache's format.
        num_queries_per_kv: Query heads a KV head.
        query_len: Query tokens of a decode request at most.
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
    """Build and load the CUDA kernels; why that failed, if it did.

    Args:
        layout: The cache's format.
        more: The further arguments of ``cuda_builds``.

    """
    return cuda_builds(layout, *more).error


def start_builds(choice: str, layout: TurboFormat, *more: Any) -> None:
    """Begin to build what ``choose_kernels`` will wait for, if that is CUDA's.

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
    """Begin to build CUDA's kernels where ``choose_between`` would wait for them.

    Args:
        choice: ``attention_config.turbo_kernel``: auto, cuda or triton.
        unsupported_reason: Says why there are none of CUDA's, if so.
        build: Begins to build CUDA's.

    """
    if choice != "triton" and not _launch_refusal and not unsupported_reason():
        build()


def cuda_refusal(reason: str) -> str:
    """The message for CUDA kernels that were asked for and cannot be had."""
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
    """The kernels of a layer, built: to be called before the first request.

    Args:
        choice: ``attention_config.turbo_kernel``: auto, cuda or triton.
        layout: The cache's format.
        num_queries_per_kv: Query heads a KV head.
        query_len: Query tokens of a decode request at most.
        variant: The layer's variant.

    Raises:
        ValueError: If CUDA's are asked for and cannot be had.

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
        unsupported_reason: Says why there are none of CUDA's, if so.
        build: Builds CUDA's, and says why that failed, if it did.
        cuda: Makes CUDA's, for a reason.
        triton: Makes Triton's, for a reason.

    Raises:
        ValueError: If CUDA's are asked for and cannot be had.

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
    # The CUDA kernels are faster, and here the user can have them.
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
    """The choice of ``choose_kernels``, for all layers alike and their builders."""
    kernels = choose_kernels(choice, layout, num_queries_per_kv, query_len, variant)
    return may_fall_back(kernels, triton_kernels)


def may_fall_back(
    kernels: KernelsT, triton: Callable[[str], KernelsT]
) -> ChosenKernels[KernelsT]:
    """Have Triton's kernels serve in place of these at ``fall_back_to_triton``."""
    chosen = ChosenKernels(kernels, triton)
    _chosen.append(chosen)
    return chosen


def fall_back_to_triton(reason: str) -> None:
    """Have Triton's kernels serve all layers of this process, before any request.

    Args:
        reason: Why CUDA's, which were built, cannot: a part of a sentence.

    """
    global _launch_refusal
    logger.warning_once("Turbo KV cache: Triton kernels, because %s.", reason)
    _launch_refusal = reason
    for chosen in _chosen:
        if chosen.kernels is not None and chosen.kernels.name == CUDA:
            assert chosen.triton is not None
            chosen.kernels = chosen.triton(reason)


def refusal_of_other_ranks(kernels: NamedKernels, group: ProcessGroup) -> str | None:
    """Why another rank's kernels are not CUDA's, where this one's are.

    A step waits for its slowest rank, so nothing is lost if all run the same.

    Args:
        kernels: This rank's.
        group: Ranks with the same layers, all of which call this; on the host.

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
