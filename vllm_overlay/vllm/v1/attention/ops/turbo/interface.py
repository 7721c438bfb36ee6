# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The argument types and the entry points of every set of kernels."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.output_scratch import OutputScratch
from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail, TailUpdate

# Names of the sets of kernels, for users.
CUDA, TRITON, TORCH = "CUDA", "Triton", "PyTorch"
# Scores are in base 2.
LOG2_E = 1.4426950408889634
# The most splits of a sequence; it bounds the number of partial results.
MAX_KV_SPLITS = 64
# Positions of a sequence that share an offset of K: see ``KeyOffset``.
OFFSET_SEGMENT = 2048
# Positions that share a direction of queries: see ``QueryDirection``.
DIRECTION_SEGMENT = 512


# Shapes and dtypes of tensors that are allocated at the same time.
TensorSpecs: TypeAlias = list[tuple[tuple[int, ...], torch.dtype]]


class Variant(NamedTuple):
    """The features of a layer that CUDA's kernels are compiled with or without.

    Attributes:
        key_offset: Whether an offset is taken off K before it is stored.
        tail: Whether there is a tail.
        soft_cap: Whether a tanh bounds scores; not with ``key_offset``.
        query_direction: Whether errors of K are orthogonal to a direction of queries.

    """

    key_offset: bool = False
    tail: bool = False
    soft_cap: bool = False
    query_direction: bool = False

    @property
    def suffix(self) -> str:
        """The end of the names of kernels' instances."""
        names = ("_offset", "_tail", "_cap", "_direction")
        return "".join(name for name, has in zip(names, self) if has)


PLAIN = Variant()


class Scoring(NamedTuple):
    """How a layer scores keys, when its weights have been loaded.

    Attributes:
        scale: Softmax scale.
        sliding_window: Tokens that a query token sees, at most, itself the last; None
            for all before it.
        sinks: (Hq,) bf16, fp16 or fp32, contiguous: a logit of each query head that
            joins the softmax's sum of weights and has no value; None for none.
        soft_cap: Scores s become cap * tanh(s / cap), in base e and before sinks join
            them; None for no cap. Not with ``key_offset``: the offset's part of a score
            cannot be added back under a cap.
        key_offset: (G, H, D) fp32, contiguous, subtracted from cached keys: see
            ``KeyOffset``; None for no offset.

    """

    scale: float
    sliding_window: int | None = None
    sinks: torch.Tensor | None = None
    soft_cap: float | None = None
    key_offset: torch.Tensor | None = None

    def variant(self, has_tail: bool = False) -> Variant:
        """The variant of kernels, with a tail or without."""
        return Variant(self.key_offset is not None, has_tail, self.soft_cap is not None)


