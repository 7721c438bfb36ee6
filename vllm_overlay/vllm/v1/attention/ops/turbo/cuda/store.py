# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The store as a CUDA kernel, built by FlashInfer's JIT, like ``triton.store``."""

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
from vllm.v1.attention.ops.turbo.formats.tail_pages import TailUpdate
from vllm.v1.attention.ops.turbo.interface import StoreCall, Variant, score_factor


class StoreTuning(NamedTuple):
    """Launch parameters of the store kernel.

    Attributes:
        parts: Lanes that share a scale group, at least two for heads of 512. More are
            faster only for few tokens.
        threads: Threads of a block.

    """

    parts: int
    threads: int


# Limits of the number of K and V vectors, and the lanes that share a group up to there.
# With a trellis two lanes do not share it, only four.
# Tuning: D = 128, cold caches, an H200, 2026-11, `ci/gpu.py bench`.
_FEW_VECTORS = {
    "turbo4": ((2048, 4), (16384, 2)),
    "k4v3": ((1024, 4), (8192, 2)),
    "turbo3": ((2048, 4), (4096, 2)),
}


def default_tuning(num_vectors: int, layout: TurboFormat) -> StoreTuning:
    """The launch parameters for a number of K and V vectors."""
    for limit, parts in _FEW_VECTORS[layout.name]:
        if num_vectors <= limit:
            return StoreTuning(parts, threads=128)
    return StoreTuning(parts=1, threads=128)


def store_sizes(layout: TurboFormat, num_kv_heads: int) -> list[int]:
    """Numbers of tokens that each have different launch parameters."""
    limits = [limit // (2 * num_kv_heads) for limit, _ in _FEW_VECTORS[layout.name]]
    return sorted({1, *(limit + 1 for limit in limits)})


def _served(
    layout: TurboFormat, demand: Demand
) -> Iterator[tuple[TurboFormat, None, Variant]]:
    # A drafter's layers have no tail.
    for has_tail in sorted({False, demand.variant.tail}):
        yield layout, None, demand.variant._replace(tail=has_tail)


STORE = Family[TurboFormat, None](
    kernel="store",
    title="store kernel",
    refusal=by_head_size(SUPPORTED_HEAD_SIZES, "store kernel"),
    name=lambda layout, _: f"{layout.name}_{layout.head_size}",
    header=layout_header,
    served=_served,
    variants=Variant(key_offset=True, tail=True, query_direction=True),
    # A fused multiply-add would change the stored bytes.
    flags=("-fmad=false",),
)


def make_matrices(head_size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The rotations of K and V, of single rows, and of q, as the kernel loads them.

    These and the presets' tables of levels are kept for good. They must be made before
    a CUDA graph is captured.
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
    """The tables that the kernel reads.

    They are kv_matrix, single_matrix, query_matrix and tables of store/params.cuh.
    """
    matrices = make_matrices(layout.head_size, device)
    return (*matrices, level_tables(layout, device))


def _tail_arguments(update: TailUpdate | None) -> tuple:
    """The kernel's arguments for the tail, as in store/params.cuh."""
    if update is None:
        return (None, None, None, *[0] * 8, None)
    tail = update.tail
    return (
        tail.pages,
        tail.blocks,
        tail.packed_lens,
        tail.format.num_rows,
        *tail.format.plane_offsets,
        tail.num_tokens,
        update.block_table,
    )


def store(
    call: StoreCall, tuning: StoreTuning | None = None, enable_pdl: bool = True
) -> None:
    """Quantise K and V into their slots and, if q is given, rotate it: a ``StoreFn``.

    Thread blocks of the same launch update the tail, if there is one. They
    cannot wait for the other blocks. So a row does not count if the step stores other
    sequences' tokens in its sequence's blocks.

    Args:
        call: The tokens and queries. Blocks and heads of the cache are at multiples of
            16 bytes, vectors at multiples of 8.
        tuning: Launch parameters; None for ``default_tuning``'s.
        enable_pdl: Whether the kernel may begin, on GPUs that can, before the one
            before it on the stream has ended. It waits for that before it reads or
            writes anything but constants.

    Raises:
        RuntimeError: If the kernel cannot be built. ``build_and_load`` lists the errors
            of its function.

    """
    slot_mapping, query, layout = call.slot_mapping, call.query, call.layout
    key_offset, tail, direction = call.key_offset, call.tail, call.query_direction
    num_tokens = slot_mapping.shape[0]
    num_queries = 0 if query is None else query.shape[0]
    if num_tokens == 0 and num_queries == 0:
        return
    if tuning is None:
        tuning = default_tuning(2 * num_tokens * call.key.shape[1], layout)
    device = call.kv_cache.device
    step = tail or key_offset or direction  # all have the step's sequences
    variant = Variant(
        key_offset is not None,
        tail is not None,
        query_direction=direction is not None,
    )
    STORE.load(layout, None, device, variant)(
        call.kv_cache,
        slot_mapping,
        call.key,
        call.value,
        *_constants(layout, device),
        query,
        *(call.rotated_query or (None, None)),
        score_factor(layout, call.scale),
        None if key_offset is None else key_offset.table,
        None if direction is None else direction.table,
        None if step is None else step.seq_lens,
        None if step is None else step.query_start_loc,
        *_tail_arguments(tail),
        *tuning,
        enable_pdl,
    )
