# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of tables that go by the position of a token in its sequence, in kernels."""

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import interface

_DIRECTION_SEGMENT = tl.constexpr(interface.DIRECTION_SEGMENT)


@triton.jit
def offset_row(position, num_offsets, OFFSET_SEGMENT: tl.constexpr):
    """The row of tokens at ``position`` in their sequence: ``interface.offset_rows``.

    Padding may have any position.
    """
    position = tl.maximum(position, 0)
    row = position // OFFSET_SEGMENT + (position > 0).to(tl.int32)
    return tl.minimum(row, num_offsets - 1)


@triton.jit
def direction_row(position, num_directions):
    """The row of tokens at ``position``: ``interface.direction_rows``.

    Padding may have any position.
    """
    row = tl.maximum(position, 0) // _DIRECTION_SEGMENT
    return tl.minimum(row, num_directions - 1)
