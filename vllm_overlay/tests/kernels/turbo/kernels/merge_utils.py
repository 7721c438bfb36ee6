# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The merges under test, random results of splits, and their sums in fp64."""

import math
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, NamedTuple

import pytest
import torch

from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    AttentionCall,
    DecodeBatch,
    Partials,
    RawTokens,
)
from vllm.v1.attention.ops.turbo.triton.merge import merge_splits as triton_merge

from ..attention_utils import assert_within, merge_call
from ..utils import (
    BF16,
    CUDA_HEAD_SIZES,
    DEVICE,
    FP16,
    ON_GPU,
    cuda_module,
    gaussian,
    requires_cuda,
    requires_triton,
)

FP32 = torch.float32
NUM_KV_HEADS = 2
# Rounding of the output; for fp32, rounding of sums over up to 512 terms.
TOLERANCES = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-18}
all_sizes = pytest.mark.parametrize("head_size", CUDA_HEAD_SIZES)
output_dtypes = pytest.mark.parametrize(
    "dtype", TOLERANCES, ids=["bf16", "fp16", "fp32"]
)
with_raw = pytest.mark.parametrize("with_raw", [False, True])


class Expected(NamedTuple):
    """Sums in fp64.

    Attributes:
        output: (T, Hq, D).
        largest: (T, Hq, 1), the largest magnitude of the values of each row.

    """

    output: torch.Tensor
    largest: torch.Tensor


def within_largest(expected: Expected, dtype: torch.dtype) -> torch.Tensor:
    """Triton's largest error, by row; outputs of 16 bits are rounded once more."""
    rounding = 0.0 if dtype == FP32 else TOLERANCES[dtype]
    return 2.0**-17 * expected.largest + rounding * expected.output.abs().max()


def within_rounding(expected: Expected, dtype: torch.dtype) -> torch.Tensor:
    """The largest error of CUDA's merge, (), the same in all rows."""
    return TOLERANCES[dtype] * expected.output.abs().max()


class Merge(NamedTuple):
    """A merge under test.

    Attributes:
        name: Its name in the ids of tests.
        merge: A ``MergeFn``.
        allowed: Returns the largest error of outputs of a dtype.
        marks: Marks of its tests.
        raw_dtype: dtype of raw tokens in tests with outputs in fp32. CUDA's merge takes
            only the outputs' dtype.

    """

    name: str
    merge: Callable[[Partials, AttentionCall], None]
    allowed: Callable[[Expected, torch.dtype], torch.Tensor]
    marks: tuple[pytest.MarkDecorator, ...]
    raw_dtype: torch.dtype = FP32


def with_warps(num_warps: int | None) -> Merge:
    """CUDA's merge with so many warps a row, or all of a block if it has fewer."""

    def merge(partials: Partials, call: AttentionCall) -> None:
        cuda = cuda_module("merge")
        most = cuda.block_warps(partials.output.shape[-1])
        own = None if num_warps is None else min(num_warps, most)
        cuda.merge_splits(partials, call, own)

    name = "cuda" if num_warps is None else f"cuda{num_warps}"
    return Merge(name, merge, within_rounding, (requires_cuda,))


TRITON = Merge("triton", triton_merge, within_largest, (requires_triton,), FP16)
CUDA = with_warps(None)


def merges(
    *cuda: int | None, sizes: Iterable[int] = CUDA_HEAD_SIZES
) -> pytest.MarkDecorator:
    """Parametrise a test by ``kernel, head_size``.

    Args:
        cuda: Warps a row in CUDA's merge: a kernel each.
        sizes: Head sizes. The interpreter has the first one.

    """
    few = [*sizes] if ON_GPU else [*sizes][:1]
    both = [(TRITON, few), *((with_warps(n), sizes) for n in cuda or (None,))]
    cases = [
        pytest.param(x, size, marks=x.marks, id=f"{x.name}-{size}")
        for x, own in both
        for size in own
    ]
    return pytest.mark.parametrize("kernel, head_size", cases)


