# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention to sequences that grow, and the result to expect."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    AttendedTokens,
    DecodeBatch,
    OffsetScores,
    Partials,
    RawTokens,
    offset_rows,
)
from vllm.v1.attention.ops.turbo.reference.attention import paged_attention

from .attention_kernels import KERNELS, without
from .attention_utils import (
    assert_by_2x_rule,
    attend_by,
    attention_of_rounded,
    rotate_query,
)
from .kernel_under_test import Kernel
from .kernels.store_checks import CUDA
from .kernels.tails import SMALL_LAYOUTS, STORES, GrowingSequences
from .sequences import ints, layout_id
from .utils import DEVICE, INVALID_BLOCK, load_context

# The reference is tested beside the kernels.
TORCH = Kernel(
    "torch", lambda query, call, partials: paged_attention(call), None, marks=()
)


def kernels_with_tails(
    layouts: Iterable[TurboFormat] = SMALL_LAYOUTS,
    for_cuda: Iterable[TurboFormat] | None = None,
) -> pytest.MarkDecorator:
    """Parametrise a test by ``kernel, layout``; CUDA's may have other layouts."""
    cases = [
        kernel.case(layout, name=layout_id(layout))
        for kernel in (TORCH, *(KERNELS[x] for x in ("triton", *without("tail"))))
        for layout in (for_cuda or layouts if is_cuda(kernel) else layouts)
        if not kernel.refusal(layout)
    ]
    return pytest.mark.parametrize("kernel, layout", cases)


def is_cuda(kernel: Kernel) -> bool:
    return kernel.name not in ("torch", "triton")


