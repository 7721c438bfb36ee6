# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The turbo KV cache in PyTorch, for CPUs and as the reference of the kernels."""

from vllm.v1.attention.ops.turbo.reference.attention import attention
from vllm.v1.attention.ops.turbo.reference.cache import (
    load,
    offsets_of,
    store,
    tile_addresses,
)
from vllm.v1.attention.ops.turbo.reference.forward import forward
from vllm.v1.attention.ops.turbo.reference.rotation import (
    inverse_rotate,
    rotate,
    round_query,
)
from vllm.v1.attention.ops.turbo.reference.unbias import unbiased

__all__ = [
    "attention",
    "forward",
    "inverse_rotate",
    "load",
    "offsets_of",
    "rotate",
    "round_query",
    "store",
    "tile_addresses",
    "unbiased",
]
