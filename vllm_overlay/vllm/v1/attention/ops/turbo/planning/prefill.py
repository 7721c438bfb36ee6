# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Plans a prefill on the host: cuts it into slices."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.ops.turbo.planning.cuts import plan_runs, plan_slices
from vllm.v1.attention.ops.turbo.planning.prefill_plan import (
    CachedRequests,
    PrefillPlan,
    PrefillSlice,
    Span,
)
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape
from vllm.v1.attention.ops.turbo.planning.sliding_window import (
    LEAST_TOKENS,
    plan_window_slices,
)
from vllm.v1.attention.ops.turbo.planning.spans import plan_spans
from vllm.v1.attention.ops.turbo.planning.tokens import CachedPiece, SeqLens

# Bytes of the dequantised K and V of one piece, together.
PIECE_BYTES = 64 * 2**20
# Bytes of a slice's rotated queries; the output of a piece takes as many again.
ROW_BYTES = 64 * 2**20
# The largest head size that every version of FlashAttention takes.
FLASH_ATTN_MAX_HEAD_SIZE = 256
# Query tokens of a slice with larger heads. Their attention kernel takes memory for the
# LSE that grows with the square of the tokens: at most 8 MiB a KV head, with outputs.
_RAW_TOKENS = 2048


LocalLensFn: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class PrefillLimits(NamedTuple):
    """The bounds of a prefill's scratch.

    Attributes:
        slice_tokens: The most query tokens of a slice.
        piece_tokens: The most tokens that are dequantised at a time; under a sliding
            window, the most tokens that are attended to at a time.
        raw_tokens: The most query tokens of a slice that reads nothing from the cache;
            None for no limit.

    """

    slice_tokens: int
    piece_tokens: int
    raw_tokens: int | None = None


