# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The plan of a prefill: slices of query tokens, and the keys that each attends to."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.planning.sliding_window import WindowSlice
from vllm.v1.attention.ops.turbo.planning.spans import SpanPlan


class RawTokens(NamedTuple):
    """The tokens of a slice's requests whose K and V are used as computed.

    They are the step's tokens up to the slice's last one. Tokens of the first request
    that come before the slice are included.

    Attributes:
        cu_lens: (R + 1,) int32 on the device, cumulative lengths of the R requests.
        max_len: Most tokens of a request.
        num_tokens: Tokens of all R requests.

    """

    cu_lens: torch.Tensor
    max_len: int
    num_tokens: int


class CachedPiece(NamedTuple):
    """Cached tokens that are dequantised at a time: a run of each of R requests.

    Attributes:
        starts: (R,) int32 on the device, the position of each run's first token in its
            request.
        cu_lens: (R + 1,) int32 on the device, cumulative lengths of the runs.
        max_len: Tokens of the longest run.
        num_tokens: Tokens of all runs.

    """

    starts: torch.Tensor
    cu_lens: torch.Tensor
    max_len: int
    num_tokens: int


class CachedRequests(NamedTuple):
    """R requests whose cached tokens are dequantised together.

    Either one piece holds the tokens of all, or a single request takes several pieces.

    Attributes:
        tokens: The range of their query tokens among the slice's.
        query_start_loc: (R + 1,) int32 on the device, from zero.
        max_query_len: Most query tokens of a request.
        block_table: (R, max_blocks) int32 on the device.
        own: The query tokens, if they are read from the cache; else None.
        context: The cached tokens before them, in pieces.

    """

    tokens: slice
    query_start_loc: torch.Tensor
    max_query_len: int
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
        query_start_loc: (R + 1,) int32 on the device, from zero.
        max_query_len: Most query tokens of a request.
        raw: The tokens that are used as computed, at most a piece if they are of
            several requests; None if all is read from the cache.
        cached: The requests that read the cache, in groups that are dequantised
            together: all R of them, or none.
        is_shared: Whether ranks share the requests' context, and a request has some.

    """

    tokens: slice
    query_start_loc: torch.Tensor
    max_query_len: int
    raw: RawTokens | None
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
