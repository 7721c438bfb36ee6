# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The launches of a layer's forward pass."""

import torch

from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail
from vllm.v1.attention.ops.turbo.interface import (
    AttentionCall,
    AttentionFn,
    Partials,
    RawTokens,
    RotatedQuery,
    StoreCall,
)
from vllm.v1.attention.ops.turbo.layer.prefill import prefill_attention
from vllm.v1.attention.ops.turbo.layer.prefill_sources import PrefillCall
from vllm.v1.attention.ops.turbo.layer.raw_tokens import attend_to_raw_tokens
from vllm.v1.attention.ops.turbo.layer.runner import TurboRunner
from vllm.v1.attention.ops.turbo.planning.decode import DecodePlan, PlannedCall
from vllm.v1.attention.ops.turbo.planning.scratch import DecodeScratch, SharedScratch
from vllm.v1.attention.ops.turbo.planning.step import StepPlan


def forward(
    runner: TurboRunner,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    step: StepPlan,
    output: torch.Tensor,
    tail: Tail | None = None,
) -> None:
    """Store, then attend: from decodes, then extends, then prefills.

    A prefill reuses scratch. Its kernels do not begin before the previous kernel has
    ended. That is a merge, which has waited for the kernels whose results it reads.

    Args:
        runner: The layer's. It has kernels.
        query: (T, Hq, D) bf16 or fp16.
        key: (T, H, D); None if another layer stores them.
        value: (T, H, D of V), likewise.
        kv_cache: (num_blocks, H, N, C) uint8.
        step: The plan of the step, which has T query tokens.
        output: (>= T, Hq, D of V), of which T rows are written.
        tail: The 8-bit copy of the newest tokens, for decodes and extends; None for
            none.

    """
    _store_and_decode(runner, query, key, value, kv_cache, step, output, tail)
    window = runner.scoring.sliding_window
    for first, plan in step.prefills(key is None):
        assert runner.flash_attn is not None
        rows = slice(first, first + int(plan.query_start_loc_cpu[-1]))
        call = PrefillCall(
            query[rows],
            None if key is None else key[rows],
            None if value is None else value[rows],
            kv_cache,
            runner.layout,
            runner.scoring,
            runner.scratch.take_for_prefill(
                plan.max_buffered_tokens(window), query.device
            ),
            output[rows],
            runner.flash_attn,
            runner.context_parallel,
        )
        spans = plan.spans if step.sees_spans(window) else None
        prefill_attention(call, plan, spans)


def _store_and_decode(
    runner: TurboRunner,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    step: StepPlan,
    output: torch.Tensor,
    tail: Tail | None,
) -> None:
    """Store all tokens, and attend from decodes and extends.

    No token is stored if the layer reads another's cache.
    """
    kernels, scoring = runner.entry_points, runner.scoring
    plan = step.decode_plans[runner.context_shape]
    scratch = step.decode_scratch.get(runner.context_shape)
    if scratch is None:
        # All layers of this shape share it in a step.
        scratch = runner.scratch.take_for_decodes(plan, query.device)
        step.decode_scratch[runner.context_shape] = scratch
    queries, rotated_query = _queries_to_rotate(runner, query, plan, scratch, output)
    if key is None or value is None:
        heads, slots = runner.shape.num_kv_heads, step.slot_mapping[:0]
        none = query.new_empty(0, heads, runner.shape.head_size)
        none_v = query.new_empty(0, heads, runner.shape.head_size_v)
        stored = StoreCall(kv_cache, slots, none, none_v, runner.layout)
    else:
        stored = StoreCall(
            kv_cache,
            step.slot_mapping,
            key,
            value,
            runner.layout,
            key_offset=step.key_offset(scoring.key_offset),
            tail=None if tail is None else step.tail_update(tail),
            query_direction=step.query_direction(runner.query_direction),
        )
    kernels.store(
        stored._replace(query=queries, rotated_query=rotated_query, scale=scoring.scale)
    )
    for call in plan.calls:
        own = call.tokens
        raw = None
        if key is not None and value is not None and not runner.stored:
            raw = RawTokens(query[own], key[own], value[own], scoring.scale)
            if call.attends_before:
                assert scratch.raw is not None and runner.flash_attn is not None
                raw = attend_to_raw_tokens(
                    raw,
                    call.batch,
                    scratch.raw,
                    runner.flash_attn,
                    scoring,
                )
        attention = AttentionCall(
            kv_cache,
            runner.layout,
            call.batch,
            scoring,
            output[own],
            query[own],
            raw,
            None if tail is None else tail.from_sequence(call.first_request),
        )
        _attend(runner, call, rotated_query, attention, scratch)


