# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention over the turbo KV cache: metadata and dispatch.

The format and the kernels are in ``vllm/v1/attention/ops/turbo``. The cache
dtype selects this backend; no other setting does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
    max_decode_query_len,
)
from vllm.v1.attention.backends.fa_utils import (
    get_flash_attn_version,
    is_flash_attn_varlen_func_available,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import (
    HEAD_SIZES,
    TILE_TOKENS,
    TurboFormat,
    is_turbo_cache_dtype,
)
from vllm.v1.attention.ops.turbo.kernels import (
    TurboKernels,
    choose_kernels,
    cuda_refusal,
)
from vllm.v1.attention.ops.turbo.prefill import (
    PrefillBuffers,
    PrefillMetadata,
    build_prefill_metadata,
    piece_tokens,
    prefill_attention,
)
from vllm.v1.attention.ops.turbo.torch_attention import paged_attention
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
)
from vllm.v1.worker.workspace import (
    current_workspace_manager,
    is_workspace_manager_initialized,
)

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger(__name__)

# What every version takes.
FLASH_ATTN_MAX_HEAD_SIZE = 256


def refusal(cache_dtype: str | None, reason: str) -> str:
    """The message for what a turbo cache dtype cannot serve."""
    return (
        f"--kv-cache-dtype {cache_dtype} does not support this: {reason}. "
        "Use --kv-cache-dtype fp8 or auto instead."
    )


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
        reasons.append("XPU")
    name = TurboAttentionBackend.get_name()
    if selected_backend is not None and selected_backend.name != name:
        reasons.append(
            f"attention backend {selected_backend.name} (it reads its pages with "
            f"{name} alone, so drop --attention-backend)"
        )
    if reasons:
        raise ValueError(refusal(selector_config.kv_cache_dtype, ", ".join(reasons)))
    module, qualname = TurboAttentionBackend.full_cls_name()
    return f"{module}.{qualname}"


def unsupported_spec_features(spec: AttentionSpec) -> list[str]:
    """What of a layer's cache spec the backend does not implement."""
    if type(spec) is not FullAttentionSpec:
        kind = type(spec).__name__.removesuffix("Spec")
        return [f"layers of kind {kind}"]
    features = {
        # Full attention stands for these without the hybrid cache manager.
        "sliding window": spec.sliding_window is not None,
        "chunked local attention": spec.attention_chunk_size is not None,
        "non-causal attention": spec.non_causal,
        "head_size_v other than head_size": spec.head_size_v != spec.head_size,
        "tokens_per_state other than 1": spec.tokens_per_state != 1,
    }
    return [feature for feature, found in features.items() if found]


def get_flash_attn(head_size: int) -> Callable[..., torch.Tensor] | None:
    """FlashAttention's varlen function for a head size, its version bound.

    The version is the one vLLM picks on this GPU; None if there is none that
    takes the head size.
    """
    if not is_flash_attn_varlen_func_available():
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    if current_platform.is_rocm():
        return flash_attn_varlen_func
    version = get_flash_attn_version(head_size=head_size)
    if version is None or head_size > FLASH_ATTN_MAX_HEAD_SIZE:
        return None
    return partial(flash_attn_varlen_func, fa_version=version)


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


@dataclass
class TurboMetadata(AttentionMetadata):
    """One batch: decode requests first, then prefills.

    A decode request has one query token and those that it is to verify.

    Attributes:
        num_actual_tokens: Query tokens, without padding.
        slot_mapping: (T,) slots of the query tokens, -1 for none.
        seq_lens: (R,) int32 lengths, query tokens included.
        block_table: (R, max_blocks) int32.
        num_decodes: Decode requests; with CUDA graphs, padded.
        num_decode_tokens: Their query tokens, likewise.
        decode_query_len: Query tokens of a decode request, at most.
        decode_start_loc: (num_decodes + 1,) int32 on the device, where their tokens
            begin; None if each has ``decode_query_len``.
        prefill: The others; None if there are none.

    """

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    decode_query_len: int
    decode_start_loc: torch.Tensor | None
    prefill: PrefillMetadata | None


