# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The format of the tail: a page with a request's newest tokens in 8 bits.

Users know the tail as the recent window, and turn it off by ``turbo_window``.

Most of the error of packed codes comes from the nearest tokens, which get most of the
weight. A running request has a separate page with a copy of its newest tokens in 8
bits, and decoding attends to these instead of their codes. KIVI (Liu et al.,
arXiv:2402.02750) keeps such a window in 16 bits. Eight bits lose less than the half as
many more rows gain that fit into the same bytes.

The page is one of the layer's pages, (block, KV head) contiguous, seen as R rows. The
token at position p is in row p % R. A row has

- K, less the offset that is taken off stored keys, and V: an int8 for each of their
  coordinates, not rotated,
- a scale for each 16 coordinates of both: bf16, the largest magnitude / 127,
- a tag: the token's packed K codes, and p + 1.

A row is valid only if its tag equals the packed codes at that position, in every head.
So nothing has to be cleared, whatever request had the page before and whatever wrote
the packed token: a prefix hit, a transfer or a rejected draft. Codes of V are not
compared, because a token's K and V are always written together.

This is scratch of a running request and not a part of the stored format. It may change
with ``VERSION``. Transfers between engines move it along with the pages.
"""

from dataclasses import dataclass
from functools import cached_property

from vllm.v1.attention.ops.turbo.format import SCALE_GROUP, TurboFormat

# The version of rows and their layout. Engines of the same version may exchange them.
VERSION = 1
# The most rows of a page, which kernels mark in the bits of a word.
MAX_ROWS = 64
# The largest magnitude of a code.
MAX_CODE = 127
# Planes begin at multiples of this many bytes.
_ALIGNMENT = 16


@dataclass(frozen=True)
class TailFormat:
    """The layout of rows in a page of one KV head: six planes, one after the other.

    Attributes:
        layout: The packed pages' format.
        block_size: N, tokens of a packed page.
        sliding_window: The most tokens that a query token sees, itself included; None
            for all before it. There are at most as many rows. Query tokens and the rows
            that are valid for them are at most R together, so each query token sees all
            of these rows.

    """

    layout: TurboFormat
    block_size: int
    sliding_window: int | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of a (block, KV head)."""
        return self.block_size * self.layout.slot_size

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Bytes of a row in each plane: K, V, their scales, K codes, position + 1."""
        layout = self.layout
        vectors = (layout.head_size, layout.head_size_v)
        scales = (2 * (size // SCALE_GROUP) for size in vectors)
        return (*vectors, *scales, layout.key_code_bytes, 4)

    def _starts(self, num_rows: int) -> list[int]:
        """The offsets of planes of ``num_rows`` rows, and the end of the last one."""
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
        """Bytes in a page before each plane: K, V, their scales, K codes, position + 1.

        All are multiples of 16.
        """
        return tuple(self._starts(self.num_rows)[:-1])
