# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention over the turbo KV cache in plain PyTorch, for CPU tensors."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.recent import RecentWindow
from vllm.v1.attention.ops.turbo.reference.cache import load
from vllm.v1.attention.ops.turbo.reference.rotation import inverse_rotate
from vllm.v1.attention.ops.turbo.reference.window import load_window

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.planning.spans import SpanPlan


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    spans: Iterable[tuple[int, int]] = (),
    logits_soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one sequence, in the dtype of its arguments.

    Args:
        query: (Q, Hq, D), the last Q positions of the sequence.
        key: (T, H, D).
        value: (T, H, D).
        scale: Factor of the scores.
        causal: Whether query i sees only the first T - Q + i + 1 tokens.
        sliding_window: The most of these that query i sees, the newest ones; None for
            all.
        sinks: (Hq,), a logit of each query head that joins the softmax and has no
            value; None for none.
        spans: First and last (exclusive) of the T tokens of each span: query i also
            sees later tokens of its span.
        logits_soft_cap: Scores s become cap * tanh(s / cap), but sinks do not; None for
            no cap.

    Returns:
        Output (Q, Hq, D) and natural log-sum-exp (Q, Hq) of the scores.

    """
    num_queries, num_heads, _ = query.shape
    num_tokens, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    key = key.repeat_interleave(group, 1)
    value = value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,thd->hqt", query, key) * scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    if causal:
        last = torch.arange(num_queries, device=query.device) + num_tokens - num_queries
        positions = torch.arange(num_tokens, device=query.device)
        hidden = positions > last[:, None]
        if sliding_window is not None:
            hidden |= positions <= last[:, None] - sliding_window
        for begin, end in spans:
            is_later = (last[:, None] < positions) & (positions < end)
            hidden &= ~(is_later & (last[:, None] >= begin))
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores.float(), -1)
    weights = torch.softmax(scores, -1)
    if sinks is not None:
        share = torch.sigmoid(lse - sinks.float()[:, None])
        weights = weights * share[..., None].to(weights.dtype)
    return torch.einsum("hqt,thd->qhd", weights, value), lse.T


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: list[int],
    seq_lens: list[int],
    scale: float,
    layout: TurboFormat,
    output: torch.Tensor,
    key_offset: torch.Tensor | None = None,
    window: RecentWindow | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    spans: "SpanPlan | None" = None,
    logits_soft_cap: float | None = None,
) -> None:
    """Causal attention of a batch, sequence by sequence, in fp32.

    Args:
        query: (T, Hq, D), the sequences' queries one after the other.
        key: (T, H, D) keys of the query tokens; None to read them from the cache, like
            all tokens before them.
        value: (T, H, D), likewise.
        kv_cache: (num_blocks, H, N, C) uint8, which also has the query tokens.
        block_table: (R, max_blocks).
        query_start_loc: R + 1 offsets into ``query``.
        seq_lens: R lengths, the query tokens included.
        scale: Softmax scale.
        layout: The cache's format.
        output: (T, Hq, D), written.
        key_offset: (G, H, D) fp32, the offset by segments that was taken off the cached
            keys; None for none.
        window: The recent window, from which the newest tokens before the query tokens
            are read; None to read them from the cache.
        sliding_window: The most tokens that a query token sees, itself included; None
            for all before it. Other tokens are not loaded.
        sinks: (Hq,), a logit of each query head that joins the softmax and has no
            value; None for none.
        spans: Query tokens that also see later ones; None if none do.
        logits_soft_cap: The cap that bounds scores by a tanh; None for none.

    """
    block_size = kv_cache.shape[2]
    bounds = zip(query_start_loc, query_start_loc[1:], seq_lens)
    for row, (begin, end, seq_len) in enumerate(bounds):
        if begin == end:
            continue
        first = 0
        if sliding_window is not None:
            first = max(seq_len - (end - begin) + 1 - sliding_window, 0)
        positions = torch.arange(first, seq_len, device=query.device)
        blocks = block_table[row, positions // block_size].long()
        slots = blocks * block_size + positions % block_size
        if key is not None and value is not None:
            slots = slots[: seq_len - (end - begin) - first]
        num_cached = num_packed = len(slots)
        if window is not None:
            num_packed -= seq_len - int(window.packed_lens[row])
        keys, values = load(kv_cache, slots[:num_packed], layout)
        keys = inverse_rotate(keys) * layout.key_codebook.gain
        values = inverse_rotate(values)
        if window is not None and num_packed < num_cached:
            newest = positions[num_packed:num_cached]
            window_keys, window_values = load_window(window, row, newest)
            keys = torch.cat([keys, window_keys])
            values = torch.cat([values, window_values])
        if key_offset is not None:
            segments = positions[:num_cached] // interface.OFFSET_SEGMENT
            keys = keys + key_offset[segments.clamp(max=key_offset.shape[0] - 1)]
        if key is not None and value is not None:
            keys = torch.cat([keys, key[begin:end].float()])
            values = torch.cat([values, value[begin:end].float()])
        result, _ = attention(
            query[begin:end].float(),
            keys,
            values,
            scale,
            sliding_window=sliding_window,
            sinks=sinks,
            spans=[
                (start - first, stop - first)
                for start, stop in (spans.positions(row) if spans else ())
            ],
            logits_soft_cap=logits_soft_cap,
        )
        output[begin:end] = result.to(output.dtype)
