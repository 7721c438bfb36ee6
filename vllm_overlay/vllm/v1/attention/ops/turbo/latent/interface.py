# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The types that all sets of kernels for MLA take.

It is like ``interface``, but a token has one latent and one rotary key in place of K
and V. Shapes: L the rank of the latent, R the rotary coordinates, C the bytes of a slot
(``LatentFormat``).
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from vllm.v1.attention.ops.turbo.interface import DecodeBatch, Partials
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat

# The most splits of a sequence.
LATENT_MAX_SPLITS = 256


class LatentStoreCall(NamedTuple):
    """T tokens of a layer whose latents and rotary keys are stored.

    Attributes:
        kv_cache: (num_blocks, N, C) uint8, written; see ``check_pages``.
        slot_mapping: (T,) int64, block * N + position, or -1 to store nothing.
        kv_c: (>= T, L) bf16 or fp16, the normalised latents, not rotated; last axis
            contiguous.
        k_pe: (>= T, R) of the same dtype, with rotary embedding applied; last axis
            contiguous; ignored if R is 0.
        layout: The cache's format.
        mean: (L,) fp32, contiguous, taken off latents first; None for none. The
            difference is rounded to the dtype of ``kv_c``.

    """

    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor | None
    layout: LatentFormat
    mean: torch.Tensor | None = None


class LatentCall(NamedTuple):
    """Attention of a layer from the last tokens of B sequences, T query tokens.

    In a sequence with Q query tokens, token j sees the first seq_len - Q + j + 1
    tokens. All of them are in the cache, the query tokens included. If it sees none,
    the output is zero and the LSE -inf. Pages past ``seq_lens`` have no effect on the
    result.

    With a mean m, the cache has c - m for each latent c. All scores of a query q lack
    the same q.m, so weights need nothing. Weights add up to 1, so the output gets m.
    The LSE lacks scale * q.m. Outputs of ranks that share a context merge by such LSEs
    as they are, because all lack the same.

    Attributes:
        kv_cache: (num_blocks, N, C) uint8; see ``check_pages``.
        layout: The cache's format.
        batch: The sequences.
        scale: Softmax scale, in base e.
        output: (T, Hq, L) bf16, fp16 or fp32, written, in the coordinates of the
            rotated latent; last axis contiguous.
        lse: (T, Hq) fp32, written: natural log-sum-exp of the scores; last axis
            contiguous.
        query: (T, Hq, L) bf16 or fp16, in the coordinates of the rotated latent; last
            axis contiguous.
        query_rope: (T, Hq, R) of the same dtype, last axis contiguous; None if R is 0.
        rotated_mean: (L,) fp32, contiguous, the rotated mean of ``LatentStoreCall``,
            added to outputs; None for none.
        is_sparse: Whether ``batch.block_table`` has slots of tokens in any order, not
            blocks: (>= B, K) int32. ``batch.seq_lens`` counts them, and a sequence has
            one query token, which sees all of them.

    """

    kv_cache: torch.Tensor
    layout: LatentFormat
    batch: DecodeBatch
    scale: float
    output: torch.Tensor
    lse: torch.Tensor
    query: torch.Tensor
    query_rope: torch.Tensor | None = None
    rotated_mean: torch.Tensor | None = None
    is_sparse: bool = False

    def check(self, partials: Partials) -> int:
        """Assert the shapes and dtypes of the call and its scratch.

        Args:
            partials: Scratch of vectors of L.

        Returns:
            Splits that the partial results have room for.

        """
        query, output, lse, layout = self.query, self.output, self.lse, self.layout
        num_tokens, num_heads, rank = query.shape
        assert rank == layout.rank, (query.shape, layout)
        self.batch.check(num_tokens)
        assert not self.is_sparse or self.batch.query_len == 1, self.batch
        assert output.shape == query.shape, (output.shape, query.shape)
        assert lse.shape == (num_tokens, num_heads) and lse.dtype == torch.float32
        tensors = [query, output, lse]
        if layout.rope:
            rope = self.query_rope
            assert rope is not None and rope.dtype == query.dtype
            assert rope.shape == (num_tokens, num_heads, layout.rope)
            tensors.append(rope)
        assert all(tensor.stride(-1) == 1 for tensor in tensors)
        assert all(tensor.is_contiguous() for tensor in partials)
        assert partials.output.shape[1:] == query.shape[1:], partials.output.shape
        return self.batch.num_splits(partials.lse.shape[0], LATENT_MAX_SPLITS)


class GatherCall(NamedTuple):
    """Tokens of contexts that are dequantised.

    The fields are those of ``gather_and_maybe_dequant_cache``: row t belongs to
    sequence s = token_to_seq[t], at position t - cu_seq_lens[s] + seq_starts[s].

    Attributes:
        kv_cache: (num_blocks, N, C) uint8; see ``check_pages``.
        output: (>= num_tokens, L + R) bf16, fp16 or fp32, last axis contiguous;
            ``num_tokens`` rows are written: latents, rotated back, and rotary keys.
        block_table: (B, max_blocks) int32, last axis contiguous.
        layout: The cache's format.
        cu_seq_lens: (>= B + 1,) int32, where the sequences' rows begin.
        token_to_seq: (>= num_tokens,) int32, the sequence of each row.
        num_tokens: Rows of all sequences together.
        seq_starts: (>= B,) int32, positions of the sequences' first rows, not only
            multiples of N; None for zeros.
        mean: (L,) fp32, contiguous, added to latents that are rotated back: that of
            ``LatentStoreCall``; None for none.

    """

    kv_cache: torch.Tensor
    output: torch.Tensor
    block_table: torch.Tensor
    layout: LatentFormat
    cu_seq_lens: torch.Tensor
    token_to_seq: torch.Tensor
    num_tokens: int
    seq_starts: torch.Tensor | None = None
    mean: torch.Tensor | None = None


# The kinds of entry points of a set of kernels: see ``latent.kernels.LatentKernels``.
LatentStoreFn: TypeAlias = Callable[[LatentStoreCall], None]
LatentAttentionFn: TypeAlias = Callable[[LatentCall, Partials], None]
LatentSizesFn: TypeAlias = Callable[[LatentFormat], list[int]]
GatherFn: TypeAlias = Callable[[GatherCall], None]