def _queries_to_rotate(
    runner: TurboRunner,
    query: torch.Tensor,
    plan: DecodePlan,
    scratch: DecodeScratch,
    output: torch.Tensor,
) -> tuple[torch.Tensor, RotatedQuery]:
    """The queries that the store rotates, and memory for the rotated ones.

    If ranks share the context, these are the queries of all ranks.
    """
    num_rotated = plan.num_rotated_tokens
    queries = query[:num_rotated]
    if scratch.query is not None:
        rotated = scratch.query[:num_rotated]
    elif scratch.shared is None:
        # A call writes the output of its own tokens alone, after it has read their
        # queries. So rotated queries can share memory with the output.
        rotated = output[:num_rotated].view(torch.float16)
    else:
        assert runner.context_parallel is not None
        rotated = scratch.shared.query
        if plan.num_tokens > 0:
            queries = runner.context_parallel.gather(queries)
        else:
            queries = rotated.view(query.dtype)
    return queries, RotatedQuery(rotated, scratch.query_scale[: rotated.shape[0]])


def _attend(
    runner: TurboRunner,
    planned: PlannedCall,
    rotated_query: RotatedQuery,
    call: AttentionCall,
    scratch: DecodeScratch,
) -> None:
    """Make one call of attention from decodes or extends.

    Args:
        runner: The layer's.
        planned: The call's plan.
        rotated_query: The rotated queries of all calls.
        call: The layer's tensors of the call.
        scratch: The step's scratch.

    """
    kernels = runner.entry_points
    if planned.ends_in_outputs:
        assert kernels.extend_outputs and scratch.outputs
        kernels.extend_outputs(call._replace(tail=None), scratch.outputs)
        return
    own, count = planned.tokens, planned.num_partials
    query = RotatedQuery(rotated_query.vectors[own], rotated_query.scale[own])
    attend = kernels.decode_attention
    if planned.is_extend:
        assert kernels.extend_attention is not None
        attend = kernels.extend_attention
    partials = Partials(scratch.partial[:count], scratch.partial_lse[:count])
    if scratch.shared is None:
        attend(query, call, partials)
    else:
        _attend_with_others(runner, attend, query, call, partials, scratch.shared)


def _attend_with_others(
    runner: TurboRunner,
    attend: AttentionFn,
    query: RotatedQuery,
    call: AttentionCall,
    partials: Partials,
    scratch: SharedScratch,
) -> None:
    """Make one call of attention to a context that ranks share.

    Each rank merges its splits, and a collective joins the ranks' results. The joined
    result is then merged with the query tokens, as a single split.
    """
    assert runner.context_parallel is not None
    slots = call.batch.num_query_slots
    part, lse = scratch.output[:slots], scratch.lse[:slots]
    # A rank's part has neither the query tokens nor the sinks.
    scoring = call.scoring._replace(sinks=None)
    own_part = AttentionCall(
        call.kv_cache, call.layout, call.batch, scoring, part, lse=lse
    )
    attend(query, own_part, partials)
    part, lse = runner.context_parallel.reduce(part, lse, is_lse_base_on_e=False)
    merge_splits = runner.entry_points.merge_splits
    merge_splits(Partials(part, lse), call._replace(tail=None))
