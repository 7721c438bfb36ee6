# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which modules of CUDA kernels serving may ask for, so that all are built before."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import extend as cuda_extend
from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.format import TurboFormat


class ModuleLoader(NamedTuple):
    """A module that serving may ask for.

    Attributes:
        name: The kernel and what it is an instance for, as the build's log has them.
        load: Builds, if need be, and loads the module; returns its function.

    """

    name: str
    load: Callable[[], Callable[..., None]]


def serving_modules(
    layout: TurboFormat,
    num_queries_per_kv: int,
    max_query_len: int,
    max_extend_len: int,
    device: torch.device | None = None,
    has_key_offset: bool = False,
    with_window: bool = False,
    has_soft_cap: bool = False,
) -> list[ModuleLoader]:
    """All modules that a layer's batches may ask for, each once.

    They may be called side by side, in threads.

    Args:
        layout: The cache's format, without a ``cuda.decode.unsupported_reason``.
        num_queries_per_kv: Query heads a KV head.
        max_query_len: Query tokens of a sequence that is decoded, at most.
        max_extend_len: Those of a sequence that is extended, at most; 0 for no extends.
            A layout with an ``cuda.extend.unsupported_reason`` has none.
        device: The GPU; None for the current one.
        has_key_offset: Whether an offset is taken off K.
        with_window: Whether there is a recent window.
        has_soft_cap: Whether scores are bounded by a tanh.

    """
    if device is None:
        device = torch.device("cuda", torch.accelerator.current_device_index())
    head_size, variant = layout.head_size, (has_key_offset, has_soft_cap)
    loads: dict[str, Callable[[], Callable[..., None]]] = {}
    # Drafters' layers have no window.
    for has_window in (False, True) if with_window else (False,):
        instance = cuda_store.instance(layout, has_key_offset, has_window)
        loads[f"store {instance}"] = partial(
            cuda_store.load, layout, device, has_key_offset, has_window
        )
    instance = cuda_merge.instance(head_size, has_soft_cap)
    loads[f"merge {instance}"] = partial(
        cuda_merge.load, head_size, device, has_soft_cap
    )
    for query_len in range(1, max_query_len + 1):
        num_queries = num_queries_per_kv * query_len
        queries = cuda_decode.num_queries_at_once(head_size, num_queries)
        instance = cuda_decode.instance(layout, queries, *variant)
        loads[f"decode {instance}"] = partial(
            cuda_decode.load_instance, layout, queries, device, *variant
        )
    if cuda_extend.unsupported_reason(layout):
        max_extend_len = 0
    for query_len in range(1, max_extend_len + 1):
        columns = cuda_extend.num_columns(num_queries_per_kv * query_len)
        instance = cuda_extend.instance(layout, columns, *variant)
        loads[f"extend {instance}"] = partial(
            cuda_extend.load_instance, layout, columns, device, *variant
        )
    return [ModuleLoader(name, load) for name, load in loads.items()]
