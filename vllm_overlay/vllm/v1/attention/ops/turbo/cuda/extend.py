# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of a few dozen query tokens to packed pages, as a CUDA kernel.

It is for prefix hits and short continuations of long contexts. As ``cuda.decode``,
with the same partial results, but what is read of a page is decoded once for up to 64
queries of a KV head, or more by the kernel of ``extend_rows``, which serves on Hopper.
Queries are used in fp16 as they are, and keys are decoded to fp16 exactly, so scores
have no error but that of the products' fp32 sums.
"""

from collections.abc import Callable
from functools import cache

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import extend_rows
from vllm.v1.attention.ops.turbo.cuda.build import (
    CudaModule,
    build_and_load,
    capability_of,
    shared_memory,
)
from vllm.v1.attention.ops.turbo.cuda.constants import instance_suffix, layout_header
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    MAX_KV_SPLITS,
    DecodeBatch,
    NewestTokens,
    OffsetScores,
    Partials,
    RecentWindow,
    RotatedQuery,
)

SUPPORTED_HEAD_SIZES = (64, 128, 256)
# Queries of a KV head that attend at once; more do in further passes.
COLUMNS = (32, 64)
# kStepTiles of extend/segment.cuh.
_STEP_TILES = 8
# Stages of tiles, where shared memory has room: one is copied while one is read.
_MAX_STAGES = 2
# What a column takes beside queries and weights, at most, and a warp's part of it.
_COLUMN_BYTES = 32
_WARP_COLUMN_BYTES = 4
_ALIGNMENT = 128
# Blocks a multiprocessor that work is divided among, and the splits of all query
# tokens of a batch that there is room for in any case.
_BLOCKS_PER_SM = 2
_MAX_PARTIALS = 4096


def unsupported_reason(layout: TurboFormat) -> str | None:
    """Why a layout has no such kernel, so that prefill serves; None if it has."""
    if layout.head_size not in SUPPORTED_HEAD_SIZES:
        return f"head size {layout.head_size} has no CUDA extend kernel"
    return None


def num_columns(num_queries: int) -> int:
    """Queries at once, of so many a sequence and KV head."""
    return next((n for n in COLUMNS if num_queries <= n), COLUMNS[-1])


def num_warps(layout: TurboFormat) -> int:
    """Warps a block: each has up to 32 coordinates of the output."""
    return 8 if layout.head_size > 128 else 4


def num_stages(layout: TurboFormat, columns: int, shared_bytes: int) -> int:
    """Stages of tiles of a block, which has ``shared_bytes`` of shared memory."""
    tokens = _STEP_TILES * fmt.TILE_TOKENS
    per_column = 2 * (layout.head_size + tokens) + _COLUMN_BYTES
    per_column += num_warps(layout) * _WARP_COLUMN_BYTES
    left = shared_bytes - columns * per_column - _ALIGNMENT
    fitting = left // (_STEP_TILES * layout.tile_bytes)
    assert fitting > 0, (layout, columns, shared_bytes)
    return min(_MAX_STAGES, fitting)


def instance(
    layout: TurboFormat,
    columns: int,
    has_key_offset: bool = False,
    has_soft_cap: bool = False,
) -> str:
    """The name of a module's instance."""
    suffix = instance_suffix(has_key_offset, has_soft_cap=has_soft_cap)
    return f"{layout.name}_{layout.head_size}_c{columns}{suffix}"


def module(
    layout: TurboFormat,
    columns: int,
    shared_bytes: int,
    has_key_offset: bool = False,
    has_soft_cap: bool = False,
) -> CudaModule:
    """What is built, for GPUs whose blocks have so much shared memory, for cached keys
    with an offset or without, and for scores with a soft cap or without.

    Raises:
        RuntimeError: If there is no instance for the layout.

    """
    reason = unsupported_reason(layout)
    if reason is not None:
        raise RuntimeError(reason)
    flags = {
        "COLUMNS": columns,
        "WARPS": num_warps(layout),
        "STAGES": num_stages(layout, columns, shared_bytes),
        "MAX_SHARED_BYTES": shared_bytes,
    }
    return CudaModule(
        "extend",
        instance(layout, columns, has_key_offset, has_soft_cap),
        layout_header(layout, has_key_offset, has_soft_cap=has_soft_cap),
        tuple(f"-DEXTEND_{name}={value}" for name, value in flags.items()),
    )


def load(
    layout: TurboFormat,
    num_queries: int,
    device: torch.device,
    has_key_offset: bool = False,
    has_soft_cap: bool = False,
) -> Callable[..., None]:
    """Build, if need be, and load the kernel for a number of queries.

    Args:
        layout: The cache's format.
        num_queries: Queries of a sequence and KV head: query heads, times tokens.
        device: Where it is to run.
        has_key_offset: Whether an offset was taken off cached keys.
        has_soft_cap: Whether scores are bounded by a tanh.

    Raises:
        RuntimeError: If it cannot be built.

    """
    variant = has_key_offset, has_soft_cap
    if extend_rows.unsupported_reason(layout, capability_of(device)) is None:
        plan = extend_rows.plan_for(layout, num_queries)
        return extend_rows.load(layout, plan, device, *variant)
    return load_instance(layout, num_columns(num_queries), device, *variant)


@cache
def load_instance(
    layout: TurboFormat,
    columns: int,
    device: torch.device,
    has_key_offset: bool = False,
    has_soft_cap: bool = False,
) -> Callable[..., None]:
    """As ``load``, of one of the modules of a layout."""
    shared_bytes = shared_memory(device)
    return build_and_load(
        module(layout, columns, shared_bytes, has_key_offset, has_soft_cap), device
    )


def num_kv_splits(
    num_seqs: int, num_kv_heads: int, num_sms: int, query_len: int = 1
) -> int:
    """Splits a sequence at most: room for partial results.

    As ``cuda.decode.num_kv_splits``, with blocks in place of warps: the kernel itself
    decides on the ranges, by lengths, and a sequence that is alone is to have all
    blocks, unless the batch is so large that room for it would cost too much.

    Args:
        num_seqs: Sequences in the (padded) batch.
        num_kv_heads: KV heads.
        num_sms: Multiprocessors of the GPU.
        query_len: Query tokens a sequence.

    """
    num_seqs = max(1, num_seqs)
    blocks = num_sms * _BLOCKS_PER_SM
    alone = -(-blocks // num_kv_heads) + 1
    average = -(-blocks // (num_seqs * num_kv_heads))
    room = max(_MAX_PARTIALS // (num_seqs * query_len), average + 1)
    return max(2, min(MAX_KV_SPLITS, alone, room))


def extend_attention(
    query: RotatedQuery,
    kv_cache: torch.Tensor,
    layout: TurboFormat,
    batch: DecodeBatch,
    partials: Partials,
    output: torch.Tensor,
    newest: NewestTokens | None = None,
    offset: OffsetScores | None = None,
    window: RecentWindow | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
    lse: torch.Tensor | None = None,
    enable_pdl: bool = True,
) -> None:
    """Attend from each sequence's last tokens to its cached tokens: ``AttentionFn``.

    The layout is one without an ``unsupported_reason``. With ``newest`` the cache is
    read up to the query tokens, and the merge attends to these, one after the other, or
    adds what attention to them gave.

    Raises:
        RuntimeError: If the kernel cannot be built; see ``build_and_load`` for what its
            function raises.

    """
    cuda_decode.attend(
        load,
        query,
        kv_cache,
        layout,
        batch,
        partials,
        output,
        newest,
        offset,
        window,
        sliding_window,
        sinks,
        logits_soft_cap,
        lse,
        enable_pdl,
    )
