# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefill attention: FlashAttention over raw or dequantised K and V.

Cached context is dequantised in pieces of bounded size, for all requests at once, and
attended to in rotated space; the pieces' outputs are merged by their log-sum-exp. A
batch whose queries would need too much scratch is served slice by slice.

Tokens that see later ones, an image's, attend to these in calls of their own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vllm.platforms import current_platform
from vllm.v1.attention.backends.fa_utils import (
    get_flash_attn_version,
    is_flash_attn_varlen_func_available,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.attention.ops.turbo.context_parallel import ContextParallel
from vllm.v1.attention.ops.turbo.efficient_attention import efficient_attention
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import OffsetScores
from vllm.v1.attention.ops.turbo.later_tokens import attend_to_later_tokens
from vllm.v1.attention.ops.turbo.planning.prefill import (
    FLASH_ATTN_MAX_HEAD_SIZE,
    CachedRequests,
    PrefillPlan,
    PrefillSlice,
)
from vllm.v1.attention.ops.turbo.planning.scratch import PrefillScratch
from vllm.v1.attention.ops.turbo.planning.sliding_window import WindowSlice
from vllm.v1.attention.ops.turbo.planning.spans import LaterTokens
from vllm.v1.attention.ops.turbo.varlen_attention import attend, read_runs


def get_flash_attn(head_size: int) -> Callable[..., Any] | None:
    """FlashAttention's varlen function for a head size, its version bound.

    The version is the one vLLM picks on this GPU. For larger heads on NVIDIA's GPUs it
    is FlashAttention 4 if vLLM picks that for them, else PyTorch's memory-efficient
    attention. None if there is none for this GPU.
    """
    is_large = head_size > FLASH_ATTN_MAX_HEAD_SIZE
    if is_flash_attn_varlen_func_available():
        version = get_flash_attn_version(head_size=head_size)
        if version is not None and (version == 4 or not is_large):
            from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

            return partial(flash_attn_varlen_func, fa_version=version)
    return efficient_attention if is_large and current_platform.is_cuda() else None


def _attend_to_requests(
    rotated_query: torch.Tensor,
    kv_cache: torch.Tensor,
    requests: CachedRequests,
    scale: float,
    layout: TurboFormat,
    scratch: PrefillScratch,
    output: torch.Tensor,
    flash_attn: Callable[..., torch.Tensor],
    offset: OffsetScores | None,
) -> torch.Tensor:
    """Attention to all pieces of some requests, in rotated space, into ``output``;
    returns its LSE.
    """
    from vllm.v1.attention.ops.turbo.triton.prefill import (
        add_offset_scores,
        gather_context,
    )

    lse = None
    for piece in requests.pieces:
        gather_context(
            kv_cache,
            requests.block_table,
            piece.starts,
            piece.cu_lens,
            piece.max_len,
            piece.num_tokens,
            layout,
            scratch.key,
            scratch.value,
        )
        target = output if lse is None else scratch.output[: output.shape[0]]
        piece_lse = attend(
            flash_attn,
            rotated_query,
            scratch.key[: piece.num_tokens],
            scratch.value[: piece.num_tokens],
            target,
            requests.query_start_loc,
            requests.max_query_len,
            piece.cu_lens,
            piece.max_len,
            scale * layout.key_codebook.gain,
            causal=piece is requests.own,
        )
        if offset is not None:
            add_offset_scores(
                piece_lse,
                offset,
                requests.query_start_loc,
                requests.max_query_len,
                piece.starts,
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
    cached: list[CachedRequests],
    scale: float,
    layout: TurboFormat,
    scratch: PrefillScratch,
    output: torch.Tensor,
    flash_attn: Callable[..., torch.Tensor],
    key_offset: torch.Tensor | None,
) -> torch.Tensor:
    """Attention to all that a slice reads of the cache, in rotated space, into
    ``output``; returns its LSE.
    """
    from vllm.v1.attention.ops.turbo.triton.prefill import rotate_rows

    rotated_query = scratch.query[: query.shape[0]]
    rotate_rows(query, rotated_query)
    lses = []
    for requests in cached:
        offset = None
        if key_offset is not None:
            offset = OffsetScores(query[requests.tokens], key_offset, scale)
        lse = _attend_to_requests(
            rotated_query[requests.tokens],
            kv_cache,
            requests,
            scale,
            layout,
            scratch,
            output[requests.tokens],
            flash_attn,
            offset,
        )
        lses.append(lse)
    lse = lses[0]
    if len(cached) > 1:
        # Not by torch.cat: the driver would load its kernel while serving.
        lse = lse.new_empty(query.shape[1], query.shape[0])
        for requests, requests_lse in zip(cached, lses):
            lse[:, requests.tokens] = requests_lse
    return lse


def _attend_to_context(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    query_slice: PrefillSlice,
    scale: float,
    layout: TurboFormat,
    scratch: PrefillScratch,
    output: torch.Tensor,
    flash_attn: Callable[..., torch.Tensor],
    key_offset: torch.Tensor | None,
    context_parallel: ContextParallel | None,
) -> torch.Tensor:
    """Attention to all that a slice reads of the cache, of all ranks, into ``output``;
    returns its LSE.
    """
    from vllm.v1.attention.ops.turbo.triton.prefill import rotate_rows

    cached = query_slice.cached
    others = (scale, layout, scratch)
    if context_parallel is None:
        lse = _attend_to_cache(
            query, kv_cache, cached, *others, output, flash_attn, key_offset
        )
        rotate_rows(output, output, inverse=True)
        return lse
    assert scratch.context is not None and key_offset is None
    part, queries = scratch.context[: query.shape[0]], context_parallel.gather(query)
    if cached:
        lse = _attend_to_cache(
            queries, kv_cache, cached, *others, part, flash_attn, None
        )
    else:
        lse = torch.full(
            (queries.shape[1], queries.shape[0]),
            -torch.inf,
            dtype=torch.float32,
            device=query.device,
        )
    rotated, lse = context_parallel.reduce(part, lse.T, is_lse_base_on_e=True)
    rotate_rows(rotated, output, inverse=True)
    return lse.T.contiguous()


def _attend_to_raw(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_slice: PrefillSlice,
    scale: float,
    scratch: PrefillScratch | None,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    flash_attn: Callable[..., torch.Tensor],
    needs_lse: bool,
) -> torch.Tensor | None:
    """Attention of a slice's queries to the prefills' raw K and V, merged into
    ``output`` if that has an ``lse``; returns the LSE of all, if it is needed.
    """
    from vllm.v1.attention.ops.turbo.triton.isolate import isolate_broken_values

    own = query_slice.raw
    assert own is not None
    end = query_slice.tokens.stop
    raw = slice(end - own.num_tokens, end)
    raw_key, raw_value = key[raw], value[raw]
    if query_slice.has_neighbours:
        assert scratch is not None
        isolated_key = scratch.key[: own.num_tokens]
        isolated_value = scratch.value[: own.num_tokens]
        isolate_broken_values(raw_key, raw_value, isolated_key, isolated_value)
        raw_key, raw_value = isolated_key, isolated_value
    target = output
    if lse is not None:
        assert scratch is not None
        target = scratch.own_output(*query.shape[:2])
    raw_lse = attend(
        flash_attn,
        query,
        raw_key,
        raw_value,
        target,
        query_slice.query_start_loc,
        query_slice.max_query_len,
        own.cu_lens,
        own.max_len,
        scale,
    )
    if lse is None:
        return raw_lse
    # Not in place, as above.
    merged_lse = torch.empty_like(lse) if needs_lse else None
    merge_attn_states(output, output, lse, target, raw_lse, merged_lse)
    return merged_lse


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    plan: PrefillPlan,
    scale: float,
    layout: TurboFormat,
    scratch: PrefillScratch | None,
    output: torch.Tensor,
    flash_attn: Callable[..., torch.Tensor],
    key_offset: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    later_tokens: list[list[LaterTokens]] | None = None,
    context_parallel: ContextParallel | None = None,
) -> None:
    """Causal attention of the prefill requests, whose tokens are stored.

    Args:
        query: (T, Hq, D).
        key: (T, H, D), raw; None if all is read from the cache.
        value: (T, H, D), likewise.
        kv_cache: (num_blocks, H, N, C) uint8.
        plan: How the requests are served.
        scale: Softmax scale.
        layout: The cache's format.
        scratch: Scratch for ``plan.max_buffered_tokens``; None if that is None.
        output: (T, Hq, D), written; contiguous.
        flash_attn: FlashAttention's varlen function, version bound.
        key_offset: (G, H, D) fp32, taken off the cached keys (see ``OffsetScores``);
            None if nothing was.
        sinks: (Hq,), of each query head a logit without a value; None for none.
        later_tokens: Of each of the plan's slices what its queries see for being in a
            span; None for no spans.
        context_parallel: The ranks that share the context; None for this one alone.

    """
    from vllm.v1.attention.ops.turbo.triton.sinks import weigh_by_sinks

    for index, query_slice in enumerate(plan.slices):
        queries, result = query[query_slice.tokens], output[query_slice.tokens]
        parts = later_tokens[index] if later_tokens else []
        lse = None
        if query_slice.reads_cache:
            assert scratch is not None
            lse = _attend_to_context(
                queries,
                kv_cache,
                query_slice,
                scale,
                layout,
                scratch,
                result,
                flash_attn,
                key_offset,
                context_parallel,
            )
        if query_slice.raw is not None:
            assert key is not None and value is not None
            lse = _attend_to_raw(
                queries,
                key,
                value,
                query_slice,
                scale,
                scratch,
                result,
                lse,
                flash_attn,
                needs_lse=sinks is not None or bool(parts),
            )
        if parts:
            assert lse is not None
            attend_to_later_tokens(
                queries,
                key,
                value,
                kv_cache,
                parts,
                scale,
                layout,
                scratch,
                result,
                lse,
                flash_attn,
                key_offset,
            )
        if sinks is not None:
            assert lse is not None
            weigh_by_sinks(result, lse, sinks)


