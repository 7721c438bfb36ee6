# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The attention backend of ``--kv-cache-dtype turbo4``.

It reuses the metadata and the forward pass of TurboQuant's backend, which splits a
batch into decodes and prefills. It overrides the store, decode attention and prefill.
The format and the kernels are in ``vllm/v1/attention/ops/turbo``.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from vllm.config import get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionLayer,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends import turboquant_attn
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.turboquant_attn import (
    TurboQuantAttentionBackend,
    TurboQuantAttentionImpl,
    TurboQuantMetadata,
    TurboQuantMetadataBuilder,
)
from vllm.v1.attention.ops.turbo.format import HEAD_SIZES, TurboFormat
from vllm.v1.attention.ops.turbo.refusals import (
    OTHER_DTYPE,
    WAYS_OUT,
    refuse_unsupported,
)
from vllm.v1.attention.ops.turbo.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.triton.decode import (
    PROGRAMS_PER_SM,
    decode_attention,
    num_kv_splits,
)
from vllm.v1.attention.ops.turbo.triton.gather import gather
from vllm.v1.attention.ops.turbo.triton.store import store
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVQuantMode
from vllm.v1.worker.workspace import (
    current_workspace_manager,
    is_workspace_manager_initialized,
)


class TurboAttentionBackend(TurboQuantAttentionBackend):
    """The backend of ``turbo4``."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["turbo4"]

    @staticmethod
    def get_name() -> str:
        return "TURBO"

    @staticmethod
    def get_impl_cls() -> type["TurboAttentionImpl"]:
        return TurboAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["TurboMetadataBuilder"]:
        return TurboMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # A (block, KV head) is contiguous in these.
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_SIZES

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | None) -> bool:
        return kv_cache_dtype == "turbo4"

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        # Connectors cannot tell these pages from others of the same size.
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        # The CPU platform has none.
        return capability is None or capability >= DeviceCapability(8, 0)

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Name the way out with each reason."""
        reasons = super().validate_configuration(*args, **kwargs)
        if "kv_cache_dtype not supported" in reasons:
            return reasons
        if current_platform.is_rocm() or current_platform.is_xpu():
            reasons.append(f"{current_platform.device_name} not supported")
        elif not turboquant_attn._HAS_FLASH_ATTN:
            reasons.append("a platform without FlashAttention not supported")
        return [f"{x} ({WAYS_OUT.get(x, OTHER_DTYPE)})" for x in reasons]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """K and V of a token and head are one slot."""
        mode = spec.kv_quant_mode
        if spec.state_content_bytes is not None or mode != KVQuantMode.TURBO4:
            return spec
        slot_size = TurboFormat(spec.head_size).slot_size
        return replace(spec, state_content_bytes=slot_size)


