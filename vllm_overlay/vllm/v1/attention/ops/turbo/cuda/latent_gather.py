# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Gather for MLA as a CUDA kernel: dequantise cached context for prefill."""

from collections.abc import Callable
from functools import cache

import torch

from vllm.v1.attention.ops.turbo.cuda.build import CudaModule, build_and_load
from vllm.v1.attention.ops.turbo.cuda.constants import latent_header
from vllm.v1.attention.ops.turbo.latent_format import LatentFormat


def instance(layout: LatentFormat) -> str:
    """The name of a module's instance."""
    return f"{layout.name}_{layout.rank}_{layout.rope}"


def module(layout: LatentFormat) -> CudaModule:
    """What is built."""
    header = latent_header(layout)
    return CudaModule("latent_gather", instance(layout), header, folder="latent")


@cache
def load(layout: LatentFormat, device: torch.device) -> Callable[..., None]:
    """Build, if need be, and load the kernel of a layout.

    Raises:
        RuntimeError: If it cannot be built.

    """
    return build_and_load(module(layout), device)


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
    """See ``latent_interface.LatentGatherFn``.

    The output's rows begin at multiples of four elements. With ``enable_pdl`` the
    kernel may begin before the one before it on the stream has ended; it waits for what
    it reads.

    Raises:
        RuntimeError: If the kernel cannot be built; see ``build_and_load`` for what its
            function raises.

    """
    if num_tokens == 0:
        return
    load(layout, kv_cache.device)(
        kv_cache,
        output,
        block_table,
        cu_seq_lens,
        token_to_seq,
        num_tokens,
        seq_starts,
        enable_pdl,
    )
