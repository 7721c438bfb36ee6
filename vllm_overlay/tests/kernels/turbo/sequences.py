# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sequences in a cache for tests of attention kernels, and the results to expect."""

import math
from copy import copy
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import nn

from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES
from vllm.v1.attention.ops.turbo.cuda.decode import DECODE
from vllm.v1.attention.ops.turbo.format import TILE_TOKENS, TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    AttentionCall,
    DecodeBatch,
    Partials,
    RawTokens,
    RotatedQuery,
    Scoring,
    offset_rows,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from .attention_utils import (
    assert_by_2x_rule,
    assert_by_rounded_weights,
    attention_of_rounded,
    rotate_query,
    split_keys,
)
from .kernel_under_test import Kernel
from .utils import (
    BF16,
    DEVICE,
    FP16,
    INVALID_BLOCK,
    fill_cache,
    gaussian,
    layout_id,
    load_context,
    make_block_table,
    new_cache,
    num_blocks_for,
    slots_of,
)

LAYOUTS = [
    TurboFormat.from_cache_dtype(name, size)
    for name in TURBO_PRESETS
    for size in SUPPORTED_HEAD_SIZES
]
LAYOUT = TurboFormat.from_cache_dtype("turbo4", 128)
# Each preset, and three head sizes.
SOME_LAYOUTS = [
    LAYOUT,
    TurboFormat.from_cache_dtype("turbo3", 64),
    TurboFormat.from_cache_dtype("k4v3", 256),
]
NUM_KV_HEADS = 2
BLOCK_SIZE = 48
# Rows of padding after the last sequence's tokens.
PADDING = 2
# Sinks of a KV head's query heads in turn: they have none, hardly any, some and
# nearly all of the weight. The next KV head begins one further on.
SINKS = [float("-inf"), -20.0, 0.0, 20.0]
# Factors of the queries by cap. A cap of 2 hardly tells scores of up to +-12 apart. A
# cap as large as models' bends them.
CAPS = {2.0: 3.0, 50.0: 12.0}
# Norms of the difference of rows of the offset, of norm 400, of the queries' part along
# them, and of what the first row has more. All segments have weight, or only one, or
# scores are in the thousands, or the first token has most of the weight, or none.
OFFSETS = {
    "near": (20, 0, 0),
    "far": (400, 0, 0),
    "large scores": (2, 80, 0),
    "far first": (20, 0, 60),
}
decode_layouts = pytest.mark.parametrize(
    "layout", [x for x in LAYOUTS if not DECODE.refusal(x)], ids=layout_id
)
raw_or_stored = pytest.mark.parametrize(
    "with_raw", [True, False], ids=["raw", "stored"]
)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def directions(*shape: int, seed: int) -> torch.Tensor:
    return nn.functional.normalize(gaussian(*shape, seed=seed), dim=-1)


class Features(NamedTuple):
    """Features of a layer, for which ``Sequences`` makes queries, keys and sinks.

    Attributes:
        sliding_window: The most tokens that a query token sees; None: all before it.
        soft_cap: A key of ``CAPS``; None: scores have no cap.
        sinks: dtype of sinks; None: there are none.
        offset: A key of ``OFFSETS``; None: nothing is taken off K.
        num_offsets: Rows of the offset's table: the first token's, and segments'.
        dtype: The model's dtype.

    """

    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: torch.dtype | None = None
    offset: str | None = None
    num_offsets: int = 4
    dtype: torch.dtype = FP16


PLAIN = Features()
IN_BF16 = Features(dtype=BF16)


class Launch(NamedTuple):
    """The arguments of an ``AttentionFn``, with NaN in scratch and output."""

    query: RotatedQuery
    call: AttentionCall
    partials: Partials


