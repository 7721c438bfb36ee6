# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention over the turbo KV cache: the backend.

The format, the kernels and what dispatches to them are in
``vllm/v1/attention/ops/turbo``. The cache dtype selects this backend; no other setting
does.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vllm.config import get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.ops.turbo import reference, refusals
from vllm.v1.attention.ops.turbo.format import TurboFormat, is_turbo_cache_dtype
from vllm.v1.attention.ops.turbo.kernel_choice import cuda_refusal
from vllm.v1.attention.ops.turbo.metadata import TurboMetadata, TurboMetadataBuilder
from vllm.v1.attention.ops.turbo.reference.attention import (
    decode_attention,
    prefill_attention,
)
from vllm.v1.attention.ops.turbo.runtime import KernelDispatch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    SlidingWindowSpec,
    replace_as,
)

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig


def get_turbo_backend_path(
    selected_backend: "AttentionBackendEnum | None",
    selector_config: "AttentionSelectorConfig",
    device_capability: "DeviceCapability | None",
) -> str:
    """Class path of the backend of a turbo cache dtype, on platforms that have no list
    of backends to choose from.

    Args:
        selected_backend: What the user asked for, if anything.
        selector_config: What the layer needs.
        device_capability: Of the device; None on a CPU.

    Raises:
        ValueError: If the dtype cannot serve the layer; the message names each
            reason and the dtypes to use instead.

    """
    reasons = TurboAttentionBackend.unsupported_features(
        device_capability=device_capability, **selector_config._asdict()
    )
    if current_platform.is_rocm():
        reasons.append(refusals.ROCM)
    if current_platform.is_xpu():
        reasons.append(refusals.XPU)
    cache_dtype = selector_config.kv_cache_dtype
    name = TurboAttentionBackend.get_name()
    if selected_backend is not None and selected_backend.name != name:
        reasons.append(refusals.backend_reason(cache_dtype, selected_backend.name))
    if reasons:
        raise ValueError(refusals.refusal(cache_dtype, reasons))
    module, qualname = TurboAttentionBackend.full_cls_name()
    return f"{module}.{qualname}"


