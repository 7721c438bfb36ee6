# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Offsets of K, one for each segment of a sequence. CUDA's store takes them off K, and
decode and extend add their part of the scores again.
"""

from itertools import accumulate

import pytest
import torch
from torch import nn

from vllm.v1.attention.ops.turbo import interface, reference
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.cuda.store import StoreTuning
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import KeyOffset, OffsetScores, StoreCall

from .store_checks import random_slots
from .test_cuda_multi import (
    COLUMNS,
    LAYOUT,
    NUM_KV_HEADS,
    OUTPUTS,
    ROUNDING,
    ROWS,
    Batch,
    decodes,
    merged_extends,
    newest_or_stored,
)
from .utils import (
    BF16,
    DEVICE,
    assert_within,
    gaussian,
    layer_caches,
    load_context,
    model_dtypes,
    requires_cuda,
)

pytestmark = requires_cuda

LAYOUTS = [
    LAYOUT,
    TurboFormat.from_cache_dtype("turbo3", 64),
    TurboFormat.from_cache_dtype("k4v3", 256),
]
some_layouts = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=[f"{layout.name}-{layout.head_size}" for layout in LAYOUTS]
)
# Tokens of a segment; an emulated GPU has shorter segments.
SEGMENT = interface.OFFSET_SEGMENT
# Lengths around borders of segments and below; some are shorter than the queries.
SEQ_LENS = [SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 4, 3 * SEGMENT + 56]
SEQ_LENS += [0, 2, 130]
# Norms of the difference of segments' offsets, of norm 400, and of the queries' part
# along them. All segments have weight, or only one, or scores are in the thousands.
KINDS = {"near": (20, 0), "far": (400, 0), "large scores": (2, 80)}
KERNELS = ["cuda", COLUMNS, "extend", ROWS]
kernels = pytest.mark.parametrize("kernel", KERNELS)
# For layers without an offset.
any_kernel = pytest.mark.parametrize("kernel", [*KERNELS, OUTPUTS])
# Kernels for many query tokens.
EXTENDS = ("extend", "outputs", "rows")


def directions(*shape: int, seed: int) -> torch.Tensor:
    return torch.nn.functional.normalize(gaussian(*shape, seed=seed), dim=-1)


def segments_of(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The segment of each index of a token; padding, with index -1, has segment 0."""
    segments = indices.clamp(min=0) // SEGMENT
    return segments.clamp(max=offsets.shape[0] - 1)


