# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The recent window: where a page holds the newest tokens of one request in 8 bits.

Most of what packed codes lose is lost in the nearest tokens, which get most of the
weight. A request has a page of its own, for as long as it runs, in which the newest
tokens lie once more, in 8 bits; decoding attends to these instead of their codes.
(KIVI, Liu et al., arXiv:2402.02750, keeps such a window in 16 bits. Eight lose less
than the rows gain that the same bytes have room for: half as many again.)

The page is one of the layer's, (block, KV head) contiguous, seen as R rows. The token
at position p lies in row p % R. A row has

- K, less the offset that is taken off stored keys, and V: D int8 each, not rotated,
- for each 16 coordinates of both a scale: bf16, the largest magnitude / 127,
- a tag: the token's packed K codes, and p + 1.

A row counts only if its tag equals what is packed at that position, of every head. So
nothing has to be cleared, whoever had the page before, and whatever else wrote the
packed token: a prefix hit, a transfer or a rejected draft. Codes of V are not compared:
who writes a token writes both.

This is scratch of a running request, no part of the stored format: it may change,
under another ``VERSION``. From one engine to another it goes along with the pages.
"""

from dataclasses import dataclass
from functools import cached_property

from vllm.v1.attention.ops.turbo.format import SCALE_GROUP, TurboFormat

# The version of rows and their places: engines of one version may exchange them.
VERSION = 1
# Rows of a page at most: kernels tell them apart by the bits of a word.
MAX_ROWS = 64
# The largest magnitude of a code.
MAX_CODE = 127
# Where planes begin.
_ALIGNMENT = 16


@dataclass(frozen=True)
class WindowFormat:
    """Where rows lie in a page of one KV head: six planes, one after the other.

    Attributes:
        layout: The packed pages' format.
        block_size: N, tokens of a packed page.
        sliding_window: Tokens that a query token sees, at most, itself the last; None:
            all before it. There are no more rows: the query tokens and the rows that
            count for them are R at most, so that each of them sees all of these.

    """

    layout: TurboFormat
    block_size: int
    sliding_window: int | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of a (block, KV head)."""
        return self.block_size * self.layout.slot_size

    @property
    def scale_bytes(self) -> int:
        """Bytes of a vector's scales."""
        return 2 * (self.layout.head_size // SCALE_GROUP)

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Bytes of a row in each plane: K, V, their scales, K codes, position + 1."""
        layout = self.layout
        vectors = (layout.head_size, layout.head_size)
        scales = (self.scale_bytes, self.scale_bytes)
        return (*vectors, *scales, layout.key_code_bytes, 4)

    def _starts(self, num_rows: int) -> list[int]:
        """Where planes of so many rows begin, and where the last ends."""
        starts = [0]
        for width in self.row_widths:
            end = starts[-1] + num_rows * width
            starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        return starts

    @cached_property
    def num_rows(self) -> int:
        """R."""
        rows = min(self.page_bytes // sum(self.row_widths), MAX_ROWS)
        if self.sliding_window is not None:
            rows = min(rows, self.sliding_window)
        while self._starts(rows)[-1] > self.page_bytes:
            rows -= 1
        return rows

    @cached_property
    def plane_offsets(self) -> tuple[int, ...]:
        """Where the planes begin in a page: K, V, their scales, K codes, position + 1.

        All are multiples of 16.
        """
        return tuple(self._starts(self.num_rows)[:-1])
