# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The choice of kernels, CUDA's or Triton's. Both read the same bytes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
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
    """CUDA's kernels, for layouts that ``TurboSource`` does not refuse.

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


class KernelSource(ABC, Generic[KernelsT]):
    """CUDA's and Triton's kernels for a layer.

    Sources with equal fields are equal, and their layers share kernels and builds.
    """

    @abstractmethod
    def unsupported_reason(self) -> str | None:
        """Why the layer has no CUDA kernels on this device; None if it has them."""

    @abstractmethod
    def modules(self) -> list["ServingModule"]:
        """The modules of CUDA kernels that serving may ask for."""

    @abstractmethod
    def cuda(self, reason: str) -> KernelsT:
        """CUDA's kernels, which serve for a reason: a part of a sentence, for users."""

    @abstractmethod
    def triton(self, reason: str) -> KernelsT:
        """Triton's kernels, likewise."""


@dataclass(frozen=True)
class TurboSource(KernelSource[KernelSet]):
    """The kernels for a layer with K and V.

    Attributes:
        layout: The cache's format.
        num_queries_per_kv: Query heads a KV head.
        query_len: The most query tokens of a decode request.
        variant: The layer's variant.

    """

    layout: TurboFormat
    num_queries_per_kv: int
    query_len: int = 1
    variant: Variant = PLAIN

    def unsupported_reason(self) -> str | None:
        is_cuda = current_platform.is_cuda()
        if not (is_cuda and current_platform.has_device_capability(80)):
            return (
                "the CUDA kernels need an NVIDIA GPU of compute capability 8.0 or later"
            )
        from vllm.v1.attention.ops.turbo.cuda.decode import DECODE

        return DECODE.unsupported_reason(self.layout, current_capability())

    def modules(self) -> list["ServingModule"]:
        from vllm.v1.attention.ops.turbo.cuda.family import Demand, modules_for
        from vllm.v1.attention.ops.turbo.cuda.modules import FAMILIES

        capability, group = current_capability(), self.num_queries_per_kv
        most = max_extend_len(self.layout.head_size, group, capability)
        demand = Demand(group, self.query_len, most, capability, self.variant)
        return modules_for(FAMILIES, self.layout, demand)

    def cuda(self, reason: str) -> KernelSet:
        return cuda_kernels(self.layout, reason, current_capability())

    def triton(self, reason: str) -> KernelSet:
        return triton_kernels(reason)


@cache
def cuda_builds(source: KernelSource[Any]) -> ModuleBuilds:
    """Begin to build and load the CUDA kernels of layers, in parallel.

    The result is cached, so that a build fails only once for all layers.
    """
    return ModuleBuilds(source.modules)


def cuda_build_error(source: KernelSource[Any]) -> str | None:
    """Build and load the CUDA kernels; the reason if that failed, else None."""
    return cuda_builds(source).error


def start_builds(choice: str, source: KernelSource[Any]) -> None:
    """Begin to build CUDA's kernels if ``choose_kernels`` will wait for them.

    Args:
        choice: ``attention_config.turbo_kernel``: auto, cuda or triton.
        source: The kernels of the layer.

    """
    if choice != "triton" and not _launch_refusal and not source.unsupported_reason():
        cuda_builds(source)


def cuda_refusal(reason: str) -> str:
    """The message for CUDA kernels that a user asks for and cannot have."""
    return (
        f"attention_config.turbo_kernel=cuda cannot be used, because {reason}. "
        "Use auto or triton instead."
    )


def choose_kernels(choice: str, source: KernelSource[KernelsT]) -> KernelsT:
    """Choose CUDA's kernels and build them, or Triton's, before the first request.

    Args:
        choice: ``attention_config.turbo_kernel``: auto, cuda or triton.
        source: The kernels of the layer.

    Raises:
        ValueError: If the user asks for CUDA's kernels and cannot have them.

    """
    asked_for = f"turbo_kernel is {choice}"
    if choice == "triton":
        return source.triton(asked_for)
    unsupported = source.unsupported_reason() or _launch_refusal
    error = None if unsupported else cuda_build_error(source)
    reason = unsupported or error
    if reason is None:
        return source.cuda("they could be loaded" if choice == "auto" else asked_for)
    if choice == "cuda":
        raise ValueError(cuda_refusal(reason))
    if unsupported:
        return source.triton(unsupported)
    # A warning, because the CUDA kernels are faster and the user can get them here.
    logger.warning_once("Turbo KV cache: Triton kernels, because %s.", error)
    return source.triton("the CUDA kernels could not be built")


@cache
def share_kernels(
    choice: str, source: KernelSource[KernelsT]
) -> ChosenKernels[KernelsT]:
    """The choice of ``choose_kernels``, for a shape's layers and their builders.

    ``fall_back_to_triton`` may replace it.
    """
    chosen = ChosenKernels(choose_kernels(choice, source), source.triton)
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
