# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A CUDA kernel as a family of modules: one for each layout, plan and variant.

Each kernel declares its family once. The declaration says which layouts and GPUs have
the kernel, what its instances are named, and what serving may ask for.
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

# Compute capability -> bytes of shared memory that a block can have. Modules are built
# for these where there is no such GPU to be asked.
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
    """The batches of a layer, by which kernels must be there.

    Attributes:
        num_queries_per_kv: Query heads a KV head; with MLA all query heads.
        max_query_len: Query tokens of a sequence that is decoded, at most.
        max_extend_len: Query tokens of a sequence that is extended, at most; 0 for no
            extends.
        capability: The GPU's compute capability, such as 90; None for none.
        variant: The layer's variant.

    """

    num_queries_per_kv: int
    max_query_len: int
    max_extend_len: int = 0
    capability: int | None = None
    variant: Variant = PLAIN

    def numbers_of_queries(self, max_len: int) -> Iterator[int]:
        """Queries of a KV head of sequences with 1 to ``max_len`` query tokens."""
        for query_len in range(1, max_len + 1):
            yield self.num_queries_per_kv * query_len


class ServingModule(NamedTuple):
    """A module that serving may ask for.

    Attributes:
        name: The kernel and the instance, as the build's log has them.
        load: Builds, if need be, and loads the module; returns its function.
        make: Makes the module for GPUs whose blocks have so much shared memory.

    """

    name: str
    load: Callable[[], Callable[..., None]]
    make: Callable[[int], CudaModule]


def by_head_size(
    head_sizes: Iterable[int], title: str
) -> Callable[[TurboFormat], str | None]:
    """A ``Family.refusal`` of layouts with other head sizes than these."""

    def refusal(layout: TurboFormat) -> str | None:
        if layout.head_size in head_sizes:
            return None
        return f"head size {layout.head_size} has no CUDA {title}"

    return refusal


@cache
def _common(variant: Variant, other: Variant) -> Variant:
    """The features that both have. It is asked for at each launch."""
    return Variant(*(a and b for a, b in zip(variant, other)))


@dataclass(frozen=True, eq=False)
class Family(Generic[LayoutT, PlanT]):
    """A CUDA kernel, and the modules that it is compiled to.

    Attributes:
        kernel: The source without ``.cu``, and the function that it exports.
        title: The kernel's name in messages.
        refusal: Says why there is no instance for a layout, on whatever GPU; None if
            there is one.
        name: Makes an instance's name from the layout and the plan, to which the
            variant's parts are added.
        header: Makes the header of constants from the layout and the variant.
        served: Yields the layouts, plans and variants that serving may ask for.
        variants: The parts of a variant that the kernel is compiled for.
        capability: The compute capability of the GPUs that have the kernel; None: 8.0
            and later.
        defines: Makes the macros from the layout, the plan and the bytes of shared
            memory of a block.
        flags: More flags of nvcc.
        folder: The folder of the source; empty: named as the kernel.
        is_specific: Whether a plan's instructions are those of one architecture, and
            not of later ones.

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
        """Why a layout has no such kernel on GPUs of a compute capability.

        Args:
            layout: The cache's format.
            capability: Such as 90; None without a GPU.

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
        """The module of an instance, for GPUs whose blocks have so much shared memory.

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
        """Build, if need be, and load an instance; its function.

        Raises:
            RuntimeError: If it cannot be built.

        """
        return load_instance(self, layout, plan, device, self.own_variant(variant))

    def serving_module(
        self, layout: LayoutT, plan: PlanT, device: torch.device, variant: Variant
    ) -> ServingModule:
        """An instance as serving asks for it."""
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
    """As ``Family.load``, once for a variant that the kernel is compiled for."""
    module = family.module(layout, plan, variant, shared_memory(device))
    return build_and_load(module, device)


def modules_for(
    families: Sequence[Family],
    layout: object,
    demand: Demand,
    device: torch.device | None = None,
) -> list[ServingModule]:
    """All modules that a layer's batches may ask for, each once.

    They may be loaded side by side, in threads.

    Args:
        families: The kernels of layers of this kind.
        layout: The cache's format.
        demand: The layer's batches; without a ``capability`` the GPU is asked.
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
