# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The modules of CUDA kernels that serving may ask for, to be built beforehand."""

from collections.abc import Iterable, Iterator
from itertools import product

import torch

from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES, CudaModule
from vllm.v1.attention.ops.turbo.cuda.decode import DECODE
from vllm.v1.attention.ops.turbo.cuda.decode_wgmma import DECODE_WGMMA
from vllm.v1.attention.ops.turbo.cuda.extend_mma import EXTEND_MMA
from vllm.v1.attention.ops.turbo.cuda.extend_wgmma import EXTEND_WGMMA, OUTPUTS
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES, Demand, modules_for
from vllm.v1.attention.ops.turbo.cuda.merge import MERGE
from vllm.v1.attention.ops.turbo.cuda.store import STORE
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import Variant

# The kernels of layers with K and V.
FAMILIES = (STORE, MERGE, DECODE, DECODE_WGMMA, EXTEND_MMA, EXTEND_WGMMA, OUTPUTS)
# Scores of larger heads have no soft cap: see refusals.py.
_MAX_CAPPED_HEAD_SIZE = 256
# Query heads a KV head, and query tokens of decodes and extends, that together need
# every module that any numbers need.
_GROUPS = (*range(1, 17), 32, 64, 128)
_MAX_QUERY_LEN = 16
_MAX_EXTEND_LEN = 64


def _served_layers(
    cache_dtypes: Iterable[str], head_sizes: Iterable[int]
) -> Iterator[tuple[TurboFormat, Variant]]:
    for name, head_size in product(cache_dtypes, head_sizes):
        layout = TurboFormat.from_cache_dtype(name, head_size)
        yield layout, Variant(tail=True)
        yield layout, Variant(key_offset=True, tail=True)
        # A pass of text finds both.
        yield layout, Variant(key_offset=True, tail=True, query_direction=True)
        if head_size <= _MAX_CAPPED_HEAD_SIZE:
            yield layout, Variant(tail=True, soft_cap=True)


def all_modules(
    capability: int,
    cache_dtypes: Iterable[str] = TURBO_PRESETS,
    head_sizes: Iterable[int] = SUPPORTED_HEAD_SIZES,
) -> dict[str, CudaModule]:
    """The modules that serving may ask for on GPUs of an architecture, by name.

    Args:
        capability: A compute capability in ``ARCHITECTURES``.
        cache_dtypes: The turbo dtypes.
        head_sizes: Head sizes that have kernels.

    """
    device = torch.device("cuda", 0)  # not used
    makers = {
        module.name: module.make
        for layout, variant in _served_layers(cache_dtypes, head_sizes)
        for group in _GROUPS
        for module in modules_for(
            FAMILIES,
            layout,
            Demand(group, _MAX_QUERY_LEN, _MAX_EXTEND_LEN, capability, variant),
            device,
        )
    }
    return {name: make(ARCHITECTURES[capability]) for name, make in makers.items()}
