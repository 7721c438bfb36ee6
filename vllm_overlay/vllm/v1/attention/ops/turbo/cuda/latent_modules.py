# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which modules of CUDA kernels MLA may ask for: as ``modules``, for packed latents."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product

import torch

from vllm.v1.attention.ops.turbo.cuda import latent_decode, latent_gather, latent_store
from vllm.v1.attention.ops.turbo.cuda.build import CudaModule
from vllm.v1.attention.ops.turbo.cuda.latent_plans import Plan, plan_for, plans_of
from vllm.v1.attention.ops.turbo.cuda.modules import ServingModule
from vllm.v1.attention.ops.turbo.latent_format import LATENT_PRESETS, LatentFormat


def latent_modules(
    layout: LatentFormat,
    num_heads: int,
    max_query_len: int,
    device: torch.device | None = None,
    plans: Sequence[Plan] | None = None,
) -> list[ServingModule]:
    """All modules that a layer's batches may ask for, each once.

    Args:
        layout: The cache's format; of some Triton's kernel decodes.
        num_heads: Query heads.
        max_query_len: Query tokens of a request that attends to packed pages, at most.
        device: The GPU; None for the current one.
        plans: What there is to attend; None for what serves on the GPU.

    """
    if device is None:
        device = torch.device("cuda", torch.accelerator.current_device_index())
    if plans is None:
        plans = latent_decode.plans_on(device.index or 0)
    found = [
        ServingModule(
            f"latent_store {latent_store.instance(layout)}",
            partial(latent_store.load, layout, device),
            lambda _: latent_store.module(layout),
        ),
        ServingModule(
            f"latent_gather {latent_gather.instance(layout)}",
            partial(latent_gather.load, layout, device),
            lambda _: latent_gather.module(layout),
        ),
    ]
    chosen = {
        plan_for(num_heads * query_len, plans)
        for query_len in range(1, max_query_len + 1)
        if latent_decode.serves(layout)
    }
    for plan in sorted(chosen):
        found.append(
            ServingModule(
                f"latent_decode {latent_decode.instance(layout, plan)}",
                partial(latent_decode.load, layout, plan, device),
                lambda _, plan=plan: latent_decode.module(layout, plan),
            )
        )
    return found


def all_latent_modules(
    capability: int,
    cache_dtypes: Iterable[str],
    head_sizes: Iterable[int],
) -> dict[str, CudaModule]:
    """What MLA may ask for on GPUs of an architecture, whatever the model.

    Args:
        capability: Such as 90.
        cache_dtypes: Which of the turbo dtypes.
        head_sizes: Which sizes of a latent and its rotary key together.

    Returns:
        The modules by name.

    """
    if latent_decode.unsupported_reason(capability):
        return {}
    device = torch.device("cuda", 0)  # not asked for anything
    found = {}
    for name, size in product(cache_dtypes, head_sizes):
        if name not in LATENT_PRESETS:
            continue
        layout = LatentFormat.from_cache_dtype(name, size)
        # Of one head, so many query tokens that each plan serves some.
        plans = plans_of(capability)
        rows = max(plan.columns for plan in plans)
        for module in latent_modules(layout, 1, rows, device, plans):
            found[module.name] = module.make(0)
    return found
