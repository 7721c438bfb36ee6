# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA kernels in a row, as in serving, with inputs that could overflow."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import (
    SCALE_CODE_MAX,
    TILE_TOKENS,
    TURBO_PRESETS,
    TurboFormat,
)
from vllm.v1.attention.ops.turbo.reference.bytes import unpack_scales

from ..attention_utils import assert_within
from ..cuda_steps import (
    BLOCK_SIZE,
    NUM_KV_HEADS,
    Scratch,
    Step,
    assert_close_in_rotated_space,
    check_row,
    fill,
    normal,
    random_sequences,
    rotated_attention,
    rows_of,
    served_splits,
    stored,
)
from ..sequences import decode_layouts
from ..utils import (
    BF16,
    DEVICE,
    INVALID_BLOCK,
    requires_cuda,
    requires_nvidia,
    slots_of,
)

pytestmark = requires_cuda

GIB = 2**30
# One layout of each preset, for tests that do not depend on the head size.
PRESETS = [TurboFormat.from_cache_dtype(name, 128) for name in TURBO_PRESETS]
each_preset = pytest.mark.parametrize("layout", PRESETS, ids=list(TURBO_PRESETS))
# A ragged batch: one sequence is most of it, others have a tile, a warp's two tiles, a
# page, or no token.
RAGGED = [200_000, 1, 17, 0, 70_001, 32, 3, 131_071, 4096, 16, 1000, 0, 33, 2, 25_600]


def check_all(
    cache: torch.Tensor,
    step: Step,
    layout: TurboFormat,
    seq_lens: list[int],
    num_splits: int,
) -> None:
    """Compare each sequence's output, in fp32, to attention in rotated space."""
    output = step.output(cache, layout, num_splits, dtype=torch.float32)
    for row, length in enumerate(seq_lens):
        where = cache, step.block_table[row], length, layout
        scores, values, expected = rotated_attention(step.query[row], *where)
        magnitude = (scores.softmax(-1)[:, None] @ values.abs())[:, 0]
        assert_close_in_rotated_space(output[row], expected, magnitude)


@decode_layouts
@pytest.mark.parametrize("group", [4, 8, 16])
def test_lengths_of_1_to_200000_in_a_batch(layout, group):
    cache, step = random_sequences(layout, RAGGED, group)
    output = step.output(cache, layout, served_splits(len(RAGGED)))
    for row, length in enumerate(RAGGED):
        if length == 0:
            assert (output[row] == 0).all()
            continue
        check_row(
            output[row], step.query[row], cache, step.block_table[row], length, layout
        )


@each_preset
@pytest.mark.parametrize("num_splits", [1, 3, None], ids=["1", "3", "served"])
def test_fifty_runs_give_the_same_bits(layout, num_splits):
    """Scratch changes no bit of outputs. With 3 splits teams of warps share a range."""
    seq_lens = [20_000, 1, 0, 3000, 17, 64, 511] * 5
    cache, step = random_sequences(layout, seq_lens)
    num_splits = num_splits or served_splits(len(seq_lens))
    expected = step.output(cache, layout, num_splits)
    assert expected.isfinite().all()
    scratch = Scratch.of(step.query, num_splits)
    for run in range(50):
        for x in scratch:
            x.fill_(math.nan if run % 2 else run)
        assert torch.equal(step.run(cache, layout, scratch), expected)


@decode_layouts
def test_one_split_gives_the_same_bits_in_any_batch(layout):
    seq_lens = [9000, 1, 0, 31, 3000, 17, 64, 511]
    cache, step = random_sequences(layout, seq_lens)
    parts = [rows_of(step, [row]) for row in range(len(seq_lens))]
    alone = torch.cat([part.output(cache, layout, 1) for part in parts])
    everyone = list(range(len(seq_lens)))
    for rows in ([3, 0], [4, 2, 2, 5], everyone, everyone[::-1] * 40, [5] * 300):
        output = rows_of(step, rows).output(cache, layout, 1)
        assert torch.equal(output, alone[rows])


