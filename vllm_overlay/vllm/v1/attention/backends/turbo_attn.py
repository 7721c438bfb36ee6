# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention over the turbo KV cache: the backend, and dispatch to the kernels.

The format and the kernels are in ``vllm/v1/attention/ops/turbo``. The cache
dtype selects this backend; no other setting does.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.config import get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionType,
    MultipleOf,
    max_decode_query_len,
)
from vllm.v1.attention.ops.turbo import reference, refusals, torch_attention
from vllm.v1.attention.ops.turbo.format import (
    HEAD_SIZES,
    TILE_TOKENS,
    TurboFormat,
    is_turbo_cache_dtype,
)
from vllm.v1.attention.ops.turbo.kernels import (
    MAX_EXTEND_LEN,
    TurboKernels,
    choose_kernels,
    cuda_refusal,
)
from vllm.v1.attention.ops.turbo.metadata import (
    MAX_EXTEND_TOKENS,
    TurboMetadata,
    TurboMetadataBuilder,
    max_extend_partials,
)
from vllm.v1.attention.ops.turbo.prefill import (
    PrefillBuffers,
    get_flash_attn,
    piece_tokens,
    prefill_attention,
)
from vllm.v1.attention.ops.turbo.workspace import Workspace
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec
from vllm.v1.worker.workspace import is_workspace_manager_initialized

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig


def get_turbo_backend_path(
    selected_backend: "AttentionBackendEnum | None",
    selector_config: "AttentionSelectorConfig",
    device_capability: "DeviceCapability | None",
) -> str:
    """Class path of the backend of a turbo cache dtype.

    Args:
        selected_backend: What the user asked for, if anything.
        selector_config: What the layer needs.
        device_capability: Of the device; None on a CPU.

    Raises:
        ValueError: If the dtype cannot serve the layer; the message names each
            reason and the dtypes to use instead.

    """
    reasons = TurboAttentionBackend.validate_configuration(
        device_capability=device_capability,  # type: ignore[arg-type]
        **selector_config._asdict(),
    )
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
        return [MultipleOf(TILE_TOKENS)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | None) -> bool:
        return is_turbo_cache_dtype(kv_cache_dtype)

    @classmethod
    def supports_compute_capability(cls, capability: "DeviceCapability | None") -> bool:
        return not current_platform.is_cuda() or capability >= DeviceCapability(8, 0)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # All that keep the tokens of a (block, head) contiguous.
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Pack K and V of a token and head into one slot."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_turbo:
            return spec
        layout = TurboFormat.from_cache_dtype(
            spec.kv_quant_mode.name.lower(), spec.head_size
        )
        return replace(spec, state_content_bytes=layout.slot_size)