class TurboAttentionBackend(AttentionBackend):
    """Backend of the turbo cache dtypes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "turbo4",
        "k4v3",
        "turbo3",
    ]
    # One launch quantises K and V and rotates q, so it needs all three.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "TURBO"

    @staticmethod
    def get_impl_cls() -> type["TurboAttentionImpl"]:
        return TurboAttentionImpl

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        # The kernels' operands are 16-bit; PyTorch's attention on a CPU takes any.
        if dtype == torch.float32:
            return current_platform.is_cpu()
        return super().supports_dtype(dtype)

    @staticmethod
    def get_builder_cls() -> type["TurboMetadataBuilder"]:
        return TurboMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        # Literals, here and below, are what the documentation's generator reads.
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 80, 96, 112, 128, 192, 256, 512]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | None) -> bool:
        return is_turbo_cache_dtype(kv_cache_dtype)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        # They are a checkpoint's, for FP8, and not read.
        return True

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        *args: Any,
        **kwargs: Any,
    ) -> list[str]:
        """As the base class; of a turbo dtype the last reason is the way out."""
        reasons = cls.unsupported_features(
            head_size, dtype, kv_cache_dtype, *args, **kwargs
        )
        if reasons and is_turbo_cache_dtype(kv_cache_dtype):
            reasons.append(refusals.way_out(kv_cache_dtype))
        return reasons

    @classmethod
    def unsupported_features(cls, *args: Any, **kwargs: Any) -> list[str]:
        """What the base class finds in a configuration, with the flags that help.

        A sliding window alone is no reason: the implementation is told its length,
        and refuses one that binds.
        """
        found = super().validate_configuration(*args, **kwargs)
        reasons = [refusals.HINTED.get(reason, reason) for reason in found]
        return [] if reasons == [refusals.SLIDING_WINDOW] else reasons

    @classmethod
    def supports_compute_capability(cls, capability: "DeviceCapability | None") -> bool:
        return not current_platform.is_cuda() or capability >= DeviceCapability(8, 0)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # All that keep the tokens of a (block, head) contiguous.
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Pack K and V of a token and head into one slot."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_turbo:
            return spec
        if type(spec) is SlidingWindowSpec:
            # The implementation was built, so the window never binds.
            spec = replace_as(
                spec,
                FullAttentionSpec,
                drop=("extra_retained_tokens",),
                sliding_window=None,
            )
        layout = TurboFormat.from_cache_dtype(
            spec.kv_quant_mode.name.lower(), spec.head_size
        )
        return replace(spec, state_content_bytes=layout.slot_size)


class TurboAttentionImpl(KernelDispatch, AttentionImpl[TurboMetadata]):
    """Stores K and V, then attends: decode from the pages, prefill by
    FlashAttention over raw or dequantised K and V.
    """

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
        **unsupported: object,
    ) -> None:
        vllm_config = get_current_vllm_config()
        speculative = vllm_config.speculative_config
        window_binds = sliding_window is not None and (
            sliding_window < refusals.longest_sequence(vllm_config)
        )
        optional = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window if window_binds else None,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        reasons = refusals.unsupported_layer_arguments(
            attn_type, optional | unsupported
        )
        if speculative is not None and speculative.uses_extract_hidden_states():
            reasons.append(refusals.HIDDEN_STATES)
        if vllm_config.parallel_config.use_ubatching:
            reasons.append(refusals.MICRO_BATCHES)
        if reasons:
            raise ValueError(refusals.refusal(kv_cache_dtype, reasons))
        KernelDispatch.__init__(
            self,
            num_heads,
            num_heads if num_kv_heads is None else num_kv_heads,
            head_size,
            float(scale),
            TurboFormat.from_cache_dtype(kv_cache_dtype, head_size),
            vllm_config,
        )
        self.kv_cache_dtype = kv_cache_dtype
        if self.kernel_choice == "cuda" and current_platform.is_cpu():
            raise ValueError(cuda_refusal("the CPU platform runs PyTorch's operators"))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Choose the kernels, for building them may take seconds."""
        if not current_platform.is_cpu():
            _ = self.kernels

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TurboMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store K and V, then attend.

        Args:
            layer: The layer, not read.
            query: (T, Hq, D), T padded.
            key: (T, H, D).
            value: (T, H, D).
            kv_cache: (num_blocks, H, N, C) uint8.
            attn_metadata: Of the batch; None in the profile run, which takes
                the workspace.
            output: (T, Hq, D), written.
            output_scale: Must be None.
            output_block_scale: Must be None.

        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                refusals.refusal(self.kv_cache_dtype, [refusals.FUSED_OUTPUT])
            )
        if attn_metadata is None:
            self._reserve_workspace(query.device)
            return output.fill_(0)
        num_tokens = attn_metadata.num_actual_tokens
        tokens = (query[:num_tokens], key[:num_tokens], value[:num_tokens])
        if query.device.type == "cpu":
            self._forward_torch(*tokens, kv_cache, attn_metadata, output)
        else:
            self._forward_kernels(*tokens, kv_cache, attn_metadata, output)
        return output

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store K and V only: for callers that update the cache by themselves."""
        if key.device.type == "cpu":
            reference.store(kv_cache, slot_mapping, key, value, self.layout)
        else:
            self.kernels.store(kv_cache, slot_mapping, key, value, self.layout)

    def _forward_torch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TurboMetadata,
        output: torch.Tensor,
    ) -> None:
        slots = metadata.slot_mapping[: query.shape[0]]
        reference.store(kv_cache, slots, key, value, self.layout)
        for attend in (decode_attention, prefill_attention):
            attend(
                query,
                key,
                value,
                kv_cache,
                metadata,
                self.scale,
                self.layout,
                self.stored,
                output,
            )
