# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arms that turbo is compared to: vLLM's other KV caches and their kernels."""

from typing import Any

import torch
from turbo_decode_arms import DTYPE, Arm, Batch


class PagesArm(Arm):
    """Pages of bf16 or fp8, tokens before heads, K beside V.

    Args:
        batch: The decode step.
        fp8: Whether K and V are kept in fp8.
        cache: The cache of another arm, to share; None for a new one.

    """

    def __init__(
        self, batch: Batch, fp8: bool, cache: torch.Tensor | None = None
    ) -> None:
        super().__init__(batch)
        shape = batch.shape
        size = (batch.num_blocks, batch.block_size, shape.num_kv_heads)
        dtype = torch.uint8 if fp8 else DTYPE
        self.cache = cache if cache is not None else torch.zeros(
            *size, 2 * shape.head_size, dtype=dtype, device=batch.device
        )  # fmt: skip
        self.token_bytes = 2 * shape.head_size * dtype.itemsize
        self.kv_cache_dtype = "fp8" if fp8 else "auto"
        if fp8:
            self.relative_error = 0.15
        self.page_dtype = torch.float8_e4m3fn if fp8 else DTYPE
        self.one = torch.ones((), device=batch.device)

    def pages(self) -> tuple[torch.Tensor, ...]:
        """K and V: (num_blocks, block_size, H, D) each."""
        pages = self.cache.view(self.page_dtype)
        return pages.split(self.batch.shape.head_size, -1)

    def arguments(self) -> dict[str, Any]:
        """The arguments that FlashAttention and Triton's attention share."""
        batch, (key_cache, value_cache) = self.batch, self.pages()
        return {
            "k": key_cache,
            "v": value_cache,
            "out": batch.output,
            "max_seqlen_q": batch.query_len,
            "seqused_k": batch.seq_lens,
            "max_seqlen_k": batch.max_seq_len,
            "softmax_scale": self.scale,
            "causal": True,
            "block_table": batch.block_table,
        }

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


