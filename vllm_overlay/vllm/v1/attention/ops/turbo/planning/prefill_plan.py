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

    They are the step's, up to the slice's last: of its first request, too, those that
    lie before the slice.

    Attributes:
        cu_lens: (R + 1,) int32 on the device, cumulative lengths of the R requests.
        max_len: Most tokens of a request.
        num_tokens: Tokens of all R requests.

    """

    cu_lens: torch.Tensor
    max_len: int
    num_tokens: int


class CachedPiece(NamedTuple):
    """Cached tokens of R requests, a run of each, that are dequantised at a time.

    Attributes:
        starts: (R,) int32 on the device, position in its request of each run's first.
        cu_lens: (R + 1,) int32 on the device, cumulative lengths of the runs.
        max_len: Tokens of the longest run.
        num_tokens: Tokens of all runs.

    """

    starts: torch.Tensor
    cu_lens: torch.Tensor
    max_len: int
    num_tokens: int


class CachedRequests(NamedTuple):
    """Requests whose cached tokens are dequantised side by side, R of them: so many
    that one piece holds all, or one whose tokens take several pieces.

    Attributes:
        tokens: Place of their query tokens among the slice's.
        query_start_loc: (R + 1,) int32 on the device, from zero.
        max_query_len: Most query tokens of a request.
        block_table: (R, max_blocks) int32 on the device.
        own: The query tokens, to be read from the cache; None if they are not.
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
        """All that is read from the cache."""
        return self.context if self.own is None else [self.own, *self.context]


class PrefillSlice(NamedTuple):
    """Query tokens of R prefill requests, one after the other, attended from at a time.

    Attributes:
        tokens: Place of the query tokens among the prefills'.
        query_start_loc: (R + 1,) int32 on the device, from zero.
        max_query_len: Most query tokens of a request.
        raw: The tokens that are used as computed, of several requests no more than a
            piece; None if all is read from the cache.
        cached: The requests that are read from the cache, by those that are
            dequantised side by side: all R of them, or none.
        is_shared: Whether ranks share the requests' context, and any of these has some.

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
    """The prefill requests of a batch; R requests, T tokens.

    Attributes:
        slices: The query tokens, as they are attended from one after the other; none
            if all layers have sliding windows.
        block_table: (R, max_blocks) int32 on the device.
        query_start_loc_cpu: (R + 1,) int32 on the host, from zero.
        seq_lens_cpu: (R,) int32 lengths on the host, query tokens included.
        window_slices: By the layers' sliding windows, likewise.
        spans: Tokens that see later ones, too; None if none do.

    """

    slices: list[PrefillSlice]
    block_table: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu: torch.Tensor
    window_slices: dict[int, list[WindowSlice]] = field(default_factory=dict)
    spans: SpanPlan | None = None

    def max_buffered_tokens(self, sliding_window: int | None = None) -> int | None:
        """Query tokens that ``PrefillScratch`` is to hold; None: none are needed.

        Args:
            sliding_window: The layer's; None if it has none.

        """
        if sliding_window is not None:
            slices = self.window_slices[sliding_window]
            return 0 if any(x.runs is not None for x in slices) else None
        if not any(x.reads_cache or x.has_neighbours for x in self.slices):
            return None
        lengths = (x.tokens.stop - x.tokens.start for x in self.slices if x.reads_cache)
        return max(lengths, default=0)
