# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A stand-in for the indexer of sparse MLA, whose kernels need a GPU.

It scores tokens as DeepSeek V3.2 does, and lists the best of those that a token sees.
Keys are kept in FP8 with a scale, in plain rows of the indexer's own cache: 128 codes
and an fp32 number. Queries are not quantised.
"""

from functools import cache
from typing import Any

import torch

KEY_SIZE, MAX_FP8 = 128, 448.0


def pack_keys(keys: torch.Tensor) -> torch.Tensor:
    """Packs keys, (T, 128), into rows of the cache, (T, 132) uint8."""
    scales = keys.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / MAX_FP8
    codes = (keys.float() / scales).to(torch.float8_e4m3fn)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], -1)


def unpack_keys(rows: torch.Tensor) -> torch.Tensor:
    """Unpacks rows of the cache, (T, 132) uint8, into keys, (T, 128) fp32."""
    codes = rows[:, :KEY_SIZE].view(torch.float8_e4m3fn)
    return codes.float() * rows[:, KEY_SIZE:].contiguous().view(torch.float32)


def list_tokens(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, topk: int
) -> torch.Tensor:
    """Lists the tokens that the last tokens of a request attend to.

    Args:
        query: (Q, heads, 128), of the request's last Q tokens.
        weights: (Q, heads), of the heads' scores, which count if they are positive.
        keys: (S, 128) fp32, of all tokens of the request.
        topk: The length of a list.

    Returns:
        (Q, topk) int32, positions from the best on; -1 behind the last. Of tokens with
        the same score the earlier one is better.

    """
    num_queries, length = len(query), len(keys)
    scores = (query.double() @ keys.double().T).relu()
    scores = (scores * weights.double().unsqueeze(-1)).sum(1)
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(length - num_queries + 1)
    scores.masked_fill_(hidden, float("-inf"))
    best, order = scores.sort(dim=-1, descending=True, stable=True)
    order = order.masked_fill(best == float("-inf"), -1)[:, :topk].int()
    return torch.nn.functional.pad(order, (0, topk - order.shape[1]), value=-1)


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    q_quant: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """A ``SparseAttnIndexer.forward_cpu``: stores keys and writes lists of tokens."""
    from vllm.forward_context import get_forward_context

    lists, metadata = self.topk_indices_buffer, get_forward_context().attn_metadata
    if metadata is None:
        return lists
    common = metadata[self.k_cache.prefix]
    # (num_blocks, N, 132), and a row a slot.
    pages = self.k_cache.kv_cache
    block_size, num_tokens = pages.shape[1], common.num_actual_tokens
    slots = common.slot_mapping[:num_tokens]
    own = slots >= 0
    blocks, places = slots[own] // block_size, slots[own] % block_size
    pages[blocks, places] = pack_keys(k[:num_tokens][own])
    lists[: hidden_states.shape[0]] = -1
    starts = common.query_start_loc.tolist()
    for row, length in enumerate(common.seq_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        positions = torch.arange(length)
        blocks = common.block_table_tensor[row, positions // block_size].long()
        keys = unpack_keys(pages[blocks, positions % block_size])
        lists[tokens] = list_tokens(
            q_quant[tokens], weights[tokens], keys, self.topk_tokens
        )
    return lists


@cache
def emulate_indexers() -> None:
    """Lets models with DeepSeek V3.2's indexer run on a CPU."""
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.model_executor.models import deepseek_v2
    from vllm.v1.attention.backend import (
        AttentionMetadataBuilder,
        CommonAttentionMetadata,
    )
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    class CommonBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
        """Hands on the metadata that all backends get."""

        reorder_batch_threshold = 1
        # It has views of tensors that a drafter updates.
        supports_draft_decode_metadata_update = True

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> CommonAttentionMetadata:
            return common_attn_metadata

        def update_draft_decode_metadata(
            self, metadata: CommonAttentionMetadata
        ) -> None:
            pass

    def keep(
        query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        return query, query.new_ones(query.shape[0], 1)

    DeepseekV32IndexerBackend.get_builder_cls = staticmethod(lambda: CommonBuilder)
    SparseAttnIndexer.forward_cpu = _forward
    deepseek_v2.per_token_group_quant_fp8 = keep
