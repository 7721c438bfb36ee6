# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of the table of an offset of K, in kernels."""

from vllm.triton_utils import tl, triton


@triton.jit
def offset_row(position, num_offsets, OFFSET_SEGMENT: tl.constexpr):
    """The row of tokens at ``position`` in their sequence: ``interface.offset_rows``.

    Padding may have any position.
    """
    position = tl.maximum(position, 0)
    row = position // OFFSET_SEGMENT + (position > 0).to(tl.int32)
    return tl.minimum(row, num_offsets - 1)
