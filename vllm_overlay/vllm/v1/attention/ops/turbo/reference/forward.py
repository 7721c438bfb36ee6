# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A step of a layer with turbo pages in plain PyTorch, for CPU tensors."""

from typing import TYPE_CHECKING

import torch

from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail
from vllm.v1.attention.ops.turbo.interface import (
    AttentionCall,
    DecodeBatch,
    RawTokens,
    StoreCall,
)
from vllm.v1.attention.ops.turbo.reference.attention import (
    paged_attention,
    shared_attention,
)
from vllm.v1.attention.ops.turbo.reference.cache import store
from vllm.v1.attention.ops.turbo.reference.tail import update_tail

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.layer.runner import TurboRunner
    from vllm.v1.attention.ops.turbo.planning.prefill_plan import SpanPlan
    from vllm.v1.attention.ops.turbo.planning.step import StepPlan


def forward(
    runner: "TurboRunner",
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    step: "StepPlan",
    output: torch.Tensor,
    tail: Tail | None = None,
) -> None:
    """Store a step's tokens and attend, like ``layer.forward`` by kernels.

    Args:
        runner: The layer's. It has the format, the scoring and the ranks that share the
            context.
        query: (T, Hq, D).
        key: (T, H, D); None if another layer has stored them.
        value: (T, H, D), likewise.
        kv_cache: (num_blocks, H, N, C) uint8.
        step: The plan of the step, which has T query tokens.
        output: (>= T, Hq, D), of which T rows are written.
        tail: The 8-bit copy of the newest tokens; None for none.

    """
    layout, scoring, ranks = runner.layout, runner.scoring, runner.context_parallel
    if key is not None and value is not None:
        offset = step.key_offset(scoring.key_offset)
        tokens = kv_cache, step.slot_mapping, key, value, layout
        direction = step.query_direction(runner.query_direction)
        store(StoreCall(*tokens, key_offset=offset, query_direction=direction))
        if tail is not None:
            update_tail(step.tail_update(tail), *tokens, offset)
    decodes = DecodeBatch(
        step.num_decodes,
        step.block_table,
        step.seq_lens,
        step.decode_query_len,
        step.decode_start_loc,
    )
    parts: list[tuple[slice, DecodeBatch, Tail | None, SpanPlan | None]] = [
        (slice(0, step.num_decode_tokens), decodes, tail, None)
    ]
    for first, plan in step.prefills(shares_cache=key is None):
        starts, lens = plan.query_start_loc_cpu, plan.seq_lens_cpu
        longest = int(starts.diff().max())
        batch = DecodeBatch(len(lens), plan.block_table, lens, longest, starts)
        spans = plan.spans if step.sees_spans(scoring.sliding_window) else None
        parts.append((slice(first, first + int(starts[-1])), batch, None, spans))
    for rows, batch, own_tail, spans in parts:
        raw = None
        if key is not None and value is not None and not runner.stored:
            raw = RawTokens(query[rows], key[rows], value[rows], scoring.scale)
        call = AttentionCall(
            kv_cache,
            layout,
            batch,
            scoring,
            output[rows],
            query[rows],
            raw,
            own_tail,
        )
        if ranks is not None:
            shared_attention(call, ranks)
        else:
            paged_attention(call, spans)