def prefill_limits(
    shape: LayerShape,
    stored: bool,
    sliding_window: int | None = None,
) -> PrefillLimits:
    """The tokens that fit in ROW_BYTES and PIECE_BYTES, at least one.

    Under a sliding window there are no rotated queries. A piece then has room for the
    tokens that one query token sees, and for ``LEAST_TOKENS`` more.

    Args:
        shape: The shape of the layer; if several shapes share a plan, the one with most
            query heads.
        stored: Whether a slice's own tokens are read from the cache: as one piece.
        sliding_window: The most tokens that a query token sees; None for no limit.

    """
    head_bytes = shape.head_size * shape.dtype.itemsize
    slice_tokens = max(1, ROW_BYTES // (shape.num_heads * head_bytes))
    token_numbers = shape.num_kv_heads * (shape.head_size + shape.head_size_v)
    piece_tokens = max(1, PIECE_BYTES // (token_numbers * shape.dtype.itemsize))
    if sliding_window is not None:
        least = sliding_window - 1 + LEAST_TOKENS
        return PrefillLimits(0, max(piece_tokens, least), None)
    if stored:
        slice_tokens = min(slice_tokens, piece_tokens)
    raw_tokens = None
    if shape.largest_head_size > FLASH_ATTN_MAX_HEAD_SIZE:
        slice_tokens, raw_tokens = min(slice_tokens, _RAW_TOKENS), _RAW_TOKENS
    return PrefillLimits(slice_tokens, piece_tokens, raw_tokens)


def plan_context(
    context_lens: torch.Tensor, tokens_per_piece: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut the requests' contexts, laid end to end, into pieces.

    Args:
        context_lens: (R,) int32 on the host.
        tokens_per_piece: Tokens of a piece, over all requests.

    Returns:
        For each piece, on the host: the first position of each request's tokens in it,
        (R,) int32, and cumulative lengths, (R + 1,) int32.

    """
    begins = context_lens.cumsum(0) - context_lens
    total = int(context_lens.sum())
    pieces = []
    for first in range(0, total, tokens_per_piece):
        starts = torch.minimum((first - begins).clamp(min=0), context_lens)
        ends = (first + tokens_per_piece - begins).clamp(min=0)
        ends = torch.minimum(ends, context_lens)
        cu_lens = torch.zeros(len(starts) + 1, dtype=torch.int32)
        torch.cumsum(ends - starts, 0, out=cu_lens[1:])
        pieces.append((starts.to(torch.int32), cu_lens))
    return pieces


class PrefillPlanner(NamedTuple):
    """Plans the prefills of layers that read the same tokens from the cache.

    Attributes:
        stored: Whether query tokens are also read from the cache.
        limits: The bounds of the scratch of layers without a sliding window; None if
            all have one.
        device: The kernels' device.
        window_tokens: ``PrefillLimits.piece_tokens`` by sliding window.
        local_lens: Where ranks share the context, a function from numbers of first
            tokens, (R,) int32 on the host, to this rank's share of them; None where
            they do not.

    """

    stored: bool
    limits: PrefillLimits | None
    device: torch.device
    window_tokens: Mapping[int, int] = MappingProxyType({})
    local_lens: LocalLensFn | None = None

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        spans: Sequence[Span] = (),
    ) -> PrefillPlan:
        """Plan R consecutive requests of a batch, without waiting for the device.

        Args:
            query_start_loc: (R + 1,) int32 on the host, where requests' tokens begin in
                the batch.
            seq_lens: (R,) int32 on the host, exact.
            block_table: (R, max_blocks) int32 on the device.
            spans: The requests' spans, with ``request`` among the R requests, and
                tokens' indices in the batch.

        """
        begin = int(query_start_loc[0])
        query_start_loc = query_start_loc - begin
        requests = query_start_loc, seq_lens, block_table
        window_slices = {
            window: plan_window_slices(
                *requests, self.stored, window, max_tokens, self.device
            )
            for window, max_tokens in self.window_tokens.items()
        }
        slices = self._plan_slices(*requests)
        plan = PrefillPlan(
            slices, block_table, query_start_loc, seq_lens, window_slices
        )
        own = [x._replace(begin=x.begin - begin, end=x.end - begin) for x in spans]
        plan.spans = plan_spans(own, plan, block_table, self.stored, self.device)
        return plan

    def _plan_slices(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> list[PrefillSlice]:
        """Plan the slices of layers without a sliding window."""
        limits = self.limits
        if limits is None:
            return []
        query_lens = query_start_loc.diff()
        context_lens = seq_lens - query_lens
        runs = [(0, len(query_lens))]
        if not self.stored:
            runs = plan_runs(query_lens.tolist(), limits.piece_tokens)
        slices = []
        for first, last in runs:
            starts = query_start_loc[first : last + 1]
            max_tokens = limits.slice_tokens
            if not self.stored and not context_lens[first:last].any():
                # Without context no scratch holds rotated queries.
                max_tokens = limits.raw_tokens or int(starts[-1])
            slices += [
                self._plan_slice(
                    tokens,
                    starts[requests.start : requests.stop + 1],
                    context_lens[first:last][requests],
                    block_table[first:last][requests],
                )
                for tokens, requests in plan_slices(starts, max_tokens)
            ]
        return slices

    def _plan_slice(
        self,
        tokens: slice,
        bounds: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> PrefillSlice:
        """Plan one slice.

        Args:
            tokens: The range of the slice's query tokens among the prefills'.
            bounds: (R + 1,) int32 on the host, where its requests begin.
            context_lens: (R,) int32 on the host, without query tokens.
            block_table: (R, max_blocks) int32 on the device.

        """
        assert self.limits is not None
        starts = bounds.clamp(tokens.start, tokens.stop)
        queries = SeqLens.of_host(starts - tokens.start, self.device)
        raw = None
        if self.stored:
            context_lens = context_lens + (starts - bounds)[:-1]
        else:
            raw = queries
            if int(bounds[0]) != tokens.start:
                ends = bounds.clamp(max=tokens.stop) - bounds[0]
                raw = SeqLens.of_host(ends, self.device)
        # From whole lengths: all ranks must agree, because they wait for each other.
        is_shared = self.local_lens is not None and bool(context_lens.any())
        if self.local_lens is not None:
            context_lens = self.local_lens(context_lens)
        ranges = []
        if self.stored or context_lens.any():
            # If any request has cached tokens, each group has some.
            ranges = plan_runs(
                context_lens.tolist(), self.limits.piece_tokens, may_be_empty=False
            )
        return PrefillSlice(
            tokens,
            queries,
            raw,
            [
                self._plan_requests(
                    starts[first : last + 1] - tokens.start,
                    context_lens[first:last],
                    block_table[first:last],
                    queries if len(ranges) == 1 else None,
                )
                for first, last in ranges
            ],
            is_shared,
        )

    def _plan_requests(
        self,
        starts: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        queries: SeqLens | None,
    ) -> CachedRequests:
        """Plan requests of a slice that are dequantised together.

        Args:
            starts: (R + 1,) int32 on the host, where the requests' tokens begin in the
                slice.
            context_lens: (R,) int32 on the host.
            block_table: (R, max_blocks) int32 on the device.
            queries: Lengths from ``starts`` if that begins at zero; else None.

        """
        limits, device = self.limits, self.device
        assert limits is not None
        tokens = slice(int(starts[0]), int(starts[-1]))
        if queries is None:
            queries = SeqLens.of_host(starts - tokens.start, device)
        own = None
        if self.stored:
            own = CachedPiece(async_tensor_h2d(context_lens, device), queries)
        context = [
            CachedPiece(
                async_tensor_h2d(firsts, device), SeqLens.of_host(cu_lens, device)
            )
            for firsts, cu_lens in plan_context(context_lens, limits.piece_tokens)
        ]
        return CachedRequests(tokens, queries, block_table, own, context)