class Sequences:
    """Sequences in a cache, queries of their last tokens, and other K and V of these.

    Args:
        layout: The cache's format.
        seq_lens: Lengths of the sequences, which may be below their query lengths.
        query_lens: Query tokens of each sequence; an int: of every one.
        group: Query heads a KV head.
        features: The layer's features.
        block_size: Tokens of a block.
        cache_layout: The order of layers, blocks and heads in memory.
        num_stored: The most tokens of a sequence, its last ones, that are stored; the
            others are zeros. None: all are stored.

    Attributes:
        scoring: How the layer scores keys. Tests may change it.
        seen: The cache and block table that kernels get; None: ``cache`` and ``table``.

    """

    def __init__(
        self,
        layout: TurboFormat,
        seq_lens: list[int],
        query_lens: list[int] | int,
        group: int = 4,
        features: Features = PLAIN,
        *,
        block_size: int = BLOCK_SIZE,
        cache_layout: KVCacheLayout = KVCacheLayout.LBHNC,
        num_stored: int | None = None,
    ) -> None:
        self.layout, self.seq_lens, self.group = layout, seq_lens, group
        self.block_size, self.num_stored = block_size, num_stored
        self.dtype = features.dtype
        self.is_uniform = isinstance(query_lens, int)
        if isinstance(query_lens, int):
            query_lens = [query_lens] * len(seq_lens)
        self.query_len = max(query_lens)
        self.starts = [0, *accumulate(query_lens)]
        num_blocks = num_blocks_for(seq_lens, block_size)
        shape = (num_blocks, NUM_KV_HEADS, block_size)
        self.cache = new_cache(layout, *shape, cache_layout)
        self.table = make_block_table(seq_lens, block_size)
        self.fill()
        self.num_heads = group * NUM_KV_HEADS
        heads = [self.num_heads, NUM_KV_HEADS, NUM_KV_HEADS]
        num_tokens = self.starts[-1] + (0 if self.is_uniform else PADDING)
        largest = max(layout.head_size, layout.head_size_v)
        qkv = gaussian(num_tokens, sum(heads), largest, dtype=features.dtype, seed=7)
        query, key, value = qkv.split(heads, 1)
        self.query, self.key = (x[..., : layout.head_size] for x in (query, key))
        self.value = value[..., : layout.head_size_v]
        for start, query_len, length in zip(self.starts, query_lens, seq_lens):
            # Rows of tokens that do not exist hold NaN, as padding may.
            qkv[start : start + max(query_len - length, 0)] = math.nan
        self.seen: tuple[torch.Tensor, torch.Tensor] | None = None
        self.scoring = Scoring(
            layout.head_size**-0.5,
            soft_cap=features.soft_cap,
            sinks=None if features.sinks is None else self.make_sinks(features.sinks),
        )
        if features.soft_cap is not None:
            self.query *= CAPS[features.soft_cap]
        if features.offset is not None:
            self.take_off(*OFFSETS[features.offset], features.num_offsets)
        if features.sliding_window is not None:
            self.slide(features.sliding_window)

    def fill(self, byte: int = 0xFF) -> None:
        """Store Gaussian K and V; all other bytes of pages are ``byte``."""
        self.cache.fill_(byte if self.num_stored is None else 0)
        where = self.cache, self.table, self.seq_lens, self.layout, self.dtype
        fill_cache(*where, self.num_stored)

    def slots(self, row: int, first: int, last: int) -> torch.Tensor:
        """Slots of a sequence's tokens first to last - 1, (last - first,) int64."""
        return slots_of(self.table[row], first, last, self.block_size)

    def make_sinks(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        heads = torch.arange(self.num_heads)
        turns = heads + heads // self.group
        return torch.tensor(SINKS, dtype=dtype)[turns % len(SINKS)].to(DEVICE)

    def take_off(
        self, difference: float, common: float, first: float, num_offsets: int
    ) -> None:
        """Take an offset off cached keys, which the raw keys still have.

        Args:
            difference: Norm of the difference of offsets.
            common: Norm of the queries' part along the offsets.
            first: Norm of what is added to the first token's offset.
            num_offsets: Number of offsets.

        """
        size = self.layout.head_size
        direction = directions(NUM_KV_HEADS, size, seed=11)
        others = directions(num_offsets, NUM_KV_HEADS, size, seed=12)
        table = (400 * direction + difference * others).contiguous()
        table[0] += first * directions(NUM_KV_HEADS, size, seed=13)
        self.scoring = self.scoring._replace(key_offset=table)
        self.query += (
            (common * direction).repeat_interleave(self.group, 0).to(self.dtype)
        )
        for start, end, length in zip(self.starts, self.starts[1:], self.seq_lens):
            key = self.key[start:end]
            indices = torch.arange(length - len(key), length, device=DEVICE)
            key.copy_((key.float() + table[offset_rows(indices, table)]).to(self.dtype))

    def slide(self, window: int) -> None:
        """Have kernels see a window only.

        Tiles before the first one that a query token sees hold bytes that no encoder
        writes, and blocks before it do not exist.
        """
        self.scoring = self.scoring._replace(sliding_window=window)
        cache, table = self.cache.clone(), self.table.clone()
        pages = cache.flatten(2).view(*cache.shape[:2], -1, self.layout.tile_bytes)
        for row, length in enumerate(self.seq_lens):
            query_len = self.starts[row + 1] - self.starts[row]
            tile = max(length - query_len + 1 - window, 0) // TILE_TOKENS
            block, rest = divmod(tile, self.block_size // TILE_TOKENS)
            if rest:
                pages[table[row, block], :, :rest] = 0xFF
            table[row, :block] = INVALID_BLOCK
        self.seen = cache, table

    def alone(self, row: int) -> "Sequences":
        """One of the sequences, with the same cache, queries, keys and values."""
        own = copy(self)
        part = slice(*self.starts[row : row + 2])
        own.seq_lens, own.starts = [self.seq_lens[row]], [0, part.stop - part.start]
        own.table = self.table[row : row + 1]
        own.query, own.key, own.value = (
            x[part] for x in (self.query, self.key, self.value)
        )
        return own

    def launch(self, with_raw: bool, num_splits: int = 8) -> Launch:
        """The arguments of an ``AttentionFn``, with NaN in scratch and output."""
        num_partials = len(self.seq_lens) * self.query_len * num_splits
        shape = (num_partials, self.num_heads, self.layout.head_size_v)
        partial = torch.full(shape, math.nan, device=DEVICE)
        shape = (*self.query.shape[:2], self.layout.head_size_v)
        output = torch.full(shape, math.nan, device=DEVICE).to(self.query)
        raw = RawTokens(self.query, self.key, self.value, self.scoring.scale)
        cache, table = self.seen or (self.cache, self.table)
        lens, starts = ints(self.seq_lens), ints(self.starts)
        batch = DecodeBatch(len(self.seq_lens), table, lens, self.query_len, starts)
        if self.is_uniform:
            batch = batch._replace(query_start_loc=None)
        tensors = output, self.query, raw if with_raw else None
        call = AttentionCall(cache, self.layout, batch, self.scoring, *tensors)
        partials = Partials(partial, partial[:, :, 0].contiguous())
        return Launch(rotate_query(self.query, self.layout), call, partials)

    def attend(
        self, kernel: Kernel, with_raw: bool, num_splits: int = 8
    ) -> torch.Tensor:
        """The kernel's output, (T, Hq, D)."""
        launch = self.launch(with_raw, num_splits)
        kernel.attend(*launch)
        return launch.call.output

    def partials(
        self, kernel: Kernel, rotated: torch.Tensor, score_scale: float
    ) -> Partials:
        """The kernel's results for one split, in rotated space.

        Args:
            kernel: The kernel.
            rotated: (T, Hq, D), rotated queries to take in place of the sequences'.
            score_scale: The factor of all scores, in base 2.

        """
        scale = torch.full(rotated.shape[:2], score_scale, device=DEVICE)
        query = RotatedQuery(rotated.to(FP16).contiguous(), scale)
        launch = self.launch(False, 1)._replace(query=query)
        kernel.attend(*launch)
        return launch.partials

    def compare(self, kernel: Kernel, with_raw: bool, output: torch.Tensor) -> None:
        """Compare each sequence's rows, and rows that see no tokens to zero."""
        assert output[self.starts[-1] :].isnan().all()
        for row, length in enumerate(self.seq_lens):
            start, end = self.starts[row : row + 2]
            seen = min(length, end - start)
            assert (output[start : end - seen] == 0).all()
            if seen > 0:
                part = slice(end - seen, end)
                num_raw = seen if with_raw else 0
                self._compare_row(kernel, row, output[part], part, num_raw)

    def _compare_row(
        self,
        kernel: Kernel,
        row: int,
        output: torch.Tensor,
        part: slice,
        num_raw: int,
    ) -> None:
        """Apply the 2x rule of ``attention_utils`` to a sequence's rows.

        The target has q as the kernel rounds it. With an offset of K, this q is for
        k - m, and q without rounding for m and for raw tokens whose keys are exact.
        """
        query, scoring, length = self.query[part], self.scoring, self.seq_lens[row]
        key, value = load_context(self.cache, self.table[row], length, self.layout)
        if num_raw:
            key[-num_raw:], value[-num_raw:] = self.key[part], self.value[part]
        where = scoring.scale, query.dtype
        options = {"sliding_window": scoring.sliding_window, "sinks": scoring.sinks}
        if scoring.key_offset is not None:
            indices = torch.arange(length, device=DEVICE)
            offset = scoring.key_offset[offset_rows(indices, scoring.key_offset)]
            offset[length - num_raw :] = 0
            if num_raw and kernel.rounded_keys is not None:
                # Raw keys have the offset of the last cached token taken off, but
                # that of the tokens after it if it is the first.
                last = torch.tensor(max(length - num_raw - 1, 1))
                own = scoring.key_offset[offset_rows(last, scoring.key_offset)]
                key[-num_raw:] = kernel.rounded_keys(key[-num_raw:] - own)
                offset[-num_raw:], num_raw = own, 0
            parts = split_keys(kernel.rounded(query), query, key, num_raw, offset)
            assert_by_rounded_weights(output, *parts, value, *where, **options)
            return
        options["logits_soft_cap"] = scoring.soft_cap
        target = None
        if kernel.rounded is not None:
            keys, num_exact = key, num_raw
            if num_raw and kernel.rounded_keys is not None:
                raw = kernel.rounded_keys(key[-num_raw:])
                keys, num_exact = torch.cat([key[:-num_raw], raw]), 0
            rounded = kernel.rounded(query)
            target = attention_of_rounded(
                rounded, query, keys, value, num_exact, scoring.scale, **options
            )
        assert_by_2x_rule(
            output, query, key, value, *where, kernel.rotates_rule, target, **options
        )

    def check(
        self, kernel: Kernel, with_raw: bool, num_splits: int = 8
    ) -> torch.Tensor:
        """Compare the output to the reference, and two runs bit for bit.

        The comparison must fail without the soft cap, and without the sinks.
        """
        output = self.attend(kernel, with_raw, num_splits)
        self.compare(kernel, with_raw, output)
        if "repetition" not in kernel.opt_outs:
            again = self.attend(kernel, with_raw, num_splits)
            end = self.starts[-1]
            assert torch.equal(output[:end], again[:end])
        scoring = self.scoring
        for name in ("soft_cap", "sinks"):
            if getattr(scoring, name) is not None:
                self.scoring = scoring._replace(**{name: None})
                with pytest.raises(AssertionError, match="allowed"):
                    self.compare(kernel, with_raw, output)
        self.scoring = scoring
        return output

    def check_alone(
        self, kernel: Kernel, with_raw: bool = True, num_splits: int = 1
    ) -> None:
        """Compare each sequence's output to its output alone, bit for bit."""
        together = self.attend(kernel, with_raw, num_splits)
        for row, length in enumerate(self.seq_lens):
            own = together[slice(*self.starts[row : row + 2])]
            alone = self.alone(row).attend(kernel, with_raw, num_splits)
            assert torch.equal(alone, own)
            assert length > 0 or (own == 0).all()

    def check_recycled_bytes(self, kernel: Kernel) -> None:
        """Bytes past a sequence's end in its last page change no bit of the output."""
        outputs = []
        for byte in (0xFF, 0x00, 0xF7):
            self.fill(byte)
            outputs.append(self.attend(kernel, False, 4))
        assert outputs[0].isfinite().all()
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])
