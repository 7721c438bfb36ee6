# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The entry points of a set of kernels, which a layer calls."""

from typing import Protocol

import torch

from vllm.v1.attention.ops.turbo.interface import (
    AttentionFn,
    MergeFn,
    OutputLensFn,
    OutputScratchFn,
    OutputsFn,
    SplitsFn,
    StoreFn,
    StoreSizesFn,
)


class Kernels(Protocol):
    """One set of kernels, for MLA's layers or for others."""

    @property
    def name(self) -> str:
        """CUDA or Triton."""

    @property
    def reason(self) -> str:
        """Why these kernels serve: a part of a sentence, for users."""

    @property
    def num_decode_splits(self) -> SplitsFn:
        """Splits that attention of decode requests asks for."""

    def make_matrices(self, size: int, device: torch.device) -> None:
        """Make the tensors that the kernels keep on a device for good.

        Args:
            size: Coordinates of a vector that is rotated.
            device: Where the kernels run.

        """


class KernelSet(Kernels, Protocol):
    """The entry points of one set of kernels for K and V.

    Attention has scratch for partial results, whose size bounds the splits of a
    sequence. With one split a result does not depend on the rest of the batch.
    """

    @property
    def store(self) -> StoreFn:
        """Quantises K and V into their slots and, if q is given, rotates it."""

    @property
    def decode_attention(self) -> AttentionFn:
        """Attends from the query tokens of decode requests to cached tokens, causally:
        to each split of the sequences, and then merges the results.
        """

    @property
    def extend_attention(self) -> AttentionFn | None:
        """Attends from up to ``max_extend_len`` query tokens a sequence; None if
        prefill has to serve extends.
        """

    @property
    def max_merged_tokens(self) -> int | None:
        """The most query tokens of a sequence that the merge of ``extend_attention``
        attends to itself; twice as many if the sequence is the only one. For more it
        takes ``RawTokens.attended``. None: it attends to any number, and does not
        take that.
        """

    @property
    def extend_outputs(self) -> OutputsFn | None:
        """Attends like ``extend_attention``, but to cached tokens and to the query
        tokens at once, so that results need no merge; None if there is no such kernel.

        Ranks do not share the context. Tokens of a tail are read as codes. The call's
        ``query`` is needed: it has the output's dtype, strides and alignment, and does
        not share memory with the output. ``raw.attended`` is ignored. The scratch is
        that of ``output_scratch``.
        """

    @property
    def merge_splits(self) -> MergeFn:
        """Merges the ranks' parts of sequences, and attention to the query tokens: the
        last step of ``decode_attention``. There are S parts of B * Q query tokens. Only
        the shape of ``kv_cache`` is used, and the batch's block table is not read.
        """

    @property
    def num_extend_splits(self) -> SplitsFn:
        """Splits that ``extend_attention`` asks for."""

    def block_sizes(self, block_size: int, head_size: int) -> list[int]:
        """Block sizes that each launch a different kernel of ``decode_attention``.

        Args:
            block_size: Tokens of a block. A runner may cut it into smaller ones.
            head_size: D, coordinates of a vector.

        """

    @property
    def store_sizes(self) -> StoreSizesFn:
        """Numbers of tokens, ascending, that each launch a different kernel of
        ``store``.
        """

    @property
    def output_lens(self) -> OutputLensFn:
        """Lengths of extends that together launch every instance of
        ``extend_outputs``.
        """

    @property
    def output_scratch(self) -> OutputScratchFn:
        """Shapes and dtypes of ``OutputScratch``, for a call of ``extend_outputs`` or
        for any smaller one.
        """
