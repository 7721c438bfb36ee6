# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Store for MLA as a CUDA kernel: quantises latents and rotary keys into pages."""

import torch

from vllm.v1.attention.ops.turbo.cuda.constants import latent_store_header
from vllm.v1.attention.ops.turbo.cuda.family import Family
from vllm.v1.attention.ops.turbo.cuda.store_tables import level_tables
from vllm.v1.attention.ops.turbo.latent.format import (
    LATENT_PRESETS,
    LATENT_SIZES,
    LatentFormat,
)
from vllm.v1.attention.ops.turbo.latent.interface import LatentStoreCall

# The most tokens with which four lanes share a group, by the rank. A warp then has 128
# coordinates. With more tokens each lane has a group.
# Tuning: us of four lanes / of one, latents of 512, an H200, 2026-11, `ci/gpu.py mla`.
# Four bits: 7.0 / 7.9 for 256 tokens, 8.6 / 8.2 for 512.
# Three bits: 11.5 / 12.0 for 128 tokens, 13.0 / 12.1 for 256.
_FEW_TOKENS = {512: 256, 256: 512}


def default_parts(num_tokens: int, layout: LatentFormat) -> int:
    """Lanes that share a scale group: 1 or 4."""
    return 4 if num_tokens <= _FEW_TOKENS[layout.rank] else 1


def store_sizes(layout: LatentFormat) -> list[int]:
    """Numbers of tokens that each launch a different kernel."""
    return [1, _FEW_TOKENS[layout.rank] + 1]


LATENT_STORE = Family[LatentFormat, None](
    kernel="latent_store",
    title="store kernel of MLA",
    refusal=lambda layout: None,
    name=lambda layout, _: f"{layout.name}_{layout.rank}_{layout.rope}",
    header=lambda layout, _: latent_store_header(layout),
    served=lambda layout, demand: [(layout, None, demand.variant)],
    # A fused multiply-add would change the stored bytes.
    flags=("-fmad=false",),
    folder="latent",
)


def make_tables(rank: int, device: torch.device) -> None:
    """Make the tables of the presets' levels, which are kept for good.

    They must be made before a CUDA graph is captured.
    """
    for head_size, (size, _) in LATENT_SIZES.items():
        if size == rank:
            for name in LATENT_PRESETS:
                level_tables(LatentFormat.from_cache_dtype(name, head_size), device)


def store(
    call: LatentStoreCall, parts: int | None = None, enable_pdl: bool = True
) -> None:
    """Quantise latents and rotary keys into their slots: a ``LatentStoreFn``.

    Args:
        call: The tokens. Blocks of the cache and rows of ``kv_c`` are at multiples of
            16 bytes, rows of ``k_pe`` at multiples of 8.
        parts: Lanes that share a scale group, 1 or 4; None for ``default_parts``.
        enable_pdl: Whether the kernel may begin before the previous one on the stream
            has ended. It waits for that before it reads or writes anything but
            constants.

    Raises:
        RuntimeError: If the kernel cannot be built. ``build_and_load`` lists the errors
            of its function.

    """
    layout, device = call.layout, call.kv_cache.device
    num_tokens = call.slot_mapping.shape[0]
    if num_tokens == 0:
        return
    if parts is None:
        parts = default_parts(num_tokens, layout)
    LATENT_STORE.load(layout, None, device)(
        call.kv_cache,
        call.slot_mapping,
        call.kv_c,
        call.k_pe if layout.rope else None,
        level_tables(layout, device),
        call.mean,
        parts,
        enable_pdl,
    )