def sliding_window_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slices: list[WindowSlice],
    sliding_window: int,
    scale: float,
    layout: TurboFormat,
    scratch: PrefillScratch | None,
    output: torch.Tensor,
    flash_attn: Callable[..., torch.Tensor],
    key_offset: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    later_tokens: list[list[LaterTokens]] | None = None,
) -> None:
    """As ``prefill_attention``, where a query token sees a few tokens before it.

    Args:
        query: (T, Hq, D).
        key: (T, H, D), raw; None if all is read from the cache.
        value: (T, H, D), likewise.
        kv_cache: (num_blocks, H, N, C) uint8.
        slices: How the requests are served: the plan's of this window.
        sliding_window: Tokens that a query token sees, at most, itself the last.
        scale: Softmax scale.
        layout: The cache's format.
        scratch: Scratch for a piece; None if no slice has runs.
        output: (T, Hq, D), written; contiguous.
        flash_attn: FlashAttention's varlen function, version bound.
        key_offset: (G, H, D) fp32, taken off the cached keys, by segments; None if
            nothing was.
        sinks: (Hq,), of each query head a logit without a value; None for none.
        later_tokens: Of each slice what its queries see for being in a span; None for
            no spans.

    """
    from vllm.v1.attention.ops.turbo.triton.prefill import add_offset_scores
    from vllm.v1.attention.ops.turbo.triton.sinks import weigh_by_sinks

    for index, query_slice in enumerate(slices):
        tokens, runs = query_slice.tokens, query_slice.runs
        parts = later_tokens[index] if later_tokens else []
        if runs is None:
            assert key is not None and value is not None
            run_key, run_value = key[tokens], value[tokens]
            cu_lens, max_len = query_slice.query_start_loc, query_slice.max_query_len
        else:
            run_key, run_value = read_runs(
                kv_cache,
                query_slice.block_table,
                runs,
                key,
                value,
                layout,
                scratch,
                key_offset,
            )
            cu_lens, max_len = runs.cu_lens, runs.max_len
        lse = attend(
            flash_attn,
            query[tokens],
            run_key,
            run_value,
            output[tokens],
            query_slice.query_start_loc,
            query_slice.max_query_len,
            cu_lens,
            max_len,
            scale,
            window_size=[sliding_window - 1, 0],
        )
        if sinks is None and not parts:
            continue
        if key_offset is not None and runs is not None:
            # Where all keys of a run lack the same, other logits have to know of it.
            add_offset_scores(
                lse,
                OffsetScores(query[tokens], key_offset, scale),
                query_slice.query_start_loc,
                query_slice.max_query_len,
                runs.starts,
            )
        if parts:
            attend_to_later_tokens(
                query[tokens],
                key,
                value,
                kv_cache,
                parts,
                scale,
                layout,
                scratch,
                output[tokens],
                lse,
                flash_attn,
                key_offset,
            )
        if sinks is not None:
            weigh_by_sinks(output[tokens], lse, sinks)
