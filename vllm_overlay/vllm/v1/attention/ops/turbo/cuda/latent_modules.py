# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The modules of CUDA kernels that MLA may ask for, like ``modules`` for K and V."""

from collections.abc import Iterable
from itertools import product

import torch

from vllm.v1.attention.ops.turbo.cuda.build import CudaModule
from vllm.v1.attention.ops.turbo.cuda.family import Demand, modules_for
from vllm.v1.attention.ops.turbo.cuda.latent_decode import (
    LATENT_DECODE,
    unsupported_reason,
)
from vllm.v1.attention.ops.turbo.cuda.latent_gather import GATHER
from vllm.v1.attention.ops.turbo.cuda.latent_plans import plans_of
from vllm.v1.attention.ops.turbo.cuda.latent_store import LATENT_STORE
from vllm.v1.attention.ops.turbo.latent.format import LATENT_PRESETS, LatentFormat

# The kernels of layers with latents.
LATENT_FAMILIES = (LATENT_STORE, GATHER, LATENT_DECODE)


def all_latent_modules(
    capability: int,
    cache_dtypes: Iterable[str],
    head_sizes: Iterable[int],
) -> dict[str, CudaModule]:
    """The modules that MLA may ask for on GPUs of an architecture, by name.

    Args:
        capability: The compute capability, such as 90.
        cache_dtypes: The turbo dtypes; some have no format of latents.
        head_sizes: Sizes of a latent and its rotary key together.

    """
    if unsupported_reason(capability):
        return {}
    # One query head, with enough query tokens to need every plan.
    max_query_len = max(plan.columns for plan in plans_of(capability))
    demand = Demand(1, max_query_len, capability=capability)
    demands = demand, demand._replace(has_lists=True)
    device = torch.device("cuda", 0)  # not used
    return {
        module.name: module.make(0)
        for name, size in product(cache_dtypes, head_sizes)
        if name in LATENT_PRESETS
        for layout in [LatentFormat.from_cache_dtype(name, size)]
        for each in demands
        for module in modules_for(LATENT_FAMILIES, layout, each, device)
    }
