# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arms of ``benchmark_turbo_mla.py`` with packed latents."""

from functools import cached_property, partial
from typing import Any

import torch
from turbo_mla_arms import BLOCK_SIZE, RANK, ROPE, SIZE, Arm, Batch, Chunk

# The plans of CUDA's decode kernel, by the end of an arm's name. They are for compute
# capability 10.0 and 12.0, for 8.0 to 8.9, and for Hopper by warpgroups alone, with
# query rows as columns or as rows.
PLANS = {
    "slices": "SLICES",
    "slices_8x": "COPYING_SLICES",
    "warpgroups": "WARPGROUPS",
    "rows": "ROWS",
}


def kernels_of_plans(name: str) -> Any:
    """CUDA's ``LatentKernels`` with the decode plans of a name of ``PLANS``."""
    from vllm.v1.attention.ops.turbo.cuda import latent_decode, latent_plans
    from vllm.v1.attention.ops.turbo.cuda.latent_kernels import CudaLatentKernels

    plans = getattr(latent_plans, PLANS[name])
    return CudaLatentKernels("they were asked for")._replace(
        decode_attention=partial(latent_decode.decode_attention, plans=plans),
        num_decode_splits=partial(latent_decode.num_decode_splits, plans=plans),
    )


class TurboArm(Arm):
    """Packed latents in rotated coordinates. The layer's weights rotate queries, and
    rotate outputs back. With ``has_mean`` latents lose a mean when they are stored.
    """

    def __init__(
        self,
        batch: Batch,
        cache_dtype: str,
        kernels: str = "auto",
        cache: torch.Tensor | None = None,
        has_mean: bool = False,
    ) -> None:
        super().__init__(batch)
        from vllm.v1.attention.ops.turbo.choose import choose_kernels
        from vllm.v1.attention.ops.turbo.latent.choose import LatentSource
        from vllm.v1.attention.ops.turbo.latent.format import LatentFormat

        self.layout = LatentFormat.from_cache_dtype(cache_dtype, SIZE)
        shape = batch.shape
        if kernels in PLANS:
            self.kernels = kernels_of_plans(kernels)
        else:
            sizes = shape.num_heads, shape.query_len
            source = LatentSource(self.layout, *sizes, is_sparse=bool(self.num_read))
            self.kernels = choose_kernels(kernels, source)
        self.token_bytes = self.layout.slot_size
        size = (batch.num_blocks, BLOCK_SIZE, self.token_bytes)
        if cache is None:
            cache = torch.zeros(size, dtype=torch.uint8, device=batch.device)
        self.cache = cache
        self.mean = self.rotated_mean = None
        if has_mean:
            from vllm.v1.attention.ops.turbo.latent.mean import with_rotation

            rows = with_rotation(torch.full((RANK,), 0.5)).to(batch.device)
            self.mean, self.rotated_mean = rows.unbind()

    def write(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor
    ) -> None:
        from vllm.v1.attention.ops.turbo.latent.interface import LatentStoreCall

        call = LatentStoreCall(self.cache, slots, kv_c, k_pe, self.layout, self.mean)
        self.kernels.store(call)

    def gather(self, chunk: Chunk, output: torch.Tensor) -> None:
        from vllm.v1.attention.ops.turbo.latent.interface import GatherCall

        call = GatherCall(
            self.cache,
            output,
            self.batch.block_table,
            self.layout,
            chunk.cu_seq_lens,
            chunk.token_to_seq,
            chunk.num_tokens,
            chunk.starts,
            self.mean,
        )
        self.kernels.gather(call)

    def latents(self, output: torch.Tensor) -> torch.Tensor:
        from vllm.v1.attention.ops.turbo.reference import inverse_rotate

        return inverse_rotate(output.cpu().float()).to(output.device)

    @cached_property
    def rotated(self) -> tuple[torch.Tensor, ...]:
        """The queries' rotated latent and rotary parts, the output and its LSE."""
        from vllm.v1.attention.ops.turbo.reference import rotate

        query, rope = self.batch.query.split([RANK, ROPE], -1)
        rotated = rotate(query.cpu().float()).to(query)
        lse = torch.empty(query.shape[:2], device=query.device)
        return rotated, rope, torch.empty_like(rotated), lse

    def decode_batch(self) -> Any:
        """The ``DecodeBatch`` of the call."""
        from vllm.v1.attention.ops.turbo.interface import DecodeBatch

        batch = self.batch
        return DecodeBatch(
            len(batch.seq_lens),
            batch.block_table,
            batch.seq_lens,
            batch.shape.query_len,
        )

    @cached_property
    def calls(self) -> tuple[Any, Any]:
        """The batch and the scratch of the call."""
        from vllm.utils.platform_utils import num_compute_units
        from vllm.v1.attention.ops.turbo.interface import Partials

        batch, (num_tokens, heads) = self.decode_batch(), self.batch.query.shape[:2]
        splits = self.kernels.num_decode_splits(
            batch.num_seqs, heads, num_compute_units(0), batch.query_len
        )
        rows = num_tokens * splits
        output = torch.empty(rows, heads, RANK, device=self.batch.device)
        return batch, Partials(output, output.new_empty(output.shape[:2]))

    def attention(self) -> torch.Tensor:
        from vllm.v1.attention.ops.turbo.latent.interface import LatentCall

        query, rope, output, lse = self.rotated
        batch, partials = self.calls
        scale = self.batch.shape.scale
        pages = self.cache, self.layout, batch
        tensors = output, lse, query, rope, self.rotated_mean
        call = LatentCall(*pages, scale, *tensors, is_sparse=bool(self.num_read))
        self.kernels.decode_attention(call, partials)
        return output
