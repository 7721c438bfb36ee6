# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A step of a layer with turbo pages in plain PyTorch, for CPU tensors."""

from typing import TYPE_CHECKING

import torch

from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.recent import RecentWindow
from vllm.v1.attention.ops.turbo.interface import StoreCall
from vllm.v1.attention.ops.turbo.reference.attention import paged_attention
from vllm.v1.attention.ops.turbo.reference.cache import store
from vllm.v1.attention.ops.turbo.reference.shared import shared_attention
from vllm.v1.attention.ops.turbo.reference.window import update_window

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.layer.context_parallel import ContextParallel
    from vllm.v1.attention.ops.turbo.planning.step import StepPlan


def forward(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    step: "StepPlan",
    scale: float,
    layout: TurboFormat,
    stored: bool,
    output: torch.Tensor,
    key_offset: torch.Tensor | None = None,
    window: RecentWindow | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
    context_parallel: "ContextParallel | None" = None,
) -> None:
    """Store a step's tokens and attend, like the kernels on other devices.

    Args:
        query: (T, Hq, D).
        key: (T, H, D); None if another layer has stored them.
        value: (T, H, D), likewise.
        kv_cache: (num_blocks, H, N, C) uint8.
        step: The plan of the step, which has T query tokens.
        scale: Softmax scale.
        layout: The cache's format.
        stored: Whether query tokens are also read from the cache.
        output: (>= T, Hq, D), of which T rows are written.
        key_offset: (G, H, D) fp32, the offset by segments that is taken off keys; None
            for none.
        window: The 8-bit copy of the newest tokens; None for none.
        sliding_window: The most tokens that a query token sees, itself included; None
            for all before it.
        sinks: (Hq,), a logit of each query head that joins the softmax and has no
            value; None for none.
        logits_soft_cap: The cap that bounds scores by a tanh; None for none.
        context_parallel: The ranks that share the context; None if they do not.

    """
    offset = step.key_offset(key_offset)
    if key is not None and value is not None:
        tokens = step.slot_mapping, key, value, layout
        store(StoreCall(kv_cache, *tokens, key_offset=offset))
    if window is not None:
        assert key is not None and value is not None
        update_window(
            step.window_update(window),
            kv_cache,
            step.slot_mapping,
            key,
            value,
            layout,
            offset,
        )
    start_loc = step.decode_start_loc
    if start_loc is None:
        start_loc = torch.arange(0, step.num_decode_tokens + 1, step.decode_query_len)
    parts = [
        (
            slice(0, step.num_decode_tokens),
            step.block_table,
            start_loc,
            step.seq_lens[: step.num_decodes],
            window,
            None,
        )
    ]
    for first, prefill in step.prefills(shares_cache=key is None):
        starts = prefill.query_start_loc_cpu
        parts.append(
            (
                slice(first, first + int(starts[-1])),
                prefill.block_table,
                starts,
                prefill.seq_lens_cpu,
                None,
                prefill.spans if step.sees_spans(sliding_window) else None,
            )
        )
    for rows, block_table, starts, seq_lens, own_window, spans in parts:
        if context_parallel is not None:
            assert key is not None and value is not None and not stored
            shared_attention(
                query[rows],
                key[rows],
                value[rows],
                kv_cache,
                block_table,
                starts.tolist(),
                seq_lens.tolist(),
                scale,
                layout,
                output[rows],
                context_parallel,
                sinks,
                logits_soft_cap,
            )
            continue
        paged_attention(
            query[rows],
            None if stored or key is None else key[rows],
            None if stored or value is None else value[rows],
            kv_cache,
            block_table,
            starts.tolist(),
            seq_lens.tolist(),
            scale,
            layout,
            output[rows],
            key_offset,
            own_window,
            sliding_window,
            sinks,
            spans,
            logits_soft_cap,
        )
