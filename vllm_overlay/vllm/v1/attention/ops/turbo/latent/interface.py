# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The types and entry points of the sets of kernels for MLA, CUDA's and Triton's.

It is like ``interface``, but a token has one latent and one rotary key in place of K
and V. Shapes: L the rank of the latent, R the rotary coordinates, C the bytes of a slot
(``LatentFormat``).
"""

from typing import Protocol

import torch

from vllm.v1.attention.ops.turbo.formats.pages import check_pages
from vllm.v1.attention.ops.turbo.interface import DecodeBatch, Partials
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat

# The most splits of a sequence.
LATENT_MAX_SPLITS = 256


class LatentStoreFn(Protocol):
    """Quantises latents and rotary keys into their slots."""

    def __call__(
        self,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor | None,
        layout: LatentFormat,
    ) -> None:
        """Store T tokens.

        Args:
            kv_cache: (num_blocks, N, C) uint8; see ``check_latent_pages``.
            slot_mapping: (T,) int64, block * N + position, or -1 to store nothing.
            kv_c: (>= T, L) bf16 or fp16, the normalised latents, not rotated; last axis
                contiguous.
            k_pe: (>= T, R) of the same dtype, with rotary embedding applied; last axis
                contiguous; None if R is 0.
            layout: The cache's format.

        """


class LatentAttentionFn(Protocol):
    """Attends from each sequence's newest tokens to its cached tokens, causally."""

    def __call__(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor | None,
        kv_cache: torch.Tensor,
        layout: LatentFormat,
        batch: DecodeBatch,
        partials: Partials,
        output: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> None:
        """Attend to each split of the sequences, and merge the results.

        In a sequence with Q query tokens, token j sees the first seq_len - Q + j + 1
        tokens. All of them are in the cache, the query tokens included. If it sees
        none, the output is zero and the LSE -inf. Pages past ``seq_lens`` have no
        effect on the result.

        Args:
            query: (T, Hq, L) bf16 or fp16, in the coordinates of the rotated latent;
                last axis contiguous.
            query_rope: (T, Hq, R) of the same dtype, last axis contiguous; None if R is
                0.
            kv_cache: (num_blocks, N, C) uint8; see ``check_latent_pages``.
            layout: The cache's format.
            batch: The call's sequences.
            partials: Scratch, with vectors of L; its size bounds the splits of a
                sequence. With one split a result does not depend on the rest of the
                batch.
            output: (T, Hq, L) bf16, fp16 or fp32, written, in the coordinates of the
                rotated latent; last axis contiguous.
            lse: (T, Hq) fp32, written: natural log-sum-exp of the scores; last axis
                contiguous.
            scale: Softmax scale, in base e.

        """


class LatentSplitsFn(Protocol):
    """The number of a sequence's splits that attention needs room for."""

    def __call__(
        self, num_seqs: int, num_heads: int, num_sms: int, query_len: int = 1
    ) -> int:
        """Partial results a query token, from sizes that are fixed in a CUDA graph.

        Args:
            num_seqs: Sequences of the (padded) batch.
            num_heads: Query heads.
            num_sms: Multiprocessors of the GPU.
            query_len: The most query tokens of a sequence.

        """


class LatentGatherFn(Protocol):
    """Dequantises tokens of contexts."""

    def __call__(
        self,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        block_table: torch.Tensor,
        layout: LatentFormat,
        cu_seq_lens: torch.Tensor,
        token_to_seq: torch.Tensor,
        num_tokens: int,
        seq_starts: torch.Tensor | None = None,
    ) -> None:
        """Write the tokens' latents, rotated back, and rotary keys.

        The arguments are those of ``gather_and_maybe_dequant_cache``: row t belongs to
        sequence s = token_to_seq[t], at position t - cu_seq_lens[s] + seq_starts[s].

        Args:
            kv_cache: (num_blocks, N, C) uint8; see ``check_latent_pages``.
            output: (>= num_tokens, L + R) bf16, fp16 or fp32, last axis contiguous;
                ``num_tokens`` rows are written.
            block_table: (B, max_blocks) int32, last axis contiguous.
            layout: The cache's format.
            cu_seq_lens: (>= B + 1,) int32, where the sequences' rows begin.
            token_to_seq: (>= num_tokens,) int32, the sequence of each row.
            num_tokens: Rows of all sequences together.
            seq_starts: (>= B,) int32, positions of the sequences' first rows, not only
                multiples of N; None for zeros.

        """


class LatentKernels(Protocol):
    """The entry points of one set of kernels."""

    @property
    def name(self) -> str:
        """CUDA or Triton."""

    @property
    def reason(self) -> str:
        """Why these kernels serve: a part of a sentence, for users."""

    @property
    def store(self) -> LatentStoreFn:
        """Quantises latents and rotary keys into their slots."""

    @property
    def decode_attention(self) -> LatentAttentionFn:
        """Attends from the newest tokens of sequences, with absorbed weights."""

    @property
    def num_decode_splits(self) -> LatentSplitsFn:
        """Splits that ``decode_attention`` asks for."""

    @property
    def gather(self) -> LatentGatherFn:
        """Dequantises contexts, for prefills."""

    def store_sizes(self, layout: LatentFormat) -> list[int]:
        """Numbers of tokens, ascending, that each launch a different kernel of
        ``store``.
        """

    def make_matrices(self, rank: int, device: torch.device) -> None:
        """Make the tensors that the kernels keep on a device for good."""


def check_latent_pages(kv_cache: torch.Tensor, layout: LatentFormat) -> None:
    """Check the kernels' preconditions on a layer's cache.

    Args:
        kv_cache: (num_blocks, N, C) uint8.
        layout: The cache's format.

    Raises:
        ValueError: As ``formats.pages.check_pages``.

    """
    check_pages(kv_cache.unsqueeze(1), layout)


def check_latent_query(
    query: torch.Tensor,
    query_rope: torch.Tensor | None,
    layout: LatentFormat,
    batch: DecodeBatch,
    partials: Partials,
    output: torch.Tensor,
    lse: torch.Tensor,
) -> int:
    """Assert the preconditions of a call of ``LatentAttentionFn``.

    Args:
        query: (T, Hq, L) bf16 or fp16.
        query_rope: (T, Hq, R) of the same dtype; not read if R is 0.
        layout: The cache's format.
        batch: The call's sequences.
        partials: Scratch.
        output: (T, Hq, L) bf16, fp16 or fp32.
        lse: (T, Hq) fp32.

    Returns:
        The splits of a sequence that the partial results have room for.

    """
    num_tokens, num_heads, rank = query.shape
    assert rank == layout.rank, (query.shape, layout)
    batch.check(num_tokens)
    assert output.shape == query.shape, (output.shape, query.shape)
    assert lse.shape == (num_tokens, num_heads) and lse.dtype == torch.float32
    tensors = [query, output, lse]
    if layout.rope:
        assert query_rope is not None and query_rope.dtype == query.dtype
        assert query_rope.shape == (num_tokens, num_heads, layout.rope)
        tensors.append(query_rope)
    assert all(tensor.stride(-1) == 1 for tensor in tensors)
    assert all(tensor.is_contiguous() for tensor in partials)
    assert partials.output.shape[1:] == query.shape[1:], partials.output.shape
    return batch.num_splits(partials.lse.shape[0], LATENT_MAX_SPLITS)