class TurboMetadataBuilder(AttentionMetadataBuilder[TurboMetadata]):
    """Builds ``TurboMetadata``."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int = 1

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        cache_dtype = kv_cache_spec.kv_quant_mode.name.lower()
        reasons = unsupported_spec_features(kv_cache_spec)
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.enable_permute_local_kv:
            reasons.append("enable_permute_local_kv")
        if reasons:
            raise ValueError(refusal(cache_dtype, ", ".join(reasons)))
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.stored = vllm_config.attention_config.turbo_prefill == "stored"
        self.tokens_per_piece = piece_tokens(
            vllm_config.scheduler_config.max_num_batched_tokens,
            kv_cache_spec.num_kv_heads,
            kv_cache_spec.head_size,
            vllm_config.model_config.dtype,
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TurboMetadata:
        common = common_attn_metadata
        # Not by whether they are prefilled: lengths on the host are not exact for
        # requests whose drafts are verified, so no such may go the prefill way.
        num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold
        )
        query_len, is_uniform = 1, True
        if self.reorder_batch_threshold > 1 and num_decodes > 0:
            query_lens = common.query_start_loc_cpu[: num_decodes + 1].diff()
            # A padded batch has requests without tokens at its end, and the tokens
            # that these would have.
            query_len = max(int(query_lens.max()), 1)
            is_uniform = num_decodes * query_len == num_decode_tokens
        prefill = None
        if num_prefills > 0:
            # Exact on prefill rows.
            seq_lens_cpu = common.seq_lens_cpu_upper_bound
            assert seq_lens_cpu is not None
            prefill = build_prefill_metadata(
                common.query_start_loc_cpu[num_decodes:] - num_decode_tokens,
                seq_lens_cpu[num_decodes:],
                common.block_table_tensor[num_decodes:],
                self.stored,
                self.tokens_per_piece,
                self.device,
            )
        return TurboMetadata(
            num_actual_tokens=common.num_actual_tokens,
            slot_mapping=common.slot_mapping,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            decode_query_len=query_len,
            decode_start_loc=(
                None if is_uniform else common.query_start_loc[: num_decodes + 1]
            ),
            prefill=prefill,
        )


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
        refused = {
            "ALiBi": alibi_slopes is not None,
            "sliding window": sliding_window is not None,
            "logits soft cap": bool(logits_soft_cap),
            f"attention type {attn_type}": attn_type != AttentionType.DECODER,
            "KV sharing between layers": kv_sharing_target_layer_name is not None,
            "speculative decoding with a draft model": speculative is not None
            and speculative.uses_draft_kv_cache(),
        }
        refused |= {
            name: value is not None and value is not False
            for name, value in unsupported.items()
        }
        reasons = [reason for reason, found in refused.items() if found]
        if reasons:
            raise ValueError(refusal(kv_cache_dtype, ", ".join(reasons)))
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
        self.tokens_per_piece = piece_tokens(
            self.max_num_tokens, self.num_kv_heads, head_size, self.dtype
        )
        self.flash_attn = get_flash_attn(head_size)
        ratio = 4 * head_size / self.layout.slot_size
        logger.info_once(
            "KV cache %s: %d bytes a token, layer and KV head, %.2f times less than "
            "16 bits; prefill attends to %s K and V.",
            kv_cache_dtype,
            self.layout.slot_size,
            ratio,
            "stored" if self.stored else "raw",
        )

    @cached_property
    def kernels(self) -> TurboKernels:
        """What stores and decodes on a GPU."""
        group = self.num_heads // self.num_kv_heads
        return choose_kernels(
            self.kernel_choice, self.layout, group, self.max_decode_query_len
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Choose the kernels, for building them may take seconds."""
        if current_platform.is_cpu():
            logger.info_once("Turbo KV cache: PyTorch's operators, on a CPU.")
        else:
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
                refusal(self.kv_cache_dtype, "fused output quantization")
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
        num_tokens = metadata.num_decode_tokens
        start_loc = metadata.decode_start_loc
        if start_loc is None:
            start_loc = torch.arange(0, num_tokens + 1, metadata.decode_query_len)
        self._attend_torch(
            *(x[:num_tokens] for x in (query, key, value)),
            kv_cache,
            metadata.block_table,
            start_loc.tolist(),
            metadata.seq_lens[: metadata.num_decodes].tolist(),
            output[:num_tokens],
        )
        self._prefill_torch(query, key, value, kv_cache, metadata, output)

    def _prefill_torch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TurboMetadata,
        output: torch.Tensor,
    ) -> None:
        prefill = metadata.prefill
        if prefill is None:
            return
        rows = slice(metadata.num_decode_tokens, query.shape[0])
        self._attend_torch(
            query[rows],
            key[rows],
            value[rows],
            kv_cache,
            prefill.block_table,
            prefill.query_start_loc_cpu.tolist(),
            prefill.seq_lens_cpu.tolist(),
            output[rows],
        )

    def _attend_torch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start_loc: list[int],
        seq_lens: list[int],
        output: torch.Tensor,
    ) -> None:
        paged_attention(
            query,
            None if self.stored else key,
            None if self.stored else value,
            kv_cache,
            block_table,
            query_start_loc,
            seq_lens,
            self.scale,
            self.layout,
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

        num_decode_tokens, prefill = metadata.num_decode_tokens, metadata.prefill
        rows = slice(num_decode_tokens, query.shape[0])
        needs_buffers = prefill is not None and (self.stored or prefill.context)
        rotated_query, query_scale, partial_output, partial_lse, *prefill_buffers = (
            self._workspace(
                num_decode_tokens,
                self._num_partials(metadata.num_decodes, metadata.decode_query_len),
                query.shape[0] - num_decode_tokens if needs_buffers else 0,
                query.device,
            )
        )
        decode_tokens = [x[:num_decode_tokens] for x in (query, key, value)]
        self.kernels.store(
            kv_cache,
            metadata.slot_mapping[: query.shape[0]],
            key,
            value,
            self.layout,
            decode_tokens[0],
            rotated_query,
            query_scale,
            self.scale,
        )
        self.kernels.decode_attention(
            rotated_query,
            query_scale,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            self.layout,
            partial_output,
            partial_lse,
            output[:num_decode_tokens],
            None if self.stored else NewestToken(*decode_tokens, self.scale),
            metadata.decode_query_len,
            metadata.decode_start_loc,
        )
        if prefill is None:
            return
        if self.flash_attn is None:
            self._prefill_torch(query, key, value, kv_cache, metadata, output)
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

    def _workspace(
        self,
        num_decode_tokens: int,
        num_partials: int,
        num_prefill_tokens: int,
        device: torch.device,
    ) -> list[torch.Tensor]:
        """Scratch of one forward pass, in a single request: a second request
        would overlap the first.

        Returns:
            Rotated queries, their scales, partial outputs and their LSE of the
            decodes, then, if there are prefill tokens, the ``PrefillBuffers``.

        """
        heads, size = self.num_heads, self.head_size
        wanted = [
            ((num_decode_tokens, heads, size), torch.float16),
            ((num_decode_tokens, heads), torch.float32),
            ((num_partials, heads, size), torch.float32),
            ((num_partials, heads), torch.float32),
        ]
        if num_prefill_tokens > 0:
            shapes = PrefillBuffers.shapes(
                num_prefill_tokens,
                self.tokens_per_piece,
                heads,
                self.num_kv_heads,
                size,
            )
            wanted += [(shape, self.dtype) for shape in shapes]
        if is_workspace_manager_initialized():
            return current_workspace_manager().get_simultaneous(*wanted)
        return [torch.empty(s, dtype=dtype, device=device) for s, dtype in wanted]

    def _reserve_workspace(self, device: torch.device) -> None:
        """Take all memory of the largest batch, in the profile run."""
        if not is_workspace_manager_initialized():
            return
        num_partials = max(
            self._num_partials(count, query_len)
            for count in range(1, self.max_num_seqs + 1)
            for query_len in range(1, self.max_decode_query_len + 1)
        )
        self._workspace(
            self.max_num_seqs * self.max_decode_query_len,
            num_partials,
            self.max_num_tokens,
            device,
        )
        # Kept for good by a cache: not to be made in a CUDA graph's pool.
        self.kernels.make_matrices(self.head_size, device)
