# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tail: rows that count, their content, and attention to them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm.v1.attention.ops.turbo import interface, reference
from vllm.v1.attention.ops.turbo.choose import triton_kernels
from vllm.v1.attention.ops.turbo.format import SCALE_GROUP, TurboFormat
from vllm.v1.attention.ops.turbo.formats.tail import MAX_CODE, MAX_ROWS, TailFormat
from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail, TailUpdate
from vllm.v1.attention.ops.turbo.interface import (
    DecodeBatch,
    KeyOffset,
    OffsetScores,
    Partials,
    RawTokens,
    StoreCall,
)
from vllm.v1.attention.ops.turbo.reference.attention import paged_attention
from vllm.v1.attention.ops.turbo.reference.tail import (
    dequantize_rows,
    load_tail,
    planes,
    quantize_rows,
    update_tail,
)

from .attention_utils import assert_by_2x_rule, attend_by, rotate_query
from .utils import (
    BF16,
    CACHE_LAYOUTS,
    DEVICE,
    FP16,
    INVALID_BLOCK,
    ON_GPU,
    all_head_sizes,
    all_presets,
    gaussian,
    load_context,
    new_cache,
    packings,
    requires_triton,
    slots_of,
    vectors,
)

NUM_HEADS, NUM_KV_HEADS = 4, 2
# Native kernels are compiled for the segments that are served.
SEGMENT = interface.OFFSET_SEGMENT if ON_GPU else 64


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "OFFSET_SEGMENT", SEGMENT)


def store_by_torch(call: StoreCall) -> None:
    """A ``StoreFn`` in PyTorch, without queries."""
    reference.store(call._replace(tail=None))
    if call.tail is not None:
        update_tail(call.tail, *call[:5], call.key_offset)


def attend_by_torch(*args, **options) -> None:
    """As ``attend_by`` with an ``AttentionFn``, of queries that are not rotated."""
    attend_by(lambda query, call, partials: paged_attention(call), *args, **options)


def store_by_triton(call: StoreCall) -> None:
    """Store with Triton on a GPU. In the interpreter, which takes seconds for a store,
    the reference stores and Triton updates the tail alone.
    """
    if ON_GPU:
        triton_kernels().store(call)
        return
    from vllm.v1.attention.ops.turbo.triton import tail as triton_tail

    reference.store(call._replace(tail=None))
    if call.tail is not None:
        triton_tail.update_tail(call.tail, *call[:5], call.key_offset)


def attend_by_triton(*args, **options) -> None:
    attend_by(triton_kernels().decode_attention, *args, **options)


# By name: the function that stores, and the function that attends.
PATHS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "torch": (store_by_torch, attend_by_torch),
    "triton": (store_by_triton, attend_by_triton),
}
all_paths = pytest.mark.parametrize(
    "path", ["torch", pytest.param("triton", marks=requires_triton)]
)


