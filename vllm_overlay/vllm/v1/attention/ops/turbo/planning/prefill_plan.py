# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The plan of a prefill: slices of query tokens, and the keys that each attends to."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.planning.sliding_window import WindowSlice
from vllm.v1.attention.ops.turbo.planning.tokens import CachedPiece, KeyRuns, SeqLens


class CachedRequests(NamedTuple):
    """R requests whose cached tokens are dequantised together.

    Either one piece holds the tokens of all, or a single request takes several pieces.

    Attributes:
        tokens: The range of their query tokens among the slice's.
        queries: Lengths of their query tokens.
        block_table: (R, max_blocks) int32 on the device.
        own: The query tokens, if they are read from the cache; else None.
        context: The cached tokens before them, in pieces.

    """

    tokens: slice
    queries: SeqLens
    block_table: torch.Tensor
    own: CachedPiece | None
    context: list[CachedPiece]

    @property
    def pieces(self) -> list[CachedPiece]:
        """All pieces that are read from the cache."""
        return self.context if self.own is None else [self.own, *self.context]


class PrefillSlice(NamedTuple):
    """Consecutive query tokens of R prefill requests that attend at a time.

    Attributes:
        tokens: The range of the query tokens among the prefills'.
        queries: Lengths of the requests' query tokens.
        raw: The tokens whose K and V are used as computed, at most a piece if they are
            of several requests; None if all is read from the cache. They are the step's
            tokens up to the slice's last one. Tokens of the first request that come
            before the slice are included.
        cached: The requests that read the cache, in groups that are dequantised
            together: all R of them, or none.
        is_shared: Whether ranks share the requests' context, and a request has some.

    """

    tokens: slice
    queries: SeqLens
    raw: SeqLens | None
    cached: list[CachedRequests]
    is_shared: bool = False

    @property
    def reads_cache(self) -> bool:
        """Whether there is cached context, on this rank or another."""
        return self.is_shared or bool(self.cached)

    @property
    def has_neighbours(self) -> bool:
        """Whether raw K and V of several requests lie side by side."""
        return self.raw is not None and self.raw.cu_lens.shape[0] > 2


class Span(NamedTuple):
    """Two or more query tokens of a step and a request that see each other.

    Attributes:
        request: The request's index in the batch.
        begin: The first token's index among the batch's query tokens.
        end: The last token's index (exclusive).
        position: The first token's position in the request.

    """

    request: int
    begin: int
    end: int
    position: int


class LaterTokens(NamedTuple):
    """Q query tokens of a span, and the K tokens from the first of them to its end.

    Query token i sees all but the first i + 1 of the K tokens.

    Attributes:
        tokens: The range of the query tokens among the slice's.
        keys: The range of the K tokens among the prefills' query tokens.
        queries: Lengths of one request: Q.
        key_lens: Lengths of one request: K, which is more than Q.
        block_table: (1, max_blocks) int32 on the device.
        runs: The K tokens, if they are read from the cache; else None.

    """

    tokens: slice
    keys: slice
    queries: SeqLens
    key_lens: SeqLens
    block_table: torch.Tensor
    runs: KeyRuns | None

    @property
    def window_size(self) -> list[int]:
        """FlashAttention's window, which aligns the last query with the last key."""
        return [self.key_lens.max_len - self.queries.max_len - 1, -1]


@dataclass
class SpanPlan:
    """The spans of a prefill.

    Attributes:
        spans: The spans, with indices among the prefills' requests and tokens.
        slices: The later tokens that each slice sees, in layers without a sliding
            window.
        window_slices: The same for other layers, by their sliding windows.

    """

    spans: list[Span]
    slices: list[list[LaterTokens]]
    window_slices: dict[int, list[list[LaterTokens]]]

    def positions(self, request: int) -> list[tuple[int, int]]:
        """The first and last (exclusive) positions of a request's spans."""
        return [
            (span.position, span.position + span.end - span.begin)
            for span in self.spans
            if span.request == request
        ]


@dataclass
class PrefillPlan:
    """The plan of a batch's R prefill requests.

    Attributes:
        slices: The slices of layers without a sliding window, in order; empty if all
            layers have one.
        block_table: (R, max_blocks) int32 on the device.
        query_start_loc_cpu: (R + 1,) int32 on the host, from zero.
        seq_lens_cpu: (R,) int32 lengths on the host, query tokens included.
        window_slices: The slices of other layers, by their sliding windows.
        spans: Tokens that also see later ones, as an image's do; None if none do.

    """

    slices: list[PrefillSlice]
    block_table: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu: torch.Tensor
    window_slices: dict[int, list[WindowSlice]] = field(default_factory=dict)
    spans: SpanPlan | None = None

    def max_buffered_tokens(self, sliding_window: int | None = None) -> int | None:
        """Query tokens that ``PrefillScratch`` has to hold; None: it is not needed.

        Args:
            sliding_window: The most tokens that a query token of the layer sees; None
                for no limit.

        """
        if sliding_window is not None:
            slices = self.window_slices[sliding_window]
            return 0 if any(x.runs is not None for x in slices) else None
        if not any(x.reads_cache or x.has_neighbours for x in self.slices):
            return None
        lengths = (x.tokens.stop - x.tokens.start for x in self.slices if x.reads_cache)
        return max(lengths, default=0)
