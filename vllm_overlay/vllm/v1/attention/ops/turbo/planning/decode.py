# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The plan that cuts a step's decodes and extends into calls of the kernels.

A decode request has one query token and the draft tokens to be verified. An extend is
the short end of a prompt, mostly after a prefix hit: it also reads packed context.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.turbo.formats.output_scratch import num_raw_tiles
from vllm.v1.attention.ops.turbo.interface import DecodeBatch, SplitsFn
from vllm.v1.attention.ops.turbo.planning.requests import RequestSpan
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape

# The most query tokens of a step's extends. The limits of their lengths were measured
# up to here.
MAX_EXTEND_TOKENS = 16384
# The same where ranks share the context: each rank has room for all ranks' queries.
MAX_SHARED_EXTEND_TOKENS = 2048
# The most query slots of a call: its requests times the longest one's query tokens.
# Scratch grows with them.
MAX_CALL_TOKENS = 1024
# The same of calls that end in outputs. Their scratch grows with the query tokens, and
# their partial results with the GPU's thread blocks, not with query slots.
MAX_OUTPUT_CALL_TOKENS = 8192
# Queries of a KV head that a pass of such a call attends from.
_PASS_QUERIES = 128
# Splits of a sequence that a call has room for, if the kernels ask for as many. With
# fewer, sequences of unlike lengths would leave a part of the GPU idle.
_LEAST_SPLITS = 4


class PlannedCall(NamedTuple):
    """One call of decode or extend attention, without the layer's tensors.

    Attributes:
        tokens: The step's query tokens that the call attends from. With a
            ``query_start_loc`` these are the tokens that it indexes.
        first_request: The first sequence's index among the step's requests.
        batch: The call's sequences.
        num_partials: Partial results that the call has scratch for.
        is_extend: Whether ``extend_attention`` or ``extend_outputs`` is called.
        attends_before: Whether attention to the query tokens, as computed, runs before
            the call, because they are too many for the merge.
        ends_in_outputs: Whether ``extend_outputs`` is called.

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
        """Query tokens in ``tokens``, which may begin before the call's first one."""
        return self.tokens.stop - self.tokens.start

    @property
    def num_raw_tokens(self) -> int:
        """Query tokens that attend to each other before the call."""
        return self.num_tokens if self.attends_before else 0


class DecodePlan(NamedTuple):
    """The calls of a step's decodes and extends, for all layers of a shape.

    Attributes:
        calls: The calls, in order.
        num_tokens: Query tokens of all calls.
        num_partials: Partial results of the largest call.

    """

    calls: list[PlannedCall]
    num_tokens: int
    num_partials: int

    @property
    def num_rotated_tokens(self) -> int:
        """The number of first query tokens whose queries are rotated beforehand; calls
        that end in outputs rotate theirs.
        """
        calls = (call for call in self.calls if not call.ends_in_outputs)
        return max((call.tokens.stop for call in calls), default=0)

    @property
    def num_raw_tokens(self) -> int:
        """The most query tokens of a call that attend to each other before it."""
        return max((call.num_raw_tokens for call in self.calls), default=0)

    @property
    def num_raw_tiles(self) -> int:
        """The most tiles of query tokens of a call that ends in outputs."""
        return max(
            (
                num_raw_tiles(call.num_tokens, call.batch.num_seqs)
                for call in self.calls
                if call.ends_in_outputs
            ),
            default=0,
        )

    @property
    def num_slots(self) -> int:
        """The query slots of the largest call."""
        return max((call.batch.num_query_slots for call in self.calls), default=0)

    @property
    def writes_all(self) -> bool:
        """Whether each query token gets a result; padding after requests of unequal
        lengths gets none.
        """
        return all(call.batch.query_start_loc is None for call in self.calls)


def find_extends(
    query_lens: list[int],
    context_lens: list[int],
    max_len: int,
    max_tokens: int,
    max_call_tokens: int = MAX_CALL_TOKENS,
) -> list[tuple[int, int]]:
    """Find the first requests after the decodes that are served as extends.

    Args:
        query_lens: Query tokens of each request that is no decode.
        context_lens: Cached tokens before them.
        max_len: The most query tokens of an extend; 0: there are no extends.
        max_tokens: The most query tokens of all extends.
        max_call_tokens: The most query slots of a call: its requests times the longest
            one's query tokens.

    Returns:
        First and last (exclusive) request of each call, from zero on. Empty if none of
        these requests has context, because a prefill of them reads no cache.

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
    """Cut sequences evenly into calls, from sizes that are fixed in a CUDA graph.

    Args:
        num_seqs: Sequences of the batch.
        query_len: Query tokens of each.
        num_splits: Splits of a sequence that the kernels ask for.
        max_partials: The most partial results of a call of several sequences.

    Returns:
        First and last (exclusive) sequence of each call.

    """
    if num_seqs == 0:
        return []
    most = max_partials // (query_len * min(num_splits, _LEAST_SPLITS))
    size = cdiv(num_seqs, cdiv(num_seqs, max(1, most)))
    return [(first, min(first + size, num_seqs)) for first in range(0, num_seqs, size)]


class DecodePlanner(NamedTuple):
    """Plans the decodes and extends of all layers of a shape.

    Attributes:
        shape: The shape of the layers.
        num_sms: Multiprocessors of the GPU.
        num_decode_splits: Splits of a sequence that decode attention asks for.
        num_extend_splits: Splits that extend attention asks for.
        max_merged_tokens: The most query tokens of an extend that its merge attends to,
            twice as many for a request alone; None: any number.
        extends_to_outputs: Whether ``extend_outputs`` serves all but small extends.

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
            decodes: The decode requests, which come first in the batch.
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
        # One split of the tensors: a step may have dozens of calls, and slices of each
        # would take three times as long on the host.
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
        """Cut extends that need no merge into calls."""
        most = self.shape.max_output_requests(span.query_len)
        return cut_evenly(span.num_requests, 1, 1, most)

    def _ends_in_outputs(self, span: RequestSpan) -> bool:
        """Whether ``extend_outputs`` serves extends.

        It does not serve extends whose query tokens' tiles have no room in scratch. It
        also is slower than a merge if so few requests attend that most thread blocks
        have a part of a pass.
        """
        # Tuning, one request on an H200, 2026-11, `ci/gpu.py extend`, us merged / in
        # outputs behind 65536 tokens: 103 / 108 of 32 query tokens, 290 / 317 of 128.
        if not self.extends_to_outputs:
            return False
        if self.shape.max_output_requests(span.query_len) == 0:
            return False
        queries = span.query_len * self.shape.num_queries_per_kv
        passes = self.shape.num_kv_heads * cdiv(queries, _PASS_QUERIES)
        is_small = span.num_requests * span.query_len <= MAX_CALL_TOKENS
        return 2 * span.num_requests * passes >= self.num_sms or not is_small

    def _attends_before(self, span: RequestSpan) -> bool:
        """Whether attention to extends' query tokens runs before the merge.

        The merge of one request is faster up to twice as many query tokens.
        """
        # Tuning, an H200, 2026-11, `ci/gpu.py extend`, 32 query tokens behind 65536:
        # 99 us if the merge attends to them, 103 if FlashAttention does before.
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
        """The call of a span of requests, from the span's rows of the tensors."""
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
