# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse multi-head latent attention over the turbo KV cache.

An indexer lists the tokens that a query token attends to. They are read from packed
pages, in decodes and prefills alike. vLLM's indexer and its cache stay as they are.
A batch of prefills no longer than the lists is projected up, as in other backends.
"""

from typing import Any, ClassVar

import torch

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionLayer,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.mla.sparse_utils import (
    triton_convert_req_index_to_global_index,
)
from vllm.v1.attention.backends.mla.turbo_mla import TurboLatentImpl, TurboMLABackend
from vllm.v1.attention.backends.mla.turbo_mla_metadata import (
    bounded_rows,
    check_spec,
)
from vllm.v1.attention.ops.metadata import compute_token_to_req_indices
from vllm.v1.attention.ops.turbo import refusals
from vllm.v1.attention.ops.turbo.serving.startup import log_turbo_cache
from vllm.v1.kv_cache_interface import AttentionSpec


class TurboMLASparseBackend(TurboMLABackend):
    """The backend of the turbo cache dtypes for sparse MLA."""

    @staticmethod
    def get_name() -> str:
        return "TURBO_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type["TurboMLASparseImpl"]:  # type: ignore[override]
        return TurboMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type["TurboMLASparseMetadataBuilder"]:  # type: ignore[override]
        return TurboMLASparseMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class TurboMLASparseMetadataBuilder(
    SparseMLACommonMetadataBuilder[SparseMLACommonMetadata]
):
    """Builds the metadata of a step. Decodes have as many tokens as drafts need."""

    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    # Requests of tokens follow from a tensor that the drafter updates.
    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        check_spec(kv_cache_spec, serves_sparse=True)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        log_turbo_cache(vllm_config)

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config: VllmConfig) -> int:
        # Contexts that are projected up are no longer than the lists.
        base = SparseMLACommonMetadataBuilder
        size = base.determine_chunked_prefill_workspace_size(vllm_config)
        return bounded_rows(vllm_config, size)

    def _build_req_id_per_token(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> torch.Tensor:
        if not current_platform.is_cpu():
            return super()._build_req_id_per_token(common_attn_metadata)
        find_requests(
            common_attn_metadata.query_start_loc, self.req_id_per_token_buffer
        )
        return self.req_id_per_token_buffer

    def update_draft_decode_metadata(self, metadata: SparseMLACommonMetadata) -> None:
        if current_platform.is_cpu():
            find_requests(metadata.query_start_loc, metadata.req_id_per_token)
        elif num_tokens := metadata.num_decode_tokens:
            compute_token_to_req_indices(
                metadata.query_start_loc,
                metadata.req_id_per_token,
                num_tokens,
                num_tokens,
            )


class TurboMLASparseImpl(
    TurboLatentImpl[SparseMLACommonMetadata],
    SparseMLACommonImpl[SparseMLACommonMetadata],
):
    """Stores latents and rotary keys, and attends to those that an indexer lists."""

    own_arguments: ClassVar[frozenset[str]] = refusals.SPARSE_MLA_ARGUMENTS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A dense prefill sees its own tokens as computed.
        self.supports_dense_mha_prefill = not self.runner.stored

    def _unmeasured_size(self) -> int:
        # DeepSeek V3.2's layers leave out the projections in the profile run.
        builder = TurboMLASparseMetadataBuilder
        num_rows = builder.determine_chunked_prefill_workspace_size(self.vllm_config)
        projected = 2 * self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
        return max(self._absorbed_size, num_rows * projected)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the listed tokens: see ``TurboMLAImpl.forward_mqa``."""
        assert self.topk_indices_buffer is not None
        query, rope = self.split_query(q)
        num_tokens = query.shape[0]
        slots, counts = find_slots(
            attn_metadata.req_id_per_token[:num_tokens],
            attn_metadata.block_table,
            self.topk_indices_buffer[:num_tokens],
            attn_metadata.block_size,
        )
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        cache = kv_c_and_k_pe_cache.view(torch.uint8)
        self.runner.attend_to_lists(query, rope, cache, slots, counts, output, lse)
        return output, lse


def find_requests(query_start_loc: torch.Tensor, requests: torch.Tensor) -> None:
    """Write the request of each query token, on a CPU.

    Args:
        query_start_loc: (R + 1,) int32, where requests' tokens begin.
        requests: (>= T,) int32, written; zero past the last token.

    """
    requests.zero_()
    lens = query_start_loc.diff()
    own = torch.arange(len(lens), dtype=torch.int32).repeat_interleave(lens)
    requests[: len(own)] = own


def find_slots(
    requests: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of listed tokens.

    Args:
        requests: (T,) int32, the request of each query token.
        block_table: (R, max_blocks) int32.
        positions: (T, K) int32, positions in the request in any order; -1 for none.
        block_size: Tokens of a block.

    Returns:
        (T, K) int32, block * block_size + place, those of no token last; and their
        numbers, (T,) int32.

    """
    if not current_platform.is_cpu():
        return triton_convert_req_index_to_global_index(
            requests,
            block_table,
            positions,
            BLOCK_SIZE=block_size,
            NUM_TOPK_TOKENS=positions.shape[1],
            return_valid_counts=True,
        )
    known = positions.clamp(min=0).long()
    blocks = block_table[requests.long()].gather(1, known // block_size)
    slots = blocks * block_size + (known % block_size).int()
    is_none = (positions < 0).int()
    order = is_none.sort(dim=1, stable=True).indices
    counts = positions.shape[1] - is_none.sum(1, dtype=torch.int32)
    return slots.masked_fill(is_none.bool(), -1).gather(1, order), counts
