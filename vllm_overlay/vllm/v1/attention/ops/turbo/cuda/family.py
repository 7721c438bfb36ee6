# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A CUDA kernel as a family of modules: one for each layout, plan and variant.

Each kernel declares its family once. The declaration has the layouts and GPUs of the
kernel, the names of its instances, and the instances that serving may ask for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from vllm.v1.attention.ops.turbo.cuda.build import (
    CudaModule,
    build_and_load,
    capability_of,
    shared_memory,
)
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import PLAIN, Variant

# The most bytes of shared memory of a thread block, by compute capability. Modules are
# built for these without asking a GPU.
ARCHITECTURES = {
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    120: 101376,
}
LayoutT = TypeVar("LayoutT")
PlanT = TypeVar("PlanT")


class Demand(NamedTuple):
    """The batches of a layer, which determine the kernels that it needs.

    Attributes:
        num_queries_per_kv: Query heads a KV head; with MLA all query heads.
        max_query_len: The most query tokens of a decode request.
        max_extend_len: The most query tokens of an extend; 0 for no extends.
        capability: The GPU's compute capability, such as 90; None if unknown.
        variant: The layer's variant.
        has_lists: Whether query tokens of MLA attend to lists of tokens.

    """

    num_queries_per_kv: int
    max_query_len: int
    max_extend_len: int = 0
    capability: int | None = None
    variant: Variant = PLAIN
    has_lists: bool = False

    def numbers_of_queries(self, max_len: int) -> Iterator[int]:
        """Queries of a KV head, for sequences with 1 to ``max_len`` query tokens."""
        for query_len in range(1, max_len + 1):
            yield self.num_queries_per_kv * query_len


class ServingModule(NamedTuple):
    """A module that serving may ask for.

    Attributes:
        name: The kernel and the instance, as in the build's log.
        load: Loads the module, and builds it first if it is not built; returns its
            function.
        make: Makes the module from the most bytes of shared memory of a block.

    """

    name: str
    load: Callable[[], Callable[..., None]]
    make: Callable[[int], CudaModule]


def by_head_size(
    head_sizes: Iterable[int], title: str
) -> Callable[[TurboFormat], str | None]:
    """A ``Family.refusal`` of layouts with other head sizes, or two of them."""

    def refusal(layout: TurboFormat) -> str | None:
        head_size, head_size_v = layout.head_size, layout.head_size_v
        if head_size != head_size_v:
            return (
                f"head size {head_size} of K and {head_size_v} of V has no CUDA {title}"
            )
        if head_size in head_sizes:
            return None
        return f"head size {head_size} has no CUDA {title}"

    return refusal


@cache
def _common(variant: Variant, other: Variant) -> Variant:
    """The features of both variants. It is cached because each launch asks for it."""
    return Variant(*(a and b for a, b in zip(variant, other)))


