# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Gather for MLA as a CUDA kernel: dequantises cached context for a prefill."""

from vllm.v1.attention.ops.turbo.cuda.constants import latent_header
from vllm.v1.attention.ops.turbo.cuda.family import Family
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import GatherCall

GATHER = Family[LatentFormat, None](
    kernel="latent_gather",
    title="gather kernel of MLA",
    refusal=lambda layout: None,
    name=lambda layout, _: f"{layout.name}_{layout.rank}_{layout.rope}",
    header=lambda layout, _: latent_header(layout),
    served=lambda layout, demand: [(layout, None, demand.variant)],
    folder="latent",
)


def gather(call: GatherCall, enable_pdl: bool = True) -> None:
    """Dequantise cached latents: a ``GatherFn``.

    Args:
        call: The tokens. Rows of the output begin at multiples of four elements.
        enable_pdl: Whether the kernel may begin before the previous one on the stream
            has ended. It waits for that before it reads what that may have written.

    Raises:
        RuntimeError: If the kernel cannot be built. ``build_and_load`` lists the errors
            of its function.

    """
    if call.num_tokens == 0:
        return
    GATHER.load(call.layout, None, call.kv_cache.device)(
        call.kv_cache,
        call.output,
        call.block_table,
        call.cu_seq_lens,
        call.token_to_seq,
        call.num_tokens,
        call.seq_starts,
        call.mean,
        enable_pdl,
    )