class Splits:
    """Random results of splits; each sequence has written the first of its splits.

    Args:
        counts: Number of splits of each sequence that have tokens.
        num_splits: Splits of a sequence.
        query_lens: Query tokens of each sequence; None: one.
        group: Query heads a KV head.
        head_size: Size D of a head.
        raw_dtype: dtype of the query tokens' q, K and V; None: results have all tokens.
        seq_lens: Lengths of the sequences; None: all query tokens exist.

    Attributes:
        shape: B, S, Q and Hq, where Q is the longest query.
        partial: (B * S * Q, Hq, D) fp32; NaN where nothing was written.
        lse: (B * S * Q, Hq) fp32, in base 2; -inf there.
        raw: The raw tokens, views of one tensor, whose scores are as large as LSEs.

    """

    def __init__(
        self,
        counts: list[int],
        num_splits: int,
        query_lens: list[int] | None = None,
        group: int = 2,
        head_size: int = 64,
        raw_dtype: torch.dtype | None = None,
        seq_lens: list[int] | None = None,
    ) -> None:
        self.query_lens = query_lens or [1] * len(counts)
        self.starts = torch.tensor([0, *self.query_lens]).cumsum(0).tolist()
        self.seq_lens = seq_lens or [
            100 * count + n for count, n in zip(counts, self.query_lens)
        ]
        query_len, num_heads = max(self.query_lens), group * NUM_KV_HEADS
        self.group, self.head_size = group, head_size
        self.shape = (len(counts), num_splits, query_len, num_heads)
        written = torch.arange(num_splits) < torch.tensor(counts)[:, None]
        written = written[..., None, None].expand(self.shape).to(DEVICE).flatten(0, 2)
        self.partial = gaussian(*self.shape, head_size, seed=1).flatten(0, 2)
        self.partial[~written] = math.nan
        self.lse = 2 * gaussian(*self.shape, seed=2).flatten(0, 2)
        self.lse[~written] = -math.inf
        self.raw: RawTokens | None = None
        if raw_dtype is not None:
            sizes = [num_heads, NUM_KV_HEADS, NUM_KV_HEADS]
            shape = (self.starts[-1], sum(sizes), head_size)
            qkv = gaussian(*shape, dtype=raw_dtype, seed=3).split(sizes, 1)
            self.raw = RawTokens(*qkv, head_size**-0.5)

    @property
    def partials(self) -> Partials:
        return Partials(self.partial, self.lse)

    @property
    def batch(self) -> DecodeBatch:
        """The sequences. The block table is empty: a merge reads none."""
        query_len = self.shape[2]
        is_uniform = set(self.query_lens) == {query_len}
        lens, starts = (
            torch.tensor(x, dtype=torch.int32, device=DEVICE)
            for x in (self.seq_lens, self.starts)
        )
        table = torch.empty(0, 0, dtype=torch.int32, device=DEVICE)
        start_loc = None if is_uniform else starts
        return DecodeBatch(len(lens), table, lens, query_len, start_loc)

    def call(self, output: torch.Tensor, **options: Any) -> AttentionCall:
        return merge_call(self.batch, output, NUM_KV_HEADS, self.raw, **options)

    def of_splits(self, splits: torch.Tensor) -> "Splits":
        """The results of some splits of all sequences."""
        own = copy(self)
        own.shape = (self.shape[0], len(splits), *self.shape[2:])
        partial = self.partial.view(*self.shape, self.head_size)
        own.partial = partial[:, splits].flatten(0, 2)
        own.lse = self.lse.view(self.shape)[:, splits].flatten(0, 2)
        return own

    def merge(
        self, kernel: Merge, dtype: torch.dtype = FP32, **options: Any
    ) -> torch.Tensor:
        """The output, (T, Hq, D), rows of a larger tensor whose other elements stay."""
        num_tokens, num_heads = self.starts[-1], self.shape[-1]
        shape = (num_tokens + 2, num_heads + 1, self.head_size)
        buffer = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
        output = buffer[:num_tokens, 1:]
        kernel.merge(self.partials, self.call(output, **options))
        assert buffer[num_tokens:].isnan().all() and buffer[:, 0].isnan().all()
        return output

    def expected(self, sinks: torch.Tensor | None = None) -> Expected:
        """The merged output of the tokens that each row sees."""
        matrix = rotation_matrix(self.head_size, DEVICE, torch.float64, inverse=True)
        lse = self.lse.view(self.shape).double() * math.log(2)
        parts = self.partial.view(*self.shape, self.head_size).double()
        parts = parts.where(~lse.isneginf()[..., None], 0) @ matrix
        parts *= self.head_size**-0.5
        outputs, largest = [], []
        for row, (start, end) in enumerate(zip(self.starts, self.starts[1:])):
            first = max(start, end - self.seq_lens[row])
            for token in range(start, end):
                place = token - start
                scores, values = lse[row, :, place], parts[row, :, place]
                if self.raw is not None:
                    seen = slice(first, token + 1)
                    key, value = (
                        x[seen].double().repeat_interleave(self.group, 1)
                        for x in (self.raw.key, self.raw.value)
                    )
                    own = (key * self.raw.query[token].double()).sum(-1)
                    scores = torch.cat([scores, own * self.raw.scale])
                    values = torch.cat([values, value])
                if sinks is not None:
                    # A sink counts as one more split, whose values are zero.
                    scores = torch.cat([scores, sinks.double()[None]])
                    values = torch.cat([values, torch.zeros_like(values[:1])])
                weights = scores.softmax(0).nan_to_num()
                outputs.append((weights[..., None] * values).sum(0))
                largest.append(values.abs().amax((0, 2))[:, None])
        return Expected(torch.stack(outputs), torch.stack(largest))

    def check(
        self,
        kernel: Merge,
        dtype: torch.dtype = FP32,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compare the output to sums in fp64, and two runs bit for bit."""
        output = self.merge(kernel, dtype, sinks=sinks)
        expected = self.expected(sinks)
        assert_within(output, expected.output, kernel.allowed(expected, dtype))
        assert torch.equal(output, self.merge(kernel, dtype, sinks=sinks))
        return output