class Scene:
    """A cache in which sequences grow, each with a page for its newest tokens.

    Attributes:
        lengths: Lengths of the sequences in tokens.
        keys: K last stored at each position of each sequence, (T, H, D).
        values: V likewise.
        last_tail: The tail of the last step, with its packed lengths.
        query_start_loc: (num_seqs + 1,) int32, first tokens of the sequences in the
            last step.

    """

    def __init__(
        self,
        layout: TurboFormat,
        num_seqs: int = 1,
        num_tokens: int = MAX_ROWS - 1,
        block_size: int = 16,
        max_blocks: int = 6,
        dtype: torch.dtype = BF16,
        table: torch.Tensor | None = None,
        sliding_window: int | None = None,
        **cache_options,
    ) -> None:
        """``num_tokens``: tokens that the tail holds; ``table``: the offset of K."""
        self.layout, self.block_size, self.dtype = layout, block_size, dtype
        self.format = TailFormat(layout, block_size, sliding_window)
        self.num_tokens, self.table = num_tokens, table
        # The first block is the null block.
        num_blocks = 1 + num_seqs * (max_blocks + 1)
        shape = (layout, num_blocks, NUM_KV_HEADS, block_size)
        self.cache = new_cache(*shape, **cache_options)
        generator = torch.Generator().manual_seed(num_blocks)
        order = 1 + torch.randperm(num_blocks - 1, generator=generator)
        order = order.view(num_seqs, -1).int().to(DEVICE)
        self.blocks = order[:, 0].clone()
        self.block_table = torch.nn.functional.pad(
            order[:, 1:], (0, 1), value=INVALID_BLOCK
        )
        self.lengths = [0] * num_seqs
        size = (max_blocks * block_size, NUM_KV_HEADS, layout.head_size)
        self.keys = [
            torch.zeros(size, dtype=dtype, device=DEVICE) for _ in self.lengths
        ]
        self.values = [torch.zeros_like(x) for x in self.keys]
        self.num_steps = 0
        self.last_tail = self.tail()
        self.query_start_loc = self.ints([0])

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def tail(self, cache: torch.Tensor | None = None) -> Tail:
        """The tail of the next step, whose packed lengths are to be written."""
        packed_lens = self.ints([-7] * (len(self.lengths) + 1))
        cache = self.cache if cache is None else cache
        return Tail(cache, self.blocks, packed_lens, self.format, self.num_tokens)

    def offset(self, seq_lens: torch.Tensor, starts: torch.Tensor) -> KeyOffset | None:
        return None if self.table is None else KeyOffset(self.table, seq_lens, starts)

    def step(
        self,
        query_lens: list[int],
        path: str = "torch",
        skipped: list[int] | None = None,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        lengths: list[int] | None = None,
    ) -> list[int]:
        """Store tokens after those that the sequences have.

        All bytes and lengths are compared to the reference's.

        Args:
            query_lens: Number of new tokens of each sequence.
            path: The key of ``PATHS`` that stores.
            skipped: The step's tokens that have slot -1.
            key: K, (T, H, D); None for random numbers.
            value: V, likewise.
            lengths: Lengths of the sequences after the step; None: the old lengths
                plus the new tokens.

        Returns:
            Number of tokens of each sequence's tail that count.

        """
        self.num_steps += 1
        num_tokens = sum(query_lens)
        shape = (num_tokens + 2, NUM_KV_HEADS, self.layout.head_size)
        seed = 10 * self.num_steps
        if key is None:
            key = gaussian(*shape, dtype=self.dtype, seed=seed + 1)
        if value is None:
            value = gaussian(*shape, dtype=self.dtype, seed=seed + 2)
        slots, first = [], 0
        for row, count in enumerate(query_lens):
            ends = self.lengths[row], self.lengths[row] + count
            slots.append(slots_of(self.block_table[row], *ends, self.block_size))
            self.keys[row][slice(*ends)] = key[first : first + count]
            self.values[row][slice(*ends)] = value[first : first + count]
            self.lengths[row] = ends[1]
            first += count
        slot_mapping = torch.cat(slots)
        slot_mapping[skipped or []] = -1
        self.lengths = lengths or self.lengths
        seq_lens = self.ints(self.lengths)
        starts = torch.nn.functional.pad(self.ints(query_lens).cumsum(0), (1, 0)).int()
        self.query_start_loc = starts
        expected = self.cache.clone(memory_format=torch.preserve_format)
        found = []
        for name, cache in (("torch", expected), (path, self.cache)):
            self.last_tail = tail = self.tail(cache)
            call = StoreCall(
                cache,
                slot_mapping,
                key,
                value,
                self.layout,
                key_offset=self.offset(seq_lens, starts),
                tail=TailUpdate(tail, self.block_table, seq_lens, starts),
            )
            PATHS[name][0](call)
            found.append(tail.packed_lens.tolist())
        assert torch.equal(self.cache, expected)
        assert found[0] == found[1]
        assert found[0][-1] == -7
        return [a - b for a, b in zip(self.lengths, found[0])]

    def rows(self, row: int) -> list[torch.Tensor]:
        """The planes of a sequence's page."""
        return planes(self.cache[int(self.blocks[row])], self.format)

    def tail_rows(self, row: int, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """K without its offset, and V, of a sequence's rows in the tail."""
        positions = torch.arange(first, last, device=DEVICE)
        return load_tail(self.tail(), row, positions)

    def overwrite(self, row: int, position: int) -> None:
        """Store another token at a position without an update of the tail."""
        slots = slots_of(self.block_table[row], position, position + 1, self.block_size)
        x = gaussian(1, NUM_KV_HEADS, self.layout.head_size, dtype=BF16, seed=99)
        reference.store(StoreCall(self.cache, slots, x, x, self.layout))


def small(name: str = "turbo4", head_size: int = 64) -> TurboFormat:
    return TurboFormat.from_cache_dtype(name, head_size)


def error_bound(x: torch.Tensor) -> torch.Tensor:
    """The bound of a coordinate's error: half a step of a scale rounded to bf16."""
    largest = x.float().abs().unflatten(-1, (-1, SCALE_GROUP)).amax(-1, keepdim=True)
    step = largest / MAX_CODE * (1 + 2**-8)
    return (step * 0.501).expand(*step.shape[:-1], SCALE_GROUP).flatten(-2)


@all_presets
@all_head_sizes
@pytest.mark.parametrize("block_size", [16, 32, 48, 528])
def test_planes_of_a_page(name, head_size, block_size):
    """Planes fit the page and do not overlap; one more row would not fit."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    tail_format = TailFormat(layout, block_size)
    rows, widths = tail_format.num_rows, tail_format.row_widths
    assert 4 <= rows <= MAX_ROWS
    offsets = (*tail_format.plane_offsets, tail_format.page_bytes)
    assert not any(offset % 16 for offset in offsets)
    for width, offset, end in zip(widths, offsets, offsets[1:]):
        assert offset + rows * width <= end
    if rows < MAX_ROWS:
        padded = sum(-(-(rows + 1) * width // 16) * 16 for width in widths[:-1])
        assert padded + (rows + 1) * widths[-1] > tail_format.page_bytes
    page = torch.zeros(2, block_size, layout.slot_size, dtype=torch.uint8)
    views = planes(page, tail_format)
    for index, view in enumerate(views):
        assert view.shape[:2] == (2, rows)
        view.view(torch.uint8).fill_(index + 1)
    for index, width in enumerate(widths):
        count = (page.flatten(1) == index + 1).sum(1)
        assert count.tolist() == [rows * width] * 2


def test_rows_are_near_what_they_are_of():
    """Rows are at most half a step off, for any magnitude."""
    x = vectors((40, 2, 64), torch.float32, seed=3)
    # Smaller numbers would have a scale that is subnormal in bf16.
    x = torch.where(x.abs() < 2.0**-110, 0, x)
    codes, scales = quantize_rows(x)
    found = dequantize_rows(codes, scales)
    assert found.isfinite().all()
    finite = x.unflatten(-1, (-1, SCALE_GROUP)).isfinite().all(-1, keepdim=True)
    finite = finite.expand(-1, -1, -1, SCALE_GROUP).flatten(-2)
    assert ((found - x).abs() <= error_bound(x))[finite].all()
    # All codes are used, so that no finer steps meet the bound.
    assert codes.min() == -MAX_CODE and codes.max() == MAX_CODE
    # NaN counts as zero, and its neighbours do not change.
    broken = torch.where(x[4].isnan(), 0, x[4])
    assert torch.equal(found[4], dequantize_rows(*quantize_rows(broken)))


STORED = [("turbo4", 64, BF16), ("turbo3", 64, FP16), ("turbo4", 80, FP16)]
STORED += [("turbo3", 80, BF16), ("turbo3", 96, FP16), ("turbo3", 112, BF16)]
STORED += [("turbo4", 128, BF16), ("turbo3", 128, FP16), ("k4v3", 192, BF16)]
STORED += [("turbo3", 256, BF16), ("turbo4", 512, FP16)]


@all_paths
@pytest.mark.parametrize(
    "name, head_size, dtype", STORED, ids=[f"{name}-{size}" for name, size, _ in STORED]
)
def test_rows_hold_the_newest_tokens(name, head_size, dtype, path):
    """Rows hold the newest tokens of a prefill with more tokens than rows."""
    scene = Scene(small(name, head_size), num_seqs=2, dtype=dtype)
    rows = scene.format.num_rows
    shape = (2 * rows + 13, NUM_KV_HEADS, head_size)
    key = vectors(shape, dtype, seed=1)
    value = vectors(shape, dtype, seed=2).flip(0)
    lengths = [rows + 11, rows - 2]
    assert scene.step(lengths, path, key=key, value=value) == [0, 0]
    for row, length in enumerate(lengths):
        first = max(length - rows, 0)
        found = scene.tail_rows(row, first, length)
        for x, known in zip(found, (scene.keys[row], scene.values[row])):
            known = known[first:length].float()
            near = (x - known).abs() <= error_bound(known) + 2.0**-110
            whole = known.unflatten(-1, (-1, SCALE_GROUP)).isfinite().all(-1)
            assert near.unflatten(-1, (-1, SCALE_GROUP)).all(-1)[whole].all()
        places = scene.rows(row)[5][:, torch.arange(first, length) % rows]
        assert (places == torch.arange(first, length, device=DEVICE) + 1).all()


@all_paths
@packings
@pytest.mark.parametrize("num_tokens", [0, 3, MAX_ROWS - 1])
def test_a_token_a_step(name, num_tokens, path):
    """All rows count, except the row that the step's own token takes."""
    scene = Scene(small(name), num_tokens=num_tokens)
    rows = scene.format.num_rows
    for context in range(2 * rows + 3):
        assert scene.step([1], path) == [min(num_tokens, rows - 1, context)]


@all_paths
@packings
def test_prefill_in_chunks(name, path):
    """Chunks have fewer or more tokens than rows; the next one has the rows left."""
    scene = Scene(small(name), num_seqs=3, num_tokens=4, block_size=32)
    rows = scene.format.num_rows
    assert rows >= 9
    assert scene.step([3, rows + 9, rows], path) == [0, 0, 0]
    assert scene.step([2, rows - 3, rows - 1], path) == [3, 3, 1]
    assert scene.step([1, rows, rows + 1], path) == [4, 0, 0]
    assert scene.step([1, 2, 1], path) == [4, 4, 4]


@all_paths
def test_drafts_that_are_rejected(path):
    """Rows of rejected drafts do not count, nor do rows that drafts took."""
    scene = Scene(small())
    rows = scene.format.num_rows
    scene.step([20], path)
    assert scene.step([3], path) == [rows - 3]
    # Two of the three are rejected, and other tokens take their places.
    scene.lengths = [21]
    assert scene.step([3], path) == [rows - 3]
    # All but one are rejected, and the other rows are theirs.
    scene.lengths = [22]
    assert scene.step([1], path) == [rows - 2]
    assert scene.step([1], path) == [rows - 1]
    key, value = scene.tail_rows(0, 20, 22)
    for x, known in ((key, scene.keys[0]), (value, scene.values[0])):
        known = known[20:22].float()
        assert ((x - known).abs() <= error_bound(known)).all()


@all_paths
@packings
def test_page_of_another_request(name, path):
    """Another request's page has the right positions by chance, but other keys."""
    scene = Scene(small(name), num_seqs=2)
    rows = scene.format.num_rows
    own = scene.blocks[1].item()
    scene.blocks[1] = 0
    assert scene.step([20, 20], path) == [0, 0]
    # The request that had the page has none from now on.
    scene.blocks[:] = scene.ints([own, scene.blocks[0]])
    assert torch.equal(
        scene.rows(1)[5].sort().values[0].cpu(), torch.arange(20 - rows, 20).int() + 1
    )
    assert scene.step([1, 1], path) == [0, 0]
    assert scene.step([1, 1], path) == [1, 1]


@all_paths
@packings
@pytest.mark.parametrize("age", [1, 3])
def test_token_that_another_stores(name, age, path):
    """Rows after a foreign token count; older rows do not, even if they are right."""
    scene = Scene(small(name))
    scene.step([20], path)
    scene.overwrite(0, 20 - age)
    assert scene.step([1], path) == [age - 1]


@all_paths
@packings
@pytest.mark.parametrize("head", range(NUM_KV_HEADS))
def test_every_byte_of_the_codes_of_every_head_counts(name, head, path):
    """The first and last bytes of both planes count, in the cache and in the tag, and
    so does the position.
    """
    layout = small(name, 80)
    scene = Scene(layout)
    rows, num_bytes = scene.format.num_rows, layout.key_code_bytes
    scene.step([40], path)
    before = scene.cache.clone()
    branches = num_bytes if layout.key_bits == 4 else layout.head_size // 4
    tag, places = scene.rows(0)[4:]
    addresses = reference.tile_addresses(layout)[0]
    page = scene.cache[int(scene.block_table[0, 37 // 16]), head].view(-1)
    for byte in sorted({0, branches - 1, branches % num_bytes, num_bytes - 1}):
        for changed in (
            tag[head, 37 % rows, byte : byte + 1],
            page[addresses[37 % 16, byte]].view(1),
            places[head, 37 % rows].view(1).view(torch.uint8)[:1],
        ):
            changed ^= 16
            scene.lengths = [40]
            assert scene.step([1], path) == [2]
            scene.cache.copy_(before)
    # A byte that is not a code does not count.
    page[addresses[37 % 16, num_bytes]] ^= 1
    scene.lengths = [40]
    assert scene.step([1], path) == [min(rows - 1, 40)]


@all_paths
def test_padding_writes_nothing(path):
    """Sequences without a page or tokens, or shorter than a query, write nothing."""
    scene = Scene(small(), num_seqs=5)
    scene.blocks[0] = 0
    scene.step([20, 20, 20, 0, 0], path)
    assert (scene.cache[0] == 0xFF).all()
    pages = scene.cache[scene.blocks.long()].clone()
    # The third is padding. The fourth has the last of two tokens, which has slot -1.
    skipped = [1, 2, 3, 4, 5]
    found = scene.step([1, 0, 1, 2, 2], path, skipped, lengths=[21, 20, 0, 1, -1])
    rows = scene.format.num_rows
    assert found == [0, min(rows, 20), 0, 0, 0]
    assert torch.equal(scene.cache[scene.blocks.long()], pages)
    assert (scene.cache[0] == 0xFF).all()


@all_paths
@pytest.mark.parametrize("cache_layout", CACHE_LAYOUTS, ids=lambda x: x.name)
def test_strides_and_pages_of_blocks(cache_layout, path):
    """Pages with any order of layers, blocks and heads; keys are views also."""
    scene = Scene(
        small("turbo3", 80), 2, 5, 48, max_blocks=2, cache_layout=cache_layout
    )
    qkv = gaussian(70, 3 * NUM_KV_HEADS, 80, dtype=BF16)
    _, key, value = qkv.split(NUM_KV_HEADS, 1)
    assert scene.step([50, 7], path, key=key, value=value) == [0, 0]
    assert scene.step([2, 1], path, key=key, value=value) == [5, 5]
    # Bytes of other layers lie between.
    buffer = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    buffer.set_(scene.cache.untyped_storage())
    assert (buffer != 0xFF).any()
    scene.cache.fill_(0xFF)
    assert (buffer == 0xFF).all()


@all_paths
def test_tokens_that_are_not_stored(path):
    """Tokens that are not stored have no row: old content stays and does not count."""
    scene = Scene(small())
    rows = scene.format.num_rows
    scene.step([20], path)
    before = [plane[:, 20 % rows].clone() for plane in scene.rows(0)]
    assert scene.step([3], path, skipped=[0]) == [rows - 3]
    for plane, known in zip(scene.rows(0), before):
        assert torch.equal(plane[:, 20 % rows], known)
    assert scene.step([1], path) == [2]


@all_paths
def test_rows_of_tokens_that_are_not_stored(path):
    """Rows of tokens that are not stored keep their content, and no older token of the
    step takes them.
    """
    scene = Scene(small())
    rows = scene.format.num_rows
    scene.step([20], path)
    before = [plane.clone() for plane in scene.rows(0)]
    assert scene.step([3], path, skipped=[0, 1, 2]) == [rows - 3]
    assert all(map(torch.equal, scene.rows(0), before))
    assert scene.step([rows + 3], path, skipped=[rows + 2]) == [0]
    place = (scene.lengths[0] - 1) % rows
    for plane, known in zip(scene.rows(0), before):
        assert torch.equal(plane[:, place], known[:, place])


def make_offset(num_segments: int, head_size: int) -> torch.Tensor:
    """An offset, (G, H, D) fp32, larger than the keys and different by segment."""
    return 5 * gaussian(num_segments, NUM_KV_HEADS, head_size, seed=17)


@all_paths
@packings
@pytest.mark.parametrize("num_segments", [1, 2, 3])
def test_offset_of_keys(name, num_segments, path):
    """Rows hold keys without the offset of their segment, or of the last segment."""
    table = make_offset(num_segments, 64)
    blocks = SEGMENT // 32 + 1
    scene = Scene(small(name), block_size=32, max_blocks=blocks, table=table)
    scene.lengths = [SEGMENT - 2]
    assert scene.step([5], path) == [0]
    assert scene.step([1], path) == [5]
    first, last = SEGMENT - 2, SEGMENT + 3
    own = [0] * 2 + [min(1, num_segments - 1)] * 3
    known = scene.keys[0][first:last].float() - table[own]
    found, _ = scene.tail_rows(0, first, last)
    assert ((found - known).abs() <= error_bound(known)).all()


def raw_tokens(scene: Scene, query_lens: list[int]) -> RawTokens:
    """The sequences' last tokens, as views of one tensor; padding is NaN."""
    num_tokens, head_size = sum(query_lens), scene.layout.head_size
    sizes = [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
    qkv = gaussian(num_tokens, sum(sizes), head_size, dtype=scene.dtype, seed=5)
    query, key, value = qkv.split(sizes, 1)
    first = 0
    for row, (count, length) in enumerate(zip(query_lens, scene.lengths)):
        last = first + count
        if length == 0:
            qkv[first:last] = math.nan
        elif count > 0:
            key[first:last] = scene.keys[row][length - count : length]
            value[first:last] = scene.values[row][length - count : length]
        first = last
    return RawTokens(query, key, value, head_size**-0.5)


def attend(
    scene: Scene,
    query_lens: list[int],
    raw: RawTokens,
    path: str,
    num_splits: int = 2,
    dtype: torch.dtype | None = None,
    **options,
) -> torch.Tensor:
    """The output of the last step's queries, (T, Hq, D), with NaN in scratch and output
    before. The options are those of an ``AttentionFn``.
    """
    layout, num_seqs, query_len = scene.layout, len(query_lens), max(query_lens)
    shape = (num_seqs * num_splits * query_len, NUM_HEADS, layout.head_size)
    partial = torch.full(shape, math.nan, device=DEVICE)
    output = torch.full_like(raw.query, math.nan, dtype=dtype)
    offset = None
    if scene.table is not None:
        offset = OffsetScores(raw.query, scene.table, raw.scale)
    is_uniform = len(set(query_lens)) == 1
    PATHS[path][1](
        rotate_query(raw.query, layout),
        scene.cache,
        layout,
        DecodeBatch(
            num_seqs,
            scene.block_table,
            scene.ints(scene.lengths),
            query_len,
            None if is_uniform else scene.query_start_loc,
        ),
        Partials(partial, partial[:, :, 0].clone()),
        output,
        raw,
        offset,
        scene.last_tail,
        **options,
    )
    return output


def seen_tokens(
    scene: Scene, row: int, raw: RawTokens, tokens: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, (T, H, D) fp32, that a sequence's queries should attend to."""
    first_raw = scene.lengths[row] - (tokens.stop - tokens.start)
    num_tail = scene.lengths[row] - int(scene.last_tail.packed_lens[row])
    num_packed = first_raw - num_tail
    parts = [
        load_context(scene.cache, scene.block_table[row], num_packed, scene.layout)
    ]
    if num_tail > 0:
        parts.append(scene.tail_rows(row, num_packed, first_raw))
    keys, values = (torch.cat(side) for side in zip(*parts))
    if scene.table is not None:
        segments = torch.arange(first_raw, device=DEVICE) // SEGMENT
        keys = keys + scene.table[segments.clamp(max=len(scene.table) - 1)]
    keys = torch.cat([keys, raw.key[tokens].float()])
    return keys, torch.cat([values, raw.value[tokens].float()])


def visible_blocks(
    scene: Scene, query_lens: list[int], options: dict[str, Any]
) -> torch.Tensor:
    """The block table, with invalid blocks before a sliding window."""
    table = scene.block_table.clone()
    window = options.get("sliding_window") or math.inf
    for row, (count, length) in enumerate(zip(query_lens, scene.lengths)):
        hidden = max(length - count + 1 - window, 0) // scene.block_size
        table[row, : int(hidden)] = INVALID_BLOCK
    return table


def check_attention(
    scene: Scene, query_lens: list[int], path: str, num_splits: int = 2, **options
) -> None:
    """Compare the attention of the last step's queries by the 2x rule.

    The options are those of both ``reference.attention`` and an ``AttentionFn``.
    """
    raw = raw_tokens(scene, query_lens)
    if scene.table is not None:
        # Scores of some hundreds leave the softmax one token.
        raw.query.mul_(0.1)
    seen = scene.block_table
    scene.block_table = visible_blocks(scene, query_lens, options)
    output = attend(scene, query_lens, raw, path, num_splits, **options)
    scene.block_table = seen
    first = 0
    for row, count in enumerate(query_lens):
        tokens = slice(first, first + count)
        first += count
        if scene.lengths[row] == 0:
            assert (output[tokens] == 0).all()
        elif count > 0:
            keys, values = seen_tokens(scene, row, raw, tokens)
            where = output[tokens], raw.query[tokens], keys, values
            assert_by_2x_rule(*where, raw.scale, scene.dtype, **options)


ATTENDED = [("turbo4", 64), ("turbo3", 64), ("turbo4", 80), ("turbo3", 128)]


@all_paths
@pytest.mark.parametrize("name, head_size", ATTENDED)
@pytest.mark.parametrize("num_tokens", [0, 5, MAX_ROWS - 1])
def test_decoding(name, head_size, num_tokens, path):
    """Contexts are longer or shorter than the tail; one request has no page."""
    scene = Scene(small(name, head_size), 4, num_tokens, dtype=FP16)
    rows = scene.format.num_rows
    scene.blocks[3] = 0
    contexts = [40, rows - 2, 1, 9]
    scene.step(contexts)
    counts = [min(num_tokens, rows - 1, context) for context in contexts[:3]]
    assert scene.step([1] * 4) == [*counts, 0]
    check_attention(scene, [1] * 4, path)


QUERIES = {
    "three each": ([30, 2, 17], [3, 3, 3]),
    "ragged": ([30, 17, 9, 20], [3, 1, 0, 2]),
    "padded": ([20, 0, 0], [2, 2, 2]),
}


@all_paths
@packings
@pytest.mark.parametrize("contexts, query_lens", QUERIES.values(), ids=QUERIES)
def test_several_query_tokens(name, contexts, query_lens, path):
    """Each query token sees all of the tail, which their number does not shift."""
    scene = Scene(small(name), len(contexts), num_tokens=4, block_size=32)
    scene.step(contexts)
    padding = [row for row, context in enumerate(contexts) if context == 0]
    scene.blocks[padding] = 0
    lengths = [
        context + count if context else 0
        for context, count in zip(contexts, query_lens)
    ]
    counts = [min(4, context) for context in contexts]
    assert scene.step(query_lens, lengths=lengths) == counts
    check_attention(scene, query_lens, path, num_splits=1)


@all_paths
@packings
@pytest.mark.parametrize("with_offset", [False, True], ids=["", "offset"])
def test_tail_of_the_whole_context(name, with_offset, path):
    """No token is packed, so that the output is exact up to roundings to fp32. Kernels
    take several steps for the longest context.
    """
    table = make_offset(1, 128) if with_offset else None
    scene = Scene(small(name, 128), 3, block_size=48, max_blocks=1, table=table)
    contexts = [11, 1, 5]
    scene.step(contexts)
    assert scene.step([2] * 3) == contexts
    raw = raw_tokens(scene, [2] * 3)
    output = attend(scene, [2] * 3, raw, path, dtype=torch.float32)
    for row in range(3):
        tokens = slice(2 * row, 2 * row + 2)
        keys, values = seen_tokens(scene, row, raw, tokens)
        query = raw.query[tokens].double()
        expected, _ = reference.attention(
            query, keys.double(), values.double(), raw.scale
        )
        error = (output[tokens] - expected).abs().max().item()
        assert error <= 2**-16 * values.abs().max().item()


@all_paths
@packings
@pytest.mark.parametrize("num_segments", [1, 2])
def test_offset_in_scores(name, num_segments, path):
    """A tail begins in one segment of the offset and ends in the next."""
    table = make_offset(num_segments, 64)
    blocks = SEGMENT // 32 + 1
    scene = Scene(small(name), 1, 6, 32, blocks, dtype=FP16, table=table)
    scene.step([SEGMENT + 3])
    assert scene.step([2]) == [6]
    raw = raw_tokens(scene, [2])
    # Scores of some hundreds leave the softmax one token.
    raw.query.mul_(0.1)
    keys, values = seen_tokens(scene, 0, raw, slice(0, 2))
    output = attend(scene, [2], raw, path)
    assert_by_2x_rule(output, raw.query, keys, values, raw.scale, FP16)


@all_paths
def test_soft_cap(path):
    """The cap applies to packed tokens, the tail and the raw tokens."""
    scene = Scene(small(), 3, num_tokens=4, dtype=FP16)
    scene.step([30, 5, 1])
    assert scene.step([2] * 3) == [4, 4, 1]
    raw = raw_tokens(scene, [2] * 3)
    raw.query.mul_(4)
    output = attend(scene, [2] * 3, raw, path, logits_soft_cap=2.0)
    for row in range(3):
        tokens = slice(2 * row, 2 * row + 2)
        keys, values = seen_tokens(scene, row, raw, tokens)
        where = output[tokens], raw.query[tokens], keys, values, raw.scale, FP16
        assert_by_2x_rule(*where, logits_soft_cap=2.0)
        with pytest.raises(AssertionError, match="allowed"):
            assert_by_2x_rule(*where)


# Sliding windows with more tokens than rows, and with fewer. The short ones leave some
# queries no packed token.
SLIDING = [(40, [1] * 4), (9, [3, 1, 2, 3]), (7, [1] * 4), (5, [3] * 4)]


@all_paths
@packings
@pytest.mark.parametrize("sliding_window, query_lens", SLIDING)
def test_sliding_window(name, sliding_window, query_lens, path):
    """The tail lies in the sliding window; packed tokens before it stay."""
    scene = Scene(
        small(name), 4, block_size=32, dtype=FP16, sliding_window=sliding_window
    )
    contexts = [60, sliding_window, 6, 33]
    scene.step(contexts)
    rows = scene.format.num_rows
    assert rows <= sliding_window
    counts = [min(rows - own, context) for own, context in zip(query_lens, contexts)]
    assert scene.step(query_lens) == counts
    check_attention(scene, query_lens, path, sliding_window=sliding_window)


@all_paths
@pytest.mark.parametrize("query_lens", [[1] * 3, [2] * 3])
@pytest.mark.parametrize("feature", ["sinks", "offset", "soft cap"])
def test_features_beside_a_sliding_window(query_lens, feature, path):
    """Tails that cross a border of the offset's segments, or lie in one."""
    window, options = 24, {}
    table = make_offset(3, 64) if feature == "offset" else None
    if feature == "sinks":
        options["sinks"] = torch.tensor([-20.0, 0.0, 2.0, 20.0], device=DEVICE)
    if feature == "soft cap":
        options["logits_soft_cap"] = 2.0
    blocks = SEGMENT // 32 + 2
    scene = Scene(small(), 3, 10, 32, blocks, FP16, table=table, sliding_window=window)
    scene.step([SEGMENT + 4, SEGMENT - 3, 30])
    rows = scene.format.num_rows
    assert scene.step(query_lens) == [min(10, rows - query_lens[0])] * 3
    check_attention(scene, query_lens, path, sliding_window=window, **options)


@requires_triton
def test_triton_store_updates_the_tail():
    """Triton's entry point updates the tail after its launch, from the new bytes."""
    scene = Scene(small("turbo3"), num_seqs=2)
    scene.step([9, 4])
    store = PATHS["triton"][0]
    PATHS["entry"] = (triton_kernels().store, store)
    try:
        assert scene.step([1, 2], "entry") == [3, 2]
    finally:
        del PATHS["entry"]