class OffsetBatch(Batch):
    """A batch whose cached keys lack an offset that the newest keys have."""

    def __init__(
        self,
        seq_lens: list[int],
        query_lens: list[int] | int,
        group: int,
        layout: TurboFormat = LAYOUT,
        dtype: torch.dtype = BF16,
        kind: str = "near",
        num_offsets: int = 3,
    ) -> None:
        super().__init__(layout, seq_lens, query_lens, group, dtype)
        difference, common = KINDS[kind]
        size = layout.head_size
        direction = directions(NUM_KV_HEADS, size, seed=11)
        others = directions(num_offsets, NUM_KV_HEADS, size, seed=12)
        self.offsets = (400 * direction + difference * others).contiguous()
        self.group = group
        self.query += (common * direction).repeat_interleave(group, 0).to(dtype)
        for row, length in enumerate(seq_lens):
            start, end = self.starts[row : row + 2]
            key = self.key[start:end]
            indices = torch.arange(length - len(key), length, device=DEVICE)
            offsets = self.offsets[segments_of(indices, self.offsets)]
            key.copy_((key.float() + offsets).to(dtype))

    def run(self, kernel: str, with_newest: bool, num_splits: int = 8) -> torch.Tensor:
        offset = OffsetScores(self.query, self.offsets, self.scale)
        return self.decode(kernel, with_newest, num_splits, offset)

    def check(self, kernel: str, with_newest: bool, output: torch.Tensor) -> None:
        """Compare each sequence's rows, and rows that see no tokens to zero."""
        assert output[self.starts[-1] :].isnan().all()
        for row, length in enumerate(self.seq_lens):
            start, end = self.starts[row : row + 2]
            seen = min(length, end - start)
            assert (output[start : end - seen] == 0).all()
            if seen > 0:
                part = slice(end - seen, end)
                self.check_part(kernel, with_newest, output, row, part)

    def check_part(
        self,
        kernel: str,
        with_newest: bool,
        output: torch.Tensor,
        row: int,
        part: slice,
    ) -> None:
        """Compare a sequence's rows to attention in fp64.

        The target has q as the kernel rounds it for k - m, and q without rounding for m
        and the newest tokens. The error may be twice the error of attention with
        weights, values and outputs in the model's dtype.
        """
        length, seen = self.seq_lens[row], part.stop - part.start
        query = self.query[part]
        rotated = reference.rotate(query.float())
        rounded = reference.inverse_rotate(ROUNDING[kernel](rotated))
        queries = torch.cat([rounded, query.float()], -1).double()
        key, value = load_context(self.cache, self.table[row], length, self.layout)
        indices = torch.arange(length, device=DEVICE)
        offsets = self.offsets[segments_of(indices, self.offsets)]
        keys = torch.cat([key, offsets], -1)
        if with_newest:
            newest = self.key[part].float()
            keys[-seen:] = torch.cat([torch.zeros_like(newest), newest], -1)
            value[-seen:] = self.value[part].float()
        keys = keys.double().repeat_interleave(self.group, 1)
        values = value.double().repeat_interleave(self.group, 1)
        scores = torch.einsum("qhd,thd->hqt", queries, keys) * self.scale
        last = torch.arange(length - seen, length, device=DEVICE)
        hidden = indices > last[:, None]
        if self.sliding_window is not None:
            hidden |= indices <= last[:, None] - self.sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            # Sinks count as one more token, whose value is zero.
            sinks = self.sinks.double()[:, None, None].expand(-1, seen, 1)
            scores = torch.cat([scores, sinks], -1)
            values = nn.functional.pad(values, (0, 0, 0, 0, 0, 1))
        weights = scores.softmax(-1)
        target = torch.einsum("hqt,thd->qhd", weights, values)
        plain = torch.einsum(
            "hqt,thd->qhd", weights.to(query.dtype), values.to(query.dtype)
        )
        allowed = 2 * (plain.double() - target).abs().max().item()
        allowed += 2**-11 * target.abs().max().item()
        assert_within(output[part], target, allowed, f"sequence {row}")


def check(
    batch: OffsetBatch, kernel: str, with_newest: bool, num_splits: int = 8
) -> None:
    """Compare the output to the reference, and two runs bit for bit."""
    output = batch.run(kernel, with_newest, num_splits)
    batch.check(kernel, with_newest, output)
    again = batch.run(kernel, with_newest, num_splits)
    end = batch.starts[-1]
    assert torch.equal(output[:end], again[:end])


@decodes
@some_layouts
@model_dtypes
@newest_or_stored
@pytest.mark.parametrize(
    "query_len, group", [(1, 4), (1, 5), (1, 16), (3, 1), (3, 4), (2, 16)]
)
def test_decodes(layout, dtype, with_newest, query_len, group, kernel):
    batch = OffsetBatch(SEQ_LENS, query_len, group, layout, dtype)
    check(batch, kernel, with_newest)


@decodes
@some_layouts
@newest_or_stored
@pytest.mark.parametrize("group", [1, 4])
def test_ragged_drafts(layout, with_newest, group, kernel):
    query_lens = [1, 3, 2, 4, 1, 0, 2, 3]
    check(OffsetBatch(SEQ_LENS, query_lens, group, layout), kernel, with_newest)


