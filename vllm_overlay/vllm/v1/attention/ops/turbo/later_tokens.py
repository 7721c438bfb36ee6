# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of a span's tokens, an image's, to those of it that come after them."""

from collections.abc import Callable

import torch

from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.attention.ops.turbo import reasons, refusals
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import OffsetScores
from vllm.v1.attention.ops.turbo.planning.prefill import FLASH_ATTN_MAX_HEAD_SIZE
from vllm.v1.attention.ops.turbo.planning.scratch import PrefillScratch
from vllm.v1.attention.ops.turbo.planning.spans import LaterTokens
from vllm.v1.attention.ops.turbo.varlen_attention import attend, read_runs


def attend_to_later_tokens(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    parts: list[LaterTokens],
    scale: float,
    layout: TurboFormat,
    scratch: PrefillScratch | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    flash_attn: Callable[..., torch.Tensor],
    key_offset: torch.Tensor | None,
) -> None:
    """Merge what a slice's queries see for being in a span into what they have of
    causal attention.

    Args:
        query: (T, Hq, D), the slice's.
        key: (P, H, D) of the prefills' tokens, raw; None if all is read from the cache.
        value: (P, H, D), likewise.
        kv_cache: (num_blocks, H, N, C) uint8.
        parts: Which query tokens see what.
        scale: Softmax scale.
        layout: The cache's format.
        scratch: Scratch for a span's tokens; None if none are read from the cache.
        output: (T, Hq, D) contiguous, changed.
        lse: (Hq, T) fp32 natural log-sum-exp of ``output``, changed.
        flash_attn: FlashAttention's varlen function, version bound.
        key_offset: (G, H, D) fp32, taken off the cached keys, by segments; None if
            nothing was.

    Raises:
        NotImplementedError: If what attends to these heads knows no windows.

    """
    from vllm.v1.attention.ops.turbo.triton.prefill import add_offset_scores

    if parts and query.shape[2] > FLASH_ATTN_MAX_HEAD_SIZE:
        reason = reasons.MM_PREFIX_OF_LARGE_HEADS.of(head_size=query.shape[2])
        raise NotImplementedError(refusals.refusal(layout.name, [reason]))
    for part in parts:
        queries, result = query[part.tokens], output[part.tokens]
        if part.runs is None:
            assert key is not None and value is not None
            # No other sequence's tokens, whose values may be broken.
            later_key, later_value = key[part.keys], value[part.keys]
        else:
            later_key, later_value = read_runs(
                kv_cache,
                part.block_table,
                part.runs,
                None,
                None,
                layout,
                scratch,
                key_offset,
            )
        # An image's, and at a time: less than other layers take beside attention.
        target = torch.empty_like(result)
        later_lse = attend(
            flash_attn,
            queries,
            later_key,
            later_value,
            target,
            part.query_start_loc,
            part.num_queries,
            part.cu_lens,
            part.num_keys,
            scale,
            causal=False,
            window_size=part.window_size,
        )
        if part.runs is not None and key_offset is not None:
            add_offset_scores(
                later_lse,
                OffsetScores(queries, key_offset, scale),
                part.query_start_loc,
                part.num_queries,
                part.runs.starts,
            )
        own_lse = lse[:, part.tokens].contiguous()
        # Not in place: threads of one row may still read the old LSE.
        merged_lse = torch.empty_like(own_lse)
        merge_attn_states(result, result, own_lse, target, later_lse, merged_lse)
        lse[:, part.tokens] = merged_lse
