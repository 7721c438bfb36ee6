# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What attention over the turbo KV cache is told of a batch."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.attention.ops.turbo.prefill import (
    PrefillMetadata,
    build_prefill_metadata,
    piece_tokens,
)
from vllm.v1.attention.ops.turbo.refusals import (
    PERMUTED_TRANSFER,
    refusal,
    unsupported_spec_features,
)
from vllm.v1.kv_cache_interface import AttentionSpec


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
            reasons.append(PERMUTED_TRANSFER)
        if reasons:
            raise ValueError(refusal(cache_dtype, reasons))
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