class AttendingSequences(GrowingSequences):
    """Sequences that grow, to which the queries of the last step attend.

    Their pages are those of the store that goes with the kernel.
    """

    def __init__(
        self, kernel: Kernel, layout: TurboFormat, *size: Any, **options: Any
    ) -> None:
        store = {x.name: x for x in STORES}.get(kernel.name, CUDA)
        super().__init__(layout, *size, store=store, **options)
        self.kernel, self.is_cuda = kernel, is_cuda(kernel)

    def visible_blocks(self) -> torch.Tensor:
        """The block table, with invalid blocks before a sliding window."""
        table, window = self.block_table.clone(), self.format.sliding_window
        if window is not None:
            for row, (count, length) in enumerate(zip(self.query_lens, self.lengths)):
                hidden = max(length - count + 1 - window, 0) // self.block_size
                table[row, :hidden] = INVALID_BLOCK
        return table

    def attend(
        self,
        num_splits: int = 2,
        dtype: torch.dtype | None = None,
        attends_before: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """The output of a step, (T, Hq, D), with NaN in scratch and output before.

        Args:
            num_splits: Splits of a sequence.
            dtype: dtype of the raw tokens and of the output; None: fp32 for CUDA's
                kernels, and the model's for others.
            attends_before: Whether the merge gets the result of attention to the
                raw tokens.
            options: Options of an ``AttentionFn``, beside the sliding window.

        """
        if dtype is None:
            dtype = torch.float32 if self.is_cuda else self.dtype
        total, query_len = self.starts[-1], max(self.query_lens)
        query = self.query[:total]
        result = (query.shape[1], self.layout.head_size_v)
        shape = (len(self.lengths) * query_len * num_splits, *result)
        partial = torch.full(shape, math.nan, device=DEVICE)
        shape = (query.shape[0], *result)
        output = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
        offset = None
        if self.offset is not None:
            offset = OffsetScores(query, self.offset, self.scale)
        options = self._scoring(options)
        raw = RawTokens(
            *(x[:total].to(dtype) for x in (self.query, self.key, self.value)),
            self.scale,
        )
        if attends_before:
            raw = raw._replace(attended=self._attended(raw, **options))
        has_starts = self.is_ragged or len(set(self.query_lens)) > 1
        attend_by(
            self.kernel.attend,
            rotate_query(query, self.layout),
            self.cache,
            self.layout,
            DecodeBatch(
                len(self.lengths),
                self.visible_blocks(),
                ints(self.lengths),
                query_len,
                ints(self.starts) if has_starts else None,
            ),
            Partials(partial, partial[:, :, 0].contiguous()),
            output,
            raw,
            offset,
            self.tails[0],
            **options,
        )
        return output

    def _scoring(self, options: dict[str, Any]) -> dict[str, Any]:
        window = self.format.sliding_window
        return options if window is None else options | {"sliding_window": window}

    def _attended(
        self, raw: RawTokens, sinks: object = None, **options: Any
    ) -> AttendedTokens:
        """The result of attention of each sequence to its raw tokens."""
        output = torch.empty_like(raw.query)
        lse = output.new_empty(output.shape[1::-1], dtype=torch.float32)
        for part in map(self.part, range(len(self.lengths))):
            result, own_lse = reference.attention(
                *(x[part].float() for x in raw[:3]), raw.scale, **options
            )
            output[part], lse[:, part] = result.to(output.dtype), own_lse.T
        return AttendedTokens(output, lse)

    def seen(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """The tokens, T of them, that a sequence's queries should attend to.

        Returns:
            K and V, each (T, H, D) fp32; the part of K that was taken off packed keys,
            likewise; and the number of tokens that are not packed.

        """
        length, part = self.lengths[row], self.part(row)
        first_raw = length - self.query_lens[row]
        num_packed = int(self.tails[1].packed_lens[row]) - self.query_lens[row]
        table = self.block_table[row]
        packed = load_context(self.cache, table, num_packed, self.layout)
        tail_rows = self.tail_rows(row, num_packed, first_raw)
        key, value = (torch.cat(both) for both in zip(packed, tail_rows))
        taken_off = torch.zeros_like(key)
        if self.offset is not None:
            indices = torch.arange(first_raw, device=DEVICE)
            offsets = self.offset[offset_rows(indices, self.offset)]
            key = key + offsets
            taken_off[:num_packed] = offsets[:num_packed]
        raw = self.key[part].float()
        return (
            torch.cat([key, raw]),
            torch.cat([value, self.value[part].float()]),
            torch.cat([taken_off, torch.zeros_like(raw)]),
            length - num_packed,
        )

    def expected(self, row: int, **options: Any) -> torch.Tensor:
        """A sequence's output, (Q, Hq, D) fp32.

        Scores of packed keys, without their offset, are from q as the kernel rounds it.
        All other scores are from q without rounding.
        """
        key, value, taken_off, num_exact = self.seen(row)
        query = self.query[self.part(row)]
        rounded = (self.kernel.rounded or torch.Tensor.float)(query)
        where = rounded, query, key, value, num_exact, self.scale, taken_off
        return attention_of_rounded(*where, **self._scoring(options))

    def check_row(self, row: int, output: torch.Tensor, **options: Any) -> None:
        """Compare a sequence's output to attention, by the 2x rule for kernels that
        keep queries in the model's dtype.

        The error of others is that of weights and values in fp16. An offset makes keys
        ten times as long, and the error of their scores, sums of a hundred and more
        terms, grows with them.
        """
        part = self.part(row)
        if self.lengths[row] == 0:
            assert (output[part] == 0).all()
        elif not self.is_cuda:
            key, value, _, _ = self.seen(row)
            where = output[part], self.query[part], key, value, self.scale, self.dtype
            assert_by_2x_rule(*where, **self._scoring(options))
        else:
            expected = self.expected(row, **options)
            error = (output[part] - expected).norm() / expected.norm()
            allowed = 2**-10 if self.offset is None else 2**-8
            assert error <= allowed, f"{row}: {error}, {allowed} is allowed"

    def check(self, num_splits: int = 2, **options: Any) -> torch.Tensor:
        """Compare the attention of the last step's queries, and return the output."""
        if self.offset is not None and not self.is_cuda:
            # Scores of some hundreds leave the softmax one token.
            self.query.mul_(0.1)
        output = self.attend(num_splits, **options)
        for row, count in enumerate(self.query_lens):
            if count > 0:
                self.check_row(row, output, **options)
        return output
