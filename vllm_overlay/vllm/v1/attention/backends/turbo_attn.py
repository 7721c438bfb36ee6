# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention over the turbo KV cache: backend and implementation.

The format, the kernels and the planning of a step are in
``vllm/v1/attention/ops/turbo``. Only the cache dtype selects this backend.
"""

from dataclasses import replace
from typing import ClassVar

import torch

from vllm.config import get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionLayer,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.turbo_metadata import (
    TurboMetadata,
    TurboMetadataBuilder,
)
from vllm.v1.attention.backends.turbo_tail import TurboTail, tail_choice
from vllm.v1.attention.ops.turbo import reasons, reference, refusals
from vllm.v1.attention.ops.turbo.choose import cuda_refusal
from vllm.v1.attention.ops.turbo.format import TurboFormat, is_turbo_cache_dtype
from vllm.v1.attention.ops.turbo.interface import Scoring, StoreCall
from vllm.v1.attention.ops.turbo.keys.offset import may_add_key_bias
from vllm.v1.attention.ops.turbo.layer.context_parallel import ContextParallel
from vllm.v1.attention.ops.turbo.layer.flash import get_flash_attn
from vllm.v1.attention.ops.turbo.layer.forward import forward
from vllm.v1.attention.ops.turbo.layer.launching import warm_up
from vllm.v1.attention.ops.turbo.layer.runner import TurboRunner
from vllm.v1.attention.ops.turbo.layer.warm_up import run_kernels
from vllm.v1.attention.ops.turbo.planning.prefill import FLASH_ATTN_MAX_HEAD_SIZE
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape
from vllm.v1.attention.ops.turbo.serving.backend import TurboPagesBackend
from vllm.v1.attention.ops.turbo.serving.connectors import unsupported_connectors
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.worker.workspace import is_workspace_manager_initialized


class TurboAttentionBackend(TurboPagesBackend):
    """The backend of the turbo cache dtypes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "turbo4",
        "k4v3",
        "turbo3",
    ]
    # One launch quantises K and V and rotates q, so the forward pass stores them.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "TURBO"

    @staticmethod
    def get_impl_cls() -> type["TurboAttentionImpl"]:
        return TurboAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["TurboMetadataBuilder"]:
        return TurboMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        # The documentation's generator reads literals, here and below.
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 80, 96, 112, 128, 192, 256, 512]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | None) -> bool:
        return is_turbo_cache_dtype(kv_cache_dtype)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: "DeviceCapability | None") -> bool:
        return not current_platform.is_cuda() or capability >= DeviceCapability(8, 0)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Set the bytes of a slot, which packs K and V of a token and head."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_turbo:
            return spec
        layout = TurboFormat.from_cache_dtype(
            spec.kv_quant_mode.name.lower(), spec.head_size, spec.head_size_v
        )
        return replace(spec, state_content_bytes=layout.slot_size)


