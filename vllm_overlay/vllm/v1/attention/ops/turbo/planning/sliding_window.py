# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Plans a prefill under a sliding window on the host.

A query token sees few tokens then. The cached ones are dequantised into a buffer beside
the request's raw tokens, and one call attends to the buffer.
"""

from typing import NamedTuple

import torch

from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.ops.turbo.planning.tokens import CachedPiece, KeyRuns, SeqLens

# The least query tokens that a buffer has room for, after the tokens before them.
LEAST_TOKENS = 1024


class WindowSlice(NamedTuple):
    """Consecutive query tokens of R requests that attend at a time.

    A request may come several times, each time with different tokens.

    Attributes:
        tokens: The range of the query tokens among the prefills'.
        queries: Lengths of the requests' query tokens.
        block_table: (R, max_blocks) int32 on the device.
        runs: The keys that they see, to be copied into a buffer; None if these are just
            the query tokens of a single request.

    """

    tokens: slice
    queries: SeqLens
    block_table: torch.Tensor
    runs: KeyRuns | None

    @property
    def keys(self) -> slice:
        """The range of the keys among the prefills', used without runs."""
        return self.tokens

    @property
    def key_lens(self) -> SeqLens:
        """Keys of each request."""
        return self.queries if self.runs is None else self.runs.lens


class _Part(NamedTuple):
    """Query tokens of one request that attend at a time.

    Attributes:
        request: The request's index among the prefills.
        begin: The first query token's index among the prefills'.
        end: The last query token's index (exclusive).
        start: The position of the first token that is seen in the request.
        num_cached: Tokens from there on that are read from the cache.
        num_raw: Raw tokens that follow these.

    """

    request: int
    begin: int
    end: int
    start: int
    num_cached: int
    num_raw: int


def _cut_request(
    request: int,
    begin: int,
    end: int,
    context_len: int,
    stored: bool,
    sliding_window: int,
    max_tokens: int,
) -> list[_Part]:
    """Cut a request's query tokens evenly, so that the keys of a part fit a buffer."""
    length, before = end - begin, sliding_window - 1
    if length == 0:
        return []
    if min(context_len, before) + length <= max_tokens:
        size = length
    else:
        size = cdiv(length, cdiv(length, max_tokens - before))
    parts = []
    for first in range(0, length, size):
        last = min(first + size, length)
        start = max(context_len + first - before, 0)
        num_cached = max(context_len + (last if stored else 0) - start, 0)
        num_raw = context_len + last - start - num_cached
        parts.append(
            _Part(request, begin + first, begin + last, start, num_cached, num_raw)
        )
    return parts


def _lay_out(parts: list[_Part], device: torch.device) -> KeyRuns:
    """The runs of parts, one after the other."""
    lens = [part.num_cached + part.num_raw for part in parts]
    cu_lens = [0]
    for length in lens:
        cu_lens.append(cu_lens[-1] + length)
    columns = [
        [part.start for part in parts],
        [part.num_cached for part in parts],
        [part.end - part.num_raw for part in parts],
        cu_lens[1:],
    ]
    # One copy to the device. The first column is zero because ``cu_lens`` begins so.
    rows = torch.tensor([[0, *column] for column in columns], dtype=torch.int32)
    starts, cached_lens, raw_starts, sums = async_tensor_h2d(rows, device)
    rotated = [
        begin + part.num_cached
        for begin, part in zip(cu_lens, parts)
        if part.num_cached
    ]
    runs = SeqLens(sums, max(lens), cu_lens[-1])
    most_cached = max(part.num_cached for part in parts)
    cached = CachedPiece(
        starts[1:], runs._replace(max_len=most_cached), cached_lens[1:]
    )
    return KeyRuns(cached, raw_starts[1:], runs, max(rotated, default=0))


def plan_window_slices(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    stored: bool,
    sliding_window: int,
    max_tokens: int,
    device: torch.device,
) -> list[WindowSlice]:
    """Plan a prefill under a sliding window, without waiting for the device.

    Args:
        query_start_loc: (R + 1,) int32 on the host, from zero.
        seq_lens: (R,) int32 on the host, exact.
        block_table: (R, max_blocks) int32 on the device.
        stored: Whether query tokens are also read from the cache.
        sliding_window: The most tokens that a query token sees, itself included.
        max_tokens: Tokens that the buffer has room for, more than ``sliding_window``.
        device: The kernels' device.

    """
    bounds = query_start_loc.tolist()
    contexts = (seq_lens - query_start_loc.diff()).tolist()
    if len(contexts) == 1 and contexts[0] == 0 and not stored:
        queries = SeqLens.of_host(query_start_loc, device)
        return [WindowSlice(slice(0, bounds[1]), queries, block_table, None)]
    batches: list[list[_Part]] = []
    room = 0
    for request, context_len in enumerate(contexts):
        for part in _cut_request(
            request,
            bounds[request],
            bounds[request + 1],
            context_len,
            stored,
            sliding_window,
            max_tokens,
        ):
            length = part.num_cached + part.num_raw
            if not batches or length > room:
                batches.append([])
                room = max_tokens
            batches[-1].append(part)
            room -= length
    slices = []
    for parts in batches:
        first = parts[0].begin
        starts = [part.begin - first for part in parts] + [parts[-1].end - first]
        requests = [part.request for part in parts]
        table = block_table[requests[0] : requests[-1] + 1]
        if requests != list(range(requests[0], requests[-1] + 1)):
            # A request comes several times, or has no query token.
            rows = async_tensor_h2d(torch.tensor(requests), device)
            table = block_table.index_select(0, rows)
        queries = SeqLens.of_host(torch.tensor(starts, dtype=torch.int32), device)
        tokens, runs = slice(first, parts[-1].end), _lay_out(parts, device)
        slices.append(WindowSlice(tokens, queries, table, runs))
    return slices
