# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of the recent window as a CUDA kernel: see ``window_format``."""

from collections.abc import Callable
from functools import cache

import torch

from vllm.v1.attention.ops.turbo.cuda.build import CudaModule, build_and_load
from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import KeyOffset, WindowUpdate


def instance(layout: TurboFormat) -> str:
    """The name of a module's instance."""
    return f"{layout.name}_{layout.head_size}"


def module(layout: TurboFormat) -> CudaModule:
    """What is built, for models with an offset of K and without."""
    return CudaModule("window", instance(layout), layout_header(layout))


@cache
def load(layout: TurboFormat, device: torch.device) -> Callable[..., None]:
    """Build, if need be, and load the kernel of a layout.

    Raises:
        RuntimeError: If it cannot be built.

    """
    return build_and_load(module(layout), device)


def update_window(
    update: WindowUpdate,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TurboFormat,
    key_offset: KeyOffset | None = None,
) -> None:
    """Count the rows that are valid, and write those of a step's tokens.

    The kernel before it on the stream is the store of these tokens, which lets it begin
    early: it waits for that to end before it reads what that writes.

    Args:
        update: Of the step's sequences; ``packed_lens`` is written.
        kv_cache: (num_blocks, H, N, C) uint8, in which the step's tokens are stored.
        slot_mapping: (T,) int64, their slots; a token with -1 has no row.
        key: (>= T, H, D) bf16 or fp16, last axis contiguous.
        value: (>= T, H, D), likewise.
        layout: The cache's format.
        key_offset: What is taken off K; None for nothing. Where tokens are in their
            sequences is in ``update``.

    Raises:
        RuntimeError: If the kernel cannot be built; see ``build_and_load`` for what its
            function raises.

    """
    window = update.window
    load(layout, kv_cache.device)(
        kv_cache,
        slot_mapping,
        key,
        value,
        None if key_offset is None else key_offset.table,
        window.pages,
        window.blocks,
        window.packed_lens,
        window.format.num_rows,
        *window.format.plane_offsets,
        window.num_tokens,
        update.block_table,
        update.seq_lens,
        update.query_start_loc,
    )
