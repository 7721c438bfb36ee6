# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arms of ``benchmark_turbo_decode.py``: ways to keep and read a KV cache.

vLLM is imported where it is used, so that what one arm lacks ends that arm only.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """One decode batch: ``batch`` sequences of ``context`` tokens each."""

    batch: int
    context: int
    num_heads: int
    num_kv_heads: int
    head_size: int

    @staticmethod
    def parse(text: str) -> "Shape":
        return Shape(*map(int, text.split("x")))

    def __str__(self) -> str:
        sizes = (self.num_heads, self.num_kv_heads, self.head_size)
        return "x".join(map(str, (self.batch, self.context, *sizes)))


class Batch:
    """The tensors of a decode step that every arm gets.

    Attributes:
        query: (B, Hq, D); ``key`` and ``value`` (B, H, D): of the newest token.
        output: (B, Hq, D).
        block_table: (B, max_blocks) int32, blocks in random order.
        seq_lens: (B,) int32.
        slot_mapping: (B,) int64, slots of the newest tokens.

    """

    def __init__(
        self, shape: Shape, seq_lens: list[int], block_size: int, device: str
    ) -> None:
        self.shape = shape
        self.block_size = block_size
        self.device = device
        self.max_seq_len = max(seq_lens)
        num_seqs, size = len(seq_lens), shape.head_size
        self.num_blocks = num_seqs * -(-self.max_seq_len // block_size)
        self.query = self.random(num_seqs, shape.num_heads, size)
        self.key = self.random(num_seqs, shape.num_kv_heads, size)
        self.value = self.random(num_seqs, shape.num_kv_heads, size)
        self.output = torch.full_like(self.query, float("nan"))
        order = torch.randperm(self.num_blocks, device=device)
        self.block_table = order.to(torch.int32).view(num_seqs, -1)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        last = [self.slots(i)[-1:] for i in range(num_seqs)]
        self.slot_mapping = torch.cat(last)

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, dtype=DTYPE, device=self.device)

    def slots(self, sequence: int) -> torch.Tensor:
        """Slots of a sequence's tokens, in order."""
        length = int(self.seq_lens[sequence])
        position = torch.arange(length, device=self.device)
        block = self.block_table[sequence, position // self.block_size]
        return block * self.block_size + position % self.block_size


class Arm(ABC):
    """One way to keep and read the KV cache.

    Attributes:
        cache: uint8 or bf16, (num_blocks, ...).
        token_bytes: Bytes of a token and KV head.
        relative_error: Bound of the gate against unquantised K and V; None: the
            arm has to attend exactly to what its cache holds.

    """

    cache: torch.Tensor
    token_bytes: int
    relative_error: float | None = None

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.scale = batch.shape.head_size**-0.5

    @abstractmethod
    def write(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store (T, H, D) keys and values."""

    def store(self) -> None:
        """Store the newest tokens."""
        batch = self.batch
        self.write(batch.key, batch.value, batch.slot_mapping)

    @abstractmethod
    def attention(self) -> None:
        """Attend, into ``batch.output``."""

    def held(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cache holds of ``key`` and ``value``: fp32, on the host."""
        return key.cpu().float(), value.cpu().float()


class FlashAttentionArm(Arm):
    """FlashAttention 3 over bf16 or fp8 pages, called as vLLM's backend does."""

    def __init__(self, batch: Batch, fp8: bool, planned: bool) -> None:
        super().__init__(batch)
        shape = batch.shape
        size = (batch.num_blocks, batch.block_size, shape.num_kv_heads)
        dtype = torch.uint8 if fp8 else DTYPE
        self.cache = torch.zeros(
            *size, 2 * shape.head_size, dtype=dtype, device=batch.device
        )
        self.token_bytes = 2 * shape.head_size * dtype.itemsize
        self.kv_cache_dtype = "fp8" if fp8 else "auto"
        if fp8:
            self.relative_error = 0.15
        self.one = torch.ones((), device=batch.device)
        descale = self.one.expand(len(batch.seq_lens), shape.num_kv_heads)
        self.options: dict[str, Any] = {
            "cu_seqlens_q": torch.arange(
                len(batch.seq_lens) + 1, dtype=torch.int32, device=batch.device
            ),
            "q_descale": descale,
            "k_descale": descale,
            "v_descale": descale,
        }
        self.query_dtype = torch.float8_e4m3fn if fp8 else DTYPE
        self.query = batch.query.to(self.query_dtype)
        if planned:
            self.options |= self.plan()

    def plan(self) -> dict[str, Any]:
        """The schedule and the bound on splits of vLLM's full CUDA graphs."""
        from vllm.config.attention import AttentionConfig
        from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata

        batch, shape = self.batch, self.batch.shape
        num_splits = AttentionConfig().flash_attn_max_num_splits_for_cuda_graph
        metadata = get_scheduler_metadata(
            batch_size=len(batch.seq_lens),
            max_seqlen_q=1,
            max_seqlen_k=batch.max_seq_len,
            num_heads_q=shape.num_heads,
            num_heads_kv=shape.num_kv_heads,
            headdim=shape.head_size,
            cache_seqlens=batch.seq_lens,
            qkv_dtype=self.query_dtype,
            cu_seqlens_q=self.options["cu_seqlens_q"],
            page_size=batch.block_size,
            causal=True,
            num_splits=num_splits,
        )
        return {"scheduler_metadata": metadata, "num_splits": num_splits}

    def write(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        from vllm import _custom_ops as ops

        key_cache, value_cache = self.cache.split(self.batch.shape.head_size, -1)
        ops.reshape_and_cache_flash(
            key,
            value,
            key_cache,
            value_cache,
            slots,
            self.kv_cache_dtype,
            self.one,
            self.one,
        )

    def attention(self) -> None:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        batch = self.batch
        pages = self.cache.view(self.query_dtype)
        key_cache, value_cache = pages.split(batch.shape.head_size, -1)
        flash_attn_varlen_func(
            q=self.query,
            k=key_cache,
            v=value_cache,
            out=batch.output,
            max_seqlen_q=1,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            block_table=batch.block_table,
            fa_version=3,
            **self.options,
        )


class TurboQuantArm(Arm):
    """vLLM's ``turboquant_*`` presets."""

    relative_error = 0.5

    def __init__(self, batch: Batch, cache_dtype: str) -> None:
        from vllm.config.attention import AttentionConfig
        from vllm.model_executor.layers.quantization.turboquant.centroids import (
            get_centroids,
        )
        from vllm.model_executor.layers.quantization.turboquant.config import (
            TurboQuantConfig,
        )
        from vllm.v1.attention.ops.turbo.rotation import hadamard

        super().__init__(batch)
        size, heads = batch.shape.head_size, batch.shape.num_heads
        config = TurboQuantConfig.from_cache_dtype(cache_dtype, size)
        assert isinstance(config, TurboQuantConfig)
        self.config = config
        self.token_bytes = self.config.slot_size_aligned
        device = batch.device
        pages = (batch.num_blocks, batch.block_size, batch.shape.num_kv_heads)
        self.cache = torch.zeros(
            *pages, self.token_bytes, dtype=torch.uint8, device=device
        )
        self.rotation = (hadamard(size).float() / size**0.5).to(device)
        self.centroids = get_centroids(size, self.config.centroid_bits).to(device)
        levels, _ = self.centroids.sort()
        self.midpoints = (levels[:-1] + levels[1:]) / 2
        num_seqs = len(batch.seq_lens)
        self.num_splits = AttentionConfig().tq_max_kv_splits_for_cuda_graph
        self.partial = torch.empty(
            num_seqs, heads, self.num_splits, size + 1, device=device
        )
        self.result = torch.empty_like(batch.query)
        self.lse = torch.empty(num_seqs, heads, device=device)

    def write(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        from vllm.v1.attention.ops.triton_turboquant_store import (
            triton_turboquant_store,
        )

        triton_turboquant_store(
            key,
            value,
            self.cache,
            slots,
            self.rotation,
            self.midpoints,
            mse_bits=self.config.key_mse_bits,
            key_packed_size=self.config.key_packed_size,
            value_quant_bits=self.config.effective_value_quant_bits,
            key_fp8=self.config.key_fp8,
        )

    def attention(self) -> None:
        from vllm.v1.attention.ops.triton_turboquant_decode import (
            triton_turboquant_decode_attention,
        )

        batch = self.batch
        result = triton_turboquant_decode_attention(
            query=batch.query,
            kv_cache=self.cache,
            block_table=batch.block_table,
            seq_lens=batch.seq_lens,
            Pi=self.rotation,
            centroids=self.centroids,
            scale=self.scale,
            mse_bits=self.config.key_mse_bits,
            key_packed_size=self.config.key_packed_size,
            value_quant_bits=self.config.effective_value_quant_bits,
            key_fp8=self.config.key_fp8,
            norm_correction=self.config.norm_correction,
            PiT=self.rotation,
            mid_o_buf=self.partial,
            output_buf=self.result,
            lse_buf=self.lse,
            max_num_kv_splits=self.num_splits,
        )
        # The backend copies, too.
        batch.output.copy_(result)


class TurboArm(Arm):
    """The turbo presets.

    Args:
        batch: The decode step.
        cache_dtype: The preset.
        kernels: As ``attention_config.turbo_kernel``.
        variant: Block of tokens, warps and stages of Triton's attention kernel, and
            splits a sequence (0: as served); None: as served.
        cache: Of another variant, to be shared.

    """

    def __init__(
        self,
        batch: Batch,
        cache_dtype: str,
        kernels: str = "auto",
        variant: tuple[int, int, int, int] | None = None,
        cache: torch.Tensor | None = None,
    ) -> None:
        from vllm.utils.platform_utils import num_compute_units
        from vllm.v1.attention.ops.turbo.format import TurboFormat
        from vllm.v1.attention.ops.turbo.kernels import choose_kernels

        super().__init__(batch)
        shape, device = batch.shape, batch.device
        self.layout = TurboFormat.from_cache_dtype(cache_dtype, shape.head_size)
        self.token_bytes = self.layout.slot_size
        pages = (batch.num_blocks, shape.num_kv_heads, batch.block_size)
        # A recycled page holds any byte.
        self.cache = cache if cache is not None else torch.full(
            (*pages, self.token_bytes), 0xFF, dtype=torch.uint8, device=device
        )  # fmt: skip
        num_seqs, heads = len(batch.seq_lens), shape.num_heads
        group = heads // shape.num_kv_heads
        self.kernels = choose_kernels(kernels, self.layout, group)
        self.options = {}
        if variant:
            from vllm.v1.attention.ops.turbo.triton_decode import DecodeTuning

            self.options["tuning"] = DecodeTuning(*variant[:3])
        self.num_splits = variant[3] if variant else 0
        if self.num_splits == 0:
            units = 1 if device == "cpu" else num_compute_units()
            self.num_splits = self.kernels.num_kv_splits(
                num_seqs, shape.num_kv_heads, units
            )
        self.rotated_query = torch.empty_like(batch.query, dtype=torch.float16)
        self.query_scale = torch.empty(num_seqs, heads, device=device)
        num_partials = num_seqs * self.num_splits
        self.partial = torch.empty(num_partials, heads, shape.head_size, device=device)
        self.partial_lse = torch.empty(num_partials, heads, device=device)

    def write(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self.kernels.store(self.cache, slots, key, value, self.layout)

    def store(self) -> None:
        batch = self.batch
        self.kernels.store(
            self.cache,
            batch.slot_mapping,
            batch.key,
            batch.value,
            self.layout,
            batch.query,
            self.rotated_query,
            self.query_scale,
            self.scale,
        )

    def attention(self) -> None:
        batch = self.batch
        self.kernels.decode_attention(
            self.rotated_query,
            self.query_scale,
            self.cache,
            batch.block_table,
            batch.seq_lens,
            self.layout,
            self.partial,
            self.partial_lse,
            batch.output,
            **self.options,
        )

    def held(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm.v1.attention.ops.turbo import reference

        pages = self.cache.cpu()
        rotated_key, rotated_value = reference.load(pages, slots.cpu(), self.layout)
        key = reference.inverse_rotate(rotated_key) * self.layout.key_codebook.gain
        return key, reference.inverse_rotate(rotated_value)