class TurboAttentionImpl(AttentionImpl[TurboMetadata]):
    """Stores K and V, then attends.

    Decodes attend to the packed pages. Prefills use FlashAttention over raw or
    dequantised K and V.

    Attributes:
        runner: The layer's kernels.
        tail: The layer that keeps the newest tokens in 8 bits; None for none.
        states_per_token: Tokens that the layer stores for each token of a request.

    """

    states_per_token: ClassVar[int] = 1
    tail: TurboTail | None = None
    supports_dcp: bool = True
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = False
    # A rank's lengths are those of the context, and drafts are attended to as computed.
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        head_size_v: int | None = None,
        **unsupported: object,
    ) -> None:
        vllm_config = get_current_vllm_config()
        if sliding_window is not None and (
            sliding_window
            >= self.states_per_token * refusals.longest_sequence(vllm_config)
        ):
            sliding_window = None
        # Some models pass zero for no cap.
        logits_soft_cap = float(logits_soft_cap) if logits_soft_cap else None
        found = refusals.unsupported_layer_arguments(
            attn_type, {"alibi_slopes": alibi_slopes} | unsupported
        )
        found += refusals.unsupported_settings(vllm_config)
        found += unsupported_connectors(vllm_config.kv_transfer_config)
        if not is_turbo_cache_dtype(kv_cache_dtype):
            # The model chooses this layer's backend by the dtype of other layers.
            found.append(reasons.SKIPPED_POOLED_LAYER)
        head_size_v = head_size if head_size_v is None else head_size_v
        found += refusals.unsupported_value_size(head_size_v)
        # A prefill may pad vectors of the smaller size.
        largest = max(head_size, head_size_v)
        if not current_platform.is_cpu() and get_flash_attn(largest) is None:
            found.append(reasons.NO_FLASH_ATTN.of(head_size=largest))
        if sliding_window is not None and largest > FLASH_ATTN_MAX_HEAD_SIZE:
            found.append(
                reasons.SLIDING_WINDOW_OF_LARGE_HEADS.of(
                    sliding_window=sliding_window, head_size=largest
                )
            )
        if logits_soft_cap is not None and largest > FLASH_ATTN_MAX_HEAD_SIZE:
            found.append(
                reasons.SOFT_CAP_OF_LARGE_HEADS.of(
                    logits_soft_cap=f"{logits_soft_cap:g}", head_size=largest
                )
            )
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            found += refusals.unsupported_with_dcp(
                vllm_config,
                (head_size, head_size_v),
                has_sliding_window=sliding_window is not None,
                is_pooled=self.states_per_token != 1,
                shares_cache=kv_sharing_target_layer_name is not None,
            )
        if found:
            named = kv_cache_dtype
            if not is_turbo_cache_dtype(named):
                named = vllm_config.cache_config.cache_dtype
            raise ValueError(refusals.refusal(named, found))
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        dtype = vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        layout = TurboFormat.from_cache_dtype(kv_cache_dtype, head_size, head_size_v)
        self.runner = TurboRunner(
            LayerShape.of_sizes(
                num_heads, self.num_kv_heads, head_size, layout.head_size_v, dtype
            ),
            layout,
            Scoring(self.scale, sliding_window, sinks, logits_soft_cap),
            vllm_config,
            tail_choice(vllm_config, sliding_window, self.states_per_token),
            self.states_per_token,
            ContextParallel.of_config(vllm_config) if self.dcp_world_size > 1 else None,
        )
        if kv_sharing_target_layer_name is not None:
            self.runner.share_cache()
        if self.runner.kernel_choice == "cuda" and current_platform.is_cpu():
            raise ValueError(cuda_refusal("the CPU platform runs PyTorch's operators"))
        # A model that will be run builds its kernels while its weights are loaded.
        if is_workspace_manager_initialized() and (
            self.runner.means_problem is None
            or not may_add_key_bias(vllm_config.model_config.hf_text_config)
        ):
            self.runner.start_builds()

    def make_companion_layer(self, layer_name: str) -> TurboTail | None:
        """Make the layer that keeps the tail, if one is wanted."""
        runner = self.runner
        if runner.tail_wanted:
            self.tail = TurboTail(
                layer_name,
                runner.layout,
                runner.tail_wanted,
                runner.max_query_len,
                runner.scoring.sliding_window,
            )
        return self.tail

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Begin to build the kernels, which depend on whether K has a bias."""
        self.runner.start_builds()
        if self.runner.key_bias is not None:
            self.runner.key_bias.note_loading()

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: TurboMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store K and V, then attend.

        Args:
            layer: The layer, not read.
            query: (T, Hq, D), with padding in T.
            key: (T, H, D); None for a layer that reads another's cache.
            value: (T, H, D of V), likewise.
            kv_cache: (num_blocks, H, N, C) uint8.
            attn_metadata: The metadata of the step; None in the profile run, which
                reserves the workspace.
            output: (T, Hq, D of V), written.
            output_scale: Must be None.
            output_block_scale: Must be None.

        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                refusals.refusal(self.kv_cache_dtype, [reasons.FUSED_OUTPUT])
            )
        if key is None or value is None:
            # Some models name the layer whose cache is read only in the forward pass.
            if self.runner.context_parallel is not None:
                found = [reasons.DCP_OF_SHARED_CACHES]
                raise ValueError(refusals.refusal(self.kv_cache_dtype, found))
            self.runner.share_cache()
        if attn_metadata is None:
            if self.runner.kernels is not None and is_workspace_manager_initialized():
                self.runner.reserve(query.device)
                warm_up(self.runner, query.device, run_kernels)
            return output.fill_(0)
        num_tokens = attn_metadata.num_actual_tokens
        query = query[:num_tokens]
        if key is not None and value is not None:
            key, value = key[:num_tokens], value[:num_tokens]
        tail = None
        if self.tail is not None and key is not None:
            tail = self.tail.of_step()
        run = reference.forward if self.runner.kernels is None else forward
        run(self.runner, query, key, value, kv_cache, attn_metadata, output, tail)
        return output

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store K and V only, for callers that update the cache themselves.

        Raises:
            NotImplementedError: If K has an offset or a direction of queries and the
                tokens are not those of the forward pass, because their positions are
                unknown.

        """
        table, directions = self.runner.scoring.key_offset, self.runner.query_direction
        offset = direction = None
        if table is not None or directions is not None:
            step = None
            if is_forward_context_available():
                step = get_forward_context().attn_metadata
            if isinstance(step, dict):
                step = step.get(layer.layer_name)
            if (
                not isinstance(step, TurboMetadata)
                or slot_mapping.data_ptr() != step.slot_mapping.data_ptr()
            ):
                raise NotImplementedError(
                    refusals.refusal(self.kv_cache_dtype, [reasons.FOREIGN_TOKENS])
                )
            offset = step.key_offset(table)
            direction = step.query_direction(directions)
        kernels = self.runner.kernels
        store = reference.store if kernels is None else kernels.store
        tokens = kv_cache, slot_mapping, key, value, self.runner.layout
        store(StoreCall(*tokens, key_offset=offset, query_direction=direction))
