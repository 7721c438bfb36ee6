# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The sources of keys that a prefill's queries attend to, in a few calls each."""

from typing import NamedTuple, Protocol

import torch

from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import OffsetScores, Scoring
from vllm.v1.attention.ops.turbo.layer.context_parallel import ContextParallel
from vllm.v1.attention.ops.turbo.layer.flash import FlashAttn
from vllm.v1.attention.ops.turbo.planning.prefill_plan import (
    CachedRequests,
    LaterTokens,
    PrefillSlice,
)
from vllm.v1.attention.ops.turbo.planning.scratch import PrefillScratch
from vllm.v1.attention.ops.turbo.planning.sliding_window import WindowSlice
from vllm.v1.attention.ops.turbo.planning.tokens import KeyRuns, SeqLens


class PrefillCall(NamedTuple):
    """Attention of a layer from T query tokens of prefills that have P tokens.

    Attributes:
        query: (T, Hq, D).
        key: (P, H, D), as computed; None if all is read from the cache.
        value: (P, H, D), likewise.
        kv_cache: (num_blocks, H, N, C) uint8, in which the tokens are stored.
        layout: The cache's format.
        scoring: How the layer scores keys.
        scratch: Scratch for the plan's ``max_buffered_tokens``; None if that is None.
        output: (T, Hq, D), written; contiguous.
        flash_attn: The function that attends.
        context_parallel: The ranks that share the context; None if they do not.

    """

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    kv_cache: torch.Tensor
    layout: TurboFormat
    scoring: Scoring
    scratch: PrefillScratch | None
    output: torch.Tensor
    flash_attn: FlashAttn
    context_parallel: ContextParallel | None = None

    def part(self, tokens: slice) -> "PrefillCall":
        """The call of some of the query tokens."""
        return self._replace(query=self.query[tokens], output=self.output[tokens])

    def add_offset_scores(
        self,
        lse: torch.Tensor,
        queries: SeqLens,
        starts: torch.Tensor,
        keys: SeqLens,
    ) -> None:
        """Add the part of scores that keys lack to the keys' LSE.

        Args:
            lse: (Hq, T) fp32, changed.
            queries: Lengths of R requests' queries.
            starts: (R,) int32, the position of each run's first key in its request.
            keys: Lengths of the runs of keys.

        """
        from vllm.v1.attention.ops.turbo.triton.offset import add_offset_scores

        if self.scoring.key_offset is not None:
            offset = OffsetScores(
                self.query, self.scoring.key_offset, self.scoring.scale
            )
            add_offset_scores(lse, offset, *queries[:2], starts, keys.cu_lens)


class Source(Protocol):
    """Keys and values that query tokens of a slice see."""

    @property
    def tokens(self) -> slice | None:
        """The range of these query tokens among the slice's; None for all of them."""

    def attend(self, call: PrefillCall, needs_lse: bool) -> torch.Tensor:
        """Attend from the call's queries into its output.

        Args:
            call: The call of the query tokens that see the source.
            needs_lse: Whether the LSE is used.

        Returns:
            (Hq, T) fp32, natural log-sum-exp.

        """


def merge_results(
    output: torch.Tensor,
    lse: torch.Tensor,
    other: torch.Tensor,
    other_lse: torch.Tensor,
    needs_lse: bool = True,
) -> torch.Tensor | None:
    """Merge another result into ``output``; return the LSE of both if it is needed."""
    # The LSE is not merged in place, because threads of a row may still read it.
    merged_lse = torch.empty_like(lse) if needs_lse else None
    merge_attn_states(output, output, lse, other, other_lse, merged_lse)
    return merged_lse