@decode_layouts
def test_padding(layout):
    """Padding gives zeros for any q, K, V and block table, and others do not change."""
    seq_lens = [0, 5, 0, 0, 1700, 40, 0]
    cache, step = random_sequences(layout, seq_lens)
    expected = rows_of(step, [1, 4, 5]).output(cache, layout, 4)
    step.block_table[step.seq_lens == 0] = INVALID_BLOCK
    for x in (step.query, step.key, step.value):
        x[step.seq_lens == 0] = math.nan
    for with_raw in (False, True):
        output = step.output(cache, layout, 4, with_raw)
        assert (output[[0, 2, 3, 6]] == 0).all()
        assert output.isfinite().all()
    output = step.output(cache, layout, 4)
    assert torch.equal(output[[1, 4, 5]], expected)


@each_preset
def test_nothing_but_padding(layout):
    cache, step = random_sequences(layout, [0] * 40)
    for num_splits in (1, 7, 64):
        for with_raw in (False, True):
            assert (step.output(cache, layout, num_splits, with_raw) == 0).all()
    assert rows_of(step, []).output(cache, layout, 1).shape[0] == 0


@each_preset
def test_pages_beyond_4_gib(layout):
    """The step's tokens are stored and attended to at offsets that no int32 holds.

    The sequences have the last pages of a cache, its first page, and the first page
    beyond 2**31 bytes.
    """
    seq_lens = [700, 0, 33, 1, 2000]
    used = sum(math.ceil(length / BLOCK_SIZE) for length in seq_lens)
    small, step = random_sequences(layout, seq_lens)
    page_bytes = small[0].numel()
    num_blocks = 4 * GIB // page_bytes + 2 * used
    cache = torch.empty(num_blocks, *small.shape[1:], dtype=torch.uint8, device=DEVICE)
    places = torch.arange(num_blocks - small.shape[0], num_blocks, device=DEVICE)
    assert places[0] * page_bytes > 4 * GIB
    first, second = step.block_table[0, :2].tolist()
    places[first], places[second] = 2 * GIB // page_bytes + 1, 0
    cache[places] = small
    table = step.block_table.clone()
    is_block = table != INVALID_BLOCK
    table[is_block] = places[table[is_block].long()].int()
    # The last token of each sequence is stored anew in both caches.
    last = (step.seq_lens.long() - 1).clamp(min=0)
    block = step.block_table.long().gather(1, last[:, None] // BLOCK_SIZE)[:, 0]
    position = last % BLOCK_SIZE
    exists = step.seq_lens > 0
    small_slots = (block * BLOCK_SIZE + position).where(exists, -1)
    block = places[block.where(exists, 0)]
    slots = (block * BLOCK_SIZE + position).where(exists, -1)
    outputs = [
        step._replace(slots=slots, block_table=table).output(pages, layout, 5)
        for pages, slots, table in (
            (small, small_slots, step.block_table),
            (cache, slots, table),
        )
    ]
    assert torch.equal(cache[places], small)
    assert torch.equal(*outputs)
    for row in (0, 4):
        check_row(
            outputs[1][row], step.query[row], cache, table[row], seq_lens[row], layout
        )


@decode_layouts
@pytest.mark.parametrize("score", [0.0, 1e4, -1e4])
def test_equal_scores_give_the_mean(layout, score):
    """All keys are the same vector, whose score with each query is ``score``."""
    seq_lens = [1, 16, 33, 5000]
    size = layout.head_size
    cache, step = random_sequences(layout, seq_lens)
    key = normal(1, NUM_KV_HEADS, size, seed=5)
    direction = key[0].float() / key[0].float().square().sum(-1, keepdim=True)
    query = (direction * score * size**0.5).repeat_interleave(4, 0)
    step = step._replace(query=query.to(BF16).expand_as(step.query).contiguous())
    for row, length in enumerate(seq_lens):
        value = normal(length, NUM_KV_HEADS, size, seed=row)
        fill(cache, step.block_table[row], key.expand_as(value).clone(), value, layout)
    keys, _ = stored(cache, step.block_table[3], 0, 5000, layout)
    assert torch.equal(keys, keys[:1].expand_as(keys))
    for num_splits in (1, 16):
        output = step.output(cache, layout, num_splits, dtype=torch.float32)
        for row, length in enumerate(seq_lens):
            _, values = stored(cache, step.block_table[row], 0, length, layout)
            mean = reference.inverse_rotate(values.mean(0)).repeat_interleave(4, 0)
            assert_within(output[row], mean, 2**-8 * mean.abs().max(), f"{length} keys")


@decode_layouts
def test_scores_of_10000(layout):
    """Scores from -1e4 to 1e4: a key far above the others gives its value."""
    seq_lens = [5000, 1, 300, 20_000]
    size = layout.head_size
    cache, step = random_sequences(layout, seq_lens)
    step = step._replace(query=step.query * 50)
    for row, length in enumerate(seq_lens):
        key = 50 * normal(length, NUM_KV_HEADS, size, seed=row)
        fill(cache, step.block_table[row], key, key / 50, layout)
    output = step.output(cache, layout, served_splits(4), dtype=torch.float32)
    num_single = 0
    for row, length in enumerate(seq_lens):
        where = cache, step.block_table[row], length, layout
        scores, values, _ = rotated_attention(step.query[row], *where)
        if length >= 5000:
            assert scores.amin() < -7e3 and scores.amax() > 7e3
        best = scores.topk(min(2, length), -1)
        single = best.values[:, 0] - best.values[:, -1] > 30
        if length == 1:
            single[:] = True
        heads = torch.arange(len(single), device=DEVICE)
        expected = values[heads, best.indices[:, 0]][single]
        assert_close_in_rotated_space(output[row][single], expected, expected.abs())
        assert output[row].isfinite().all()
        num_single += int(single.sum())
    assert num_single >= 24


@decode_layouts
@pytest.mark.parametrize("sign", [1, -1], ids=["rising", "falling"])
def test_scores_that_rise(layout, sign):
    """Scores of two tiles exceed those of the two before by about the threshold at
    which a warp raises its reference. No weight may overflow fp16, with one warp or
    several a range.
    """
    rises = [0.1, 0.7, 1.4, 2.8, 3.1, 5.5, 6.0, 11.5, 12.5, 40.0]
    length, size = 3000, layout.head_size
    cache, step = random_sequences(layout, [length] * len(rises))
    step = step._replace(query=step.query[:, ::4].repeat_interleave(4, 1))
    stairs = torch.arange(length, device=DEVICE) // (2 * TILE_TOKENS)
    for row, rise in enumerate(rises):
        query = step.query[row, ::4].float()
        unit = query / query.square().sum(-1, keepdim=True) * size**0.5
        score = sign * rise * (stairs - stairs[-1] / 2)
        key = (score[:, None, None] * unit).to(BF16)
        fill(cache, step.block_table[row], key, normal(*key.shape, seed=row), layout)
    for num_splits in (1, 3, served_splits(len(rises))):
        check_all(cache, step, layout, [length] * len(rises), num_splits)


@decode_layouts
def test_a_dominating_key_gives_its_value(layout):
    """A dominating key in the first tile, the last or between outweighs all others."""
    places, length = [0, 1, 15, 16, 2517, 4999], 5000
    cache, step = random_sequences(layout, [length] * len(places))
    step = step._replace(query=step.query[:, ::4].repeat_interleave(4, 1))
    expected = []
    for row, place in enumerate(places):
        key, value = (
            normal(length, NUM_KV_HEADS, layout.head_size, seed=s) for s in (1, 2)
        )
        key[place] = step.query[row, ::4] * 8
        fill(cache, step.block_table[row], key, value, layout)
        where = cache, step.block_table[row], place, place + 1, layout
        expected.append(stored(*where)[1])
    values = torch.cat(expected).repeat_interleave(4, 1)
    for num_splits in (1, 2, 64):
        output = step.output(cache, layout, num_splits, dtype=torch.float32)
        assert_close_in_rotated_space(output, values, values.abs())


@decode_layouts
@pytest.mark.parametrize(
    "magnitude, codes",
    [(2.0**20, (SCALE_CODE_MAX,) * 2), (2.0**-15, (1, 24)), (2.0**-17, (0, 8))],
    ids=["largest", "denormal", "smallest"],
)
def test_ends_of_the_scales_of_values(layout, magnitude, codes):
    """The largest scale does not overflow fp16, and the smallest are denormal in fp16.

    All of a sequence's values have such scales.
    """
    seq_lens = [1, 40, 3000]
    size = layout.head_size
    cache, step = random_sequences(layout, seq_lens)
    for row, length in enumerate(seq_lens):
        key, value = (normal(length, NUM_KV_HEADS, size, seed=s) for s in (1, 2))
        fill(cache, step.block_table[row], key, magnitude * value, layout)
    tiles = cache.view(*cache.shape[:2], -1, layout.tile_bytes)
    used = step.block_table[2, : 3000 // BLOCK_SIZE].long()
    plane = tiles[used, ..., layout.value_scales_offset :]
    scales = unpack_scales(
        plane.unflatten(-1, (TILE_TOKENS, layout.scale_words.num_bytes)),
        layout.scale_words,
    )
    assert codes[0] <= scales.min() and scales.max() <= codes[1]
    for num_splits in (1, 16):
        check_all(cache, step, layout, seq_lens, num_splits)


def replace_contents(step: Step, other: Step) -> None:
    for x, y in zip(step, other):
        x.copy_(y)


@requires_nvidia
@each_preset
@pytest.mark.parametrize("with_raw", [False, True])
def test_a_graph_is_replayed_with_other_lengths(layout, with_raw):
    """A replay reads the lengths, pages, slots and vectors that tensors then hold."""
    all_lens = [3000, 2, 70, 0, 1, 9000, 33, 512]
    cache, step = random_sequences(layout, all_lens)
    num_splits = served_splits(4)

    def at(rows: list[int], lengths: list[int]) -> Step:
        """Sequences cut to the lengths, whose last tokens are not stored yet."""
        part = rows_of(step, rows)
        part.seq_lens.copy_(torch.tensor(lengths))
        last = [max(length - 1, 0) for length in lengths]
        slots = [
            slots_of(part.block_table[i], n, n + 1, BLOCK_SIZE)
            if lengths[i]
            else part.slots[i : i + 1]
            for i, n in enumerate(last)
        ]
        return part._replace(slots=torch.cat(slots))

    static = at([3, 4, 6, 7], [0, 1, 1, 1])
    scratch = Scratch.of(static.query, num_splits)
    static.run(cache.clone(), layout, scratch, with_raw)  # builds and loads
    served_cache = cache.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.run(served_cache, layout, scratch, with_raw)
    for rows, lengths in (
        ([0, 1, 2, 3], [3000, 2, 70, 0]),
        ([5, 6, 7, 4], [1, 33, 511, 1]),
        ([3, 3, 3, 3], [0, 0, 0, 0]),
        ([5, 3, 3, 3], [9000, 0, 0, 0]),
        ([7, 5, 0, 2], [500, 8191, 2999, 16]),
    ):
        now = at(rows, lengths)
        replace_contents(static, now)
        served_cache.copy_(cache)
        for x in scratch:
            x.fill_(math.nan)
        graph.replay()
        eager_cache = cache.clone()
        expected = now.output(eager_cache, layout, num_splits, with_raw)
        assert torch.equal(scratch.output, expected)
        assert torch.equal(served_cache, eager_cache)
        assert expected.isfinite().all()


@requires_nvidia
@each_preset
def test_two_streams(layout):
    """Kernels of a stream wait for the stream's own work, and for no other stream's."""
    all_lens = [[4000, 1, 0, 300], [17, 2500, 64, 1]]
    layers = [random_sequences(layout, seq_lens) for seq_lens in all_lens]
    expected, statics = [], []
    for index, (cache, step) in enumerate(layers):
        step = step._replace(query=step.query.roll(index, 0))
        scratch = Scratch.of(step.query, 6)
        expected.append(step.run(cache, layout, scratch).clone())
        static = Step(*(torch.zeros_like(x) for x in step))
        statics.append((step, static, scratch))
    streams = [torch.cuda.Stream() for _ in layers]
    torch.accelerator.synchronize()
    outputs: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for stream, (cache, _), parts, results in zip(
            streams, layers, statics, outputs
        ):
            step, static, scratch = parts
            with torch.cuda.stream(stream):
                for x in (*static, *scratch):
                    x.zero_()
                # A kernel that does not wait for its stream would run during the sleep.
                torch.cuda._sleep(200_000)
                replace_contents(static, step)
                results.append(static.run(cache, layout, scratch).clone())
    torch.accelerator.synchronize()
    for results, one in zip(outputs, expected):
        assert all(torch.equal(output, one) for output in results)
