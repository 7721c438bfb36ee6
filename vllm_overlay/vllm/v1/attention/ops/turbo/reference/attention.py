# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention over the turbo KV cache in plain PyTorch, for CPU tensors."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import AttentionCall, DecodeBatch
from vllm.v1.attention.ops.turbo.reference.cache import load
from vllm.v1.attention.ops.turbo.reference.rotation import inverse_rotate
from vllm.v1.attention.ops.turbo.reference.tail import load_tail

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.layer.context_parallel import ContextParallel
    from vllm.v1.attention.ops.turbo.planning.prefill_plan import SpanPlan


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
        value: (T, H, D of V).
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
        Output (Q, Hq, D of V) and natural log-sum-exp (Q, Hq) of the scores.

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


def _query_starts(batch: DecodeBatch) -> list[int]:
    """B + 1 offsets of sequences' query tokens among the call's."""
    if batch.query_start_loc is not None:
        return batch.query_start_loc.tolist()
    return [row * batch.query_len for row in range(batch.num_seqs + 1)]


def _load_tokens(
    call: AttentionCall, row: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K, less its offset, and V of a sequence's packed tokens, each (T, H, D) fp32.

    Args:
        call: The call that has the sequence.
        row: The sequence's index in the batch.
        positions: (T,) in the sequence.

    """
    block_size, layout = call.kv_cache.shape[2], call.layout
    blocks = call.batch.block_table[row, positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    keys, values = load(call.kv_cache, slots, layout)
    return inverse_rotate(keys) * layout.key_codebook.gain, inverse_rotate(values)


def paged_attention(call: AttentionCall, spans: "SpanPlan | None" = None) -> None:
    """Causal attention of a batch, sequence by sequence, in fp32.

    Tokens that no query sees under a sliding window are not loaded.

    Args:
        call: The tokens that are attended to, and the output. Its ``query`` is there,
            and ``lse`` is not.
        spans: Query tokens that also see later ones; None if none do.

    """
    call.check()
    batch, scoring, raw, tail = call.batch, call.scoring, call.raw, call.tail
    assert call.query is not None and call.lse is None
    starts = _query_starts(batch)
    bounds = zip(starts, starts[1:], batch.seq_lens.tolist())
    for row, (begin, end, seq_len) in enumerate(bounds):
        tokens = slice(begin, end)
        if begin == end:
            continue
        if seq_len == 0:
            call.output[tokens] = 0
            continue
        first = 0
        if scoring.sliding_window is not None:
            first = max(seq_len - (end - begin) + 1 - scoring.sliding_window, 0)
        positions = torch.arange(first, seq_len, device=call.query.device)
        if raw is not None:
            positions = positions[: seq_len - (end - begin) - first]
        num_packed = len(positions)
        if tail is not None:
            num_packed -= seq_len - int(tail.packed_lens[row])
        keys, values = _load_tokens(call, row, positions[:num_packed])
        if tail is not None and num_packed < len(positions):
            tail_rows = load_tail(tail, row, positions[num_packed:])
            keys, values = map(torch.cat, zip((keys, values), tail_rows))
        if scoring.key_offset is not None:
            own = interface.offset_rows(positions, scoring.key_offset)
            keys = keys + scoring.key_offset[own]
        if raw is not None:
            keys = torch.cat([keys, raw.key[tokens].float()])
            values = torch.cat([values, raw.value[tokens].float()])
        call.output[tokens], _ = attention(
            call.query[tokens].float(),
            keys,
            values,
            scoring.scale,
            sliding_window=scoring.sliding_window,
            sinks=scoring.sinks,
            spans=[
                (start - first, stop - first)
                for start, stop in (spans.positions(row) if spans else ())
            ],
            logits_soft_cap=scoring.soft_cap,
        )


def _no_result(
    query: torch.Tensor, layout: TurboFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of attention to no tokens, fp32."""
    rows, options = query.shape[:2], {"device": query.device, "dtype": torch.float32}
    lse = torch.full(rows, -torch.inf, **options)
    return torch.zeros(*rows, layout.head_size_v, **options), lse


def shared_attention(call: AttentionCall, context_parallel: "ContextParallel") -> None:
    """Causal attention of a batch, like ``paged_attention``, in fp32.

    Args:
        call: The call with this rank's query heads. Its cache and block table are this
            rank's share of the context, its lengths are over all ranks, and every rank
            has its ``raw``.
        context_parallel: The ranks that share the context.

    """
    batch, raw = call.batch, call.raw
    assert call.query is not None and raw is not None
    scale, cap = call.scoring.scale, call.scoring.soft_cap
    queries = context_parallel.gather(call.query)
    part, part_lse = _no_result(queries, call.layout)
    raw_output, raw_lse = _no_result(call.query, call.layout)
    starts = _query_starts(batch)
    query_lens = torch.tensor(starts).diff()
    contexts = (batch.seq_lens[: len(query_lens)].cpu() - query_lens).clamp(min=0)
    local_lens = context_parallel.local_lens(contexts).tolist()
    for row, (begin, end, length) in enumerate(zip(starts, starts[1:], local_lens)):
        tokens = slice(begin, end)
        raw_output[tokens], raw_lse[tokens] = attention(
            call.query[tokens].float(),
            raw.key[tokens].float(),
            raw.value[tokens].float(),
            scale,
            logits_soft_cap=cap,
        )
        if begin < end and length > 0:
            positions = torch.arange(length, device=queries.device)
            part[tokens], part_lse[tokens] = attention(
                queries[tokens].float(),
                *_load_tokens(call, row, positions),
                scale,
                causal=False,
                logits_soft_cap=cap,
            )
    parts, lses = context_parallel.gather_parts(part, part_lse)
    outputs, logits = [*parts.unbind(), raw_output], [*lses.unbind(), raw_lse]
    if call.scoring.sinks is not None:
        outputs.append(torch.zeros_like(raw_output))
        logits.append(call.scoring.sinks.float().expand_as(raw_lse))
    weights = torch.softmax(torch.stack(logits), 0)[..., None]
    call.output.copy_((weights * torch.stack(outputs)).sum(0))
