# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefill attention: FlashAttention over raw or dequantised K and V.

Cached context is dequantised in pieces of bounded size, for all requests at once, and
attended to in rotated space; the pieces' outputs are merged by their log-sum-exp. A
batch whose queries would need too much scratch is served slice by slice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm.platforms import current_platform
from vllm.v1.attention.backends.fa_utils import (
    get_flash_attn_version,
    is_flash_attn_varlen_func_available,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.attention.ops.turbo.efficient_attention import efficient_attention
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.planning.prefill import (
    FLASH_ATTN_MAX_HEAD_SIZE,
    CacheGroup,
    PrefillMetadata,
)


def get_flash_attn(head_size: int) -> Callable[..., Any] | None:
    """FlashAttention's varlen function for a head size, its version bound.

    The version is the one vLLM picks on this GPU. For larger heads on NVIDIA's GPUs it
    is PyTorch's memory-efficient attention; None if there is none that takes the head
    size.
    """
    if current_platform.is_cuda() and head_size > FLASH_ATTN_MAX_HEAD_SIZE:
        return efficient_attention
    if not is_flash_attn_varlen_func_available():
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    version = get_flash_attn_version(head_size=head_size)
    if version is None or head_size > FLASH_ATTN_MAX_HEAD_SIZE:
        return None
    return partial(flash_attn_varlen_func, fa_version=version)


@dataclass
class PrefillBuffers:
    """Scratch of ``prefill_attention``.

    Attributes:
        query: (T, Hq, D) rotated queries of a slice.
        output: (T, Hq, D) output of one piece.
        key: (P, H, D) keys of a piece that are dequantised, or raw ones of several
            requests; P tokens.
        value: (P, H, D) values, likewise.

    """

    query: torch.Tensor
    output: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @staticmethod
    def shapes(
        num_tokens: int,
        piece_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
    ) -> list[tuple[int, int, int]]:
        """Shapes of the fields, in order."""
        rows = (num_tokens, num_heads, head_size)
        piece = (piece_tokens, num_kv_heads, head_size)
        return [rows, rows, piece, piece]


def _attend_to_group(
    rotated_query: torch.Tensor,
    kv_cache: torch.Tensor,
    group: CacheGroup,
    scale: float,
    layout: TurboFormat,
    buffers: PrefillBuffers,
    output: torch.Tensor,
    flash_attn: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Attention to all pieces of a group, in rotated space, into ``output``; returns
    its LSE.
    """
    from vllm.v1.attention.ops.turbo.triton.prefill import gather_context

    lse = None
    for piece in group.pieces:
        gather_context(
            kv_cache,
            group.block_table,
            piece.starts,
            piece.cu_lens,
            piece.max_len,
            piece.num_tokens,
            layout,
            buffers.key,
            buffers.value,
        )
        target = output if lse is None else buffers.output[: output.shape[0]]
        _, piece_lse, *_ = flash_attn(
            q=rotated_query,
            # Not a row more: FlashAttention multiplies what follows the last
            # sequence by zero, and scratch may hold NaN.
            k=buffers.key[: piece.num_tokens],
            v=buffers.value[: piece.num_tokens],
            out=target,
            cu_seqlens_q=group.query_start_loc,
            max_seqlen_q=group.max_query_len,
            cu_seqlens_k=piece.cu_lens,
            max_seqlen_k=piece.max_len,
            softmax_scale=scale * layout.key_codebook.gain,
            causal=piece is group.own,
            return_softmax_lse=True,
        )
        if lse is None:
            lse = piece_lse
        else:
            # Not in place: threads of one row may still read the old LSE.
            merged_lse = torch.empty_like(lse)
            merge_attn_states(output, output, lse, target, piece_lse, merged_lse)
            lse = merged_lse
    assert lse is not None
    return lse


def _attend_to_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    groups: list[CacheGroup],
    scale: float,
    layout: TurboFormat,
    buffers: PrefillBuffers,
    output: torch.Tensor,
    flash_attn: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Attention to all that a slice reads of the cache, into ``output``; returns its
    LSE.
    """
    from vllm.v1.attention.ops.turbo.triton.prefill import rotate_rows

    rotated_query = buffers.query[: query.shape[0]]
    rotate_rows(query, rotated_query)
    lses = [
        _attend_to_group(
            rotated_query[group.tokens],
            kv_cache,
            group,
            scale,
            layout,
            buffers,
            output[group.tokens],
            flash_attn,
        )
        for group in groups
    ]
    rotate_rows(output, output, inverse=True)
    lse = lses[0]
    if len(groups) > 1:
        # Not by torch.cat: the driver would load its kernel while serving.
        lse = lse.new_empty(query.shape[1], query.shape[0])
        for group, group_lse in zip(groups, lses):
            lse[:, group.tokens] = group_lse
    return lse


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: PrefillMetadata,
    scale: float,
    layout: TurboFormat,
    buffers: PrefillBuffers | None,
    output: torch.Tensor,
    flash_attn: Callable[..., torch.Tensor],
) -> None:
    """Causal attention of the prefill requests, whose tokens are stored.

    Args:
        query: (T, Hq, D).
        key: (T, H, D), raw.
        value: (T, H, D), raw.
        kv_cache: (num_blocks, H, N, C) uint8.
        metadata: Of the batch.
        scale: Softmax scale.
        layout: The cache's format.
        buffers: Scratch for ``metadata.max_buffered_tokens``; None if that is None.
        output: (T, Hq, D), written; contiguous.
        flash_attn: FlashAttention's varlen function, version bound.

    """
    from vllm.v1.attention.ops.turbo.triton.prefill import isolate_broken_values

    for part in metadata.slices:
        queries, result = query[part.tokens], output[part.tokens]
        lse = None
        if part.groups:
            assert buffers is not None
            lse = _attend_to_cache(
                queries,
                kv_cache,
                part.groups,
                scale,
                layout,
                buffers,
                result,
                flash_attn,
            )
        if part.raw is None:
            continue
        end = part.tokens.stop
        raw = slice(end - part.raw.num_tokens, end)
        raw_key, raw_value = key[raw], value[raw]
        if part.has_neighbours:
            assert buffers is not None
            isolated_key = buffers.key[: part.raw.num_tokens]
            isolated_value = buffers.value[: part.raw.num_tokens]
            isolate_broken_values(raw_key, raw_value, isolated_key, isolated_value)
            raw_key, raw_value = isolated_key, isolated_value
        target = result
        if lse is not None:
            assert buffers is not None
            target = buffers.output[: queries.shape[0]]
        _, raw_lse, *_ = flash_attn(
            q=queries,
            k=raw_key,
            v=raw_value,
            out=target,
            cu_seqlens_q=part.query_start_loc,
            max_seqlen_q=part.max_query_len,
            cu_seqlens_k=part.raw.cu_lens,
            max_seqlen_k=part.raw.max_len,
            softmax_scale=scale,
            causal=True,
            return_softmax_lse=True,
        )
        if lse is not None:
            merge_attn_states(result, result, lse, target, raw_lse)
