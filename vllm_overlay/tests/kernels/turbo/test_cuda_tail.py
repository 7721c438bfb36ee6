# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tail in CUDA's kernels. Rows and counts equal the reference's bit for
bit, and attention to them is compared to the reference.
"""

import math
from itertools import accumulate
from typing import Any

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.tail import TailFormat
from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail, TailUpdate
from vllm.v1.attention.ops.turbo.interface import (
    AttendedTokens,
    DecodeBatch,
    KeyOffset,
    OffsetScores,
    Partials,
    RawTokens,
    RotatedQuery,
    StoreCall,
)
from vllm.v1.attention.ops.turbo.reference.tail import (
    load_tail,
    planes,
    update_tail,
)

from .attention_kernels import EXTENDS, kernels, kernels_and_layouts, without
from .attention_utils import attend_by, attention_of_rounded, rotate_query
from .kernel_under_test import DECODE_KERNEL, Kernel
from .sequences import (
    LAYOUT,
    LAYOUTS,
    SEGMENT,
    SOME_LAYOUTS,
    ints,
    layout_id,
)
from .utils import (
    BF16,
    DEVICE,
    INVALID_BLOCK,
    gaussian,
    load_context,
    model_dtypes,
    requires_cuda,
)

pytestmark = requires_cuda

all_layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
with_offset = pytest.mark.parametrize(
    "with_offset", [False, True], ids=["plain", "offset"]
)
BLOCK_SIZE = 64
# Contexts around borders of segments, blocks and tails. The last but one has no page
# of a tail.
CONTEXTS = [0, 1, 63, 64, 65, SEGMENT - 8, SEGMENT + 5, 40, 300]
WITHOUT_PAGE = 7
GROUP = 4


class Scene:
    """Sequences that grow step by step, in two caches: the kernel's and the
    reference's.
    """

    def __init__(
        self,
        layout: TurboFormat,
        num_kv_heads: int = 2,
        dtype: torch.dtype = BF16,
        with_offset: bool = False,
        num_tokens: int = 64,
        group: int = GROUP,
        sliding_window: int | None = None,
    ) -> None:
        self.layout, self.num_kv_heads, self.dtype = layout, num_kv_heads, dtype
        self.format = TailFormat(layout, BLOCK_SIZE, sliding_window)
        self.num_tokens, self.group = num_tokens, group
        num_seqs, width = len(CONTEXTS), max(CONTEXTS) // BLOCK_SIZE + 6
        blocks = torch.randperm(num_seqs * (width + 1), device=DEVICE).int() + 1
        self.table = blocks[: num_seqs * width].view(num_seqs, width)
        self.blocks = blocks[num_seqs * width :].clone()
        self.blocks[WITHOUT_PAGE] = 0
        shape = (len(blocks) + 1, num_kv_heads, BLOCK_SIZE, layout.slot_size)
        cache = torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)
        self.caches = [cache, cache.clone()]
        self.offsets = None
        if with_offset:
            shape = (2, num_kv_heads, layout.head_size)
            self.offsets = 10 * gaussian(*shape, seed=5)
        self.lens = [0] * num_seqs
        self.seed = 0
        self.step(CONTEXTS)

    def step(self, query_lens: list[int], dropped: int | None = None) -> None:
        """Store tokens of each sequence in both caches, except token ``dropped``."""
        self.starts = [0, *accumulate(query_lens)]
        before, self.lens = self.lens, [a + b for a, b in zip(self.lens, query_lens)]
        # Two rows of padding after the last sequence.
        total, heads = self.starts[-1] + 2, self.num_kv_heads
        self.seed += 1
        size = self.layout.head_size
        qkv = gaussian(total, (self.group + 2) * heads, size, seed=self.seed)
        self.query, self.key, self.value = qkv.to(self.dtype).split(
            [self.group * heads, heads, heads], 1
        )
        slots = [
            int(self.table[row, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for row, (start, end) in enumerate(zip(before, self.lens))
            for p in range(start, end)
        ]
        mapping = torch.tensor([*slots, -1, -1], device=DEVICE)
        if dropped is not None:
            mapping[dropped] = -1
        seq_lens, starts = ints(self.lens), ints(self.starts)
        offset = None
        if self.offsets is not None:
            offset = KeyOffset(self.offsets, seq_lens, starts)
        self.tails = [
            Tail(
                cache,
                self.blocks,
                torch.full_like(self.blocks, -7),
                self.format,
                self.num_tokens,
            )
            for cache in self.caches
        ]
        own, other = (
            TailUpdate(tail, self.table, seq_lens, starts) for tail in self.tails
        )
        tokens = mapping, self.key, self.value, self.layout
        cuda_store.store(
            StoreCall(self.caches[0], *tokens, key_offset=offset, tail=own)
        )
        reference.store(StoreCall(self.caches[1], *tokens, key_offset=offset))
        update_tail(other, self.caches[1], *tokens, offset)

    def counts(self) -> list[int]:
        """Valid rows of each sequence's tail, equal in both caches."""
        own, other = (tail.packed_lens.tolist() for tail in self.tails)
        assert own == other
        return [a - b for a, b in zip(self.lens, own)]

    def check(self) -> list[int]:
        assert torch.equal(*self.caches)
        return self.counts()

    def attend(
        self,
        kernel: Kernel,
        num_splits: int,
        dtype: torch.dtype = torch.float32,
        attends_before: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """The output of a step, (T, Hq, D), with NaN in scratch and output before.

        Args:
            kernel: The kernel.
            num_splits: Splits of a sequence.
            dtype: dtype of the raw tokens and of the output.
            attends_before: Whether the merge gets the result of attention to the
                raw tokens.
            options: Options of an ``AttentionFn``.

        """
        heads, size = self.query.shape[1:]
        total = self.starts[-1]
        query = self.query[:total]
        query_len = max(b - a for a, b in zip(self.starts, self.starts[1:]))
        shape = (len(self.lens) * query_len * num_splits, heads, size)
        partial = torch.full(shape, math.nan, device=DEVICE)
        scale = size**-0.5
        output = torch.full(query.shape, math.nan, dtype=dtype, device=DEVICE)
        offset = None
        if self.offsets is not None:
            offset = OffsetScores(query, self.offsets, scale)
        tail = self.tails[0]
        raw = RawTokens(
            *(x[:total].to(dtype) for x in (self.query, self.key, self.value)), scale
        )
        if attends_before:
            raw = raw._replace(attended=self.attended(raw, **options))
        attend_by(
            kernel.attend,
            rotate_query(query, self.layout),
            self.caches[0],
            self.layout,
            DecodeBatch(
                len(self.lens),
                self.visible_blocks(),
                ints(self.lens),
                query_len,
                ints(self.starts),
            ),
            Partials(partial, partial[:, :, 0].contiguous()),
            output,
            raw,
            offset,
            tail,
            **options,
        )
        return output

    def attended(
        self, raw: RawTokens, sinks: object = None, **options: Any
    ) -> AttendedTokens:
        """The result of attention of each sequence to its raw tokens."""
        output = torch.empty_like(raw.query)
        lse = output.new_empty(output.shape[1::-1], dtype=torch.float32)
        for part in map(slice, self.starts, self.starts[1:]):
            result, own_lse = reference.attention(
                *(x[part].float() for x in raw[:3]), raw.scale, **options
            )
            output[part], lse[:, part] = result.to(output.dtype), own_lse.T
        return AttendedTokens(output, lse)

    def visible_blocks(self) -> torch.Tensor:
        """The block table, with invalid blocks before a sliding window."""
        table, sliding_window = self.table.clone(), self.format.sliding_window
        if sliding_window is not None:
            own = [b - a for a, b in zip(self.starts, self.starts[1:])]
            for row, (length, count) in enumerate(zip(self.lens, own)):
                first = max(length - count + 1 - sliding_window, 0)
                table[row, : first // BLOCK_SIZE] = INVALID_BLOCK
        return table

    def expected(self, kernel: Kernel, **options: Any) -> list[torch.Tensor]:
        """Each sequence's output, (Q, Hq, D) fp32.

        Scores of packed keys, without their offset, are from q as the kernel rounds it.
        All other scores are from q without rounding.
        """
        tail = self.tails[1]
        outputs = []
        for row, length in enumerate(self.lens):
            part = slice(*self.starts[row : row + 2])
            query, num_raw = self.query[part], part.stop - part.start
            num_packed = int(tail.packed_lens[row]) - num_raw
            positions = torch.arange(length - num_raw, device=DEVICE)
            cached = load_context(
                self.caches[1], self.table[row], num_packed, self.layout
            )
            tail_rows = load_tail(tail, row, positions[num_packed:])
            key, value = (torch.cat(both) for both in zip(cached, tail_rows))
            taken_off = torch.zeros_like(key)
            if self.offsets is not None:
                segments = (positions // SEGMENT).clamp(max=len(self.offsets) - 1)
                key = key + self.offsets[segments]
                taken_off[:num_packed] = self.offsets[segments[:num_packed]]
            raw = self.key[part].float()
            outputs.append(
                attention_of_rounded(
                    kernel.rounded(query),
                    query,
                    torch.cat([key, raw]),
                    torch.cat([value, self.value[part].float()]),
                    length - num_packed,
                    self.layout.head_size**-0.5,
                    torch.cat([taken_off, torch.zeros_like(raw)]),
                    **options,
                )
            )
        return outputs


@all_layouts
@model_dtypes
@with_offset
def test_rows_and_counts(layout, dtype, with_offset):
    """Decodes, drafts, ragged steps and prompts longer than the tail."""
    scene = Scene(layout, 3, dtype, with_offset)
    scene.check()
    rows, num_seqs = scene.format.num_rows, len(CONTEXTS)
    for query_lens in (
        [1] * num_seqs,
        [3, 0, 1, 5, 2, 0, 1, 1, 4],
        [rows - 1, rows, rows + 1, 2 * rows, 1, 2, 3, 4, 5],
        [2] * num_seqs,
    ):
        scene.step(query_lens)
        counts = scene.check()
        assert counts[WITHOUT_PAGE] == 0
    # All rows except two, which the step's tokens take.
    assert counts[3] == min(rows, scene.num_tokens) - 2


@pytest.mark.parametrize("num_kv_heads", [1, 4, 9])
@pytest.mark.parametrize("num_tokens", [0, 5, 64])
def test_heads_and_tokens(num_kv_heads, num_tokens):
    scene = Scene(LAYOUT, num_kv_heads, num_tokens=num_tokens)
    scene.step([1] * len(CONTEXTS))
    assert max(scene.check()) <= num_tokens


@all_layouts
@pytest.mark.parametrize("what", ["tag", "place", "packed"])
def test_a_row_that_differs_in_one_head_ends_the_count(layout, what):
    scene = Scene(layout)
    row, position = 5, CONTEXTS[5] - 4
    for cache in scene.caches:
        if what == "packed":
            block = int(scene.table[row, position // BLOCK_SIZE])
            # A byte of the token's codes, which are first in a tile.
            place = position % BLOCK_SIZE
            bytes_of_row = layout.head_size * layout.key_bits // 8
            if layout.key_codebook.trellis:
                bytes_of_row = layout.head_size // 4
            tile = place // 16 * layout.tile_bytes
            cache[block, 1].view(-1)[tile + place % 16 * bytes_of_row] ^= 1
        else:
            page = planes(cache[int(scene.blocks[row])], scene.format)
            plane = page[4][..., -1] if what == "tag" else page[5]
            plane[1, position % scene.format.num_rows] ^= 1
    scene.step([1] * len(CONTEXTS))
    assert scene.check()[row] == 3


def test_tokens_that_are_not_stored_have_no_row():
    scene = Scene(LAYOUT)
    scene.step([2] * len(CONTEXTS), dropped=5)
    scene.check()
    scene.step([1] * len(CONTEXTS))
    assert scene.check()[2] == 0


def test_a_prefix_that_is_found_while_it_is_computed():
    """Rows of a tail are compared to bytes of this step, not to those before."""
    scene = Scene(LAYOUT)
    # Sequence 8 continues in a block of sequence 3, at the same positions, which the
    # step writes. The rows of its page hold the bytes from before.
    first = CONTEXTS[8] // BLOCK_SIZE
    scene.lens[3] = first * BLOCK_SIZE
    scene.lens[8] = CONTEXTS[8]
    scene.table[3, first] = scene.table[8, first]
    scene.step([0, 0, 0, CONTEXTS[8] - scene.lens[3], 0, 0, 0, 0, 1])
    assert scene.check()[8] == 0


def test_no_row_counts_beside_tokens_that_another_stores():
    """A launch cannot tell whether it reads a block before or after another sequence's
    store in it, so no row counts. The reference stores first, and counts them.
    """
    scene = Scene(LAYOUT)
    # Sequence 3 continues in the last block of sequence 8, after that one's tokens.
    first = CONTEXTS[8] // BLOCK_SIZE
    scene.table[3, first] = scene.table[8, first]
    scene.lens[3] = CONTEXTS[8] + 2
    scene.step([0, 0, 0, 1, 0, 0, 0, 0, 1])
    own, other = (tail.packed_lens[8].item() for tail in scene.tails)
    length = scene.lens[8]
    assert (own, other) == (length, length - (scene.format.num_rows - 1))


@kernels_and_layouts(without("tail"))
@pytest.mark.parametrize("num_splits", [1, 8])
@with_offset
def test_attention(layout, kernel, num_splits, with_offset):
    """The error is that of weights and values in fp16.

    An offset makes keys ten times as long, and the error of their scores, sums of a
    hundred and more terms, grows with them. Short sequences are read from the tail
    alone, in fp32.
    """
    scene = Scene(layout, with_offset=with_offset)
    tolerance = 2**-8 if with_offset else 2**-10
    for query_lens in ([1] * len(CONTEXTS), [2, 1, 3, 1, 2, 1, 3, 1, 1]):
        scene.step(query_lens)
        counts = scene.check()
        output, expected = scene.attend(kernel, num_splits), scene.expected(kernel)
        for row, length in enumerate(scene.lens):
            part = slice(*scene.starts[row : row + 2])
            error = output[part] - expected[row]
            if counts[row] == length - query_lens[row]:
                assert error.abs().max() <= 2**-14 * expected[row].abs().max(), row
            assert error.norm() <= tolerance * expected[row].norm(), row


@pytest.mark.parametrize("num_warps", [1, 2, 8])
@pytest.mark.parametrize("group", [1, 3, 5, 8, 16])
@with_offset
@model_dtypes
def test_query_heads(dtype, with_offset, group, num_warps, monkeypatch):
    """A block's rows may be a part of a group or belong to several groups, with one or
    several warps a row. Operands in the model's dtype are tested beside fp32.
    """
    monkeypatch.setattr(cuda_merge, "warps_a_row_with_tail", lambda *_: num_warps)
    scene = Scene(LAYOUT, 2, dtype, with_offset, group=group)
    scene.step([2, 1, 3, 1, 2, 1, 3, 1, 1])
    output, expected = scene.attend(DECODE_KERNEL, 8), scene.expected(DECODE_KERNEL)
    tolerance = 2**-8 if with_offset else 2**-10
    for row in range(len(CONTEXTS)):
        error = output[slice(*scene.starts[row : row + 2])] - expected[row]
        assert error.norm() <= tolerance * expected[row].norm(), row
    rounded = scene.attend(DECODE_KERNEL, 8, dtype).float()
    rounding = 2**-8 if dtype == BF16 else 2**-11
    bound = rounding * output.abs() + 2**-14 * output.abs().max()
    assert ((rounded - output).abs() <= bound).all()


@kernels_and_layouts(without("tail"))
@pytest.mark.parametrize("num_splits", [1, 8])
def test_soft_cap(layout, kernel, num_splits):
    """The cap applies to packed tokens, the tail and the raw tokens.

    Errors are those of ``test_attention``.
    """
    scene = Scene(layout)
    scene.step([2, 1, 3, 1, 2, 1, 3, 1, 1])
    scene.check()
    scene.query *= 4
    output = scene.attend(kernel, num_splits, logits_soft_cap=2.0)
    without = scene.expected(kernel)
    for row, expected in enumerate(scene.expected(kernel, logits_soft_cap=2.0)):
        part = slice(*scene.starts[row : row + 2])
        error = (output[part] - expected).norm()
        assert error <= 2**-10 * expected.norm(), row
        if scene.lens[row] > part.stop - part.start:
            assert (without[row] - expected).norm() > 2**-4 * expected.norm(), row


# Some queries see only the tail of the short ones, and more of the long one.
@pytest.mark.parametrize("sliding_window", [16, 20, 100])
@kernels_and_layouts(without("tail"), SOME_LAYOUTS)
@pytest.mark.parametrize("num_splits", [1, 8])
@with_offset
def test_sliding_window(layout, kernel, num_splits, sliding_window, with_offset):
    """Errors are those of ``test_attention``."""
    scene = Scene(layout, with_offset=with_offset, sliding_window=sliding_window)
    heads = GROUP * scene.num_kv_heads
    options = {
        "sliding_window": sliding_window,
        "sinks": torch.linspace(-10, 5, heads, device=DEVICE),
    }
    tolerance = 2**-8 if with_offset else 2**-10
    longest = 33 if kernel.is_extend else 3
    for query_lens in (
        [1] * len(CONTEXTS),
        [2, 1, longest, 1, 2, 1, longest, 1, 1],
    ):
        scene.step(query_lens)
        counts = scene.check()
        rows = scene.format.num_rows
        assert rows <= sliding_window
        assert counts[8] == rows - query_lens[8]
        output = scene.attend(kernel, num_splits, **options)
        for row, expected in enumerate(scene.expected(kernel, **options)):
            part = slice(*scene.starts[row : row + 2])
            error = output[part] - expected
            assert error.norm() <= tolerance * expected.norm(), row


@kernels([x for x in without("tail") if x in EXTENDS])
@pytest.mark.parametrize("sliding_window", [None, 20])
@with_offset
def test_raw_tokens_that_are_attended_to_before(kernel, sliding_window, with_offset):
    """The raw tokens' result is added to the tail's, once."""
    scene = Scene(LAYOUT, with_offset=with_offset, sliding_window=sliding_window)
    query_lens = [2, 1, 33, 1, 2, 1, 33, 1, 1]
    scene.step(query_lens)
    assert max(scene.check()) > 0
    heads = GROUP * scene.num_kv_heads
    options = {"sinks": torch.linspace(-10, 5, heads, device=DEVICE)}
    if sliding_window is not None:
        options["sliding_window"] = sliding_window
    one_by_one = scene.attend(kernel, 8, **options)
    output = scene.attend(kernel, 8, attends_before=True, **options)
    assert (output - one_by_one).norm() <= 2**-14 * one_by_one.norm()


@kernels_and_layouts(without("tail"), SOME_LAYOUTS)
def test_soft_cap_of_a_sliding_window(layout, kernel):
    scene = Scene(layout, sliding_window=70)
    scene.step([2, 1, 3, 1, 2, 1, 3, 1, 1])
    scene.check()
    scene.query *= 4
    options = {"sliding_window": 70, "logits_soft_cap": 2.0}
    output = scene.attend(kernel, 8, **options)
    for row, expected in enumerate(scene.expected(kernel, **options)):
        part = slice(*scene.starts[row : row + 2])
        error = (output[part] - expected).norm()
        assert error <= 2**-10 * expected.norm(), row


def test_a_tail_is_only_with_raw_tokens():
    scene = Scene(LAYOUT)
    scene.step([1] * len(CONTEXTS))
    query = scene.query[: len(CONTEXTS)]
    partial = torch.zeros(len(CONTEXTS), *query.shape[1:], device=DEVICE)
    with pytest.raises(AssertionError, match="without raw tokens"):
        attend_by(
            DECODE_KERNEL.attend,
            RotatedQuery(query.half().contiguous(), partial[..., 0].contiguous()),
            scene.caches[0],
            scene.layout,
            DecodeBatch(len(CONTEXTS), scene.table, ints(scene.lens)),
            Partials(partial, partial[..., 0].contiguous()),
            torch.empty_like(query),
            tail=scene.tails[0],
        )
