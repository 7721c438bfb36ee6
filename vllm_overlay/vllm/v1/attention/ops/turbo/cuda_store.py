# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Store as a CUDA kernel, built by FlashInfer's JIT: see triton_store."""

import ctypes
from functools import cache
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.cuda_build import CudaModule, build_and_load
from vllm.v1.attention.ops.turbo.cuda_store_constants import (
    constants_header,
    level_tables,
    rotation_fragments,
    single_fragments,
)
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat

# Scores are in base 2.
_LOG2_E = 1.4426950408889634


class StoreTuning(NamedTuple):
    """How the store kernel is launched.

    Attributes:
        parts: Lanes that share a scale group; more are faster for few tokens only.
        threads: Threads a block.

    """

    parts: int
    threads: int


# Up to so many K and V vectors four lanes share a group, and up to so many two, on an
# H200 with D = 128 and cold caches. A trellis is shared by four only.
_FEW_VECTORS = {
    "turbo4": ((2048, 4), (16384, 2)),
    "k4v3": ((1024, 4), (8192, 2)),
    "turbo3": ((2048, 4), (4096, 2)),
}


def default_tuning(num_vectors: int, layout: TurboFormat) -> StoreTuning:
    """Launch parameters for so many K and V vectors."""
    for limit, parts in _FEW_VECTORS[layout.name]:
        if num_vectors <= limit:
            return StoreTuning(parts, threads=128)
    return StoreTuning(parts=1, threads=128)


class _StoreParams(ctypes.Structure):
    """StoreParams of store.cuh."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "key",
                "value",
                "query",
                "kv_cache",
                "slot_mapping",
                "kv_matrix",
                "single_matrix",
                "query_matrix",
                "rotated_query",
                "query_scale",
                "tables",
            )
        ),
        *(
            (f"stride_{name}", ctypes.c_int64)
            for name in (
                "key_token",
                "key_head",
                "value_token",
                "value_head",
                "query_token",
                "query_head",
                "cache_block",
                "cache_head",
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                "num_tokens",
                "num_kv_heads",
                "num_queries",
                "num_heads",
                "block_size",
            )
        ),
        ("query_factor", ctypes.c_float),
    ]


@cache
def load_library(layout: TurboFormat) -> ctypes.CDLL:
    """Build, once for all processes, and load the kernels of a layout.

    Raises:
        RuntimeError: If they cannot be built here.

    """
    module = CudaModule(
        "store",
        f"{layout.name}_{layout.head_size}",
        "turbo_store_constants.h",
        constants_header(layout),
        # The bytes are exact: no multiply-add may be fused.
        ("-fmad=false",),
    )
    library = build_and_load(module, ctypes.CDLL)
    library.turbo_store.argtypes = (
        ctypes.POINTER(_StoreParams),
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    )
    return library


def make_matrices(head_size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The rotations of K and V, of single rows and of q, as the kernel loads them.

    They, and the presets' tables of levels, are kept for good: make them before a CUDA
    graph is captured.
    """
    for name in TURBO_PRESETS:
        level_tables(TurboFormat.from_cache_dtype(name, head_size), device)
    return (
        rotation_fragments(head_size, device),
        single_fragments(head_size, device),
        rotation_fragments(head_size, device, for_query=True),
    )


@cache
def _matrix_pointers(head_size: int, device: torch.device) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in make_matrices(head_size, device))


def _rows(x: torch.Tensor, head_size: int) -> tuple[int, int, int]:
    """Pointer and strides of (T, H, D) vectors, which are loaded by 8 bytes."""
    assert x.dtype in (torch.bfloat16, torch.float16), x.dtype
    assert x.shape[2] == head_size and x.stride(2) == 1, (x.shape, x.stride())
    assert x.stride(0) % 4 == x.stride(1) % 4 == x.data_ptr() % 8 == 0, x.stride()
    return x.data_ptr(), x.stride(0), x.stride(1)


def store(
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TurboFormat,
    query: torch.Tensor | None = None,
    rotated_query: torch.Tensor | None = None,
    query_scale: torch.Tensor | None = None,
    scale: float = 1.0,
    tuning: StoreTuning | None = None,
) -> None:
    """Quantise K and V into their slots and, if given, rotate q for decoding.

    Arguments are those of ``triton_store.store``, with blocks and heads of the cache at
    multiples of 16 bytes, and vectors at multiples of 8.

    Raises:
        RuntimeError: If the kernels cannot be built or launched.

    """
    num_tokens = slot_mapping.shape[0]
    num_kv_heads, head_size = key.shape[1], layout.head_size
    num_blocks, _, block_size, _ = kv_cache.shape
    assert kv_cache.shape[1:] == (num_kv_heads, block_size, layout.slot_size)
    assert kv_cache.stride()[2:] == (layout.slot_size, 1), kv_cache.stride()
    assert kv_cache.stride(0) % 16 == kv_cache.stride(1) % 16 == 0, kv_cache.stride()
    assert num_blocks * block_size < 2**31, (num_blocks, block_size)
    assert slot_mapping.dtype == torch.int64 and slot_mapping.stride(0) == 1
    assert key.dtype == value.dtype and value.shape[1] == num_kv_heads
    assert min(key.shape[0], value.shape[0]) >= num_tokens
    assert num_tokens * num_kv_heads < 2**31, (num_tokens, num_kv_heads)
    num_queries = num_heads = 0
    query_rows: tuple[int | None, int, int] = (None, 0, 0)
    if query is not None:
        assert rotated_query is not None and query_scale is not None
        assert rotated_query.is_contiguous() and query_scale.is_contiguous()
        assert rotated_query.dtype == torch.float16 and query.dtype == key.dtype
        num_queries, num_heads = query.shape[:2]
        query_rows = _rows(query, head_size)
    if num_tokens == 0 and num_queries == 0:
        return
    if tuning is None:
        tuning = default_tuning(2 * num_tokens * num_kv_heads, layout)
    key_rows, value_rows = _rows(key, head_size), _rows(value, head_size)
    params = _StoreParams(
        key_rows[0],
        value_rows[0],
        query_rows[0],
        kv_cache.data_ptr(),
        slot_mapping.data_ptr(),
        *_matrix_pointers(head_size, kv_cache.device),
        None if rotated_query is None else rotated_query.data_ptr(),
        None if query_scale is None else query_scale.data_ptr(),
        level_tables(layout, kv_cache.device).data_ptr(),
        *key_rows[1:],
        *value_rows[1:],
        *query_rows[1:],
        kv_cache.stride(0),
        kv_cache.stride(1),
        num_tokens,
        num_kv_heads,
        num_queries,
        num_heads,
        block_size,
        scale * _LOG2_E * layout.key_codebook.gain,
    )
    status = load_library(layout).turbo_store(
        ctypes.byref(params),
        key.dtype == torch.bfloat16,
        *tuning,
        # vLLM's own would make a new stream current, in the middle of a step.
        torch.cuda.current_stream(kv_cache.device).cuda_stream,
    )
    if status != 0:
        raise RuntimeError(
            f"the turbo store kernel was not launched: CUDA error {status}"
        )
