# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arms of ``benchmark_turbo_mla.py`` that attend to lists of tokens: sparse MLA."""

from functools import cached_property
from typing import Any

import torch
from turbo_mla_arms import BLOCK_SIZE, DTYPE, RANK, ROPE, Arm, Batch, Chunk
from turbo_mla_packed import TurboArm

# The most tokens of a list, in DeepSeek V3.2 and GLM-5.
MOST_LISTED = 2048


def list_tokens(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of tokens that query tokens see, in random order.

    Returns:
        Slots, (B * Q, MOST_LISTED) int32, and -1 past a list's end; and the lengths,
        (B * Q,) int32.

    """
    count = batch.shape.query_len
    lists, lengths = [], []
    for i, length in enumerate(batch.seq_lens.tolist()):
        slots = batch.slots(i).int()
        for seen in range(length - count + 1, length + 1):
            order = torch.randperm(seen, device=batch.device)[:MOST_LISTED]
            missing = MOST_LISTED - len(order)
            lists.append(torch.nn.functional.pad(slots[order], (0, missing), value=-1))
            lengths.append(len(order))
    counts = torch.tensor(lengths, dtype=torch.int32, device=batch.device)
    return torch.stack(lists), counts


class ListedTurboArm(TurboArm):
    """Packed latents, as ``TurboArm`` has them."""

    num_read = MOST_LISTED

    def decode_batch(self) -> Any:
        from vllm.v1.attention.ops.turbo.interface import DecodeBatch

        slots, counts = list_tokens(self.batch)
        return DecodeBatch(len(slots), slots, counts)


class ListedFlashMLAArm(Arm):
    """FLASHMLA_SPARSE on ``fp8_ds_mla``, Hopper's choice for fp8: latents in fp8 with a
    scale for 128 coordinates, and rotary keys in bf16. Queries are padded to 64 heads,
    as vLLM does it.
    """

    num_read = MOST_LISTED
    token_bytes = RANK + 4 * RANK // 128 + 2 * ROPE
    # The kernel multiplies in bf16.
    relative_error = 0.02

    def __init__(self, batch: Batch, cache: torch.Tensor | None = None) -> None:
        super().__init__(batch)
        size = (batch.num_blocks, BLOCK_SIZE, self.token_bytes)
        if cache is None:
            cache = torch.zeros(size, dtype=torch.uint8, device=batch.device)
        self.cache = cache
        self.one = torch.ones((), device=batch.device)

    def write(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor
    ) -> None:
        from vllm import _custom_ops as ops

        ops.concat_and_cache_mla(kv_c, k_pe, self.cache, slots, "fp8_ds_mla", self.one)

    def gather(self, chunk: Chunk, output: torch.Tensor) -> None:
        ends = chunk.cu_seq_lens.tolist()
        for i, (begin, end) in enumerate(zip(ends, ends[1:])):
            rows = self.cache.flatten(0, 1)[self.batch.slots(i)[: end - begin]]
            codes, scales, rope = rows.split([RANK, 4 * RANK // 128, 2 * ROPE], -1)
            latents = codes.contiguous().view(torch.float8_e4m3fn).float()
            scales = scales.contiguous().view(torch.float32)
            latents = latents * scales.repeat_interleave(128, dim=-1)
            output[begin:end, :RANK] = latents.to(output.dtype)
            output[begin:end, RANK:] = rope.contiguous().view(DTYPE)

    @cached_property
    def plan(self) -> dict[str, Any]:
        from vllm.v1.attention.ops.flashmla import get_mla_metadata

        slots, _ = list_tokens(self.batch)
        num_tokens, device = len(slots), self.batch.device
        most = self.batch.max_seq_len
        return {
            # With indices the kernel reads neither of the first two.
            "block_table": torch.zeros(num_tokens, 1, dtype=torch.int32, device=device),
            "cache_seqlens": torch.full(
                (num_tokens,), most, dtype=torch.int32, device=device
            ),
            "tile_scheduler_metadata": get_mla_metadata()[0],
            "indices": slots.unsqueeze(1),
        }

    def attention(self) -> torch.Tensor:
        from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache

        query = self.batch.query.unsqueeze(1)
        heads = query.shape[2]
        padded = query.new_zeros(len(query), 1, -(-heads // 64) * 64, query.shape[3])
        padded[:, :, :heads] = query
        output, _ = flash_mla_with_kvcache(
            q=padded,
            k_cache=self.cache.unsqueeze(-2),
            head_dim_v=RANK,
            softmax_scale=self.batch.shape.scale,
            is_fp8_kvcache=True,
            **self.plan,
        )
        return output[:, 0, :heads]
