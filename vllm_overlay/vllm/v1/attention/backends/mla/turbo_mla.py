# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Multi-head latent attention over the turbo KV cache: backend and implementation.

A token's latent is stored as codes of the rotated vector, and its rotary key in 8 bits.
Decodes, drafts and short extends attend to the packed pages with absorbed weights,
which include the rotation. Prefills are vLLM's own, over dequantised contexts. The
format and the kernels are in ``vllm/v1/attention/ops/turbo``.
"""

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch

from vllm.config import get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonBaseImpl,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLACommonPrefillMetadata,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionLayer, MultipleOf
from vllm.v1.attention.backends.mla.turbo_mla_metadata import (
    TurboMLAMetadata,
    TurboMLAMetadataBuilder,
)
from vllm.v1.attention.ops.turbo import reasons, refusals
from vllm.v1.attention.ops.turbo.choose import cuda_refusal
from vllm.v1.attention.ops.turbo.formats.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.latent.format import LATENT_PRESETS, LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import GatherCall
from vllm.v1.attention.ops.turbo.latent.runner import LatentRunner
from vllm.v1.attention.ops.turbo.latent.warm_up import run_kernels
from vllm.v1.attention.ops.turbo.layer.launching import warm_up
from vllm.v1.attention.ops.turbo.layer.scratch import take_scratch
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape
from vllm.v1.attention.ops.turbo.reference import latent as reference
from vllm.v1.attention.ops.turbo.serving.backend import TurboPagesBackend
from vllm.v1.attention.ops.turbo.serving.connectors import unsupported_connectors
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.worker.workspace import is_workspace_manager_initialized

T = TypeVar("T", bound=MLACommonMetadata)


class TurboMLABackend(TurboPagesBackend, MLACommonBackend):
    """The backend of the turbo cache dtypes for dense MLA."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["turbo4", "turbo3"]

    @staticmethod
    def get_name() -> str:
        return "TURBO_MLA"

    @staticmethod
    def get_impl_cls() -> type["TurboMLAImpl"]:
        return TurboMLAImpl

    @staticmethod
    def get_builder_cls() -> type["TurboMLAMetadataBuilder"]:
        return TurboMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [320, 512, 576]

    @classmethod
    def supports_compute_capability(cls, capability: "DeviceCapability | None") -> bool:
        return not current_platform.is_cuda() or capability >= DeviceCapability(8, 0)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # Calls are planned from query lengths on the host.
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Set the bytes of a slot, which packs a token's latent and rotary key."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_turbo:
            return super().customize_spec(spec)
        layout = LatentFormat.from_cache_dtype(
            spec.kv_quant_mode.name.lower(), spec.head_size
        )
        return replace(spec, state_content_bytes=layout.slot_size)


