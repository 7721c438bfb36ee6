# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What attention over the turbo KV cache is told of a batch."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.kernel_choice import max_extend_len, share_kernels
from vllm.v1.attention.ops.turbo.planning.prefill import (
    PrefillMetadata,
    build_prefill_metadata,
    prefill_limits,
)
from vllm.v1.attention.ops.turbo.refusals import (
    NON_CAUSAL,
    PERMUTED_TRANSFER,
    refusal,
    unsupported_spec_features,
)
from vllm.v1.attention.ops.turbo.startup import log_turbo_cache
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

# Query tokens of a step that extends take, and of one call if each of its requests had
# as many as the longest: for more, scratch would be large.
MAX_EXTEND_TOKENS = 2048
MAX_CALL_TOKENS = 1024


class ExtendBatch(NamedTuple):
    """Requests of a few query tokens that attend to packed context together.

    Attributes:
        first_request: In the batch.
        num_requests: One after the other.
        first_token: In the batch.
        num_tokens: Of all of them.
        query_len: Query tokens of a request, at most.
        query_start_loc: (num_requests + 1,) int32 on the device, from zero; None if
            each has ``query_len``.

    """

    first_request: int
    num_requests: int
    first_token: int
    num_tokens: int
    query_len: int
    query_start_loc: torch.Tensor | None


@dataclass
class TurboMetadata(AttentionMetadata):
    """One batch: decode requests first, then extends, then prefills.

    A decode request has one query token and those that it is to verify. An extend is
    of a prompt's end, short, mostly behind a prefix hit.

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
        extends: Requests with few query tokens, if kernels for them are there.
        prefill: The others; None if there are none.
        short_plans: What layers have found out for those before prefills, by
            their ``Workspace``.

    """

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    decode_query_len: int
    decode_start_loc: torch.Tensor | None
    extends: list[ExtendBatch]
    prefill: PrefillMetadata | None
    short_plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_short_tokens(self) -> int:
        """Query tokens of decodes and extends: those before the prefills'."""
        return self.num_decode_tokens + sum(e.num_tokens for e in self.extends)


def plan_extends(
    query_lens: list[int], context_lens: list[int], max_len: int
) -> list[tuple[int, int]]:
    """Which of a batch's first prefill requests attend to packed context.

    Args:
        query_lens: Query tokens of each request that is no decode.
        context_lens: Tokens before them.
        max_len: Query tokens of an extend, at most; 0: there are none.

    Returns:
        First and last (exclusive) request of each call, from zero on. None if no
        request of them has context: prefill reads no cache then.

    """
    calls: list[tuple[int, int]] = []
    first = longest = total = 0
    for i, length in enumerate(query_lens):
        total += length
        if length > max_len or total > MAX_EXTEND_TOKENS:
            break
        if max(longest, length) * (i + 1 - first) > MAX_CALL_TOKENS:
            first, longest = i, 0
        longest = max(longest, length)
        if calls and calls[-1][0] == first:
            calls.pop()
        calls.append((first, i + 1))
    if not calls or not any(context_lens[: calls[-1][1]]):
        return []
    return calls


def num_draft_slots(vllm_config: VllmConfig) -> int:
    """Query tokens a request that a drafter's first pass has beyond those of the step
    before it, which it takes with all that were rejected.
    """
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else speculative.max_num_new_slots_for_drafting


def max_layer_query_len(vllm_config: VllmConfig) -> int:
    """Query tokens of a decode request, at most, of any layer, drafters' too."""
    return max_decode_query_len(vllm_config) + num_draft_slots(vllm_config)


