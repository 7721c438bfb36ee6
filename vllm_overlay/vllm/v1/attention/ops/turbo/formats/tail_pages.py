# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tails of a step's sequences, as kernels take them."""

from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.formats.tail import TailFormat


class Tail(NamedTuple):
    """The newest cached tokens of sequences, in 8 bits: see ``formats.tail``.

    Attributes:
        pages: (num_blocks, H, N, C) uint8; see ``check_pages``.
        blocks: (>= B,) int32, the index of each sequence's page; zero for none.
        packed_lens: (>= B,) int32, lengths of the sequences without the tokens that are
            read from ``pages``, the newest ones before the query tokens.
        format: The layout of rows in a page.
        num_tokens: The most tokens that are read from a page.

    """

    pages: torch.Tensor
    blocks: torch.Tensor
    packed_lens: torch.Tensor
    format: TailFormat
    num_tokens: int

    def from_sequence(self, first: int) -> "Tail":
        """The tail of the sequences from index ``first`` on."""
        blocks, packed_lens = self.blocks[first:], self.packed_lens[first:]
        return self._replace(blocks=blocks, packed_lens=packed_lens)


class TailUpdate(NamedTuple):
    """The store's work for the tails of a step's R sequences.

    It writes the rows of the step's newest tokens. It also counts the rows of earlier
    tokens that still agree with the packed bytes, and ``tail.packed_lens`` gets the
    lengths without these. A row that a token of the step overwrites is not counted.
    Rows of a sequence need not be counted if the step stores other sequences' tokens
    in its blocks.

    Attributes:
        tail: The tails, ``packed_lens`` to be written.
        block_table: (R, max_blocks) int32 of their packed pages, last axis contiguous.
        seq_lens: (R,) int32, query tokens included; zero for padding.
        query_start_loc: (R + 1,) int32, where their tokens begin among the call's.

    """

    tail: Tail
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
