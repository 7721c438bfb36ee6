# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Plans spans of a prefill's tokens that see each other, as an image's do, on the host.

vLLM describes them as multimodal prefix ranges. A query token of a span also sees the
span's later tokens. A separate call attends to these, and its result is merged with
causal attention's.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.ops.turbo.planning.prefill_plan import (
    LaterTokens,
    PrefillPlan,
    Span,
    SpanPlan,
)
from vllm.v1.attention.ops.turbo.planning.tokens import CachedPiece, KeyRuns, SeqLens


def find_spans(
    ranges: Mapping[int, list[tuple[int, int]]] | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
) -> list[Span]:
    """Find the spans of a step's query tokens, in the batch's order.

    Args:
        ranges: ``CommonAttentionMetadata.mm_req_doc_ranges``: for each request the
            first and the last position of each span.
        query_start_loc: (R + 1,) int32 on the host.
        seq_lens: (R,) int32 on the host, query tokens included. It may be too large for
            requests that are not prefilled, whose tokens come after all spans.

    """
    if not ranges or not any(ranges.values()):
        return []
    bounds, lens = query_start_loc.tolist(), seq_lens.tolist()
    spans = []
    for request in range(len(bounds) - 1):
        begin, seq_len = bounds[request], lens[request]
        context_len = seq_len - (bounds[request + 1] - begin)
        for first, last in sorted(ranges.get(request, ())):
            start, end = max(first, context_len), min(last + 1, seq_len)
            if end - start > 1:
                place = begin + start - context_len
                spans.append(Span(request, place, place + end - start, start))
    return spans


def _later_tokens(
    spans: list[Span],
    slices: Sequence[slice],
    block_table: torch.Tensor,
    stored: bool,
    device: torch.device,
) -> list[list[LaterTokens]]:
    """The later tokens that each slice sees, from spans among the prefills."""
    parts: list[list[LaterTokens]] = [[] for _ in slices]
    found = [
        (own, tokens, span, max(span.begin, tokens.start))
        for own, tokens in zip(parts, slices)
        for span in spans
        # A span's last token sees nothing after it.
        if span.begin < tokens.stop and tokens.start < span.end - 1
    ]
    if not found:
        return parts
    columns = []
    for _, tokens, span, first in found:
        num_queries = min(span.end - 1, tokens.stop) - first
        num_keys = span.end - first
        position = span.position + first - span.begin
        columns.append([0, num_queries, 0, num_keys, position, num_keys, 0])
    # One copy to the device.
    table = async_tensor_h2d(torch.tensor(columns, dtype=torch.int32), device)
    for (own, tokens, span, first), row, column in zip(found, table, columns):
        num_queries, num_keys = column[1], column[3]
        lens = SeqLens(row[2:4], num_keys, num_keys)
        runs = None
        if stored:
            cached = CachedPiece(row[4:5], lens, row[5:6])
            runs = KeyRuns(cached, row[6:7], lens, num_keys)
        own.append(
            LaterTokens(
                slice(first - tokens.start, first - tokens.start + num_queries),
                slice(first, span.end),
                SeqLens(row[0:2], num_queries, num_queries),
                lens,
                block_table[span.request : span.request + 1],
                runs,
            )
        )
    return parts


def plan_spans(
    spans: list[Span],
    plan: PrefillPlan,
    block_table: torch.Tensor,
    stored: bool,
    device: torch.device,
) -> SpanPlan | None:
    """Plan the spans of a prefill, without waiting for the device.

    Args:
        spans: The spans, with indices among the prefills' requests and tokens.
        plan: The prefill's slices.
        block_table: (R, max_blocks) int32 on the device, of the prefills' requests.
        stored: Whether query tokens are also read from the cache.
        device: The kernels' device.

    Returns:
        The plan; None if there are no spans.

    """
    if not spans:
        return None
    parts = partial(
        _later_tokens, spans, block_table=block_table, stored=stored, device=device
    )
    return SpanPlan(
        spans,
        parts([part.tokens for part in plan.slices]),
        {
            window: parts([part.tokens for part in slices])
            for window, slices in plan.window_slices.items()
        },
    )