@dataclass(frozen=True, eq=False)
class Family(Generic[LayoutT, PlanT]):
    """A CUDA kernel, and the modules that it is compiled to.

    Attributes:
        kernel: The name of the source, without ``.cu``, and of the exported function.
        title: The kernel's name in messages.
        refusal: Gives the reason why no GPU has an instance for a layout; None if there
            is one.
        name: Makes an instance's name from the layout and the plan. The variant's
            suffix is added.
        header: Makes the header of constants from the layout and the variant.
        served: Yields the layouts, plans and variants that serving may ask for.
        variants: The parts of a variant that the kernel is compiled for.
        capability: The one compute capability that has the kernel; None for 8.0 and
            later.
        defines: Makes the macros from the layout, the plan and the bytes of shared
            memory of a block.
        flags: Further flags of nvcc.
        folder: The folder of the source; empty if it has the kernel's name.
        is_specific: Whether a plan has instructions of one architecture alone, which
            later GPUs lack.

    """

    kernel: str
    title: str
    refusal: Callable[[LayoutT], str | None]
    name: Callable[[LayoutT, PlanT], str]
    header: Callable[[LayoutT, Variant], str]
    served: Callable[[Any, Demand], Iterable[tuple[LayoutT, PlanT, Variant]]]
    variants: Variant = PLAIN
    capability: int | None = None
    defines: Callable[[LayoutT, PlanT, int], Mapping[str, int]] | None = None
    flags: tuple[str, ...] = ()
    folder: str = ""
    is_specific: Callable[[PlanT], bool] = lambda plan: False

    def unsupported_reason(
        self, layout: LayoutT, capability: int | None = None
    ) -> str | None:
        """The reason why a layout has no such kernel on a GPU.

        Args:
            layout: The cache's format.
            capability: The GPU's compute capability, such as 90; None without a GPU.

        Returns:
            A part of a sentence; None if the layout has the kernel.

        """
        own = self.capability
        if own not in (None, capability):
            return (
                f"GPUs of another capability than {own / 10:.1f} have no {self.title}"
            )
        return self.refusal(layout)

    def own_variant(self, variant: Variant) -> Variant:
        """The parts of a variant that the kernel is compiled for."""
        return _common(variant, self.variants)

    def instance(self, layout: LayoutT, plan: PlanT, variant: Variant = PLAIN) -> str:
        """The name of a module's instance."""
        return self.name(layout, plan) + self.own_variant(variant).suffix

    def module(
        self,
        layout: LayoutT,
        plan: PlanT,
        variant: Variant = PLAIN,
        shared_bytes: int = 0,
    ) -> CudaModule:
        """The module of an instance, for blocks of up to ``shared_bytes``.

        Raises:
            RuntimeError: If there is no instance for the layout.

        """
        reason = self.refusal(layout)
        if reason is not None:
            raise RuntimeError(reason)
        defines = self.defines(layout, plan, shared_bytes) if self.defines else {}
        macros = (f"-D{name}={int(value)}" for name, value in defines.items())
        return CudaModule(
            self.kernel,
            self.instance(layout, plan, variant),
            self.header(layout, self.own_variant(variant)),
            (*macros, *self.flags),
            self.folder,
            self.is_specific(plan),
        )

    def load(
        self,
        layout: LayoutT,
        plan: PlanT,
        device: torch.device,
        variant: Variant = PLAIN,
    ) -> Callable[..., None]:
        """Load an instance's function, and build it first if it is not built.

        Raises:
            RuntimeError: If it cannot be built.

        """
        return load_instance(self, layout, plan, device, self.own_variant(variant))

    def serving_module(
        self, layout: LayoutT, plan: PlanT, device: torch.device, variant: Variant
    ) -> ServingModule:
        """An instance as a ``ServingModule``."""
        return ServingModule(
            f"{self.kernel} {self.instance(layout, plan, variant)}",
            partial(self.load, layout, plan, device, variant),
            partial(self.module, layout, plan, variant),
        )


@cache
def load_instance(
    family: Family[LayoutT, PlanT],
    layout: LayoutT,
    plan: PlanT,
    device: torch.device,
    variant: Variant,
) -> Callable[..., None]:
    """``Family.load``, cached by the variant that the kernel is compiled for."""
    module = family.module(layout, plan, variant, shared_memory(device))
    return build_and_load(module, device)


def modules_for(
    families: Sequence[Family],
    layout: object,
    demand: Demand,
    device: torch.device | None = None,
) -> list[ServingModule]:
    """All modules that a layer's batches may ask for, each once.

    Threads may load them at the same time.

    Args:
        families: The kernels of layers of this kind.
        layout: The cache's format.
        demand: The layer's batches; a missing ``capability`` is taken from the GPU.
        device: The GPU; None for the current one.

    """
    if device is None:
        device = torch.device("cuda", torch.accelerator.current_device_index())
    if demand.capability is None:
        demand = demand._replace(capability=capability_of(device))
    found = {
        module.name: module
        for family in families
        for key, plan, variant in family.served(layout, demand)
        for module in [family.serving_module(key, plan, device, variant)]
    }
    return list(found.values())
