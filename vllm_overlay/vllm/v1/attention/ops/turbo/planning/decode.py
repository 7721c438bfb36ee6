# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How a step's decodes and extends are cut into calls of the kernels.

A decode request has one query token and the drafts that it is to verify. An extend is
the short end of a prompt, mostly behind a prefix hit: it reads packed context, too.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.turbo.interface import (
    MAX_KV_SPLITS,
    DecodeBatch,
    SplitsFn,
    num_own_tiles,
)
from vllm.v1.attention.ops.turbo.planning.requests import RequestSpan
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape

# Query tokens of a step that extends take: as many as their lengths were measured with.
MAX_EXTEND_TOKENS = 16384
# The same where ranks share the context: all have room for the queries of all.
MAX_SHARED_EXTEND_TOKENS = 2048
# Query tokens of a call if each of its requests had as many as the longest: for more,
# scratch would be large.
MAX_CALL_TOKENS = 1024
# The same of calls that end in outputs, whose scratch is for the query tokens that
# there are, and for as many partial results as the GPU has blocks.
MAX_OUTPUT_CALL_TOKENS = 8192
# Queries of a KV head that attend at once then, in a pass.
_PASS_QUERIES = 128
# Splits of a sequence that a call has room for, if the kernels want so many: else
# sequences of unlike lengths could not keep the GPU busy, and more calls are better.
_LEAST_SPLITS = 4


class PlannedCall(NamedTuple):
    """One call of decode or extend attention, but for tensors of the layer.

    Attributes:
        tokens: The step's query tokens that the call attends from; with a
            ``query_start_loc``, those that it counts from.
        first_request: The first sequence's place among the step's requests.
        batch: The call's sequences.
        num_partials: Partial results, for which it has scratch.
        is_extend: Whether it is of ``extend_attention``.
        attends_before: Whether attention to the query tokens, as they are, comes before
            the call: the merge does not have to attend to so many.
        ends_in_outputs: Whether it is of ``extend_outputs``.

    """

    tokens: slice
    first_request: int
    batch: DecodeBatch
    num_partials: int
    is_extend: bool
    attends_before: bool = False
    ends_in_outputs: bool = False

    @property
    def num_tokens(self) -> int:
        """Query tokens, with those before a cut span's."""
        return self.tokens.stop - self.tokens.start

    @property
    def num_own_tokens(self) -> int:
        """Query tokens that have attention of their own before the call."""
        return self.num_tokens if self.attends_before else 0


class DecodePlan(NamedTuple):
    """How a step's decodes and extends are served: the same in all layers alike.

    Attributes:
        calls: One after the other.
        num_tokens: Query tokens of all calls.
        num_partials: Partial results of the largest call.

    """

    calls: list[PlannedCall]
    num_tokens: int
    num_partials: int

    @property
    def num_rotated_tokens(self) -> int:
        """The first query tokens, whose queries are rotated before they attend: calls
        that end in outputs rotate theirs.
        """
        calls = (call for call in self.calls if not call.ends_in_outputs)
        return max((call.tokens.stop for call in calls), default=0)

    @property
    def num_own_tokens(self) -> int:
        """Query tokens of a call that have attention of their own, at most."""
        return max((call.num_own_tokens for call in self.calls), default=0)

    @property
    def num_own_tiles(self) -> int:
        """Tiles of query tokens of a call that ends in outputs, at most."""
        return max(
            (
                num_own_tiles(call.num_tokens, call.batch.num_seqs)
                for call in self.calls
                if call.ends_in_outputs
            ),
            default=0,
        )

    @property
    def num_slots(self) -> int:
        """Query tokens that the largest call has room for."""
        return max((call.batch.num_query_slots for call in self.calls), default=0)

    @property
    def writes_all(self) -> bool:
        """Whether each query token has a result: tokens that pad requests of several
        lengths have none.
        """
        return all(call.batch.query_start_loc is None for call in self.calls)


def find_extends(
    query_lens: list[int],
    context_lens: list[int],
    max_len: int,
    max_tokens: int,
    max_call_tokens: int = MAX_CALL_TOKENS,
) -> list[tuple[int, int]]:
    """Which of a batch's first prefill requests attend to packed context.

    Args:
        query_lens: Query tokens of each request that is no decode.
        context_lens: Tokens before them.
        max_len: Query tokens of an extend, at most; 0: there are none.
        max_tokens: Query tokens of all extends, at most.
        max_call_tokens: Query tokens of a call, at most, if each of its requests had as
            many as the longest.

    Returns:
        First and last (exclusive) request of each call, from zero on. None if no
        request of them has context: prefill reads no cache then.

    """
    calls: list[tuple[int, int]] = []
    first = longest = total = 0
    for i, length in enumerate(query_lens):
        total += length
        if length > max_len or total > max_tokens:
            break
        if max(longest, length) * (i + 1 - first) > max_call_tokens:
            first, longest = i, 0
        longest = max(longest, length)
        if calls and calls[-1][0] == first:
            calls.pop()
        calls.append((first, i + 1))
    if not calls or not any(context_lens[: calls[-1][1]]):
        return []
    return calls


