# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Store as a CUDA kernel, built by FlashInfer's JIT: see ``triton.store``."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES
from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.cuda.family import Demand, Family, by_head_size
from vllm.v1.attention.ops.turbo.cuda.store_tables import (
    level_tables,
    rotation_fragments,
    single_fragments,
)
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    KeyOffset,
    RotatedQuery,
    Variant,
    WindowUpdate,
    score_factor,
)


class StoreTuning(NamedTuple):
    """How the store kernel is launched.

    Attributes:
        parts: Lanes that share a scale group; more are faster for few tokens only. Of
            heads of 512 at least two do.
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


def store_sizes(layout: TurboFormat, num_kv_heads: int) -> list[int]:
    """Numbers of tokens of which each takes other launch parameters."""
    limits = [limit // (2 * num_kv_heads) for limit, _ in _FEW_VECTORS[layout.name]]
    return sorted({1, *(limit + 1 for limit in limits)})


def _served(
    layout: TurboFormat, demand: Demand
) -> Iterator[tuple[TurboFormat, None, Variant]]:
    # Drafters' layers have no recent window.
    for has_window in sorted({False, demand.variant.recent_window}):
        yield layout, None, demand.variant._replace(recent_window=has_window)


STORE = Family[TurboFormat, None](
    kernel="store",
    title="store kernel",
    refusal=by_head_size(SUPPORTED_HEAD_SIZES, "store kernel"),
    name=lambda layout, _: f"{layout.name}_{layout.head_size}",
    header=layout_header,
    served=_served,
    variants=Variant(key_offset=True, recent_window=True),
    # The bytes are exact: no multiply-add may be fused.
    flags=("-fmad=false",),
)


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
def _constants(layout: TurboFormat, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tables that the kernel reads: kv_matrix, single_matrix, query_matrix
    and tables of store/params.cuh.
    """
    matrices = make_matrices(layout.head_size, device)
    return (*matrices, level_tables(layout, device))


def _window_arguments(update: WindowUpdate | None) -> tuple:
    """The kernel's arguments for the recent window: see store/params.cuh."""
    if update is None:
        return (None, None, None, *[0] * 8, None)
    window = update.window
    return (
        window.pages,
        window.blocks,
        window.packed_lens,
        window.format.num_rows,
        *window.format.plane_offsets,
        window.num_tokens,
        update.block_table,
    )


def store(
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TurboFormat,
    query: torch.Tensor | None = None,
    rotated_query: RotatedQuery | None = None,
    scale: float = 1.0,
    key_offset: KeyOffset | None = None,
    window: WindowUpdate | None = None,
    tuning: StoreTuning | None = None,
    enable_pdl: bool = True,
) -> None:
    """Quantise K and V into their slots and, if given, rotate q for decoding.

    The recent window, if there is one, is brought up to date by blocks of the same
    launch. They see no end of it, so no row counts of a sequence to whose blocks the
    step stores others' tokens.

    Arguments are ``StoreFn``'s, with blocks and heads of the cache at
    multiples of 16 bytes, and vectors at multiples of 8. With ``enable_pdl`` the kernel
    may begin, on GPUs that can, before the one before it on the stream has ended, for
    which it waits before it reads or writes anything but constants.

    Raises:
        RuntimeError: If the kernel cannot be built; see ``build_and_load`` for what its
            function raises.

    """
    num_tokens = slot_mapping.shape[0]
    num_queries = 0 if query is None else query.shape[0]
    if num_tokens == 0 and num_queries == 0:
        return
    if tuning is None:
        tuning = default_tuning(2 * num_tokens * key.shape[1], layout)
    device = kv_cache.device
    offset_table = None if key_offset is None else key_offset.table
    step = window or key_offset  # of the same sequences
    variant = Variant(key_offset is not None, window is not None)
    STORE.load(layout, None, device, variant)(
        kv_cache,
        slot_mapping,
        key,
        value,
        *_constants(layout, device),
        query,
        *(rotated_query or (None, None)),
        score_factor(layout, scale),
        offset_table,
        None if step is None else step.seq_lens,
        None if step is None else step.query_start_loc,
        *_window_arguments(window),
        *tuning,
        enable_pdl,
    )