class TurboAttentionImpl(AttentionImpl[TurboMetadata]):
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
        optional = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        reasons = refusals.unsupported_layer_arguments(
            attn_type, optional | unsupported
        )
        if speculative is not None and speculative.uses_draft_kv_cache():
            reasons.append(refusals.DRAFT_MODEL)
        if reasons:
            raise ValueError(refusals.refusal(kv_cache_dtype, reasons))
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.layout = TurboFormat.from_cache_dtype(kv_cache_dtype, head_size)
        self.dtype = vllm_config.model_config.dtype
        self.stored = vllm_config.attention_config.turbo_prefill == "stored"
        self.kernel_choice = vllm_config.attention_config.turbo_kernel
        if self.kernel_choice == "cuda" and current_platform.is_cpu():
            raise ValueError(cuda_refusal("the CPU platform runs PyTorch's operators"))
        scheduler_config = vllm_config.scheduler_config
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_decode_query_len = max_decode_query_len(vllm_config)
        self.num_sms = 1 if current_platform.is_cpu() else num_compute_units()
        self.max_num_tokens = scheduler_config.max_num_batched_tokens
        self.workspace = Workspace(
            num_heads,
            self.num_kv_heads,
            head_size,
            self.dtype,
            piece_tokens(self.max_num_tokens, self.num_kv_heads, head_size, self.dtype),
        )
        self.flash_attn = get_flash_attn(head_size)

    @cached_property
    def kernels(self) -> TurboKernels:
        """What stores and decodes on a GPU."""
        group = self.num_heads // self.num_kv_heads
        return choose_kernels(
            self.kernel_choice, self.layout, group, self.max_decode_query_len
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Choose the kernels, for building them may take seconds."""
        if not current_platform.is_cpu():
            _ = self.kernels

    @property
    def kernels_used(self) -> str:
        """What stores and decodes, and why, for users."""
        if current_platform.is_cpu():
            return "PyTorch's operators, because this is a CPU"
        return f"{self.kernels.name} kernels, because {self.kernels.reason}"

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
        for attend in (
            torch_attention.decode_attention,
            torch_attention.prefill_attention,
        ):
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

    def _forward_kernels(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TurboMetadata,
        output: torch.Tensor,
    ) -> None:
        from vllm.v1.attention.ops.turbo.triton_merge import NewestToken

        num_short_tokens, prefill = metadata.num_short_tokens, metadata.prefill
        rows = slice(num_short_tokens, query.shape[0])
        needs_buffers = prefill is not None and (self.stored or prefill.context)
        rotated_query, query_scale, partial_output, partial_lse, *prefill_buffers = (
            self.workspace.take(
                num_short_tokens,
                max(
                    self._num_partials(metadata.num_decodes, metadata.decode_query_len),
                    *(
                        self._num_extend_partials(each.num_requests, each.query_len)
                        for each in metadata.extends
                    ),
                    0,
                ),
                query.shape[0] - num_short_tokens if needs_buffers else 0,
                query.device,
            )
        )
        self.kernels.store(
            kv_cache,
            metadata.slot_mapping[: query.shape[0]],
            key,
            value,
            self.layout,
            query[:num_short_tokens],
            rotated_query,
            query_scale,
            self.scale,
        )

        def attend(
            attention: Callable[..., None],
            tokens: slice,
            requests: slice,
            num_partials: int,
            query_len: int,
            start_loc: torch.Tensor | None,
        ) -> None:
            newest = NewestToken(query[tokens], key[tokens], value[tokens], self.scale)
            attention(
                rotated_query[tokens],
                query_scale[tokens],
                kv_cache,
                metadata.block_table[requests],
                metadata.seq_lens[requests],
                self.layout,
                partial_output[:num_partials],
                partial_lse[:num_partials],
                output[tokens],
                None if self.stored else newest,
                query_len,
                start_loc,
            )

        attend(
            self.kernels.decode_attention,
            slice(0, metadata.num_decode_tokens),
            slice(0, None),
            self._num_partials(metadata.num_decodes, metadata.decode_query_len),
            metadata.decode_query_len,
            metadata.decode_start_loc,
        )
        for each in metadata.extends:
            assert self.kernels.extend_attention is not None
            attend(
                self.kernels.extend_attention,
                slice(each.first_token, each.first_token + each.num_tokens),
                slice(each.first_request, None),
                self._num_extend_partials(each.num_requests, each.query_len),
                each.query_len,
                each.query_start_loc,
            )
        if prefill is None:
            return
        if self.flash_attn is None:
            torch_attention.prefill_attention(
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
            return
        prefill_attention(
            query[rows],
            key[rows],
            value[rows],
            kv_cache,
            prefill,
            self.scale,
            self.layout,
            PrefillBuffers(*prefill_buffers) if prefill_buffers else None,
            output[rows],
            self.flash_attn,
        )

    def _num_partials(self, num_seqs: int, query_len: int) -> int:
        splits = self.kernels.num_kv_splits(
            num_seqs, self.num_kv_heads, self.num_sms, query_len
        )
        return num_seqs * query_len * splits

    def _num_extend_splits(self, num_seqs: int, query_len: int) -> int:
        assert self.kernels.num_extend_splits is not None
        return self.kernels.num_extend_splits(
            num_seqs, self.num_kv_heads, self.num_sms, query_len
        )

    def _num_extend_partials(self, num_seqs: int, query_len: int) -> int:
        return num_seqs * query_len * self._num_extend_splits(num_seqs, query_len)

    def _largest_batch(self) -> tuple[int, int, int]:
        """Of all batches, what ``Workspace.parts`` needs the most of."""
        num_partials = max(
            self._num_partials(count, query_len)
            for count in range(1, self.max_num_seqs + 1)
            for query_len in range(1, self.max_decode_query_len + 1)
        )
        num_short_tokens = self.max_num_seqs * self.max_decode_query_len
        if self.kernels.extend_attention is not None:
            num_partials = max(
                num_partials,
                max_extend_partials(
                    self.max_num_seqs, MAX_EXTEND_LEN, self._num_extend_splits
                ),
            )
            num_short_tokens += min(
                MAX_EXTEND_TOKENS,
                self.max_num_tokens,
                self.max_num_seqs * MAX_EXTEND_LEN,
            )
        return num_short_tokens, num_partials, self.max_num_tokens

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that the profile run reserves."""
        if current_platform.is_cpu():
            return 0
        return self.workspace.num_bytes(*self._largest_batch())

    def _reserve_workspace(self, device: torch.device) -> None:
        """Take all memory of the largest batch, in the profile run."""
        if not is_workspace_manager_initialized():
            return
        self.workspace.take(*self._largest_batch(), device)
        # Kept for good by a cache: not to be made in a CUDA graph's pool.
        self.kernels.make_matrices(self.head_size, device)
