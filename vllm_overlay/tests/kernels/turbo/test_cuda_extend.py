# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA extend kernels: a few dozen query tokens after long contexts in pages.

The same tests hold for the decode kernel that takes queries in fp16.
"""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda import extend as cuda_extend
from vllm.v1.attention.ops.turbo.cuda.decode import DECODE
from vllm.v1.attention.ops.turbo.cuda.extend import EXTEND
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES
from vllm.v1.attention.ops.turbo.format import HEAD_SIZES, TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    DecodeBatch,
    Partials,
    RotatedQuery,
    StoreCall,
)

from .test_cuda_multi import (
    ATTENTION,
    BLOCK_SIZE,
    LAYOUT,
    NUM_KV_HEADS,
    Batch,
    extends,
    extends_or_columns,
    fp16_layouts,
    merged_layouts,
    newest_or_stored,
)
from .utils import (
    BF16,
    DEVICE,
    FP16,
    assert_within,
    fill_cache,
    gaussian,
    make_block_table,
    new_cache,
    num_blocks_for,
    random_pages,
    requires_cuda,
    requires_hopper,
    slots_of,
)

# A multiple of the kernels' steps.
STEP = 128
ROWS_OF_FIVE_STEPS = pytest.param("rows", 320, marks=requires_hopper)


def check(
    kernel: str, batch: Batch, with_newest: bool, num_splits: int = 8
) -> torch.Tensor:
    """Compare the output to the reference, and two runs bit for bit."""
    output = batch.decode(kernel, with_newest, num_splits)
    batch.check(kernel, with_newest, output)
    again = batch.decode(kernel, with_newest, num_splits)
    end = batch.starts[-1]
    assert torch.equal(output[:end], again[:end])
    return output


@requires_cuda
@fp16_layouts
@pytest.mark.parametrize("query_len", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize("group", [1, 4, 5, 8])
@newest_or_stored
def test_against_reference(kernel, layout, query_len, group, with_newest):
    ends = {0, 1, query_len - 1, query_len, query_len + 1, 16 + query_len // 2}
    ends |= {STEP - 1, STEP, STEP + 1, STEP + query_len, 1000, 2 * STEP + query_len}
    check(kernel, Batch(layout, sorted(ends), query_len, group), with_newest)


@requires_cuda
@fp16_layouts
@pytest.mark.parametrize("group", [1, 4, 5, 8])
@newest_or_stored
def test_queries_of_different_lengths(kernel, layout, group, with_newest):
    """A sequence has as many passes as its queries need; some sequences have none."""
    query_lens = [1, 64, 16, 3, 33, 0, 17, 0, 8, 2]
    seq_lens = [4098, 1001, 16, 130, 20, 5, 0, 0, 700, 1]
    check(kernel, Batch(layout, seq_lens, query_lens, group), with_newest)


@requires_cuda
@extends_or_columns
@newest_or_stored
@pytest.mark.parametrize("num_splits", [1, 2, 8])
@pytest.mark.parametrize("query_lens", [[200, 200], [130, 1, 700]], ids=str)
def test_hundreds_of_queries(kernel, query_lens, num_splits, with_newest):
    """A sequence has more passes than its context has steps."""
    contexts = [40, 0, 7]
    seq_lens = [sum(lens) for lens in zip(query_lens, contexts)]
    check(kernel, Batch(LAYOUT, seq_lens, query_lens, 4), with_newest, num_splits)


@requires_cuda
@extends_or_columns
@newest_or_stored
@pytest.mark.parametrize("num_splits", [1, 2, 3, 64])
@pytest.mark.parametrize(
    "seq_lens",
    [[20_000], [512 + i for i in range(80)], [9000] + [40] * 63, [0] * 40 + [300]],
    ids=["one", "many", "ragged", "padded"],
)
def test_splits(kernel, with_newest, num_splits, seq_lens):
    """Ranges of blocks begin anywhere, and a block has several."""
    check(kernel, Batch(LAYOUT, seq_lens, 16, 4, BF16), with_newest, num_splits)


@requires_cuda
@pytest.mark.parametrize("kernel, length", [("extend", 160), ROWS_OF_FIVE_STEPS])
def test_ranges_by_the_room_for_splits(kernel, length):
    """There are as many blocks as steps, but a pass of five steps may have only four
    splits. An emulated GPU has too few blocks to show a fault.
    """
    check(kernel, Batch(LAYOUT, [length], 7, 4, BF16), False, 4)


@requires_cuda
@extends
@newest_or_stored
def test_a_pass_of_more_than_two_ranges(kernel, with_newest):
    """A block has tiles in the middle of a pass, even if there are only four blocks."""
    check(kernel, Batch(LAYOUT, [70, 1000], 5, 4), with_newest, 64)


@requires_cuda
@extends_or_columns
@pytest.mark.parametrize("query_len", [3, 16, 33])
def test_one_split_does_not_depend_on_the_batch(kernel, query_len):
    seq_lens = [40, 0, 1700, 300]
    batch = Batch(LAYOUT, seq_lens, query_len, 4)
    together = batch.decode(kernel, True, 1)
    for row, length in enumerate(seq_lens):
        part = slice(row * query_len, (row + 1) * query_len)
        alone = Batch(LAYOUT, [length], query_len, 4)
        alone.cache, alone.table = batch.cache, batch.table[row : row + 1]
        alone.query, alone.key = batch.query[part], batch.key[part]
        alone.value = batch.value[part]
        assert torch.equal(alone.decode(kernel, True, 1), together[part])


@requires_cuda
@fp16_layouts
def test_recycled_bytes_do_not_leak(kernel, layout):
    """Bytes past a sequence's end in its last page change no bit of the output."""
    seq_lens = [3, 17, 33, STEP + 5]
    outputs = []
    for byte in (0xFF, 0x00, 0xF7):
        batch = Batch(layout, seq_lens, 3, 4)
        batch.cache.fill_(byte)
        fill_cache(batch.cache, batch.table, seq_lens, layout, FP16)
        outputs.append(batch.decode(kernel, False, 4))
    assert outputs[0].isfinite().all()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@requires_cuda