class FlashAttentionArm(PagesArm):
    """FlashAttention as vLLM's backend calls it on Hopper: version 3, or version 4 for
    heads of more than 256.
    """

    def __init__(
        self,
        batch: Batch,
        fp8: bool,
        planned: bool,
        cache: torch.Tensor | None = None,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__(batch, fp8, cache)
        self.sliding_window = sliding_window
        # Tokens to the left and right of a query token; -1: all.
        self.window_size = (sliding_window - 1, 0) if sliding_window else (-1, -1)
        descale = self.one.expand(len(batch.seq_lens), batch.shape.num_kv_heads)
        self.fa_version = 3 if batch.shape.head_size <= 256 else 4
        self.options: dict[str, Any] = {
            "cu_seqlens_q": batch.query_start_loc(),
            "q_descale": descale,
            "k_descale": descale,
            "v_descale": descale,
        }
        self.query = batch.query.to(self.page_dtype)
        if planned:
            self.options |= self.plan()

    def plan(self) -> dict[str, Any]:
        """The schedule, for version 3, and the bound on splits in vLLM's full CUDA
        graphs.
        """
        from vllm.config.attention import AttentionConfig
        from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata

        batch, shape = self.batch, self.batch.shape
        num_splits = AttentionConfig().flash_attn_max_num_splits_for_cuda_graph
        if self.fa_version != 3:
            return {"num_splits": num_splits}
        metadata = get_scheduler_metadata(
            batch_size=len(batch.seq_lens),
            max_seqlen_q=batch.query_len,
            max_seqlen_k=batch.max_seq_len,
            num_heads_q=shape.num_heads,
            num_heads_kv=shape.num_kv_heads,
            headdim=shape.head_size,
            cache_seqlens=batch.seq_lens,
            qkv_dtype=self.page_dtype,
            cu_seqlens_q=self.options["cu_seqlens_q"],
            page_size=batch.block_size,
            causal=True,
            window_size=self.window_size,
            num_splits=num_splits,
        )
        return {"scheduler_metadata": metadata, "num_splits": num_splits}

    def attention(self) -> None:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        flash_attn_varlen_func(
            q=self.query,
            window_size=list(self.window_size),
            fa_version=self.fa_version,
            **self.arguments(),
            **self.options,
        )


class TritonArm(PagesArm):
    """The Triton backend of vLLM, which serves any head size."""

    def __init__(
        self, batch: Batch, fp8: bool, cache: torch.Tensor | None = None
    ) -> None:
        from vllm.utils.math_utils import next_power_of_2
        from vllm.v1.attention.backends.triton_attn import (
            MIN_LAUNCH_GRID_SIZE_2D,
            NUM_PAR_SOFTMAX_SEGMENTS,
        )
        from vllm.v1.kv_cache_interface import KVQuantMode

        super().__init__(batch, fp8, cache)
        shape, num_tokens = batch.shape, batch.query.shape[0]
        segments = (num_tokens, shape.num_heads, NUM_PAR_SOFTMAX_SEGMENTS)
        descale = self.one.expand(len(batch.seq_lens), shape.num_kv_heads)
        quant_mode = KVQuantMode.FP8_PER_TENSOR if fp8 else KVQuantMode.NONE
        self.options: dict[str, Any] = {
            "cu_seqlens_q": batch.query_start_loc(),
            "q_descale": None,
            "k_descale": descale,
            "v_descale": descale,
            "kv_quant_mode": quant_mode,
            "seq_threshold_3D": MIN_LAUNCH_GRID_SIZE_2D // shape.num_kv_heads,
            "num_par_softmax_segments": NUM_PAR_SOFTMAX_SEGMENTS,
            "softmax_segm_output": torch.empty(
                *segments, next_power_of_2(shape.head_size), device=batch.device
            ),
            "softmax_segm_max": torch.empty(segments, device=batch.device),
            "softmax_segm_expsum": torch.empty(segments, device=batch.device),
        }

    def attention(self) -> None:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        unified_attention(
            q=self.batch.query,
            window_size=(-1, -1),
            softcap=0,
            **self.arguments(),
            **self.options,
        )


class TurboQuantArm(Arm):
    """The ``turboquant_*`` presets of vLLM."""

    relative_error = 0.5

    def __init__(self, batch: Batch, cache_dtype: str) -> None:
        from vllm.config.attention import AttentionConfig
        from vllm.model_executor.layers.quantization.turboquant.centroids import (
            get_centroids,
        )
        from vllm.model_executor.layers.quantization.turboquant.config import (
            TurboQuantConfig,
        )
        from vllm.v1.attention.ops.turbo.formats.rotation import hadamard

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
        # The backend also copies.
        batch.output.copy_(result)


class XqaArm(PagesArm):
    """FlashInfer's XQA, with which vLLM's FlashInfer backend decodes on Hopper."""

    def __init__(
        self, batch: Batch, fp8: bool, cache: torch.Tensor | None = None
    ) -> None:
        from vllm import envs
        from vllm.platforms import current_platform

        if not (
            current_platform.is_device_capability(90)
            or current_platform.is_device_capability_family(120)
        ):
            raise RuntimeError("vLLM decodes with XQA on SM90 and SM12x only")
        super().__init__(batch, fp8, cache)
        num_bytes = envs.VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
        self.workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=batch.device)

    def attention(self) -> None:
        from vllm.utils.flashinfer import flashinfer_xqa_batch_decode_with_kv_cache

        batch = self.batch
        flashinfer_xqa_batch_decode_with_kv_cache(
            query=batch.query,
            kv_cache=self.pages(),
            workspace_buffer=self.workspace,
            block_tables=batch.block_table,
            seq_lens=batch.seq_lens,
            max_seq_len=batch.max_seq_len,
            bmm1_scale=self.scale,
            bmm2_scale=1.0,
            out=batch.output,
            kv_layout="NHD",
            q_len_per_req=1,
        )


