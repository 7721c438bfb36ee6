# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How a step's decodes and extends are cut into calls of the kernels.

A decode request has one query token and the drafts that it is to verify. An extend is
the short end of a prompt, mostly behind a prefix hit: it reads packed context, too.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.turbo.interface import (
    MAX_KV_SPLITS,
    DecodeBatch,
    SplitsFn,
)
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape

# Query tokens of a request up to which its cached context is read as it is packed, and
# queries of a KV head: of more, so many passes would decode it that dequantising it
# once is faster. Measured on an H200, with four query heads a KV head
# (benchmark_turbo_extend.py).
MAX_EXTEND_LEN = 48
_MAX_EXTEND_QUERIES = 192
# Query tokens of a step that extends take, and of one call if each of its requests had
# as many as the longest: for more, scratch would be large.
MAX_EXTEND_TOKENS = 2048
MAX_CALL_TOKENS = 1024
# Splits of a sequence that a call has room for, if the kernels want so many: else
# sequences of unlike lengths could not keep the GPU busy, and more calls are better.
_LEAST_SPLITS = 4


def max_extend_len(num_queries_per_kv: int) -> int:
    """Query tokens that ``extend_attention`` serves, with so many heads a KV head."""
    return min(MAX_EXTEND_LEN, max(1, _MAX_EXTEND_QUERIES // num_queries_per_kv))


class RequestSpan(NamedTuple):
    """Requests that follow one another in a batch, and attend to packed context.

    Attributes:
        first_request: The first one's place in the batch.
        num_requests: R.
        first_token: The place of its first query token in the batch.
        num_tokens: Query tokens of all R.
        query_len: Query tokens of a request, at most.
        query_start_loc: (R + 1,) int32 on the device, from zero; None if each has
            ``query_len``.

    """

    first_request: int
    num_requests: int
    first_token: int
    num_tokens: int
    query_len: int
    query_start_loc: torch.Tensor | None


class PlannedCall(NamedTuple):
    """One call of decode or extend attention, but for tensors of the layer.

    Attributes:
        tokens: The step's query tokens that the call attends from; with a
            ``query_start_loc``, those that it counts from.
        first_request: The first sequence's place among the step's requests.
        batch: The call's sequences.
        num_partials: Partial results, for which it has scratch.
        is_extend: Whether it is of ``extend_attention``.

    """

    tokens: slice
    first_request: int
    batch: DecodeBatch
    num_partials: int
    is_extend: bool


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
    query_lens: list[int], context_lens: list[int], max_len: int
) -> list[tuple[int, int]]:
    """Which of a batch's first prefill requests attend to packed context.

    Args:
        query_lens: Query tokens of each request that is no decode.
        context_lens: Tokens before them.
        max_len: Query tokens of an extend, at most; 0: there are none.

    Returns:
        First and last (exclusive) request of each call, from zero on. None if no
        request of them has context: prefill reads no cache then.

    """
    calls: list[tuple[int, int]] = []
    first = longest = total = 0
    for i, length in enumerate(query_lens):
        total += length
        if length > max_len or total > MAX_EXTEND_TOKENS:
            break
        if max(longest, length) * (i + 1 - first) > MAX_CALL_TOKENS:
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

    """

    shape: LayerShape
    num_sms: int
    num_decode_splits: SplitsFn
    num_extend_splits: SplitsFn

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
        calls = list(self._calls(decodes, False, block_table, seq_lens))
        for span in extends:
            calls += self._calls(span, True, block_table, seq_lens)
        return DecodePlan(
            calls,
            decodes.num_tokens + sum(span.num_tokens for span in extends),
            max((call.num_partials for call in calls), default=0),
        )

    def _calls(
        self,
        span: RequestSpan,
        is_extend: bool,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> Iterator[PlannedCall]:
        query_len, start_loc = span.query_len, span.query_start_loc
        wanted = self._num_splits(span.num_requests, query_len, is_extend)
        for first, last in cut_evenly(
            span.num_requests, query_len, wanted, self.shape.max_partials
        ):
            if start_loc is None:
                begin = span.first_token + first * query_len
                tokens = slice(begin, span.first_token + last * query_len)
            else:
                tokens = slice(span.first_token, span.first_token + span.num_tokens)
            request = span.first_request + first
            batch = DecodeBatch(
                last - first,
                block_table[request:],
                seq_lens[request:],
                query_len,
                None if start_loc is None else start_loc[first : last + 1],
            )
            num_partials = self._num_partials(batch, is_extend)
            yield PlannedCall(tokens, request, batch, num_partials, is_extend)

    def _num_splits(self, num_seqs: int, query_len: int, is_extend: bool) -> int:
        count = self.num_extend_splits if is_extend else self.num_decode_splits
        return count(num_seqs, self.shape.num_kv_heads, self.num_sms, query_len)

    def _num_partials(self, batch: DecodeBatch, is_extend: bool) -> int:
        queries = batch.num_query_slots
        room = max(1, self.shape.max_partials // queries)
        wanted = self._num_splits(batch.num_seqs, batch.query_len, is_extend)
        return queries * min(wanted, room)


def largest_batch(
    shape: LayerShape,
    max_num_seqs: int,
    max_num_tokens: int,
    max_query_len: int,
    has_extends: bool,
) -> tuple[int, int]:
    """Of all steps, the most query tokens of decodes and extends, and the most partial
    results of a call.

    A call has as many partial results as ``LayerShape.max_partials``, more if one
    request alone has, and at most ``MAX_KV_SPLITS`` a query token.

    Args:
        shape: The layer's.
        max_num_seqs: Requests of a step.
        max_num_tokens: Query tokens of a step.
        max_query_len: Query tokens of a decode request.
        has_extends: Whether the kernels have an ``extend_attention``.

    """
    num_tokens = num_call_tokens = max_num_seqs * max_query_len
    if has_extends:
        extend_len = max_extend_len(shape.num_queries_per_kv)
        max_query_len = max(max_query_len, extend_len)
        extended = max_num_seqs * extend_len
        num_call_tokens = max(num_call_tokens, min(extended, MAX_CALL_TOKENS))
        num_tokens += min(extended, max_num_tokens, MAX_EXTEND_TOKENS)
    num_partials = min(
        max(shape.max_partials, max_query_len), num_call_tokens * MAX_KV_SPLITS
    )
    return num_tokens, num_partials
