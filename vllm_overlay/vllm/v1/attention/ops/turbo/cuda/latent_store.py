# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Store for MLA as a CUDA kernel: quantise latents and rotary keys into pages."""

import torch

from vllm.v1.attention.ops.turbo.cuda.constants import latent_store_header
from vllm.v1.attention.ops.turbo.cuda.family import Family
from vllm.v1.attention.ops.turbo.cuda.store_tables import level_tables
from vllm.v1.attention.ops.turbo.latent.format import (
    LATENT_PRESETS,
    LATENT_SIZES,
    LatentFormat,
)

# Up to so many tokens four lanes share a group and a latent's 128 coordinates are a
# warp's; of more a lane has a group. By the rank. On an H200, with latents of 512, four
# lanes and one take 7.0 and 7.9 us of 256 tokens, and 8.6 and 8.2 of 512; with codes of
# three bits 11.5 and 12.0 of 128, and 13.0 and 12.1 of 256.
_FEW_TOKENS = {512: 256, 256: 512}


def default_parts(num_tokens: int, layout: LatentFormat) -> int:
    """Lanes that share a scale group: 1 or 4."""
    return 4 if num_tokens <= _FEW_TOKENS[layout.rank] else 1


def store_sizes(layout: LatentFormat) -> list[int]:
    """Numbers of tokens of which each takes another kernel."""
    return [1, _FEW_TOKENS[layout.rank] + 1]


LATENT_STORE = Family[LatentFormat, None](
    kernel="latent_store",
    title="store kernel of MLA",
    refusal=lambda layout: None,
    name=lambda layout, _: f"{layout.name}_{layout.rank}_{layout.rope}",
    header=lambda layout, _: latent_store_header(layout),
    served=lambda layout, demand: [(layout, None, demand.variant)],
    # The bytes are exact: no multiply-add may be fused.
    flags=("-fmad=false",),
    folder="latent",
)


def make_tables(rank: int, device: torch.device) -> None:
    """Make the tables of levels of the presets, which are kept for good: before a CUDA
    graph is captured.
    """
    for head_size, (size, _) in LATENT_SIZES.items():
        if size == rank:
            for name in LATENT_PRESETS:
                level_tables(LatentFormat.from_cache_dtype(name, head_size), device)


def store(
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor | None,
    layout: LatentFormat,
    parts: int | None = None,
    enable_pdl: bool = True,
) -> None:
    """See ``latent.interface.LatentStoreFn``.

    Blocks of the cache and rows of ``kv_c`` are at multiples of 16 bytes, rows of
    ``k_pe`` at multiples of 8. With ``enable_pdl`` the kernel may begin before the one
    before it on the stream has ended, for which it waits before it reads or writes
    anything but constants.

    Args:
        kv_cache: See there, as the next four.
        slot_mapping: (T,).
        kv_c: (>= T, L).
        k_pe: (>= T, R).
        layout: The cache's format.
        parts: Lanes that share a scale group, 1 or 4; None for ``default_parts``.
        enable_pdl: See above.

    Raises:
        RuntimeError: If the kernel cannot be built; see ``build_and_load`` for what its
            function raises.

    """
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    if parts is None:
        parts = default_parts(num_tokens, layout)
    LATENT_STORE.load(layout, None, kv_cache.device)(
        kv_cache,
        slot_mapping,
        kv_c,
        k_pe if layout.rope else None,
        level_tables(layout, kv_cache.device),
        parts,
        enable_pdl,
    )
