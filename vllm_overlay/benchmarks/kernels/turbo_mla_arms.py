# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arms of ``benchmark_turbo_mla.py``: packed and other caches of MLA, and kernels.

Functions import vLLM, so that a missing import ends only the arm that needs it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from turbo_decode_arms import DTYPE, Sequences

# The sizes of DeepSeek and of models derived from it.
RANK, ROPE = 512, 64
SIZE = RANK + ROPE
# FLASHMLA's block size, which all arms have.
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """A decode step of sequences with equal lengths and numbers of query tokens."""

    batch: int
    context: int
    num_heads: int
    query_len: int

    @staticmethod
    def parse(text: str) -> "Shape":
        """Read ``32x32768x16`` or, with several query tokens, ``32x32768x16x4``."""
        batch, context, num_heads, *query_len = map(int, text.split("x"))
        return Shape(batch, context, num_heads, *(query_len or [1]))

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}x{self.num_heads}x{self.query_len}"

    @property
    def scale(self) -> float:
        """Softmax scale of DeepSeek's heads, of 128 + 64 coordinates."""
        return 192**-0.5


class Batch(Sequences):
    """The tensors of a step, of B sequences' last Q tokens, that every arm gets.

    Attributes:
        query: (B * Q, Hq, L + R).
        kv_c: (B * Q, L), latents of the last tokens.
        k_pe: (B * Q, R), rotary keys of the last tokens.

    """

    def __init__(self, shape: Shape, seq_lens: list[int], device: str) -> None:
        super().__init__(seq_lens, BLOCK_SIZE, device, shape.query_len)
        self.shape = shape
        num_tokens = len(seq_lens) * shape.query_len
        self.query = self.random(num_tokens, shape.num_heads, SIZE)
        self.kv_c, self.k_pe = self.tokens(num_tokens)

    def tokens(self, count: int) -> tuple[torch.Tensor, ...]:
        """Random latents and rotary keys, (count, L) and (count, R)."""
        return self.random(count, SIZE).split([RANK, ROPE], -1)


