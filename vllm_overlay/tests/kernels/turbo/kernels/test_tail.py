# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tail: rows that count and their content, with CUDA's stores, Triton's and
PyTorch's. Rows and counts equal the reference's bit for bit.
"""

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.choose import triton_kernels
from vllm.v1.attention.ops.turbo.format import SCALE_GROUP, TurboFormat
from vllm.v1.attention.ops.turbo.formats.tail import MAX_CODE, MAX_ROWS, TailFormat
from vllm.v1.attention.ops.turbo.interface import StoreCall
from vllm.v1.attention.ops.turbo.reference.tail import (
    dequantize_rows,
    planes,
    quantize_rows,
)

from ..sequences import LAYOUT, LAYOUTS
from ..utils import (
    BF16,
    CACHE_LAYOUTS,
    DEVICE,
    FP16,
    PACKINGS,
    SEGMENT,
    all_head_sizes,
    all_presets,
    gaussian,
    model_dtypes,
    requires_cuda,
    requires_triton,
    slots_of,
    vectors,
)
from .store_checks import CUDA
from .tails import (
    BORDER_BLOCK_SIZE,
    CONTEXTS,
    DECODES,
    NUM_KV_HEADS,
    TRITON,
    WITHOUT_PAGE,
    GrowingSequences,
    error_bound,
    make_offset,
    small,
    stores,
    stores_and_layouts,
)

pytestmark = pytest.mark.usefixtures("short_segments")


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


# Layouts, and the dtypes of K and V.
STORED = {
    small("turbo4", 64): BF16,
    small("turbo3", 64): FP16,
    small("turbo4", 80): FP16,
    small("turbo3", 80): BF16,
    small("turbo3", 96): FP16,
    small("turbo3", 112): BF16,
    small("turbo4", 128): BF16,
    small("turbo3", 128): FP16,
    small("k4v3", 192): BF16,
    small("turbo3", 256): BF16,
    small("turbo4", 512): FP16,
    small("turbo4", 192, 128): FP16,
    small("turbo4", 64, 80): BF16,
}


@stores_and_layouts(STORED)
def test_rows_hold_the_newest_tokens(store, layout):
    """Rows hold the newest tokens of a prefill with more tokens than rows."""
    dtype = STORED[layout]
    scene = GrowingSequences(layout, num_seqs=2, dtype=dtype, store=store)
    rows = scene.format.num_rows
    shape = (2 * rows + 13, NUM_KV_HEADS, layout.head_size)
    key = vectors(shape, dtype, seed=1)
    value = vectors((*shape[:2], layout.head_size_v), dtype, seed=2).flip(0)
    lengths = [rows + 11, rows - 2]
    assert scene.step(lengths, key=key, value=value) == [0, 0]
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


@stores_and_layouts()
@pytest.mark.parametrize("num_tokens", [0, 3, MAX_ROWS - 1])
def test_a_token_a_step(store, layout, num_tokens):
    """All rows count, except the row that the step's own token takes."""
    scene = GrowingSequences(layout, num_tokens=num_tokens, store=store)
    rows = scene.format.num_rows
    for context in range(2 * rows + 3):
        assert scene.step([1]) == [min(num_tokens, rows - 1, context)]


@stores_and_layouts()
def test_prefill_in_chunks(store, layout):
    """Chunks have fewer or more tokens than rows; the next one has the rows left."""
    scene = GrowingSequences(layout, 3, num_tokens=4, block_size=32, store=store)
    rows = scene.format.num_rows
    assert rows >= 9
    assert scene.step([3, rows + 9, rows]) == [0, 0, 0]
    assert scene.step([2, rows - 3, rows - 1]) == [3, 3, 1]
    assert scene.step([1, rows, rows + 1]) == [4, 0, 0]
    assert scene.step([1, 2, 1]) == [4, 4, 4]


@stores_and_layouts([small(), small("turbo4", 80, 64)], LAYOUTS)
@model_dtypes
@pytest.mark.parametrize("with_offset", [False, True], ids=["plain", "offset"])
def test_rows_and_counts(store, layout, dtype, with_offset):
    """Decodes, drafts, ragged steps and prompts longer than the tail."""
    offset = make_offset(3, layout.head_size, 3) if with_offset else None
    scene = GrowingSequences.at_borders(
        layout, dtype=dtype, store=store, offset=offset, num_kv_heads=3
    )
    rows = scene.format.num_rows
    for query_lens in (
        DECODES,
        [3, 0, 1, 5, 2, 0, 1, 1, 4],
        [rows - 1, rows, rows + 1, 2 * rows, 1, 2, 3, 4, 5],
        [2] * len(CONTEXTS),
    ):
        counts = scene.step(query_lens)
        assert counts[WITHOUT_PAGE] == 0
    # All rows except two, which the step's tokens take.
    assert counts[3] == min(rows - 2, scene.num_tokens)