class TurboMetadataBuilder(AttentionMetadataBuilder[TurboMetadata]):
    """Builds ``TurboMetadata``.

    Lengths on the host are not exact for requests whose drafts are verified: how many
    of the last step's were rejected is known on the device alone, as are, with adaptive
    verification, how many are verified in this one. Whoever may have drafts is a decode
    request, therefore, and decodes take all lengths from the device.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int = 1
    # All that decodes need are views of what the drafter updates between its steps.
    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.cache_dtype = kv_cache_spec.kv_quant_mode.name.lower()
        reasons = unsupported_spec_features(kv_cache_spec)
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.enable_permute_local_kv:
            reasons.append(PERMUTED_TRANSFER)
        if reasons:
            raise ValueError(refusal(self.cache_dtype, reasons))
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        # Rows that decode in the target model do so in the drafter.
        layers = self._layers()
        if layers and all(layer.is_draft_layer for layer in layers):
            self.reorder_batch_threshold += num_draft_slots(vllm_config)
        speculative = vllm_config.speculative_config
        self.has_device_query_lens = (
            speculative is not None and speculative.enable_adaptive_verification
        )
        self.stored = vllm_config.attention_config.turbo_prefill == "stored"
        assert isinstance(vllm_config.model_config.dtype, torch.dtype)
        self.prefill_limits = prefill_limits(
            max(
                (layer.num_heads for layer in layers),
                default=vllm_config.model_config.get_num_attention_heads(
                    vllm_config.parallel_config
                ),
            ),
            kv_cache_spec.num_kv_heads,
            kv_cache_spec.head_size,
            vllm_config.model_config.dtype,
            self.stored,
        )
        self.max_extend_len = self._find_max_extend_len(kv_cache_spec)
        log_turbo_cache(vllm_config)

    def _layers(self) -> list[Any]:
        """The layers that it builds for."""
        layer_type: type = AttentionLayerBase
        layers: dict[str, Any] = get_layers_from_vllm_config(
            self.vllm_config, layer_type, self.layer_names
        )
        return list(layers.values())

    def _find_max_extend_len(self, spec: AttentionSpec) -> int:
        """Query tokens up to which the layers' kernels have an ``extend_attention``."""
        if current_platform.is_cpu():
            return 0
        config = self.vllm_config
        layout = TurboFormat.from_cache_dtype(self.cache_dtype, spec.head_size)
        # A drafter's layers have other heads than the target's.
        groups = {layer.num_heads // spec.num_kv_heads for layer in self._layers()}
        choice = config.attention_config.turbo_kernel
        query_len = max_layer_query_len(config)
        kernels = [
            share_kernels(choice, layout, each, query_len).kernels for each in groups
        ]
        has_extends = kernels and all(each.extend_attention for each in kernels)
        return min(map(max_extend_len, groups)) if has_extends else 0

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> int | None:
        return max_decode_query_len(vllm_config)

    def update_draft_decode_metadata(self, metadata: TurboMetadata) -> None:
        pass

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TurboMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(refusal(self.cache_dtype, [NON_CAUSAL]))
        # Not by whether they are prefilled.
        num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold
        )
        query_len, is_uniform = self._decode_query_len(
            common, num_decodes, num_decode_tokens
        )
        extends, prefill = [], None
        if num_prefills > 0:
            extends = self._build_extends(common, num_decodes)
            num_short = num_decodes + sum(extend.num_requests for extend in extends)
            if num_short < common.num_reqs:
                starts = common.query_start_loc_cpu[num_short:]
                seq_lens_cpu = self._seq_lens_cpu(common)
                prefill = build_prefill_metadata(
                    starts - starts[0],
                    seq_lens_cpu[num_short:],
                    common.block_table_tensor[num_short:],
                    self.stored,
                    self.prefill_limits,
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
            extends=extends,
            prefill=prefill,
        )

    def _seq_lens_cpu(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """(R,) int32 lengths on the host, exact for requests that are prefilled.

        Raises:
            ValueError: If the runner gives none.

        """
        if common.seq_lens_cpu_upper_bound is None:
            raise ValueError(
                f"--kv-cache-dtype {self.cache_dtype} plans prefills by lengths on the "
                "host, and this model runner gives none "
                "(CommonAttentionMetadata.seq_lens_cpu_upper_bound)"
            )
        return common.seq_lens_cpu_upper_bound

    def _decode_query_len(
        self, common: CommonAttentionMetadata, num_decodes: int, num_decode_tokens: int
    ) -> tuple[int, bool]:
        """Query tokens of a decode request, at most, and whether each has as many."""
        if self.reorder_batch_threshold == 1 or num_decodes == 0:
            return 1, True
        query_lens = common.query_start_loc_cpu[: num_decodes + 1].diff()
        query_len = max(int(query_lens.max()), 1)
        if self.has_device_query_lens and max(query_len, common.max_query_len) > 1:
            # The host's are an even share of the drafts that are verified.
            return self.reorder_batch_threshold, False
        # A padded batch has requests without tokens at its end, and the tokens that
        # these would have.
        return query_len, num_decodes * query_len == num_decode_tokens

    def _build_extends(
        self, common: CommonAttentionMetadata, num_decodes: int
    ) -> list[ExtendBatch]:
        starts = common.query_start_loc_cpu[num_decodes:]
        query_lens = starts.diff()
        seq_lens = self._seq_lens_cpu(common)[num_decodes : common.num_reqs]
        context_lens = (seq_lens - query_lens).tolist()
        calls = plan_extends(query_lens.tolist(), context_lens, self.max_extend_len)
        return [
            ExtendBatch(
                num_decodes + first,
                last - first,
                int(starts[first]),
                int(starts[last] - starts[first]),
                int(query_lens[first:last].max()),
                async_tensor_h2d(starts[first : last + 1] - starts[first], self.device),
            )
            for first, last in calls
        ]
