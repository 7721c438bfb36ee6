# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An attention kernel under test. ``attention_kernels.py`` lists all."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda.decode import DECODE, num_queries_at_once
from vllm.v1.attention.ops.turbo.cuda.family import Family
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    AttentionCall,
    Partials,
    RotatedQuery,
    Variant,
)

from .utils import FP16, requires_cuda


class Kernel(NamedTuple):
    """A kernel under test.

    Attributes:
        name: Its name in the ids of tests.
        attend: An ``AttentionFn``. The call always has the original queries.
        rounded: Returns queries (Q, Hq, D) in fp32 as the kernel rounds them, from
            queries of any dtype. None for a kernel that keeps the model's dtype.
        rounded_keys: Returns the raw keys (T, H, D) in fp32 as the kernel rounds
            them, which it scores as cached keys are. None for a kernel that scores them
            exactly, from exact queries.
        is_extend: Whether it serves extends; other kernels serve decodes.
        refusal: Returns why a layout has no such kernel; None if it has one.
        opt_outs: Features and cases that it is not tested with, each with the reason.
        marks: Marks of its tests.
        rotates_rule: Whether the 2x rule rounds in rotated space.

    """

    name: str
    attend: Callable[..., None]
    rounded: Callable[[torch.Tensor], torch.Tensor] | None
    rounded_keys: Callable[[torch.Tensor], torch.Tensor] | None = None
    is_extend: bool = False
    refusal: Callable[[TurboFormat], str | None] = lambda layout: None
    opt_outs: Mapping[str, str] = MappingProxyType({})
    marks: tuple[pytest.MarkDecorator, ...] = (requires_cuda,)
    rotates_rule: bool = False

    def case(self, *values: Any, name: str = "") -> Any:
        """The kernel and further values, as a case of ``pytest.mark.parametrize``."""
        own_id = f"{self.name}-{name}" if name else self.name
        return pytest.param(self, *values, marks=self.marks, id=own_id)


def by_family(
    family: Family, plan_for: Callable[[TurboFormat, int], Any]
) -> Callable[..., None]:
    """An ``AttentionFn`` of a CUDA kernel, even where serving takes another one.

    Args:
        family: The kernel.
        plan_for: Returns the plan for a layout and a number of queries of a KV head.

    """

    def load(
        layout: TurboFormat, num_queries: int, device: torch.device, variant: Variant
    ) -> Callable[..., None]:
        return family.load(layout, plan_for(layout, num_queries), device, variant)

    def attend(
        query: RotatedQuery,
        call: AttentionCall,
        partials: Partials,
        enable_pdl: bool = True,
    ) -> None:
        cuda_decode.attend(load, query, call, partials, enable_pdl)

    return attend


def rounded_to_int8(query: torch.Tensor) -> torch.Tensor:
    rotated = reference.rotate(query.float())
    return reference.inverse_rotate(reference.round_query(rotated))


def rounded_to_fp16(query: torch.Tensor) -> torch.Tensor:
    return reference.inverse_rotate(reference.rotate(query.float()).to(FP16))


DECODE_KERNEL = Kernel(
    "decode",
    by_family(DECODE, lambda layout, n: num_queries_at_once(layout.head_size, n)),
    rounded_to_int8,
    refusal=DECODE.refusal,
)