@requires_cuda
@pytest.mark.parametrize("num_kv_heads", [1, 4, 9])
@pytest.mark.parametrize("num_tokens", [0, 5, MAX_ROWS])
def test_heads_and_tokens(num_kv_heads, num_tokens):
    scene = GrowingSequences.at_borders(
        LAYOUT,
        num_tokens=num_tokens,
        store=CUDA,
        num_kv_heads=num_kv_heads,
    )
    assert max(scene.step(DECODES)) <= num_tokens


@stores
def test_drafts_that_are_rejected(store):
    """Rows of rejected drafts do not count, nor do rows that drafts took."""
    scene = GrowingSequences(small(), store=store)
    rows = scene.format.num_rows
    scene.step([20])
    assert scene.step([3]) == [rows - 3]
    # Two of the three are rejected, and other tokens take their places.
    scene.lengths = [21]
    assert scene.step([3]) == [rows - 3]
    # All but one are rejected, and the other rows are theirs.
    scene.lengths = [22]
    assert scene.step([1]) == [rows - 2]
    assert scene.step([1]) == [rows - 1]
    key, value = scene.tail_rows(0, 20, 22)
    for x, known in ((key, scene.keys[0]), (value, scene.values[0])):
        known = known[20:22].float()
        assert ((x - known).abs() <= error_bound(known)).all()


@stores_and_layouts()
def test_page_of_another_request(store, layout):
    """Another request's page has the right positions by chance, but other keys."""
    scene = GrowingSequences(layout, num_seqs=2, store=store)
    rows = scene.format.num_rows
    own = scene.blocks[1].item()
    scene.blocks[1] = 0
    assert scene.step([20, 20]) == [0, 0]
    # The request that had the page has none from now on.
    scene.blocks[1], scene.blocks[0] = scene.blocks[0].item(), own
    assert torch.equal(
        scene.rows(1)[5].sort().values[0].cpu(), torch.arange(20 - rows, 20).int() + 1
    )
    assert scene.step([1, 1]) == [0, 0]
    assert scene.step([1, 1]) == [1, 1]


@stores_and_layouts()
@pytest.mark.parametrize("age", [1, 3])
def test_token_that_another_stores(store, layout, age):
    """Rows after a foreign token count; older rows do not, even if they are right."""
    scene = GrowingSequences(layout, store=store)
    scene.step([20])
    slots = slots_of(scene.block_table[0], 20 - age, 21 - age, scene.block_size)
    x = gaussian(1, NUM_KV_HEADS, layout.head_size, dtype=BF16, seed=99)
    reference.store(StoreCall(scene.cache, slots, x, x, layout))
    assert scene.step([1]) == [age - 1]


