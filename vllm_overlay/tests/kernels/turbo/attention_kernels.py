# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The attention kernels under test. A row of ``KERNELS`` adds a kernel to the tests."""

import math
from collections.abc import Iterable, Mapping

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda import extend_mma, extend_wgmma
from vllm.v1.attention.ops.turbo.cuda.decode_wgmma import DECODE_WGMMA
from vllm.v1.attention.ops.turbo.cuda.extend_mma import EXTEND_MMA
from vllm.v1.attention.ops.turbo.cuda.extend_wgmma import EXTEND_WGMMA, OUTPUTS
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.output_scratch import (
    OutputScratch,
    num_raw_tiles,
)
from vllm.v1.attention.ops.turbo.formats.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.interface import AttentionCall, Partials, RotatedQuery
from vllm.v1.attention.ops.turbo.reference.levels import power_of_two
from vllm.v1.attention.ops.turbo.triton.decode import decode_attention

from .kernel_under_test import (
    DECODE_KERNEL,
    Kernel,
    by_family,
    rounded_to_fp16,
    rounded_to_int8,
)
from .sequences import LAYOUT, LAYOUTS, Features, layout_id
from .utils import (
    DEVICE,
    FP16,
    ON_GPU,
    PACKINGS,
    requires_hopper,
    requires_triton,
)


def extend_to_outputs(
    query: RotatedQuery, call: AttentionCall, partials: Partials
) -> None:
    """Extend with the kernel that needs no merge; its scratch has NaN before.

    With one split, blocks have whole passes.
    """
    batch, num_tokens = call.batch, query.vectors.shape[0]
    specs = extend_wgmma.output_scratch(
        call.layout,
        call.num_kv_heads,
        132 if ON_GPU else 4,
        num_raw_tiles(num_tokens, batch.num_seqs),
    )
    scratch = OutputScratch(
        *(torch.full(size, math.nan, dtype=x, device=DEVICE) for size, x in specs)
    )
    if batch.num_splits(partials.lse.shape[0]) == 1:
        scratch = scratch._replace(
            partial=scratch.partial[:0], partial_lse=scratch.partial_lse[:0]
        )
    extend_wgmma.extend_outputs(call, scratch)


def rounded_by_outputs(query: torch.Tensor) -> torch.Tensor:
    """Queries, fp32, with the rounding of ``extend_outputs``, which rotates them.

    It rounds to fp16 relative to a power of two, before the division by sqrt(D).
    """
    size = query.shape[-1]
    matrix = rotation_matrix(size, query.device, torch.float32)
    rotated = query.float() @ matrix
    unit = power_of_two(torch.frexp(rotated.abs().amax(-1, True)).exponent)
    return (rotated / unit).to(FP16).float() @ matrix.T * (unit / size)


def keys_rounded_by_outputs(key: torch.Tensor) -> torch.Tensor:
    """Keys, fp32, that ``extend_outputs`` rounds to fp16 in rotated space."""
    size = key.shape[-1]
    matrix = rotation_matrix(size, key.device, torch.float32)
    rotated = key @ matrix * inverse_sqrt(size)
    return reference.inverse_rotate(rotated.to(FP16))


KERNELS = {
    kernel.name: kernel
    for kernel in (
        DECODE_KERNEL,
        Kernel(
            "decode_wgmma",
            by_family(DECODE_WGMMA, lambda layout, num_queries: None),
            rounded_to_fp16,
            refusal=DECODE_WGMMA.refusal,
            marks=(requires_hopper,),
        ),
        Kernel(
            "extend_mma",
            by_family(EXTEND_MMA, extend_mma.plan_for),
            rounded_to_fp16,
            is_extend=True,
            refusal=EXTEND_MMA.refusal,
        ),
        Kernel(
            "extend_wgmma",
            by_family(EXTEND_WGMMA, extend_wgmma.plan_for),
            rounded_to_fp16,
            is_extend=True,
            refusal=EXTEND_WGMMA.refusal,
            marks=(requires_hopper,),
        ),
        Kernel(
            "outputs",
            extend_to_outputs,
            rounded_by_outputs,
            keys_rounded_by_outputs,
            is_extend=True,
            refusal=OUTPUTS.refusal,
            opt_outs={
                "tail": "OutputsFn reads the codes of tokens in a tail",
                "partials": "the kernel writes outputs, so that there are no LSE",
            },
            marks=(requires_hopper,),
        ),
        Kernel(
            "triton",
            decode_attention,
            None,
            opt_outs={
                "layouts": "an instance for each layout would take long to compile",
                "groups": "an instance for each group would take long to compile",
                "features": "tests of the backend have Triton's kernels with features",
                "repetition": "the interpreter takes seconds for a run",
            },
            marks=(requires_triton,),
            rotates_rule=True,
        ),
    )
}
DECODES = [name for name, x in KERNELS.items() if not x.is_extend]
EXTENDS = [name for name, x in KERNELS.items() if x.is_extend]
CUDA = [name for name, x in KERNELS.items() if requires_triton not in x.marks]
# Kernels of CUDA that use queries in fp16, and take any number of them.
IN_FP16 = [x for x in CUDA if KERNELS[x].rounded is not rounded_to_int8]
# Layouts, and query heads a KV head, for kernels that are not tested with all. K and V
# of k4v3 are packed as the others' are.
FEW_LAYOUTS = [x for x in LAYOUTS if x.head_size == 64 and x.name in PACKINGS]
FEW_GROUPS = (1, 5)


def without(*features: str) -> list[str]:
    """CUDA's kernels that opt out of none of the features."""
    return [x for x in CUDA if not KERNELS[x].opt_outs.keys() & {*features}]


def kernels(names: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise a test by ``kernel``."""
    return pytest.mark.parametrize("kernel", [KERNELS[x].case() for x in names])


def kernels_and_layouts(
    names: Iterable[str], layouts: Iterable[TurboFormat] | None = None
) -> pytest.MarkDecorator:
    """Parametrise a test by ``kernel, layout``, with the layouts of each kernel.

    Without ``layouts`` these are all, or a few for kernels that opt out of all.
    """
    cases = [
        kernel.case(layout, name=layout_id(layout))
        for kernel in map(KERNELS.__getitem__, names)
        for layout in layouts
        or (FEW_LAYOUTS if "layouts" in kernel.opt_outs else LAYOUTS)
        if not kernel.refusal(layout)
    ]
    return pytest.mark.parametrize("kernel, layout", cases)


def kernels_and_features(
    names: Iterable[str],
    features: Mapping[str, Features],
    layouts: Iterable[TurboFormat] = (LAYOUT,),
) -> pytest.MarkDecorator:
    """Parametrise a test by ``kernel, layout, features``, without opt-outs."""
    cases = [
        kernel.case(layout, own, name=f"{layout_id(layout)}-{name}")
        for kernel in map(KERNELS.__getitem__, names)
        for layout in layouts
        for name, own in features.items()
        if not kernel.refusal(layout) and "features" not in kernel.opt_outs
    ]
    return pytest.mark.parametrize("kernel, layout, features", cases)