def plan_flashinfer(batch: Batch, scale: float, page_dtype: torch.dtype) -> Any:
    """FlashInfer's wrapper for decoding, planned as for vLLM's full CUDA graphs."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.flashinfer import fast_plan_decode

    shape, size = batch.shape, batch.block_size
    seq_lens = batch.seq_lens.cpu()
    blocks = (seq_lens + size - 1) // size
    indptr = torch.zeros(len(blocks) + 1, dtype=torch.int32)
    indptr[1:] = blocks.cumsum(0)
    rows = zip(batch.block_table, blocks.tolist())
    indices = torch.cat([row[:count] for row, count in rows])
    last_page_len = seq_lens - (blocks - 1) * size
    num_bytes = envs.VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(num_bytes, dtype=torch.uint8, device=batch.device),
        "NHD",
        use_cuda_graph=True,
        paged_kv_indptr_buffer=indptr.to(batch.device),
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last_page_len.to(batch.device),
        use_tensor_cores=True,
        backend="auto" if current_platform.has_device_capability(90) else "fa2",
    )
    fast_plan_decode(
        wrapper,
        indptr_cpu=indptr,
        indices=indices,
        last_page_len_cpu=last_page_len,
        seq_lens_cpu=seq_lens,
        num_qo_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        page_size=size,
        sm_scale=scale,
        q_data_type=DTYPE,
        kv_data_type=page_dtype,
        o_data_type=DTYPE,
    )
    return wrapper


def run_flashinfer(
    wrapper: Any,
    batch: Batch,
    pages: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor, ...] | None,
) -> None:
    """Attend with a planned wrapper, as vLLM's backend calls it."""
    wrapper.run(
        batch.query,
        pages,
        q_scale=1.0,
        k_scale=1.0,
        v_scale=1.0,
        out=batch.output,
        kv_cache_sf=scales,
    )


class FlashInferArm(PagesArm):
    """FlashInfer's own kernels over bf16, which vLLM runs where it cannot take XQA."""

    def __init__(self, batch: Batch, cache: torch.Tensor | None = None) -> None:
        super().__init__(batch, fp8=False, cache=cache)
        self.wrapper = plan_flashinfer(batch, self.scale, DTYPE)

    def attention(self) -> None:
        run_flashinfer(self.wrapper, self.batch, self.pages(), None)


class Nvfp4Arm(Arm):
    """``nvfp4``: 4-bit floats, with a scale in fp8 for every 16 of them."""

    MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    SCALE_COORDINATES = 16

    def __init__(self, batch: Batch) -> None:
        from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
        from vllm.v1.attention.backends import flashinfer

        if not flashinfer._nvfp4_kv_on_fa2():
            raise RuntimeError("vLLM reads nvfp4 with other kernels on this GPU")
        super().__init__(batch)
        shape = batch.shape
        side_bytes = nvfp4_kv_cache_full_dim(shape.head_size)
        self.token_bytes = 2 * side_bytes
        self.cache = torch.zeros(
            (batch.num_blocks, batch.block_size, 2 * shape.num_kv_heads, side_bytes),
            dtype=torch.uint8,
            device=batch.device,
        )
        self.pages, self.scales, self.kv_layout = flashinfer._nvfp4_kv_views(
            self.cache.transpose(1, 2), shape.num_kv_heads
        )
        self.one = torch.ones((), device=batch.device)
        self.wrapper = plan_flashinfer(batch, self.scale, torch.uint8)

    def write(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        from flashinfer import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            key,
            value,
            slots,
            self.pages,
            self.scales,
            self.one,
            self.one,
            kv_layout=self.kv_layout,
        )

    def attention(self) -> None:
        run_flashinfer(self.wrapper, self.batch, self.pages, self.scales)

    def held(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = slots // self.batch.block_size, slots % self.batch.block_size
        magnitudes = torch.tensor(self.MAGNITUDES)
        sides = []
        for pages, scales in zip(self.pages, self.scales):
            packed = pages[at].cpu()
            scale = scales.view(torch.uint8)[at].cpu().view(scales.dtype).float()
            codes = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2).int()
            numbers = magnitudes[codes & 7] * (1 - 2 * (codes >> 3))
            sides.append(numbers * scale.repeat_interleave(self.SCALE_COORDINATES, -1))
        return sides[0], sides[1]