@extends_or_columns
@newest_or_stored
def test_later_tokens_change_no_bit(kernel, with_newest):
    seq_lens, query_len = [24, STEP + 3, 66], 16
    batch = Batch(LAYOUT, seq_lens, query_len, 4)
    before = batch.decode(kernel, with_newest)
    for row, length in enumerate(seq_lens):
        slots = slots_of(batch.table[row], length - 1, length, BLOCK_SIZE)
        large = 100 * gaussian(1, NUM_KV_HEADS, 128, seed=row)
        reference.store(StoreCall(batch.cache, slots, large, large, LAYOUT))
        batch.key[batch.starts[row + 1] - 1] *= 100
        batch.value[batch.starts[row + 1] - 1] *= 100
    after = batch.decode(kernel, with_newest)
    is_equal = (before == after).flatten(1).all(1).view(-1, query_len)
    assert is_equal[:, :-1].all() and not is_equal[:, -1].any()


@requires_hopper
@pytest.mark.parametrize("exponent", [-100, 40])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@newest_or_stored
def test_queries_of_any_size(dtype, exponent, with_newest):
    """``extend_outputs`` rotates queries of any size: each row has a power of two."""
    batch = Batch(LAYOUT, [40, STEP + 3], 16, 4, dtype)
    # As far as the dtype reaches; fp16 needs its denormal numbers. Every other token's
    # queries keep their size, and one head's queries are zero.
    if dtype == FP16:
        exponent = min(max(exponent, -20), 8)
    batch.query[::2] *= 2.0**exponent
    assert batch.query.any(-1).all()
    batch.query[:, 1] = 0.0
    batch.check("outputs", with_newest, batch.decode("outputs", with_newest))