def _attend_to_pieces(
    call: PrefillCall,
    rotated_query: torch.Tensor,
    requests: CachedRequests,
    key_offset: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from requests' queries to all pieces of their context, in rotated space.

    Args:
        call: The call of the requests' query tokens.
        rotated_query: (T, Hq, D).
        requests: The requests.
        key_offset: The layer's offset from ``rotated_offset``; None for none.

    Returns:
        (Hq, T) fp32, natural log-sum-exp.

    """
    from vllm.v1.attention.ops.turbo.triton.prefill import gather_context

    scratch = call.scratch
    assert scratch is not None
    scale = call.scoring.scale * call.layout.key_codebook.gain
    scoring = call.scoring._replace(scale=scale)
    lse: torch.Tensor | None = None
    for piece in requests.pieces:
        gather_context(
            call.kv_cache,
            requests.block_table,
            piece,
            call.layout,
            scratch.key,
            scratch.value,
            key_offset,
        )
        is_first = lse is None
        target = call.output if is_first else scratch.output[: call.output.shape[0]]
        piece_lse = call.flash_attn.attend(
            rotated_query,
            *scratch.keys_and_values(piece.lens.num_tokens),
            target,
            requests.queries,
            piece.lens,
            scoring,
            causal=piece is requests.own,
        )
        call.add_offset_scores(piece_lse, requests.queries, piece.starts, piece.lens)
        if lse is None:
            lse = piece_lse
        else:
            lse = merge_results(call.output, lse, target, piece_lse)
    assert lse is not None
    return lse


def _attend_to_cache(call: PrefillCall, cached: list[CachedRequests]) -> torch.Tensor:
    """Attend to the tokens that a slice reads from this rank's cache, in rotated space.

    Returns:
        (Hq, T) fp32, natural log-sum-exp.

    """
    from vllm.v1.attention.ops.turbo.triton.prefill import (
        rotate_rows,
        rotated_offset,
    )

    query, key_offset = call.query, call.scoring.key_offset
    assert call.scratch is not None
    rotated_query = call.scratch.query[: query.shape[0]]
    rotate_rows(query, rotated_query)
    if key_offset is not None:
        # It is not kept: weights that are loaded later change the offset.
        key_offset = rotated_offset(key_offset, call.layout)
    lses = [
        _attend_to_pieces(
            call.part(requests.tokens),
            rotated_query[requests.tokens],
            requests,
            key_offset,
        )
        for requests in cached
    ]
    lse = lses[0]
    if len(cached) > 1:
        # Without torch.cat, whose kernel the driver would load while serving.
        lse = lse.new_empty(query.shape[1], query.shape[0])
        for requests, requests_lse in zip(cached, lses):
            lse[:, requests.tokens] = requests_lse
    return lse


class CachedSource(NamedTuple):
    """The cached tokens of a slice's requests, on all ranks."""

    query_slice: PrefillSlice
    tokens: slice | None = None

    def attend(self, call: PrefillCall, needs_lse: bool) -> torch.Tensor:
        from vllm.v1.attention.ops.turbo.triton.prefill import rotate_rows

        cached, ranks = self.query_slice.cached, call.context_parallel
        if ranks is None:
            lse = _attend_to_cache(call, cached)
            rotate_rows(call.output, call.output, inverse=True)
            return lse
        assert call.scratch is not None and call.scratch.context is not None
        assert call.scoring.key_offset is None
        part = call.scratch.context[: call.query.shape[0]]
        queries = ranks.gather(call.query)
        if cached:
            lse = _attend_to_cache(call._replace(query=queries, output=part), cached)
        else:
            shape = queries.shape[1], queries.shape[0]
            lse = queries.new_full(shape, -torch.inf, dtype=torch.float32)
        rotated, lse = ranks.reduce(part, lse.T, is_lse_base_on_e=True)
        rotate_rows(rotated, call.output, inverse=True)
        return lse.T.contiguous()


class RawSource(NamedTuple):
    """The query tokens of the step, as computed."""

    query_slice: PrefillSlice
    tokens: slice | None = None

    def attend(self, call: PrefillCall, needs_lse: bool) -> torch.Tensor:
        from vllm.v1.attention.ops.turbo.triton.isolate import isolate_broken_values

        raw, end = self.query_slice.raw, self.query_slice.tokens.stop
        assert raw is not None and call.key is not None and call.value is not None
        place = slice(end - raw.num_tokens, end)
        key, value = call.key[place], call.value[place]
        if self.query_slice.has_neighbours:
            assert call.scratch is not None
            isolated = call.scratch.keys_and_values(raw.num_tokens)
            isolate_broken_values(key, value, *isolated)
            key, value = isolated
        return call.flash_attn.attend(
            call.query,
            key,
            value,
            call.output,
            self.query_slice.queries,
            raw,
            call.scoring,
        )


class RunsSource(NamedTuple):
    """A run of tokens of each request: cached ones, raw ones, or both.

    Attributes:
        part: The slice, or the part of it, whose query tokens see them.
        window_size: The argument of FlashAttention.
        tokens: The range of query tokens that see the runs; None for the whole slice.
        causal: Whether no query sees a later key. If so, runs have raw tokens after
            cached ones, if there are any.

    """

    part: WindowSlice | LaterTokens
    window_size: list[int]
    tokens: slice | None = None
    causal: bool = True

    def read(self, call: PrefillCall, runs: KeyRuns) -> tuple[torch.Tensor, ...]:
        """Write K and V of the runs to scratch, end to end: see ``lay_out_runs``."""
        from vllm.v1.attention.ops.turbo.triton.runs import lay_out_runs

        assert call.scratch is not None
        laid_out = call.scratch.keys_and_values(runs.lens.num_tokens)
        raw = laid_out
        if self.causal and call.key is not None and call.value is not None:
            raw = call.key, call.value
        lay_out_runs(
            call.kv_cache,
            self.part.block_table,
            runs,
            *raw,
            call.layout,
            *laid_out,
            call.scoring.key_offset,
        )
        return laid_out

    def attend(self, call: PrefillCall, needs_lse: bool) -> torch.Tensor:
        part, runs = self.part, self.part.runs
        if runs is not None:
            key, value = self.read(call, runs)
        else:
            assert call.key is not None and call.value is not None
            # These are one sequence's, so no other's non-finite values are among them.
            key, value = call.key[part.keys], call.value[part.keys]
        lse = call.flash_attn.attend(
            call.query,
            key,
            value,
            call.output,
            part.queries,
            part.key_lens,
            call.scoring,
            causal=self.causal,
            window_size=self.window_size,
        )
        if needs_lse and runs is not None:
            # All keys of a run lack the same offset, which matters beside other logits.
            call.add_offset_scores(lse, part.queries, runs.cached.starts, runs.lens)
        return lse
