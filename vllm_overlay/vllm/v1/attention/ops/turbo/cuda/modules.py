# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which modules of CUDA kernels serving may ask for, so that all are built before."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import decode_columns, extend_rows
from vllm.v1.attention.ops.turbo.cuda import extend as cuda_extend
from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.cuda.build import (
    SUPPORTED_HEAD_SIZES,
    CudaModule,
    capability_of,
)
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat

# Compute capability -> bytes of shared memory that a block can have: what modules are
# built for where there is no such GPU to be asked.
ARCHITECTURES = {
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    120: 101376,
}
# Of longer heads scores have no soft cap: see refusals.py.
_MAX_CAPPED_HEAD_SIZE = 256
# Query heads a KV head, and query tokens of decodes and extends, that together ask for
# every module that any do.
_GROUPS = (*range(1, 17), 32, 64, 128)
_MAX_QUERY_LEN = 16
_MAX_EXTEND_LEN = 64


class ServingModule(NamedTuple):
    """A module that serving may ask for.

    Attributes:
        name: The kernel and what it is an instance for, as the build's log has them.
        load: Builds, if need be, and loads the module; returns its function.
        make: What is built, for GPUs whose blocks have so many bytes of shared memory.

    """

    name: str
    load: Callable[[], Callable[..., None]]
    make: Callable[[int], CudaModule]


def serving_modules(
    layout: TurboFormat,
    num_queries_per_kv: int,
    max_query_len: int,
    max_extend_len: int,
    device: torch.device | None = None,
    has_key_offset: bool = False,
    with_window: bool = False,
    has_soft_cap: bool = False,
    capability: int | None = None,
) -> list[ServingModule]:
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
        capability: The GPU's compute capability; None: it is asked.

    """
    if device is None:
        device = torch.device("cuda", torch.accelerator.current_device_index())
    if capability is None:
        capability = capability_of(device)
    head_size, variant = layout.head_size, (has_key_offset, has_soft_cap)
    found: dict[str, ServingModule] = {}

    def add(
        name: str,
        load: Callable[[], Callable[..., None]],
        make: Callable[[int], CudaModule],
    ) -> None:
        found[name] = ServingModule(name, load, make)

    # Drafters' layers have no window.
    for has_window in (False, True) if with_window else (False,):
        stored = has_key_offset, has_window
        add(
            f"store {cuda_store.instance(layout, *stored)}",
            partial(cuda_store.load, layout, device, *stored),
            lambda _, stored=stored: cuda_store.module(layout, *stored),
        )
    add(
        f"merge {cuda_merge.instance(head_size, has_soft_cap)}",
        partial(cuda_merge.load, head_size, device, has_soft_cap),
        lambda _: cuda_merge.module(head_size, has_soft_cap),
    )
    for query_len in range(1, max_query_len + 1):
        num_queries = num_queries_per_kv * query_len
        if decode_columns.serves(layout, num_queries, capability, *variant):
            add(
                f"decode_columns {decode_columns.instance(layout, *variant)}",
                partial(decode_columns.load, layout, device, *variant),
                lambda _: decode_columns.module(layout, *variant),
            )
            continue
        queries = cuda_decode.num_queries_at_once(head_size, num_queries)
        add(
            f"decode {cuda_decode.instance(layout, queries, *variant)}",
            partial(cuda_decode.load_instance, layout, queries, device, *variant),
            lambda n, queries=queries: cuda_decode.module(layout, queries, n, *variant),
        )
    if cuda_extend.unsupported_reason(layout):
        max_extend_len = 0
    has_rows = extend_rows.unsupported_reason(layout, capability) is None
    reason = extend_rows.outputs_unsupported_reason(layout, capability)
    has_outputs = reason is None and not has_key_offset
    for query_len in range(1, max_extend_len + 1):
        num_queries = num_queries_per_kv * query_len
        if has_rows:
            # Partial results are for ranks that share the context, and few requests.
            for with_outputs in (False, True) if has_outputs else (False,):
                plan = extend_rows.plan_for(layout, num_queries, with_outputs)
                instance = extend_rows.instance(layout, plan, *variant)
                rows = layout, plan, *variant, *[True] * with_outputs
                add(
                    f"{extend_rows.kernel_name(with_outputs)} {instance}",
                    partial(extend_rows.load, *rows[:2], device, *rows[2:]),
                    lambda _, rows=rows: extend_rows.module(*rows),
                )
            continue
        warps_plan = cuda_extend.plan_for(layout, num_queries)
        add(
            f"extend {cuda_extend.instance(layout, warps_plan, *variant)}",
            partial(cuda_extend.load_instance, layout, warps_plan, device, *variant),
            lambda n, plan=warps_plan: cuda_extend.module(layout, plan, n, *variant),
        )
    return list(found.values())


def _served_layers(
    cache_dtypes: Iterable[str], head_sizes: Iterable[int]
) -> Iterator[tuple[TurboFormat, bool, bool]]:
    """Layouts, and whether there is an offset of K and a soft cap: never both."""
    for name, head_size in product(cache_dtypes, head_sizes):
        layout = TurboFormat.from_cache_dtype(name, head_size)
        yield layout, False, False
        yield layout, True, False
        if head_size <= _MAX_CAPPED_HEAD_SIZE:
            yield layout, False, True


def all_modules(
    capability: int,
    cache_dtypes: Iterable[str] = TURBO_PRESETS,
    head_sizes: Iterable[int] = SUPPORTED_HEAD_SIZES,
) -> dict[str, CudaModule]:
    """What serving may ask for on GPUs of an architecture, whatever the model.

    Args:
        capability: One of ``ARCHITECTURES``.
        cache_dtypes: Which of the turbo dtypes.
        head_sizes: Which head sizes of those that have kernels.

    Returns:
        The modules by name.

    """
    device = torch.device("cuda", 0)  # not asked for anything
    makers = {
        module.name: module.make
        for layout, has_offset, has_cap in _served_layers(cache_dtypes, head_sizes)
        for group in _GROUPS
        for module in serving_modules(
            layout,
            group,
            _MAX_QUERY_LEN,
            _MAX_EXTEND_LEN,
            device,
            has_offset,
            True,
            has_cap,
            capability,
        )
    }
    return {name: make(ARCHITECTURES[capability]) for name, make in makers.items()}