def moved(x: torch.Tensor, places: int, pad: int) -> torch.Tensor:
    """The same numbers, ``places`` elements further on, with ``pad`` between tokens."""
    num_tokens, row = x.shape[0], x[0].numel()
    room = x.new_empty(places + num_tokens * (row + pad))
    rows = room[places:].view(num_tokens, row + pad)[:, :row]
    return rows.copy_(x.flatten(1)).view_as(x)


@requires_hopper
@pytest.mark.parametrize(
    ("places", "pad", "message"),
    [(4, 0, "its address is no multiple of 16 bytes"), (0, 4, "the stride of axis 0")],
    ids=["address", "stride"],
)
@pytest.mark.parametrize("name", ["query", "output"])
def test_what_is_copied_by_sixteen_bytes(monkeypatch, name, places, pad, message):
    """Queries and outputs of ``extend_outputs`` must be aligned to 16 bytes."""
    batch = Batch(LAYOUT, [STEP + 3], 16, 4, BF16)
    attend = ATTENTION["outputs"]

    def attend_moved(query, *args, **options) -> None:
        *rest, output, newest, offset = args
        if name == "query":
            query = query._replace(vectors=moved(query.vectors, places, pad))
        else:
            output = moved(output, places, pad)
        attend(query, *rest, output, newest, offset, **options)

    monkeypatch.setitem(ATTENTION, "outputs", attend_moved)
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        batch.decode("outputs", with_newest=True)