@merged_extends
@some_layouts
@model_dtypes
@newest_or_stored
@pytest.mark.parametrize("query_len", [7, 16, 33])
def test_extends(layout, dtype, with_newest, query_len, kernel):
    """Extends with as many queries as each plan has, and in several passes."""
    batch = OffsetBatch(SEQ_LENS, query_len, 4, layout, dtype)
    check(batch, kernel, with_newest)


@merged_extends
@some_layouts
@newest_or_stored
def test_ragged_extends(layout, with_newest, kernel):
    query_lens = [16, 1, 9, 33, 64, 0, 2, 17]
    check(OffsetBatch(SEQ_LENS, query_lens, 4, layout), kernel, with_newest)


@kernels
@newest_or_stored
@pytest.mark.parametrize("kind", KINDS)
def test_offsets(kernel, with_newest, kind):
    query_len = 8 if kernel in EXTENDS else 2
    check(OffsetBatch(SEQ_LENS, query_len, 4, kind=kind), kernel, with_newest)


@kernels
@newest_or_stored
@pytest.mark.parametrize("num_offsets", [1, 2, 4, 7])
def test_the_last_offset_is_that_of_all_that_follow(kernel, with_newest, num_offsets):
    query_len = 8 if kernel in EXTENDS else 1
    batch = OffsetBatch(
        [SEGMENT + 52, 4 * SEGMENT + 808], query_len, 4, num_offsets=num_offsets
    )
    check(batch, kernel, with_newest)


@kernels
@newest_or_stored
@pytest.mark.parametrize("kind", ["near", "far"])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 64])
@pytest.mark.parametrize(
    "seq_lens",
    [
        [6 * SEGMENT + 57],
        [SEGMENT - 8 + i for i in range(20)],
        [3 * SEGMENT + 56] + [40] * 63,
    ],
    ids=["one", "many", "ragged"],
)
def test_splits(kernel, with_newest, kind, num_splits, seq_lens):
    """Ranges of warps, teams and blocks begin anywhere and span several offsets."""
    batch = OffsetBatch(seq_lens, 3, 4, kind=kind, num_offsets=6)
    check(batch, kernel, with_newest, num_splits)


@kernels
def test_one_split_does_not_depend_on_the_batch(kernel):
    seq_lens, query_len = [SEGMENT + 1, 0, 2 * SEGMENT + 4], 3
    batch = OffsetBatch(seq_lens, query_len, 4)
    together = batch.run(kernel, True, 1)
    for row, length in enumerate(seq_lens):
        part = slice(row * query_len, (row + 1) * query_len)
        alone = OffsetBatch([length], query_len, 4)
        alone.cache, alone.table = batch.cache, batch.table[row : row + 1]
        alone.query, alone.key = batch.query[part], batch.key[part]
        alone.value = batch.value[part]
        assert torch.equal(alone.run(kernel, True, 1), together[part])


