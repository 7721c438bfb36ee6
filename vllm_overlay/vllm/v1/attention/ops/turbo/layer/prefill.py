# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefill attention: FlashAttention over raw or dequantised K and V.

A plan cuts the query tokens into slices, which bounds the scratch. The queries of a
slice attend to one source of keys after another, and the results are merged by their
log-sum-exp:

- the cached context, dequantised in pieces, in rotated space, on all ranks
- the raw tokens of the step
- under a sliding window, runs of dequantised cached tokens and raw tokens
- tokens of an image that come after a query which sees them
"""

from collections.abc import Sequence

import torch

from vllm.v1.attention.ops.turbo import reasons, refusals
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.layer.prefill_sources import (
    CachedSource,
    PrefillCall,
    RawSource,
    RunsSource,
    Source,
    merge_results,
)
from vllm.v1.attention.ops.turbo.planning.prefill import FLASH_ATTN_MAX_HEAD_SIZE
from vllm.v1.attention.ops.turbo.planning.prefill_plan import (
    PrefillPlan,
    PrefillSlice,
    SpanPlan,
)
from vllm.v1.attention.ops.turbo.planning.sliding_window import WindowSlice


def _attend_to_sources(call: PrefillCall, sources: Sequence[Source]) -> None:
    """Attend from a slice's queries to all sources; all queries see the first one."""
    from vllm.v1.attention.ops.turbo.triton.sinks import weigh_by_sinks

    sinks = call.scoring.sinks
    lse: torch.Tensor | None = None
    for number, source in enumerate(sources, 1):
        needs_lse = sinks is not None or number < len(sources)
        part = call if source.tokens is None else call.part(source.tokens)
        if number == 1:
            lse = source.attend(part, needs_lse)
            continue
        assert lse is not None
        if source.tokens is None:
            assert call.scratch is not None
            target = call.scratch.own_output(*call.query.shape[:2])
            own_lse = source.attend(part._replace(output=target), True)
            lse = merge_results(call.output, lse, target, own_lse, needs_lse)
        else:
            # A tensor for one image at a time, smaller than those of other layers.
            target = torch.empty_like(part.output)
            own_lse = source.attend(part._replace(output=target), True)
            some = lse[:, source.tokens].contiguous()
            merged = merge_results(part.output, some, target, own_lse)
            assert merged is not None
            lse[:, source.tokens] = merged
    if sinks is not None:
        assert lse is not None
        weigh_by_sinks(call.output, lse, sinks)


def check_image_heads(layout: TurboFormat) -> None:
    """Check that the attention function for a layout's heads supports windows.

    Raises:
        NotImplementedError: If it does not support them.

    """
    largest = max(layout.head_size, layout.head_size_v)
    if largest > FLASH_ATTN_MAX_HEAD_SIZE:
        reason = reasons.MM_PREFIX_OF_LARGE_HEADS.of(head_size=largest)
        raise NotImplementedError(refusals.refusal(layout.name, [reason]))


def prefill_attention(
    call: PrefillCall, plan: PrefillPlan, spans: SpanPlan | None = None
) -> None:
    """Attend causally from all tokens of a plan's prefills.

    Args:
        call: The layer's tokens, cache, scratch and output.
        plan: The plan of the requests.
        spans: Tokens that also see later ones; None if none do.

    Raises:
        NotImplementedError: If there are spans and ``check_image_heads`` refuses.

    """
    window = call.scoring.sliding_window
    slices: Sequence[PrefillSlice | WindowSlice] = plan.slices
    later = None if spans is None else spans.slices
    if window is not None:
        slices = plan.window_slices[window]
        later = None if spans is None else spans.window_slices[window]
    for index, query_slice in enumerate(slices):
        sources: list[Source] = []
        if isinstance(query_slice, WindowSlice):
            assert window is not None
            sources.append(RunsSource(query_slice, [window - 1, 0]))
        else:
            if query_slice.reads_cache:
                sources.append(CachedSource(query_slice))
            if query_slice.raw is not None:
                sources.append(RawSource(query_slice))
        images = later[index] if later else []
        if images:
            check_image_heads(call.layout)
        sources += [
            RunsSource(image, image.window_size, image.tokens, causal=False)
            for image in images
        ]
        _attend_to_sources(call.part(query_slice.tokens), sources)