class DecodeBatch(NamedTuple):
    """B sequences whose last tokens attend to packed pages in one call.

    Attributes:
        num_seqs: B, sequences.
        block_table: (>= B, max_blocks) int32, last axis contiguous.
        seq_lens: (>= B,) int32, query tokens included; zero for padding, whose output
            is zero.
        query_len: Q, the most query tokens of a sequence.
        query_start_loc: (B + 1,) int32, where sequences' tokens begin among the call's;
            outputs past the last one are not written. None if each sequence has Q.

    """

    num_seqs: int
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_len: int = 1
    query_start_loc: torch.Tensor | None = None

    @property
    def num_query_slots(self) -> int:
        """B * Q, the query tokens if every sequence had Q."""
        return self.num_seqs * self.query_len

    def num_splits(self, num_partials: int, most: int = MAX_KV_SPLITS) -> int:
        """Splits a sequence that ``num_partials`` partial results have room for."""
        splits = num_partials // self.num_query_slots
        assert 1 <= splits <= most, splits
        return splits

    def check(self, num_tokens: int) -> None:
        """Assert the kernels' preconditions for a call of ``num_tokens`` tokens."""
        start_loc = self.query_start_loc
        if start_loc is None:
            assert num_tokens == self.num_query_slots, (num_tokens, self)
        else:
            assert start_loc.dtype == torch.int32 and start_loc.stride(0) == 1
            assert start_loc.shape == (self.num_seqs + 1,), start_loc.shape
        assert self.block_table.stride(1) == 1

    def check_shared(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Assert shapes and dtypes of a rank's results: see ``AttentionCall.lse``."""
        assert output.dtype == lse.dtype == torch.float32
        assert output.is_contiguous() and lse.is_contiguous()
        assert lse.shape == output.shape[:2], (lse.shape, output.shape)
        assert lse.shape[0] == self.num_query_slots, (lse.shape, self)


class RotatedQuery(NamedTuple):
    """Queries as the store leaves them for attention to packed pages.

    Attributes:
        vectors: (T, Hq, D) fp16, contiguous; a sequence's tokens follow one another.
        scale: (T, Hq) fp32, contiguous: factors of the scores, in base 2.

    """

    vectors: torch.Tensor
    scale: torch.Tensor


def score_factor(layout: TurboFormat, scale: float) -> float:
    """The factor that turns a rotated query's products with coded keys into scores.

    The scores are in base 2 and include the softmax scale.
    """
    return scale * LOG2_E * layout.key_codebook.gain


class Partials(NamedTuple):
    """Scratch for the results of splits; each split is a softmax of its own.

    Attributes:
        output: (B * S * Q, Hq, D) fp32, contiguous, in rotated space, with S splits a
            sequence, at most ``MAX_KV_SPLITS``. Rows with an LSE of -inf are not read.
        lse: (B * S * Q, Hq) fp32, contiguous, in base 2.

    """

    output: torch.Tensor
    lse: torch.Tensor


class AttendedTokens(NamedTuple):
    """The result of attention to the raw tokens alone.

    Attributes:
        output: (T, Hq, D) of the model's dtype; last axis contiguous.
        lse: (Hq, T) fp32, base e; last axis contiguous.

    """

    output: torch.Tensor
    lse: torch.Tensor


class RawTokens(NamedTuple):
    """The sequences' query tokens, attended to as computed: not quantised.

    Tokens of a sequence follow one another. Each sees itself and those before it.

    Attributes:
        query: (T, Hq, D), not rotated.
        key: (T, H, D).
        value: (T, H, D). All three have a contiguous last axis.
        scale: Softmax scale.
        attended: The result of attention to them, which CUDA's merge adds; None if the
            merge attends to them itself, token by token.

    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    attended: AttendedTokens | None = None


class KeyOffset(NamedTuple):
    """The offset that the store takes off K, by a token's position in its sequence.

    Attributes:
        table: (G, H, D) fp32, contiguous. Row 0 is for the first token, an attention
            sink. Row g + 1 is for the other tokens of the ``OFFSET_SEGMENT`` positions
            from g * ``OFFSET_SEGMENT`` on. The last row is also for all later tokens.
        seq_lens: (R,) int32 lengths of the step's sequences, query tokens included.
        query_start_loc: (R + 1,) int32, where their tokens begin among the call's.
            Tokens past the last sequence's are padding.

    """

    table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


def offset_rows(positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Returns the rows of ``KeyOffset.table`` that tokens have.

    Args:
        positions: Positions in their sequences, integers of any shape.
        table: (G, H, D).

    """
    rows = positions // OFFSET_SEGMENT + (positions > 0)
    return rows.clamp(0, table.shape[0] - 1)


class QueryDirection(NamedTuple):
    """The direction in which most queries look, by a key's position in its sequence.

    The store makes the errors of keys nearly orthogonal to it. Readers do not need it.

    Attributes:
        table: (G, H, D) fp16, contiguous: rotated, as long as sqrt(D), in the order of
            coordinates of rotated keys. Row g is for the ``DIRECTION_SEGMENT``
            positions from g * ``DIRECTION_SEGMENT`` on. The last row is also for all
            later tokens.
        seq_lens: See ``KeyOffset``.
        query_start_loc: See ``KeyOffset``.

    """

    table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


def direction_rows(positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Returns the rows of ``QueryDirection.table`` that tokens have.

    Args:
        positions: Positions in their sequences, integers of any shape.
        table: (G, H, D).

    """
    return (positions // DIRECTION_SEGMENT).clamp(0, table.shape[0] - 1)


class OffsetScores(NamedTuple):
    """The part of scores that cached keys lack, q.m: the query times the offset.

    Attributes:
        query: (T, Hq, D), not rotated, of the model's dtype; last axis contiguous.
        table: (G, H, D) fp32, contiguous: see ``KeyOffset``.
        scale: Softmax scale.

    """

    query: torch.Tensor
    table: torch.Tensor
    scale: float


class StoreCall(NamedTuple):
    """T tokens of a layer that are stored, and Tq queries that are rotated.

    Attributes:
        kv_cache: (num_blocks, H, N, C) uint8, written; see ``check_pages``.
        slot_mapping: (T,) int64, block * N + position, or -1 to store nothing.
        key: (>= T, H, D) bf16 or fp16, last axis contiguous.
        value: (>= T, H, D), likewise.
        layout: The cache's format.
        query: (Tq, Hq, D) of the same dtype, last axis contiguous. Tq is T at most, or
            any number if T is 0. None: no query is rotated.
        rotated_query: The Tq rotated queries, written; may share memory with the later
            output. None without ``query``.
        scale: Softmax scale, a factor of ``rotated_query.scale``.
        key_offset: The offset that is taken off K first; None for none.
        tail: The 8-bit copy of the newest tokens, to be updated; None for none.
        query_direction: The direction that errors of K are orthogonal to; None for
            none.

    """

    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layout: TurboFormat
    query: torch.Tensor | None = None
    rotated_query: RotatedQuery | None = None
    scale: float = 1.0
    key_offset: KeyOffset | None = None
    tail: TailUpdate | None = None
    query_direction: QueryDirection | None = None


class AttentionCall(NamedTuple):
    """Attention of a layer from the last tokens of B sequences, T query tokens.

    Attributes:
        kv_cache: (num_blocks, H, N, C) uint8; see ``check_pages``.
        layout: The cache's format.
        batch: The sequences.
        scoring: How the layer scores keys. Pages that no query token sees under the
            sliding window have no effect on the result.
        output: (T, Hq, D) bf16, fp16 or fp32, written; last axis contiguous.
        query: (T, Hq, D), not rotated, of the model's dtype; last axis contiguous. An
            offset of K and ``OutputsFn`` need it; else it may be None.
        raw: The query tokens as computed, to be attended to in place of their codes;
            None to read them from the cache.
        tail: The newest cached tokens, to be read in place of their codes; only
            together with ``raw``. Each query token sees all of them, whatever the
            sliding window. None for none.
        lse: None if the result is whole. Else (B * Q, Hq) fp32, contiguous, written:
            LSE in base 2, -inf where there are no tokens. The result then is the part
            of a rank that has a share of each sequence, and is merged with other
            ranks' parts. ``output`` is (B * Q, Hq, D) fp32, contiguous, in rotated
            space. All tokens of the rank's share come before the query tokens, which
            ``seq_lens`` includes nonetheless. There is no ``raw``, ``tail``,
            sliding window or sink.

    """

    kv_cache: torch.Tensor
    layout: TurboFormat
    batch: DecodeBatch
    scoring: Scoring
    output: torch.Tensor
    query: torch.Tensor | None = None
    raw: RawTokens | None = None
    tail: Tail | None = None
    lse: torch.Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        """H."""
        return self.kv_cache.shape[1]

    @property
    def offset(self) -> OffsetScores | None:
        """The part of scores that cached keys lack; None if they lack none."""
        if self.scoring.key_offset is None:
            return None
        assert self.query is not None, "an offset of K without the query"
        return OffsetScores(self.query, self.scoring.key_offset, self.scoring.scale)

    def check(self) -> None:
        """Assert that the fields may be used together, and the output's shape."""
        scoring = self.scoring
        if self.lse is None:
            self.batch.check(self.output.shape[0])
        else:
            self.batch.check_shared(self.output, self.lse)
        is_whole = self.lse is None
        assert is_whole or self.raw is self.tail is None
        assert is_whole or scoring.sliding_window is scoring.sinks is None
        has_tail = self.tail is not None
        has_raw = self.raw is not None
        assert not has_tail or has_raw, "a tail without raw tokens"
        assert scoring.sliding_window is None or scoring.sliding_window > 0, scoring
        has_cap = scoring.soft_cap is not None
        assert not has_cap or scoring.key_offset is None, "capped scores with an offset"


# The kinds of entry points of a set of kernels: see ``layer.kernels.KernelSet``.
StoreFn: TypeAlias = Callable[[StoreCall], None]
AttentionFn: TypeAlias = Callable[[RotatedQuery, AttentionCall, Partials], None]
OutputsFn: TypeAlias = Callable[[AttentionCall, OutputScratch], None]
MergeFn: TypeAlias = Callable[[Partials, AttentionCall], None]
# Takes the KV heads.
StoreSizesFn: TypeAlias = Callable[[TurboFormat, int], list[int]]
# Takes the query heads a KV head, and the most query tokens of an extend.
OutputLensFn: TypeAlias = Callable[[TurboFormat, int, int], list[int]]
# Takes KV heads, multiprocessors of the GPU, and tiles of query tokens, of which no two
# sequences share one.
OutputScratchFn: TypeAlias = Callable[[TurboFormat, int, int, int], TensorSpecs]
# Takes sequences of the (padded) batch, KV heads (with MLA query heads),
# multiprocessors of the GPU and query tokens a sequence, which are all fixed in a CUDA
# graph. Returns the splits of a sequence that attention needs room for.
SplitsFn: TypeAlias = Callable[[int, int, int, int], int]