class Arm(ABC):
    """One way to keep latents, and to attend to them.

    Attributes:
        batch: The step.
        cache: (num_blocks, BLOCK_SIZE, C).
        token_bytes: C in bytes.
        num_read: The most tokens that a query token attends to; 0 for all that it sees.
        relative_error: The gate's bound for attention to the cache's content.

    """

    cache: torch.Tensor
    token_bytes: int
    num_read = 0
    relative_error = 0.01

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    @abstractmethod
    def write(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store latents, (T, L), and rotary keys, (T, R)."""

    @abstractmethod
    def attention(self) -> torch.Tensor:
        """The output, (B * Q, Hq, L), of attention from the batch's queries."""

    @abstractmethod
    def gather(self, chunk: "Chunk", output: torch.Tensor) -> None:
        """Write a chunk of contexts to ``output``, (T, L + R), in the model's dtype."""

    def latents(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs of ``attention`` in the latents' own coordinates, in fp32."""
        return output.float()

    def store(self) -> None:
        """Store the last tokens of the sequences."""
        self.write(self.batch.kv_c, self.batch.k_pe, self.batch.slot_mapping)


class Chunk:
    """A chunk of contexts for prefill: the first tokens of each sequence.

    Attributes:
        num_tokens: Number of tokens of all sequences.
        cu_seq_lens: (B + 1,) int32.
        token_to_seq: (num_tokens,) int32.
        starts: (B,) int32, zeros.

    """

    def __init__(self, batch: Batch, most: int) -> None:
        lengths = batch.seq_lens.clamp(max=max(1, most // len(batch.seq_lens)))
        zero = lengths.new_zeros(1)
        self.cu_seq_lens = torch.cat([zero, lengths.cumsum(0).int()])
        requests = torch.arange(len(lengths), dtype=torch.int32, device=batch.device)
        self.token_to_seq = requests.repeat_interleave(lengths)
        self.num_tokens = self.token_to_seq.numel()
        self.starts = torch.zeros_like(lengths)


class PlainArm(Arm):
    """Latents without packing, in bf16 or fp8."""

    def __init__(
        self, batch: Batch, fp8: bool = False, cache: torch.Tensor | None = None
    ) -> None:
        super().__init__(batch)
        dtype = torch.uint8 if fp8 else DTYPE
        self.fp8 = fp8
        self.token_bytes = SIZE * dtype.itemsize
        self.kv_cache_dtype = "fp8" if fp8 else "auto"
        size = (batch.num_blocks, BLOCK_SIZE, SIZE)
        if cache is None:
            cache = torch.zeros(size, dtype=dtype, device=batch.device)
        self.cache = cache
        self.one = torch.ones((), device=batch.device)
        if fp8:
            self.relative_error = 0.06  # queries are rounded also

    @property
    def pages(self) -> torch.Tensor:
        return self.cache.view(torch.float8_e4m3fn) if self.fp8 else self.cache

    def write(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor
    ) -> None:
        from vllm import _custom_ops as ops

        ops.concat_and_cache_mla(
            kv_c, k_pe, self.cache, slots, self.kv_cache_dtype, self.one
        )

    def gather(self, chunk: Chunk, output: torch.Tensor) -> None:
        from vllm import _custom_ops as ops

        ops.gather_and_maybe_dequant_cache(
            self.cache,
            output,
            self.batch.block_table,
            chunk.cu_seq_lens,
            chunk.token_to_seq,
            chunk.num_tokens,
            self.kv_cache_dtype,
            self.one,
            chunk.starts,
        )


class FlashAttentionArm(PlainArm):
    """FLASH_ATTN_MLA, Hopper's first choice for bf16, as FlashAttention 3."""

    @cached_property
    def plan(self) -> dict[str, Any]:
        from vllm.config.attention import AttentionConfig
        from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata

        batch, shape = self.batch, self.batch.shape
        num_splits = AttentionConfig().flash_attn_max_num_splits_for_cuda_graph
        metadata = get_scheduler_metadata(
            batch_size=len(batch.seq_lens),
            max_seqlen_q=shape.query_len,
            max_seqlen_k=batch.max_seq_len,
            num_heads_q=shape.num_heads,
            num_heads_kv=1,
            headdim=ROPE,
            cache_seqlens=batch.seq_lens,
            qkv_dtype=DTYPE,
            headdim_v=RANK,
            page_size=BLOCK_SIZE,
            cu_seqlens_q=batch.query_start_loc(),
            causal=True,
            num_splits=num_splits,
        )
        return {"scheduler_metadata": metadata, "num_splits": num_splits}

    def attention(self) -> torch.Tensor:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        latent, rope = self.cache.unsqueeze(-2).split([RANK, ROPE], -1)
        query, query_rope = self.batch.query.split([RANK, ROPE], -1)
        return flash_attn_varlen_func(
            q=query_rope,
            k=rope,
            v=latent,
            q_v=query,
            max_seqlen_q=self.batch.shape.query_len,
            cu_seqlens_q=self.starts,
            max_seqlen_k=self.batch.max_seq_len,
            seqused_k=self.batch.seq_lens,
            block_table=self.batch.block_table,
            softmax_scale=self.batch.shape.scale,
            causal=True,
            fa_version=3,
            **self.plan,
        )

    @cached_property
    def starts(self) -> torch.Tensor:
        return self.batch.query_start_loc()


class FlashMLAArm(PlainArm):
    """FLASHMLA, Hopper's choice for fp8."""

    @cached_property
    def plan(self) -> Any:
        from vllm.v1.attention.ops.flashmla import (
            get_mla_metadata,
            get_mla_metadata_dense_fp8,
        )

        shape = self.batch.shape
        rows = shape.query_len * shape.num_heads
        seq_lens = self.batch.seq_lens
        if self.fp8:
            return get_mla_metadata_dense_fp8(seq_lens, rows, 1)
        return get_mla_metadata(seq_lens, rows, 1, is_fp8_kvcache=False)[0]

    @cached_property
    def query(self) -> torch.Tensor:
        """Queries, (B, Q, Hq, L + R), in fp8 if the cache is; the cast is not timed."""
        batch = self.batch
        query = batch.query.unflatten(0, (-1, batch.shape.query_len))
        return query.to(torch.float8_e4m3fn) if self.fp8 else query

    def attention(self) -> torch.Tensor:
        from vllm.v1.attention.ops.flashmla import (
            flash_mla_with_kvcache,
            flash_mla_with_kvcache_fp8,
        )

        arguments: dict[str, Any] = {
            "q": self.query,
            "k_cache": self.pages.unsqueeze(-2),
            "block_table": self.batch.block_table,
            "cache_seqlens": self.batch.seq_lens,
            "head_dim_v": RANK,
            "softmax_scale": self.batch.shape.scale,
            "causal": True,
        }
        if not self.fp8:
            output, _ = flash_mla_with_kvcache(
                **arguments, tile_scheduler_metadata=self.plan
            )
        else:
            tiles, num_splits = self.plan
            one = self.one.reshape(1)
            output, _ = flash_mla_with_kvcache_fp8(
                **arguments,
                tile_scheduler_metadata=tiles,
                num_splits=num_splits,
                descale_q=one,
                descale_k=one,
            )
        return output.flatten(0, 1)


class TritonArm(PlainArm):
    """TRITON_MLA, the choice of GPUs before Hopper. Each query token is a sequence."""

    @cached_property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks and the number of tokens that each query token sees."""
        batch, count = self.batch, self.batch.shape.query_len
        last = torch.arange(1 - count, 1, dtype=torch.int32, device=batch.device)
        seen = (batch.seq_lens.unsqueeze(1) + last).flatten()
        return batch.block_table.repeat_interleave(count, dim=0), seen

    @cached_property
    def scratch(self) -> tuple[torch.Tensor, ...]:
        from vllm.utils.platform_utils import num_compute_units
        from vllm.v1.attention.backends.mla.triton_mla import _compute_num_kv_splits

        rows, heads, _ = self.batch.query.shape
        splits = _compute_num_kv_splits(self.batch.max_seq_len, num_compute_units(0))
        device = self.batch.device
        return (
            torch.zeros(rows, heads, RANK, dtype=DTYPE, device=device),
            torch.zeros(rows, heads, dtype=DTYPE, device=device),
            torch.empty(rows, heads, splits, RANK + 1, device=device),
        )

    def attention(self) -> torch.Tensor:
        from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

        output, lse, logits = self.scratch
        block_table, seq_lens = self.rows
        pages = self.pages.unsqueeze(2)
        decode_attention_fwd(
            self.batch.query,
            pages,
            pages[..., :RANK],
            output,
            lse,
            block_table,
            seq_lens,
            logits,
            logits.shape[2],
            self.batch.shape.scale,
            BLOCK_SIZE,
            k_scale=self.one,
            v_scale=self.one,
            is_mla=True,
        )
        return output
