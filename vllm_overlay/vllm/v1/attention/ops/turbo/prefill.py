# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefill attention: FlashAttention over raw or dequantised K and V.

Cached context is dequantised in pieces of bounded size, for all requests of
the batch at once, and attended to in rotated space; the pieces' outputs are
merged by their log-sum-exp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.fa_utils import (
    get_flash_attn_version,
    is_flash_attn_varlen_func_available,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.attention.ops.turbo.format import TurboFormat

# Dequantised K and V of one piece, together.
PIECE_BYTES = 64 * 2**20
# What every version of FlashAttention takes.
FLASH_ATTN_MAX_HEAD_SIZE = 256


@dataclass
class ContextPiece:
    """A piece of each prefill request's tokens, as it is dequantised.

    Attributes:
        starts: (R,) int32 on the device, first position of each part.
        cu_lens: (R + 1,) int32 on the device, cumulative lengths.
        max_len: Longest part.
        num_tokens: Tokens of all parts.

    """

    starts: torch.Tensor
    cu_lens: torch.Tensor
    max_len: int
    num_tokens: int


@dataclass
class PrefillMetadata:
    """The prefill requests of a batch; R requests, T tokens.

    Attributes:
        query_start_loc: (R + 1,) int32 on the device, from zero.
        max_query_len: Longest query.
        block_table: (R, max_blocks) int32.
        own: The query tokens themselves, to be read from the cache; None if
            the raw K and V are used.
        context: Pieces of the tokens before them.
        query_start_loc_cpu: ``query_start_loc`` on the host.
        seq_lens_cpu: (R,) lengths, query tokens included.

    """

    query_start_loc: torch.Tensor
    max_query_len: int
    block_table: torch.Tensor
    own: ContextPiece | None
    context: list[ContextPiece]
    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu: torch.Tensor


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


def piece_tokens(
    max_query_tokens: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> int:
    """Tokens a piece: PIECE_BYTES, but at least a whole batch of queries."""
    token_bytes = 2 * num_kv_heads * head_size * dtype.itemsize
    return max(max_query_tokens, PIECE_BYTES // token_bytes)


def plan_context(
    context_lens: torch.Tensor, tokens_per_piece: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut the requests' contexts, laid end to end, into pieces.

    Args:
        context_lens: (R,) int32 on the host.
        tokens_per_piece: Tokens a piece, in total over the requests.

    Returns:
        For each piece, on the host: first position of each request's part,
        (R,) int32, and cumulative lengths, (R + 1,) int32.

    """
    begins = context_lens.cumsum(0) - context_lens
    total = int(context_lens.sum())
    pieces = []
    for first in range(0, total, tokens_per_piece):
        starts = torch.minimum((first - begins).clamp(min=0), context_lens)
        ends = (first + tokens_per_piece - begins).clamp(min=0)
        lens = torch.minimum(ends, context_lens) - starts
        cu_lens = torch.zeros(len(lens) + 1, dtype=torch.int32)
        torch.cumsum(lens, 0, out=cu_lens[1:])
        pieces.append((starts.to(torch.int32), cu_lens))
    return pieces


def build_prefill_metadata(
    query_start_loc_cpu: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    block_table: torch.Tensor,
    stored: bool,
    tokens_per_piece: int,
    device: torch.device,
) -> PrefillMetadata:
    """Plan the prefill of a batch on the host; nothing here synchronises.

    Args:
        query_start_loc_cpu: (R + 1,) int32 on the host, from zero.
        seq_lens_cpu: (R,) int32 on the host, exact.
        block_table: (R, max_blocks) int32 on the device.
        stored: Whether query tokens, too, are read from the cache.
        tokens_per_piece: Tokens a piece, at least those of the batch.
        device: Of the kernels.

    """
    query_lens = query_start_loc_cpu.diff()
    context_lens = seq_lens_cpu - query_lens
    query_start_loc = async_tensor_h2d(query_start_loc_cpu, device)
    max_query_len = int(query_lens.max())
    own = None
    if stored:
        starts = async_tensor_h2d(context_lens, device)
        num_tokens = int(query_start_loc_cpu[-1])
        own = ContextPiece(starts, query_start_loc, max_query_len, num_tokens)
    context = [
        ContextPiece(
            async_tensor_h2d(starts, device),
            async_tensor_h2d(cu_lens, device),
            int(cu_lens.diff().max()),
            int(cu_lens[-1]),
        )
        for starts, cu_lens in plan_context(context_lens, tokens_per_piece)
    ]
    return PrefillMetadata(
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        block_table=block_table,
        own=own,
        context=context,
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens_cpu=seq_lens_cpu,
    )


@dataclass
class PrefillBuffers:
    """Scratch of ``prefill_attention``.

    Attributes:
        query: (T, Hq, D) rotated queries.
        output: (T, Hq, D) output in rotated space.
        piece_output: (T, Hq, D) output of one piece.
        key: (P, H, D) dequantised keys, P tokens a piece.
        value: (P, H, D) dequantised values.

    """

    query: torch.Tensor
    output: torch.Tensor
    piece_output: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @staticmethod
    def shapes(
        num_tokens: int,
        tokens_per_piece: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
    ) -> list[tuple[int, int, int]]:
        """Shapes of the fields, in order."""
        rows = (num_tokens, num_heads, head_size)
        piece = (tokens_per_piece, num_kv_heads, head_size)
        return [rows, rows, rows, piece, piece]


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
        buffers: Scratch; None only if there is neither ``metadata.own`` nor
            context.
        output: (T, Hq, D), written; contiguous.
        flash_attn: FlashAttention's varlen function, version bound.

    """
    from vllm.v1.attention.ops.turbo.triton_prefill import gather_context, rotate_rows

    queries = {
        "cu_seqlens_q": metadata.query_start_loc,
        "max_seqlen_q": metadata.max_query_len,
        "return_softmax_lse": True,
    }
    own_lse = None
    if metadata.own is None:
        _, own_lse, *_ = flash_attn(
            q=query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_k=metadata.query_start_loc,
            max_seqlen_k=metadata.max_query_len,
            softmax_scale=scale,
            causal=True,
            **queries,
        )
        if not metadata.context:
            return
    assert buffers is not None
    num_tokens = query.shape[0]
    rotated_query = buffers.query[:num_tokens]
    rotated_output = buffers.output[:num_tokens]
    rotate_rows(query, rotated_query)

    lse = None
    own = [] if metadata.own is None else [metadata.own]
    for piece in own + metadata.context:
        gather_context(
            kv_cache,
            metadata.block_table,
            piece.starts,
            piece.cu_lens,
            piece.max_len,
            layout,
            buffers.key,
            buffers.value,
        )
        target = rotated_output if lse is None else buffers.piece_output[:num_tokens]
        _, piece_lse, *_ = flash_attn(
            q=rotated_query,
            # Not a row more: FlashAttention multiplies what follows the last
            # sequence by zero, and scratch may hold NaN.
            k=buffers.key[: piece.num_tokens],
            v=buffers.value[: piece.num_tokens],
            out=target,
            cu_seqlens_k=piece.cu_lens,
            max_seqlen_k=piece.max_len,
            softmax_scale=scale * layout.key_codebook.gain,
            causal=piece is metadata.own,
            **queries,
        )
        if lse is None:
            lse = piece_lse
        else:
            # Not in place: threads of one row may still read the old LSE.
            merged_lse = torch.empty_like(lse)
            merge_attn_states(
                rotated_output, rotated_output, lse, target, piece_lse, merged_lse
            )
            lse = merged_lse
    if own_lse is None:
        rotate_rows(rotated_output, output, inverse=True)
    else:
        rotate_rows(rotated_output, rotated_output, inverse=True)
        merge_attn_states(output, rotated_output, lse, output, own_lse)
