# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scratch memory of a layer's kernels, and its bounds."""

import math
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.formats.output_scratch import (
    RAW_TILE_TOKENS,
    OutputScratch,
)
from vllm.v1.attention.ops.turbo.interface import TensorSpecs

# Bytes of the partial outputs of one call of decode or extend attention.
PARTIAL_BYTES = 64 * 2**20
# Bytes of the query tokens' tiles of one call that ends in outputs. With 8 KV heads of
# 128 it holds 64 requests of 128 tokens.
RAW_TILE_BYTES = 40 * 2**20


class LayerShape(NamedTuple):
    """The sizes that determine a layer's scratch. Layers of one shape share a plan.

    Attributes:
        num_heads: Hq, query heads.
        num_kv_heads: H, KV heads.
        head_size: D, of query and key, and of value unless this has its own.
        dtype: The model's dtype.
        own_size_v: D of value, and of the output, if it is not ``head_size``.

    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    own_size_v: int | None = None

    @staticmethod
    def of_sizes(
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        head_size_v: int,
        dtype: torch.dtype,
    ) -> "LayerShape":
        """The shape of a layer with these head sizes, equal or not."""
        own_size_v = None if head_size_v == head_size else head_size_v
        return LayerShape(num_heads, num_kv_heads, head_size, dtype, own_size_v)

    @property
    def head_size_v(self) -> int:
        """D of value and of the output."""
        return self.own_size_v or self.head_size

    @property
    def largest_head_size(self) -> int:
        """D of a prefill, which may pad vectors of the smaller size."""
        return max(self.head_size, self.head_size_v)

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def max_partials(self) -> int:
        """The most partial results of a call, unless a single request needs more."""
        row_bytes = self.num_heads * self.head_size_v * torch.float32.itemsize
        return max(1, PARTIAL_BYTES // row_bytes)

    @property
    def max_raw_tiles(self) -> int:
        """The most tiles of query tokens of a call that ends in outputs."""
        tile_numbers = 2 * RAW_TILE_TOKENS * self.head_size
        tile_bytes = self.num_kv_heads * tile_numbers * torch.float16.itemsize
        return RAW_TILE_BYTES // tile_bytes

    def max_output_requests(self, query_len: int) -> int:
        """The most requests of such a call if each has ``query_len`` query tokens."""
        return RAW_TILE_TOKENS * self.max_raw_tiles // (query_len + RAW_TILE_TOKENS)


class SharedScratch(NamedTuple):
    """Scratch of a step's decodes and extends where ranks share the context.

    T is a step's query tokens, C the query slots of one call, Hq the query heads of all
    ranks.

    Attributes:
        query: (T, Hq, D) fp16, rotated queries.
        output: (C, Hq, D of V) fp32, this rank's part of the results of one call.
        lse: (C, Hq) fp32, the part's LSE.

    """

    query: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor

    @staticmethod
    def specs(shape: LayerShape, num_tokens: int, num_slots: int) -> TensorSpecs:
        """Shapes and dtypes of the fields, in order."""
        heads, size = shape.num_heads, shape.head_size
        return [
            ((num_tokens, heads, size), torch.float16),
            ((num_slots, heads, shape.head_size_v), torch.float32),
            ((num_slots, heads), torch.float32),
        ]


class RawScratch(NamedTuple):
    """Scratch of attention to the query tokens of extends, all of the model's dtype.

    C is the query tokens of a call, Hq the query heads of this rank.

    Attributes:
        output: (C, Hq, D of V), the result.
        key: (C, H, D), keys whose non-finite numbers do not reach other requests.
        value: (C, H, D of V), values, likewise.

    """

    output: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @staticmethod
    def specs(shape: LayerShape, num_tokens: int) -> TensorSpecs:
        """Shapes and dtypes of the fields, in order; none without tokens."""
        if num_tokens == 0:
            return []
        sizes = (
            (shape.num_heads, shape.head_size_v),
            (shape.num_kv_heads, shape.head_size),
            (shape.num_kv_heads, shape.head_size_v),
        )
        return [((num_tokens, *size), shape.dtype) for size in sizes]


class DecodeScratch(NamedTuple):
    """Scratch of a step's decodes and extends; T query tokens, P partial results.

    Rotated queries are in the output's memory, unless ranks share the context, or the
    output has another head size.

    Attributes:
        query_scale: (T, Hq) fp32, factors of the scores, of all calls.
        partial: (P, Hq, D of V) fp32, outputs of the splits of one call.
        partial_lse: (P, Hq) fp32, their LSE.
        shared: Scratch for ranks that share the context; None if they do not.
        raw: Scratch of attention to query tokens before a call; None if there is none.
        outputs: Scratch of extends that end in outputs; None if none do.
        query: (T, Hq, D) fp16, rotated queries where the output has another head size
            and ``shared`` has none; else None.

    """

    query_scale: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor
    shared: SharedScratch | None = None
    raw: RawScratch | None = None
    outputs: OutputScratch | None = None
    query: torch.Tensor | None = None

    @staticmethod
    def specs(shape: LayerShape, num_tokens: int, num_partials: int) -> TensorSpecs:
        """Shapes and dtypes of the first three fields, in order."""
        heads, size = shape.num_heads, shape.head_size_v
        return [
            ((num_tokens, heads), torch.float32),
            ((num_partials, heads, size), torch.float32),
            ((num_partials, heads), torch.float32),
        ]


class PrefillScratch(NamedTuple):
    """Scratch of ``prefill_attention``, all of the model's dtype.

    T is the query tokens of a slice, P the tokens of a piece.

    Attributes:
        query: (T, Hq, D) rotated queries.
        output: (T, Hq, D of V) output of one piece.
        key: (P, H, D) dequantised keys, or raw keys of several requests.
        value: (P, H, D of V) values, likewise.
        context: (T, Hq, D of V) output of all pieces if ranks share the context. Hq
            then is the query heads of all ranks. None if they do not share it.

    """

    query: torch.Tensor
    output: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    context: torch.Tensor | None = None

    def keys_and_values(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``num_tokens`` rows of ``key`` and of ``value``."""
        return self.key[:num_tokens], self.value[:num_tokens]

    def own_output(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        """A contiguous (num_tokens, num_heads, D) in the memory of ``output``."""
        head_size = self.output.shape[2]
        num_elements = num_tokens * num_heads * head_size
        flat = self.output.view(-1)[:num_elements]
        return flat.view(num_tokens, num_heads, head_size)

    @staticmethod
    def specs(
        shape: LayerShape,
        num_tokens: int | None,
        piece_tokens: int,
        is_shared: bool = False,
    ) -> TensorSpecs:
        """Shapes and dtypes of the fields, in order; none if ``num_tokens`` is None."""
        if num_tokens is None:
            return []
        rows, piece = (num_tokens, shape.num_heads), (piece_tokens, shape.num_kv_heads)
        keys, values = shape.head_size, shape.head_size_v
        tensors = [(*rows, keys), (*rows, values), (*piece, keys), (*piece, values)]
        if is_shared:
            tensors.append((*rows, values))
        return [(tensor, shape.dtype) for tensor in tensors]


def num_bytes(specs: TensorSpecs) -> int:
    """Bytes of tensors, without padding for alignment."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)