def extend_pages(
    kernel: str,
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    seq_lens: list[int],
    layout: TurboFormat,
    score_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated output and base-2 LSE of one query token a sequence, with one split."""
    num_seqs, num_heads, head_size = query.shape
    partial = torch.full((num_seqs, num_heads, head_size), math.nan, device=DEVICE)
    lse = partial[:, :, 0].contiguous()
    ATTENTION[kernel](
        RotatedQuery(
            query.to(FP16).contiguous(),
            torch.full((num_seqs, num_heads), score_scale, device=DEVICE),
        ),
        cache,
        layout,
        DecodeBatch(
            num_seqs,
            table,
            torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        ),
        Partials(partial, lse),
        torch.empty_like(query),
    )
    return partial, lse


@requires_cuda
@merged_layouts
def test_one_key_gives_its_score_and_value(kernel, layout):
    """With one key the LSE is its score, up to rounding of fp32 sums, and the output is
    its value. Pages hold random bytes, with scales from the least to the largest.
    """
    num_blocks = 256
    cache = random_pages(layout, num_blocks, NUM_KV_HEADS, 16)
    blocks = torch.arange(num_blocks, device=DEVICE).flip(0)
    keys, values = reference.load(cache, blocks * 16, layout)
    query = gaussian(num_blocks, 2 * NUM_KV_HEADS, layout.head_size).to(FP16)
    output, lse = extend_pages(
        kernel, query, cache, blocks[:, None].int(), [1] * num_blocks, layout, 0.125
    )
    products = query.double() * keys.repeat_interleave(2, 1).double() * 0.125
    allowed = 2.0**-18 * products.abs().sum(-1)
    assert_within(lse.double(), products.sum(-1), allowed)
    expected = values.repeat_interleave(2, 1).double()
    largest = expected.abs().amax(-1, keepdim=True)
    allowed = 2.0**-9 * expected.abs() + 2.0**-18 * largest + 2.0**-25 * 8
    assert_within(output.double(), expected, allowed)


@requires_cuda
@merged_layouts
@pytest.mark.parametrize("score", [1e4, -1e4])
def test_large_scores(kernel, layout, score):
    """Equal keys have equal weights, however large their scores."""
    seq_lens = [1, STEP, 3 * STEP + 17]
    cache = new_cache(layout, num_blocks_for(seq_lens, 16), NUM_KV_HEADS, 16)
    cache.fill_(0xFF)
    table = make_block_table(seq_lens, 16)
    key = gaussian(1, NUM_KV_HEADS, layout.head_size, seed=3)
    expected = []
    for row, length in enumerate(seq_lens):
        slots = slots_of(table[row], 0, length, 16)
        value = gaussian(length, NUM_KV_HEADS, layout.head_size, seed=row)
        repeated = key.expand(length, -1, -1).contiguous()
        reference.store(StoreCall(cache, slots, repeated, value, layout))
        expected.append(reference.load(cache, slots, layout)[1].mean(0))
    query = reference.rotate(key).expand(len(seq_lens), -1, -1)
    query = query.repeat_interleave(4, 1)
    scale = score / query.square().sum(-1).min().item()
    output, lse = extend_pages(kernel, query, cache, table, seq_lens, layout, scale)
    assert (lse.sign() == math.copysign(1, score)).all() and lse.isfinite().all()
    values = torch.stack(expected).repeat_interleave(4, 1)
    assert (output - values).abs().max() <= 2e-3 * values.abs().max()


@requires_cuda
@merged_layouts
def test_keys_of_very_different_lengths(kernel, layout):
    """Keys of a tile differ by powers of two, and all their scores are as exact."""
    length = 16
    cache = new_cache(layout, num_blocks_for([length], 16), NUM_KV_HEADS, 16)
    table = make_block_table([length], 16)
    key = gaussian(length, NUM_KV_HEADS, layout.head_size, seed=5)
    key *= 2.0 ** torch.arange(8, -8, -1, device=DEVICE)[:, None, None]
    slots = slots_of(table[0], 0, length, 16)
    reference.store(StoreCall(cache, slots, key, key, layout))
    keys, values = (x.double() for x in reference.load(cache, slots, layout))
    query = 0.1 * gaussian(1, 2 * NUM_KV_HEADS, layout.head_size).to(FP16)
    output, lse = extend_pages(kernel, query, cache, table, [length], layout, 0.125)
    repeated = keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1)
    scores = torch.einsum("hd,thd->ht", query[0].double(), repeated[0]) * 0.125
    weights = torch.softmax(scores * math.log(2), -1)
    expected = torch.einsum("ht,thd->hd", weights, repeated[1])
    total = torch.logsumexp(scores * math.log(2), -1) / math.log(2)
    assert (lse[0].double() - total).abs().max() <= 2e-3
    assert (output[0] - expected).abs().max() <= 2e-3 * expected.abs().max()


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_shared_memory_has_room_for_two_stages(capability):
    """All architectures have room, and for two blocks with 64 queries of 128."""
    limit = ARCHITECTURES[capability]
    for name in TURBO_PRESETS:
        for size in cuda_extend.SUPPORTED_HEAD_SIZES:
            layout = TurboFormat.from_cache_dtype(name, size)
            for num_queries in (1, 33, 65):
                plan = cuda_extend.plan_for(layout, num_queries)
                assert 2 <= cuda_extend.num_stages(layout, plan, limit) <= 4
    plan = cuda_extend.plan_for(LAYOUT, 64)
    half = (limit + 1024) // 2 - 1024
    assert plan.rows == 64 and cuda_extend.num_stages(LAYOUT, plan, half) >= 2


@pytest.mark.parametrize(
    "kernel, how, sizes",
    [
        (DECODE, 64, (64, 128, 256, 512)),
        (EXTEND, cuda_extend.plan_for(LAYOUT, 64), (64, 128, 256)),
    ],
)
def test_head_sizes_without_an_instance_say_so(kernel, how, sizes):
    for size in HEAD_SIZES:
        layout = TurboFormat.from_cache_dtype("turbo4", size)
        reason = kernel.unsupported_reason(layout, 90)
        assert (reason is None) == (size in sizes)
        if reason is not None:
            with pytest.raises(RuntimeError, match=f"head size {size}"):
                kernel.module(layout, how, shared_bytes=ARCHITECTURES[90])