@stores_and_layouts([small(name, 80) for name in PACKINGS], LAYOUTS)
@pytest.mark.parametrize("head", range(NUM_KV_HEADS))
def test_every_byte_of_the_codes_of_every_head_counts(store, layout, head):
    """The first and last bytes of both planes count, in the cache and in the tag, and
    so does the position. Another sequence's rows still count.
    """
    scene, num_bytes = GrowingSequences(layout, 2, store=store), layout.key_code_bytes
    rows = scene.format.num_rows
    scene.step([40, 40])
    before = scene.cache.clone()
    branches = num_bytes if layout.key_bits == 4 else layout.head_size // 4
    tag, places = scene.rows(1)[4:]
    addresses = reference.tile_addresses(layout)[0]
    page = scene.cache[int(scene.block_table[1, 37 // 16]), head].view(-1)
    for byte in sorted({0, branches - 1, branches % num_bytes, num_bytes - 1}):
        for changed in (
            tag[head, 37 % rows, byte : byte + 1],
            page[addresses[37 % 16, byte]].view(1),
            places[head, 37 % rows].view(1).view(torch.uint8)[:1],
        ):
            changed ^= 16
            scene.lengths = [40, 40]
            assert scene.step([1, 1]) == [rows - 1, 2]
            scene.cache.copy_(before)
    # A byte that is not a code does not count.
    page[addresses[37 % 16, num_bytes]] ^= 1
    scene.lengths = [40, 40]
    assert scene.step([1, 1]) == [min(rows - 1, 40)] * 2


@stores
def test_a_prefix_that_is_found_while_it_is_computed(store):
    """Rows of a tail are compared to bytes of this step, not to those before."""
    scene = GrowingSequences.at_borders(LAYOUT, store=store)
    # Sequence 8 continues in a block of sequence 3, at the same positions, which the
    # step writes. The rows of its page hold the bytes from before.
    first = CONTEXTS[8] // BORDER_BLOCK_SIZE
    scene.lengths[3] = first * BORDER_BLOCK_SIZE
    scene.block_table[3, first] = scene.block_table[8, first]
    own = CONTEXTS[8] - scene.lengths[3]
    assert scene.step([0, 0, 0, own, 0, 0, 0, 0, 1])[8] == 0


@requires_cuda
def test_no_row_counts_beside_tokens_that_another_stores():
    """A launch cannot tell whether it reads a block before or after another sequence's
    store in it, so no row counts. The reference stores first, and counts them.
    """
    scene = GrowingSequences.at_borders(LAYOUT, store=CUDA)
    # Sequence 3 continues in the last block of sequence 8, after that one's tokens.
    first = CONTEXTS[8] // BORDER_BLOCK_SIZE
    scene.block_table[3, first] = scene.block_table[8, first]
    scene.lengths[3] = CONTEXTS[8] + 2
    scene.advance([0, 0, 0, 1, 0, 0, 0, 0, 1])
    own, other = (tail.packed_lens[8].item() for tail in scene.tails)
    length = scene.lengths[8]
    assert (own, other) == (length, length - (scene.format.num_rows - 1))


@stores
def test_padding_writes_nothing(store):
    """Sequences without a page or tokens, or shorter than a query, write nothing."""
    scene = GrowingSequences(small(), num_seqs=5, store=store)
    scene.blocks[0] = 0
    scene.step([20, 20, 20, 0, 0])
    assert (scene.cache[0] == 0xFF).all()
    pages = scene.cache[scene.blocks.long()].clone()
    # The third is padding. The fourth has the last of two tokens, which has slot -1.
    found = scene.step([1, 0, 1, 2, 2], range(1, 6), lengths=[21, 20, 0, 1, -1])
    rows = scene.format.num_rows
    assert found == [0, min(rows, 20), 0, 0, 0]
    assert torch.equal(scene.cache[scene.blocks.long()], pages)
    assert (scene.cache[0] == 0xFF).all()


@stores
@pytest.mark.parametrize("cache_layout", CACHE_LAYOUTS, ids=lambda x: x.name)
def test_strides_and_pages_of_blocks(store, cache_layout):
    """Pages with any order of layers, blocks and heads; keys are views also."""
    layout = small("turbo3", 64 if store is CUDA else 80)
    scene = GrowingSequences(
        layout, 2, 5, 48, max_blocks=2, store=store, cache_layout=cache_layout
    )
    assert scene.step([50, 7]) == [0, 0]
    assert scene.step([2, 1]) == [5, 5]
    # Bytes of other layers lie between.
    buffer = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    buffer.set_(scene.cache.untyped_storage())
    assert (buffer != 0xFF).any()
    scene.cache.fill_(0xFF)
    assert (buffer == 0xFF).all()


@stores
def test_tokens_that_are_not_stored(store):
    """Tokens that are not stored have no row: old content stays and does not count."""
    scene = GrowingSequences(small(), num_seqs=3, store=store)
    rows = scene.format.num_rows
    scene.step([20] * 3)
    before = [plane[:, 20 % rows].clone() for plane in scene.rows(0)]
    # The first token of one sequence, and the last of another.
    assert scene.step([3] * 3, skipped=[0, 5]) == [rows - 3] * 3
    for plane, known in zip(scene.rows(0), before):
        assert torch.equal(plane[:, 20 % rows], known)
    assert scene.step([1] * 3) == [2, 0, rows - 1]


@stores
def test_rows_of_tokens_that_are_not_stored(store):
    """Rows of tokens that are not stored keep their content, and no older token of the
    step takes them.
    """
    scene = GrowingSequences(small(), store=store)
    rows = scene.format.num_rows
    scene.step([20])
    before = [plane.clone() for plane in scene.rows(0)]
    assert scene.step([3], skipped=[0, 1, 2]) == [rows - 3]
    assert all(map(torch.equal, scene.rows(0), before))
    assert scene.step([rows + 3], skipped=[rows + 2]) == [0]
    place = (scene.lengths[0] - 1) % rows
    for plane, known in zip(scene.rows(0), before):
        assert torch.equal(plane[:, place], known[:, place])


@stores_and_layouts()
@pytest.mark.parametrize("num_offsets", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [0, SEGMENT - 2])
def test_offset_of_keys(store, layout, first, num_offsets):
    """Rows hold keys without the offset of their place, or without the last one."""
    table, blocks = make_offset(num_offsets, 64), SEGMENT // 32 + 1
    scene = GrowingSequences(
        layout, block_size=32, max_blocks=blocks, store=store, offset=table
    )
    scene.lengths = [first]
    assert scene.step([5]) == [0]
    assert scene.step([1]) == [5]
    own = [0, 1, 1, 1, 1] if first == 0 else [1, 1, 2, 2, 2]
    own = [min(row, num_offsets - 1) for row in own]
    known = scene.keys[0][first : first + 5].float() - table[own]
    found, _ = scene.tail_rows(0, first, first + 5)
    assert ((found - known).abs() <= error_bound(known)).all()


@requires_triton
def test_triton_store_updates_the_tail():
    """Triton's entry point updates the tail after its launch, from the new bytes."""
    scene = GrowingSequences(small("turbo3"), num_seqs=2)
    scene.step([9, 4])
    scene.store = TRITON._replace(launch=triton_kernels().store)
    assert scene.step([1, 2]) == [3, 2]
