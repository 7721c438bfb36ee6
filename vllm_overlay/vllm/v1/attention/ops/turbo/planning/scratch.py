# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scratch memory of a layer's kernels: what there is of it, and how large it may be."""

import math
from typing import NamedTuple, TypeAlias

import torch

# Partial outputs of one call of decode or extend attention.
PARTIAL_BYTES = 64 * 2**20

# Shapes and dtypes of tensors that are there at the same time.
TensorSpecs: TypeAlias = list[tuple[tuple[int, ...], torch.dtype]]


class LayerShape(NamedTuple):
    """What decides on a layer's scratch: layers alike share a step's plan.

    Attributes:
        num_heads: Hq, query heads.
        num_kv_heads: H, KV heads.
        head_size: D, of query, key and value.
        dtype: The model's.

    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def max_partials(self) -> int:
        """Partial results of a call, if one request alone has no more."""
        row_bytes = self.num_heads * self.head_size * torch.float32.itemsize
        return max(1, PARTIAL_BYTES // row_bytes)


class DecodeScratch(NamedTuple):
    """Scratch of a step's decodes and extends; T query tokens, P partial results.

    Rotated queries lie where the output comes to be.

    Attributes:
        query_scale: (T, Hq) fp32, factors of the scores, of all calls.
        partial: (P, Hq, D) fp32, outputs of the splits of one call.
        partial_lse: (P, Hq) fp32, their LSE.

    """

    query_scale: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor

    @staticmethod
    def specs(shape: LayerShape, num_tokens: int, num_partials: int) -> TensorSpecs:
        """Of the fields, in order."""
        heads, size = shape.num_heads, shape.head_size
        return [
            ((num_tokens, heads), torch.float32),
            ((num_partials, heads, size), torch.float32),
            ((num_partials, heads), torch.float32),
        ]


class PrefillScratch(NamedTuple):
    """Scratch of ``prefill_attention``; T query tokens of a slice, P of a piece.

    Attributes:
        query: (T, Hq, D) rotated queries.
        output: (T, Hq, D) output of one piece.
        key: (P, H, D) dequantised keys, or raw ones of several requests.
        value: (P, H, D) values, likewise.

    """

    query: torch.Tensor
    output: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @staticmethod
    def specs(
        shape: LayerShape, num_tokens: int | None, piece_tokens: int
    ) -> TensorSpecs:
        """Of the fields, in order; of none of them if ``num_tokens`` is None."""
        if num_tokens is None:
            return []
        rows = (num_tokens, shape.num_heads, shape.head_size)
        piece = (piece_tokens, shape.num_kv_heads, shape.head_size)
        return [(tensor, shape.dtype) for tensor in (rows, rows, piece, piece)]


def num_bytes(specs: TensorSpecs) -> int:
    """Bytes of tensors, without what aligns them."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)