class TurboLatentImpl(MLACommonBaseImpl[T]):
    """Stores latents and rotary keys, and dequantises contexts.

    It is the common part of dense and sparse MLA.

    Attributes:
        own_arguments: Names of arguments that are served, beside the base class's.
        runner: The layer's kernels.

    """

    own_arguments: ClassVar[frozenset[str]] = refusals.MLA_ARGUMENTS
    gathers_context: ClassVar[bool] = True
    can_return_lse_for_decode: bool = True
    supports_pcp: bool = False
    supports_dcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        # MLA Specific Arguments
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        **mla_args: Any,
    ) -> None:
        vllm_config = get_current_vllm_config()
        arguments: dict[str, object] = {
            "alibi_slopes": alibi_slopes,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        own = self.own_arguments
        arguments |= {name: x for name, x in mla_args.items() if name not in own}
        found = refusals.unsupported_layer_arguments(attn_type, arguments)
        if sliding_window is not None:
            found.append(reasons.MLA_SLIDING_WINDOW)
        if kv_cache_dtype not in LATENT_PRESETS:
            found.append(refusals.one_vector_reason(kv_cache_dtype))
        found += refusals.unsupported_mla_sizes(kv_lora_rank, qk_rope_head_dim)
        found += refusals.unsupported_settings(vllm_config)
        found += refusals.unsupported_mla_settings(vllm_config)
        transfer = vllm_config.kv_transfer_config
        found += unsupported_connectors(transfer, True, self.is_sparse)
        if found:
            raise ValueError(refusals.refusal(kv_cache_dtype, found))
        window = vllm_config.attention_config.turbo_window
        if window not in ("auto", 0):
            raise ValueError(refusals.tail_refusal(window, refusals.MLA_TAIL))
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            **mla_args,
        )
        self.supports_quant_query_input = False
        self.vllm_config = vllm_config
        dtype = vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        self.runner = LatentRunner(
            LayerShape(num_heads, 1, kv_lora_rank, dtype),
            self.scale,
            LatentFormat.from_cache_dtype(kv_cache_dtype, head_size),
            vllm_config,
            self.is_sparse,
        )
        if current_platform.is_cpu():
            if self.runner.kernel_choice == "cuda":
                reason = "the CPU platform runs PyTorch's operators"
                raise ValueError(cuda_refusal(reason))
            self.runner.kernels = reference.TorchLatentKernels()
        elif is_workspace_manager_initialized():
            # A model that will be run builds its kernels while its weights are loaded.
            self.runner.start_builds()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Begin to build the kernels, unless the builds have begun."""
        self.runner.start_builds()

    def transform_absorbed_weights(
        self, W_UK: torch.Tensor, W_UV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the latent's axis: queries and outputs then are in rotated space."""
        rank = self.kv_lora_rank
        # Copied each time, because sleep level 2 frees tensors that were kept on the
        # device while weights were loaded.
        kept = rotation_matrix(rank, torch.device("cpu"), torch.float32, inverse=True)
        rotation = kept.to(W_UK.device)

        def rotate(weight: torch.Tensor) -> torch.Tensor:
            # The latent's axis stays the one of stride 1, for which cuBLAS has the
            # faster products of few tokens.
            rotated = weight.float().flatten(1).T @ rotation.T * inverse_sqrt(rank)
            return rotated.T.unflatten(1, weight.shape[1:]).to(weight.dtype)

        return rotate(W_UK), rotate(W_UV)

    def reserve_workspace(self) -> None:
        """Take the memory of the largest step, and run its kernels once."""
        runner = self.runner
        device = next(self.kv_b_proj.parameters()).device
        more = self._unmeasured_size(), self.num_heads
        _ = torch.empty(more, dtype=runner.shape.dtype, device=device)
        if is_workspace_manager_initialized():
            runner.reserve(device)
            warm_up(runner, device, run_kernels)

    @property
    def _absorbed_size(self) -> int:
        """Numbers of a head's queries and outputs in the latent's coordinates."""
        return 2 * self.runner.max_absorbed_tokens * self.kv_lora_rank

    def _unmeasured_size(self) -> int:
        """Numbers of a head that vLLM's profile run does not measure."""
        # It measures the projections of prefills, which are not there at the same time.
        num_rows = MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(
            self.vllm_config
        )
        projected = num_rows * (self.qk_nope_head_dim + self.v_head_dim)
        return max(0, self._absorbed_size - projected)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Store tokens' latents and rotary keys.

        Args:
            kv_c_normed: (>= T, L) of the model's dtype.
            k_pe: (>= T, 1, R) of the model's dtype.
            kv_cache: (num_blocks, N, C) uint8.
            slot_mapping: (T,) int64, block * N + position, or -1 to store nothing.
            kv_cache_dtype: The layer's cache dtype, not read.
            k_scale: Not read.
            skip_scale: Not read.

        """
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        self.runner.store(kv_cache, slots, kv_c_normed, k_pe.squeeze(1))

    def gather_context(
        self,
        kv_cache: torch.Tensor,
        workspace: torch.Tensor,
        block_table: torch.Tensor,
        chunk: MLACommonPrefillMetadata.ContextChunk,
    ) -> None:
        call = GatherCall(
            kv_cache.view(torch.uint8),
            workspace,
            block_table,
            self.runner.layout,
            chunk.cu_seq_lens,
            chunk.token_to_seq,
            chunk.num_context_tokens,
            chunk.starts,
        )
        self.runner.gather(call)

    def split_query(
        self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries for rotated latents, and rotary queries, which may be joined."""
        if isinstance(q, tuple):
            return q
        return q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :]


class TurboMLAImpl(TurboLatentImpl[TurboMLAMetadata], MLACommonImpl[TurboMLAMetadata]):
    """Stores latents and rotary keys, and attends to them."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TurboMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to packed pages.

        Args:
            q: Queries for rotated latents, (T, Hq, L), and rotary queries, (T, Hq, R),
                apart or joined on the last axis.
            kv_c_and_k_pe_cache: (num_blocks, N, C) bytes, of any dtype.
            attn_metadata: The metadata of the step.
            layer: The layer, not read.

        Returns:
            The output in the rotated latents' space, (T, Hq, L), and the LSE, (T, Hq)
            fp32 in base e.

        """
        decode = attn_metadata.decode
        assert decode is not None
        query, rope = self.split_query(q)
        plan = decode.plans[self.runner.shape]
        make = torch.empty_like if plan.writes_all else torch.zeros_like
        output = make(query, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        cache = kv_c_and_k_pe_cache.view(torch.uint8)
        self.runner.decode(query, rope, cache, plan, output, lse)
        return output, lse

    def forward_mha(  # type: ignore[override]
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TurboMLAMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend as the base class does.

        With ``turbo_prefill`` at stored, tokens see each other as they are stored.
        """
        if self.runner.stored:
            rows = self._own_rows(kv_c_and_k_pe_cache, attn_metadata, q.shape[0])
            kv_c_normed = rows[:, : self.kv_lora_rank]
            k_pe = rows[:, self.kv_lora_rank :].unsqueeze(1)
        super().forward_mha(
            q,
            kv_c_normed,
            k_pe,
            kv_c_and_k_pe_cache,
            attn_metadata,
            k_scale,
            output,
            output_scale,
        )

    def _own_rows(
        self,
        kv_cache: torch.Tensor,
        attn_metadata: TurboMLAMetadata,
        num_tokens: int,
    ) -> torch.Tensor:
        """Latents and rotary keys of a prefill's own tokens, as they are stored."""
        prefill = attn_metadata.prefill
        token_to_seq = attn_metadata.prefill_token_to_seq
        assert prefill is not None and token_to_seq is not None
        context = prefill.chunked_context
        specs = self.runner.rows_specs(num_tokens)
        (rows,) = take_scratch(specs, kv_cache.device)
        call = GatherCall(
            kv_cache.view(torch.uint8),
            rows,
            prefill.block_table,
            self.runner.layout,
            prefill.query_start_loc,
            token_to_seq,
            num_tokens,
            None if context is None else context.context_lens,
        )
        self.runner.gather(call)
        return rows