def repeated(values: list[int], count: int) -> list[int]:
    return (values * -(-count // len(values)))[:count]


@some_layouts
@model_dtypes
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("num_seqs", [1, 2, 7, 8, 9, 65, 300])
def test_store(layout, dtype, parts, num_seqs):
    """The store writes the bytes of keys less their offsets, beside empty sequences."""
    lens = repeated([1, 0, 3, 0, 0, 40, 1, 2], num_seqs)
    ends = [SEGMENT + 1, 5, 2 * SEGMENT + 2, 0, 3 * SEGMENT + 856, 3 * SEGMENT + 26]
    ends = repeated([*ends, SEGMENT, 1], num_seqs)
    # Padding to a CUDA graph's size: sequences here, tokens below.
    lens += [0, 0]
    ends += [0, 3]
    seq_lens = [max(end, count) for end, count in zip(ends, lens)]
    starts = [0, *accumulate(lens)]
    num_tokens = starts[-1] + 3
    offsets = 400 * directions(3, NUM_KV_HEADS, layout.head_size, seed=5)
    parts_of_index = [
        torch.arange(end - count, end) for end, count in zip(seq_lens, lens)
    ]
    indices = torch.cat([*parts_of_index, torch.zeros(3, dtype=torch.long)]).to(DEVICE)
    of_tokens = offsets[segments_of(indices, offsets)]
    shape = (num_tokens, NUM_KV_HEADS, layout.head_size)
    key = (gaussian(*shape, seed=6) + of_tokens).to(dtype)
    value = gaussian(*shape, dtype=dtype, seed=7)
    slots = random_slots(num_tokens, 2 * num_tokens)
    slots[starts[-1] :] = -1
    if num_tokens > 20:
        slots[[1, 12]] = -1
    caches = [
        layer_caches(layout, num_tokens // 8 + 3, NUM_KV_HEADS, 16)[1][1]
        for _ in range(2)
    ]
    stored = (key.float() - of_tokens).to(dtype)
    reference.store(StoreCall(caches[0], slots, stored, value, layout))
    cuda_store.store(
        StoreCall(
            caches[1],
            slots,
            key,
            value,
            layout,
            key_offset=KeyOffset(offsets, ints(seq_lens), ints(starts)),
        ),
        tuning=StoreTuning(parts, 64),
    )
    assert torch.equal(*caches)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


TABLE = (3, NUM_KV_HEADS, LAYOUT.head_size)
BAD_TABLES = {
    "axes": (TABLE[1:], torch.float32, "2 axes, not 3"),
    "none": ((0, *TABLE[1:]), torch.float32, "0 along axis 0, not 1 or more"),
    "heads": ((3, 3, 128), torch.float32, "3 along axis 1, not 2"),
    "size": ((3, 2, 64), torch.float32, "64 along axis 2, not 128"),
    "dtype": (TABLE, BF16, "dtype bfloat16, not float32"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_tables_that_are_not_taken(name):
    shape, dtype, message = BAD_TABLES[name]
    table = torch.zeros(shape, dtype=dtype, device=DEVICE)
    batch = OffsetBatch([40], 1, 4)
    error = TypeError if name == "dtype" else ValueError
    for kernel in ("cuda", "extend"):
        offset = OffsetScores(batch.query, table, batch.scale)
        with pytest.raises(error, match=f"key_offset: {message}"):
            batch.decode(kernel, False, offset=offset)
    with pytest.raises(error, match=f"key_offset: {message}"):
        cuda_store.store(
            StoreCall(
                batch.cache,
                torch.full((1,), -1, device=DEVICE),
                batch.key,
                batch.value,
                LAYOUT,
                key_offset=KeyOffset(table, ints([40]), ints([0, 1])),
            )
        )


@kernels
def test_queries_that_are_not_taken(kernel):
    batch = OffsetBatch([40], 2, 4)
    for query, error, message in (
        (batch.query.float(), TypeError, "dtype float32, not float16"),
        (batch.query[:1], ValueError, "1 along axis 0, not 2"),
        (batch.query[:, :4], ValueError, "4 along axis 1, not 8"),
        (batch.query.repeat(1, 1, 2)[..., ::2], ValueError, "last axis is not"),
    ):
        offset = OffsetScores(query, batch.offsets, batch.scale)
        with pytest.raises(error, match=f"original_query: .*{message}"):
            batch.decode(kernel, False, offset=offset)


def test_lengths_that_are_not_taken():
    batch = OffsetBatch([40], 1, 4)
    for seq_lens, starts, message in (
        ([40], [0], "query_start_loc: of 1, not 2"),
        ([], [0], "seq_lens: of 0, not 1"),
    ):
        with pytest.raises(ValueError, match=message):
            cuda_store.store(
                StoreCall(
                    batch.cache,
                    torch.full((1,), -1, device=DEVICE),
                    batch.key,
                    batch.value,
                    LAYOUT,
                    key_offset=KeyOffset(batch.offsets, ints(seq_lens), ints(starts)),
                )
            )