class TurboMetadataBuilder(TurboQuantMetadataBuilder):
    """TurboQuant's, for decodes of one token, without its workspace.

    The implementation reserves the workspace in the profile run.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def _reserve_workspace(self) -> None:
        pass


class TurboAttentionImpl(TurboQuantAttentionImpl):
    """Stores K and V, decodes from packed pages, and prefills by FlashAttention."""

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
        **unsupported: object,
    ) -> None:
        config = get_current_vllm_config()
        arguments: dict[str, object] = {
            "alibi_slopes": alibi_slopes,
            "logits_soft_cap": logits_soft_cap or None,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "sinks": sinks,
            **unsupported,
        }
        refuse_unsupported(config, head_size, attn_type, arguments)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        assert isinstance(config.model_config.dtype, torch.dtype)
        self.dtype = config.model_config.dtype
        self.fa_version = get_flash_attn_version(head_size=head_size)
        self.num_sms = num_compute_units() if current_platform.is_cuda() else 1
        self.max_decodes = self._max_capture_batch_size()
        # A request's tokens have to fit into the workspace.
        self.max_gathered = max(
            config.model_config.max_model_len,
            config.scheduler_config.max_num_batched_tokens,
        )

    def _scratch(
        self, device: torch.device, *specs: tuple[tuple[int, ...], torch.dtype]
    ) -> list[torch.Tensor]:
        """Tensors that last for this layer."""
        if is_workspace_manager_initialized():
            return current_workspace_manager().get_simultaneous(*specs)
        return [
            torch.empty(*shape, dtype=dtype, device=device) for shape, dtype in specs
        ]

    def _decode_scratch(self, device: torch.device, rows: int) -> list[torch.Tensor]:
        shape = (rows, self.num_heads)
        return self._scratch(
            device,
            ((*shape, self.head_size), torch.float32),
            (shape, torch.float32),
        )

    def _gather_scratch(self, device: torch.device, tokens: int) -> list[torch.Tensor]:
        spec = ((tokens, self.num_kv_heads, self.head_size), self.dtype)
        return self._scratch(device, spec, spec)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TurboQuantMetadata,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; reserve the workspace in the profile run, which has no metadata."""
        assert output_scale is None and output_block_scale is None
        if attn_metadata is None and is_workspace_manager_initialized():
            for inverse in (False, True):
                for dtype in (torch.float16, torch.float32):
                    rotation_matrix(self.head_size, query.device, dtype, inverse)
            splits = self.num_sms * PROGRAMS_PER_SM // self.num_kv_heads + 1
            self._decode_scratch(query.device, splits + self.max_decodes)
            self._gather_scratch(query.device, self.max_gathered)
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output
        )

    def _ensure_on_device(self, layer: Any, device: torch.device) -> None:
        # The inherited forward pass reads these.
        layer._tq_Pi = layer._tq_PiT = layer._tq_centroids = None

    def _store_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        layer: Any,
    ) -> None:
        """Store (N, H, D) of K and V into (num_blocks, N, H, C), a transposed view."""
        store(key, value, kv_cache.transpose(1, 2), slot_mapping)

    def _decode_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TurboQuantMetadata,
        *unused: Any,
        **also_unused: Any,
    ) -> torch.Tensor:
        """Attend from (B, Hq, D), one query token of each request, to packed pages."""
        num_seqs = query.shape[0]
        splits = num_kv_splits(num_seqs, self.num_kv_heads, self.num_sms)
        partial, lse = self._decode_scratch(query.device, num_seqs * splits)
        return decode_attention(
            query,
            kv_cache.transpose(1, 2),
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            self.scale,
            (partial, lse),
            splits,
            self.sliding_window,
        )

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_queries: torch.Tensor,
        cu_keys: torch.Tensor,
        max_lens: tuple[int, int],
    ) -> torch.Tensor:
        """FlashAttention of sequences whose last query sees the last key."""
        options: dict[str, Any] = {}
        if self.fa_version is not None:
            options["fa_version"] = self.fa_version
        if self.sliding_window is not None:
            options["window_size"] = [self.sliding_window - 1, 0]
        return turboquant_attn.flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=cu_queries,
            cu_seqlens_k=cu_keys,
            max_seqlen_q=max_lens[0],
            max_seqlen_k=max_lens[1],
            softmax_scale=self.scale,
            causal=True,
            **options,
        )

    def _prefill_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TurboQuantMetadata,
        *unused: Any,
        **also_unused: Any,
    ) -> torch.Tensor:
        """Attend from the chunks of prefills.

        Requests with cached tokens get these dequantised in front of their chunk. They
        are attended to in groups that fit into the workspace, mostly in one.

        Args:
            query: (T, Hq, D).
            key: (T, H, D).
            value: (T, H, D).
            kv_cache: (num_blocks, N, H, C) uint8, a transposed view.
            attn_metadata: The metadata of the R prefills alone.
            unused: Arguments of TurboQuant's.
            also_unused: Likewise.

        Returns:
            (T, Hq, D) of the query's dtype.

        """
        meta = attn_metadata
        starts = meta.query_start_loc
        assert meta.query_start_loc_cpu is not None and meta.seq_lens_cpu is not None
        starts_cpu = meta.query_start_loc_cpu
        query_lens, seq_lens = starts_cpu.diff(), meta.seq_lens_cpu
        # Both lengths of each request count: the longest chunk and the longest
        # sequence may be of different ones.
        if torch.equal(query_lens, seq_lens):
            lens = (meta.max_query_len, meta.max_query_len)
            return self._attend(query, key, value, starts, starts, lens)
        key_lens, lens_gpu = seq_lens, meta.seq_lens
        if self.sliding_window is not None:
            key_lens = key_lens.minimum(query_lens + self.sliding_window - 1)
            lens_gpu = lens_gpu.minimum(starts.diff() + self.sliding_window - 1)
        ends = key_lens.cumsum(0)
        cu_keys = F.pad(lens_gpu.cumsum(0, dtype=torch.int32), (1, 0))
        output, first = torch.empty_like(query), 0
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            room = before + self.max_gathered
            last = max(int(torch.searchsorted(ends, room, right=True)), first + 1)
            num_keys = int(ends[last - 1]) - before
            own_key, own_value = self._gather_scratch(query.device, num_keys)
            tokens = slice(int(starts_cpu[first]), int(starts_cpu[last]))
            own_starts, own_keys = starts[first : last + 1], cu_keys[first : last + 1]
            own_keys = own_keys - own_keys[0]
            max_len = int(key_lens[first:last].max())
            gather(
                kv_cache.transpose(1, 2),
                (key, value),
                (own_key, own_value),
                meta.block_table[first:last],
                own_starts,
                meta.seq_lens[first:last],
                own_keys,
                max_len,
            )
            output[tokens] = self._attend(
                query[tokens],
                own_key,
                own_value,
                own_starts - own_starts[0],
                own_keys,
                (int(query_lens[first:last].max()), max_len),
            )
            first = last
        return output