def cut_evenly(
    num_seqs: int, query_len: int, num_splits: int, max_partials: int
) -> list[tuple[int, int]]:
    """Cut sequences evenly into calls, by sizes that a CUDA graph has, too.

    Args:
        num_seqs: Sequences of the batch.
        query_len: Query tokens of each.
        num_splits: Splits of a sequence that the kernels want.
        max_partials: Partial results of a call.

    Returns:
        First and last (exclusive) sequence of each call.

    """
    if num_seqs == 0:
        return []
    most = max_partials // (query_len * min(num_splits, _LEAST_SPLITS))
    size = cdiv(num_seqs, cdiv(num_seqs, max(1, most)))
    return [(first, min(first + size, num_seqs)) for first in range(0, num_seqs, size)]


class DecodePlanner(NamedTuple):
    """Plans the decodes and extends of layers alike.

    Attributes:
        shape: The layers'.
        num_sms: Multiprocessors of the GPU.
        num_decode_splits: Splits of a sequence that decode attention wants.
        num_extend_splits: Splits that extend attention wants.
        max_merged_tokens: Query tokens of an extend up to which its merge attends to
            them, of a request alone twice as many; None: whatever there are.
        extends_to_outputs: Whether ``extend_outputs`` serves extends, but for a few.

    """

    shape: LayerShape
    num_sms: int
    num_decode_splits: SplitsFn
    num_extend_splits: SplitsFn
    max_merged_tokens: int | None = None
    extends_to_outputs: bool = False

    def plan(
        self,
        decodes: RequestSpan,
        extends: list[RequestSpan],
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> DecodePlan:
        """Plan a step.

        Args:
            decodes: The decode requests, which are the batch's first.
            extends: The extends, which follow them.
            block_table: (R, max_blocks) int32 on the device, of all R requests.
            seq_lens: (R,) int32 on the device, query tokens included.

        """
        parts = decodes.cut(self._cuts(decodes, False))
        num_decode_calls = len(parts)
        to_outputs = [self._ends_in_outputs(span) for span in extends]
        bounds = [
            self._output_cuts(span) if ends else self._cuts(span, True)
            for span, ends in zip(extends, to_outputs)
        ]
        parts += RequestSpan.cut_all(extends, bounds, block_table.device)
        ends_in_outputs = [False] * num_decode_calls
        for ends, own_bounds in zip(to_outputs, bounds):
            ends_in_outputs += [ends] * len(own_bounds)
        # A step may have dozens of calls: to slice for each takes three times as long.
        end = min(block_table.shape[0], seq_lens.shape[0])
        places = [0, *(part.first_request for part in parts), end]
        sizes = [last - first for first, last in pairwise(places)]
        _, *tables = block_table[:end].split(sizes)
        _, *lens = seq_lens[:end].split(sizes)
        calls = [
            self._call(part, i >= num_decode_calls, ends, tables[i], lens[i])
            for i, (part, ends) in enumerate(zip(parts, ends_in_outputs))
        ]
        return DecodePlan(
            calls,
            decodes.num_tokens + sum(span.num_tokens for span in extends),
            max((call.num_partials for call in calls), default=0),
        )

    def _cuts(self, span: RequestSpan, is_extend: bool) -> list[tuple[int, int]]:
        return cut_evenly(
            span.num_requests,
            span.query_len,
            self._num_splits(span.num_requests, span.query_len, is_extend),
            self.shape.max_partials,
        )

    def _output_cuts(self, span: RequestSpan) -> list[tuple[int, int]]:
        """Plan extends that need no merge."""
        most = self.shape.max_output_requests(span.query_len)
        return cut_evenly(span.num_requests, 1, 1, most)

    def _ends_in_outputs(self, span: RequestSpan) -> bool:
        """Whether extends need no merge. Of so few that most blocks have a part of a
        pass, it joins these in less time: on an H200 those of 32 and 128 query tokens
        behind 65536 in 103 and 290 us, of 108 and 317. And where there is no room for
        the tiles of a request's query tokens it needs none.
        """
        if not self.extends_to_outputs:
            return False
        if self.shape.max_output_requests(span.query_len) == 0:
            return False
        queries = span.query_len * self.shape.num_queries_per_kv
        passes = self.shape.num_kv_heads * cdiv(queries, _PASS_QUERIES)
        is_small = span.num_requests * span.query_len <= MAX_CALL_TOKENS
        return 2 * span.num_requests * passes >= self.num_sms or not is_small

    def _attends_before(self, span: RequestSpan) -> bool:
        """Whether attention to extends' query tokens comes before the merge. That of
        one request attends to twice as many by itself in less time: on an H200 to 32
        behind 65536 in 99 us, of 103.
        """
        most = self.max_merged_tokens
        if most is None:
            return False
        return span.query_len > (2 * most if span.num_requests == 1 else most)

    def _call(
        self,
        span: RequestSpan,
        is_extend: bool,
        ends_in_outputs: bool,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> PlannedCall:
        """One of a span of requests, whose rows are the first of the tensors."""
        batch = DecodeBatch(
            span.num_requests,
            block_table,
            seq_lens,
            span.query_len,
            span.query_start_loc,
        )
        return PlannedCall(
            slice(span.first_token, span.first_token + span.num_tokens),
            span.first_request,
            batch,
            0 if ends_in_outputs else self._num_partials(batch, is_extend),
            is_extend,
            is_extend and not ends_in_outputs and self._attends_before(span),
            ends_in_outputs,
        )

    def _num_splits(self, num_seqs: int, query_len: int, is_extend: bool) -> int:
        count = self.num_extend_splits if is_extend else self.num_decode_splits
        return count(num_seqs, self.shape.num_kv_heads, self.num_sms, query_len)

    def _num_partials(self, batch: DecodeBatch, is_extend: bool) -> int:
        queries = batch.num_query_slots
        room = max(1, self.shape.max_partials // queries)
        wanted = self._num_splits(batch.num_seqs, batch.query_len, is_extend)
        return queries * min(wanted, room)


class LargestBatch(NamedTuple):
    """The most that any step has of each.

    Attributes:
        num_tokens: Query tokens of decodes and extends.
        num_partials: Partial results of a call.
        num_own_tokens: Query tokens of a call that have attention of their own.
        num_own_tiles: Tiles of query tokens of a call that ends in outputs.

    """

    num_tokens: int
    num_partials: int
    num_own_tokens: int
    num_own_tiles: int = 0


def largest_batch(
    shape: LayerShape,
    max_num_seqs: int,
    max_num_tokens: int,
    max_query_len: int,
    extend_len: int,
    max_extend_tokens: int,
    max_merged_tokens: int | None,
    extends_to_outputs: bool = False,
) -> LargestBatch:
    """Bounds of all steps.

    A call has as many partial results as ``LayerShape.max_partials``, more if one
    request alone has, and at most ``MAX_KV_SPLITS`` a query token.

    Args:
        shape: The layer's.
        max_num_seqs: Requests of a step.
        max_num_tokens: Query tokens of a step.
        max_query_len: Query tokens of a decode request.
        extend_len: Query tokens of an extend; 0: there are no extends.
        max_extend_tokens: Query tokens of all extends of a step.
        max_merged_tokens: See ``DecodePlanner``.
        extends_to_outputs: See there.

    """
    num_tokens = num_call_tokens = max_num_seqs * max_query_len
    num_own_tokens = own_tiles = 0
    if extend_len > 0:
        max_query_len = max(max_query_len, extend_len)
        # If each had as many as the longest. One that is longer than calls of several
        # may be has a call of its own.
        num_slots = max_num_seqs * extend_len
        num_call_slots = min(num_slots, max(MAX_CALL_TOKENS, extend_len))
        num_call_tokens = max(num_call_tokens, num_call_slots)
        extended = min(num_slots, max_num_tokens, max_extend_tokens)
        num_tokens += extended
        if max_merged_tokens is not None and extend_len > max_merged_tokens:
            most = max(shape.max_partials, extend_len)
            num_own_tokens = min(extended, num_call_slots, most)
        if extends_to_outputs:
            most = min(extended, max(MAX_OUTPUT_CALL_TOKENS, extend_len))
            own_tiles = num_own_tiles(most, min(max_num_seqs, most))
            own_tiles = min(own_tiles, shape.max_own_tiles)
    num_partials = min(
        max(shape.max_partials, max_query_len), num_call_tokens * MAX_KV_SPLITS
    )
    return LargestBatch(num_tokens, num_partials, num_own_tokens, own_tiles)
