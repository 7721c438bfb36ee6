# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Gather for MLA as a CUDA kernel: dequantises cached context for a prefill."""

import torch

from vllm.v1.attention.ops.turbo.cuda.constants import latent_header
from vllm.v1.attention.ops.turbo.cuda.family import Family
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat

GATHER = Family[LatentFormat, None](
    kernel="latent_gather",
    title="gather kernel of MLA",
    refusal=lambda layout: None,
    name=lambda layout, _: f"{layout.name}_{layout.rank}_{layout.rope}",
    header=lambda layout, _: latent_header(layout),
    served=lambda layout, demand: [(layout, None, demand.variant)],
    folder="latent",
)


def gather(
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    layout: LatentFormat,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    seq_starts: torch.Tensor | None = None,
    enable_pdl: bool = True,
) -> None:
    """Dequantise cached latents: a ``latent.interface.LatentGatherFn``.

    The output's rows begin at multiples of four elements. With ``enable_pdl`` the
    kernel may begin before the previous one on the stream has ended. It waits for the
    data that it reads.

    Raises:
        RuntimeError: If the kernel cannot be built. ``build_and_load`` lists the errors
            of its function.

    """
    if num_tokens == 0:
        return
    GATHER.load(layout, None, kv_cache.device)(
        kv_cache,
        output,
        block_table,
        cu_seq_lens,
        token_to_seq,
        num_tokens,
        seq_starts,
        enable_pdl,
    )
