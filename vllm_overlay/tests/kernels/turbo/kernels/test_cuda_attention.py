# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention kernels of CUDA and Triton, compared to causal attention over the stored K
and V: decodes with one query token or several, and extends of long contexts.

test_decode.py has decodes of one token and exact probes, and test_cuda_features.py the
features of layers. The tests of extends hold for each kernel that takes queries in
fp16.
"""

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import extend_mma
from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.cuda.decode import DECODE
from vllm.v1.attention.ops.turbo.cuda.extend_mma import EXTEND_MMA
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES
from vllm.v1.attention.ops.turbo.format import HEAD_SIZES, TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    StoreCall,
)
from vllm.v1.attention.ops.turbo.triton import decode as triton_decode

from ..attention_kernels import (
    CUDA,
    DECODES,
    EXTENDS,
    FEW_GROUPS,
    IN_FP16,
    KERNELS,
    kernels,
    kernels_and_layouts,
)
from ..attention_utils import assert_within
from ..sequences import (
    IN_BF16,
    LAYOUT,
    NUM_KV_HEADS,
    Features,
    Sequences,
    raw_or_stored,
)
from ..utils import (
    FP16,
    ON_GPU,
    gaussian,
    model_dtypes,
    requires_hopper,
    requires_nvidia,
)

# A multiple of the kernels' steps.
STEP = 128


def decode_lengths(query_len: int) -> list[int]:
    """Lengths around the query's, so that its tokens lie around ends of tiles."""
    short = {0, 1, query_len - 1, query_len, query_len + 1, 16 + query_len // 2, 33}
    if not ON_GPU:
        return sorted(short)
    longer = {31, 32, 32 + query_len - 1, 48, 63 + query_len, 1000, 2049, 4096 + 2}
    return sorted(short | longer)


@kernels_and_layouts(DECODES)
@pytest.mark.parametrize("query_len", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 8, 16])
@raw_or_stored
def test_decodes(kernel, layout, query_len, group, with_raw):
    if "groups" in kernel.opt_outs and group not in FEW_GROUPS:
        pytest.skip(kernel.opt_outs["groups"])
    batch = Sequences(layout, decode_lengths(query_len), query_len, group)
    batch.check(kernel, with_raw)


@kernels_and_layouts(IN_FP16)
@pytest.mark.parametrize("query_lens", [1, 2, 7, 16, 33, 64, "ragged"])
@pytest.mark.parametrize("group", [1, 4, 5, 8])
@raw_or_stored
def test_extends(kernel, layout, query_lens, group, with_raw):
    """A sequence has as many passes as its queries need; some sequences have none."""
    if query_lens == "ragged":
        query_lens = [1, 64, 16, 3, 33, 0, 17, 0, 8, 2]
        seq_lens = [4098, 1001, 16, 130, 20, 5, 0, 0, 700, 1]
    else:
        ends = {0, 1, query_lens - 1, query_lens, query_lens + 1, 16 + query_lens // 2}
        ends |= {STEP - 1, STEP, STEP + 1, STEP + query_lens, 1000}
        seq_lens = sorted(ends | {2 * STEP + query_lens})
    Sequences(layout, seq_lens, query_lens, group).check(kernel, with_raw)


@kernels_and_layouts(DECODES)
@pytest.mark.parametrize("group", [1, 4])
@raw_or_stored
def test_ragged_drafts(kernel, layout, group, with_raw):
    seq_lens = [1, 70, 2, 17, 33, 4, 5, 0]
    if ON_GPU:
        seq_lens[:2] = [1001, 4098]
    batch = Sequences(layout, seq_lens, [1, 4, 3, 1, 2, 4, 0, 0], group)
    batch.check(kernel, with_raw)


@kernels(IN_FP16)
@raw_or_stored
@pytest.mark.parametrize("num_splits", [1, 2, 8])
@pytest.mark.parametrize("query_lens", [[200, 200], [130, 1, 700]], ids=str)
def test_hundreds_of_queries(kernel, query_lens, num_splits, with_raw):
    """A sequence has more passes than its context has steps."""
    contexts = [40, 0, 7]
    seq_lens = [sum(lens) for lens in zip(query_lens, contexts)]
    Sequences(LAYOUT, seq_lens, query_lens).check(kernel, with_raw, num_splits)


@kernels(DECODES)
@raw_or_stored
@pytest.mark.parametrize("num_splits", [1, 2, 64])
@pytest.mark.parametrize("query_len, group", [(4, 1), (2, 4), (3, 8)])
def test_splits_of_decodes(kernel, with_raw, num_splits, query_len, group):
    """Splits may end anywhere among a sequence's last tokens."""
    seq_lens = [70 + i for i in range(40)] if ON_GPU else [70, 63]
    batch = Sequences(LAYOUT, seq_lens, query_len, group, IN_BF16)
    batch.check(kernel, with_raw, num_splits)


@kernels(IN_FP16)
@raw_or_stored
@pytest.mark.parametrize("num_splits", [1, 2, 3, 64])
@pytest.mark.parametrize(
    "seq_lens",
    [[20_000], [512 + i for i in range(80)], [9000] + [40] * 63, [0] * 40 + [300]],
    ids=["one", "many", "ragged", "padded"],
)
def test_splits(kernel, with_raw, num_splits, seq_lens):
    """Ranges of blocks begin anywhere, and a block has several."""
    batch = Sequences(LAYOUT, seq_lens, 16, features=IN_BF16)
    batch.check(kernel, with_raw, num_splits)


@pytest.mark.parametrize(
    "kernel, length",
    [KERNELS["extend_mma"].case(160), KERNELS["extend_wgmma"].case(320)],
)
def test_ranges_by_the_room_for_splits(kernel, length):
    """There are as many blocks as steps, but a pass of five steps may have only four
    splits. An emulated GPU has too few blocks to show a fault.
    """
    Sequences(LAYOUT, [length], 7, features=IN_BF16).check(kernel, False, 4)


@kernels(EXTENDS)
@raw_or_stored
def test_a_pass_of_more_than_two_ranges(kernel, with_raw):
    """A block has tiles in the middle of a pass, even if there are only four blocks."""
    Sequences(LAYOUT, [70, 1000], 5).check(kernel, with_raw, 64)


@kernels_and_layouts(KERNELS)
def test_recycled_bytes_do_not_leak(kernel, layout):
    seq_lens, query_len, group = [1, 17, 33], 1, 2
    if kernel.name in IN_FP16:
        seq_lens, query_len, group = [3, 17, 33, STEP + 5], 3, 4
    Sequences(layout, seq_lens, query_len, group).check_recycled_bytes(kernel)


@kernels(DECODES)
@pytest.mark.parametrize("query_len, group", [(2, 1), (3, 4), (8, 5)])
def test_as_one_token_after_the_other(kernel, query_len, group):
    seq_lens = [query_len, 16 + query_len // 2, 64]
    batch = Sequences(LAYOUT, seq_lens, query_len, group)
    together, queries = batch.attend(kernel, False), batch.query
    batch.query_len = 1
    for i in range(query_len):
        batch.query = queries[i::query_len]
        batch.seq_lens = [length - query_len + i + 1 for length in seq_lens]
        alone = batch.attend(kernel, False)
        allowed = 2**-9 * alone.abs().max()
        assert_within(together[i::query_len], alone, allowed)


@pytest.mark.parametrize(
    "kernel, seq_lens, query_len",
    [
        KERNELS[x].case(*lens, name=kind)
        for kind, names, *lens in (
            ("drafts", DECODES, [4, 18, 33, 66], 4),
            ("extends", IN_FP16, [24, STEP + 3, 66], 16),
        )
        for x in names
    ],
)
@raw_or_stored
def test_later_tokens_change_no_bit(kernel, seq_lens, query_len, with_raw):
    batch = Sequences(LAYOUT, seq_lens, query_len)
    before = batch.attend(kernel, with_raw)
    for row, length in enumerate(seq_lens):
        slots = batch.slots(row, length - 1, length)
        large = 100 * gaussian(1, NUM_KV_HEADS, 128, seed=row)
        reference.store(StoreCall(batch.cache, slots, large, large, LAYOUT))
        batch.key[batch.starts[row + 1] - 1] *= 100
        batch.value[batch.starts[row + 1] - 1] *= 100
    after = batch.attend(kernel, with_raw)
    is_equal = (before == after).flatten(1).all(1).view(-1, query_len)
    assert is_equal[:, :-1].all() and not is_equal[:, -1].any()


@kernels(CUDA)
@pytest.mark.parametrize("group", [1, 4])
def test_hidden_tokens_of_whole_tiles_change_no_bit(kernel, group):
    """A sequence's last tokens, which some queries do not see, may fill the tiles that
    a warp takes at once, or begin in them. A warp that has had tiles before masks
    scores only because of these queries.
    """
    query_len = 4
    # A warp takes 32 tokens, and its next 32 are 128 further on; an extend takes 128.
    ends = [9 * 32, 10 * 32, 11 * 32, 3 * 128, 5 * 128]
    seq_lens = [end + more for end in ends for more in range(query_len)]
    batch = Sequences(LAYOUT, seq_lens, query_len, group)
    before = batch.attend(kernel, False, num_splits=1)
    for place in reversed(range(1, query_len)):
        for row, length in enumerate(seq_lens):
            token = length - query_len + place
            slots = batch.slots(row, token, token + 1)
            # K stays that of fill(): a larger score would hide the other tokens.
            key = gaussian(length, NUM_KV_HEADS, 128, dtype=FP16, seed=2 * row + 100)
            value = 100 * gaussian(1, NUM_KV_HEADS, 128, seed=row)
            key = key[token : token + 1]
            reference.store(StoreCall(batch.cache, slots, key, value.to(FP16), LAYOUT))
        after = batch.attend(kernel, False, num_splits=1)
        is_equal = (before == after).flatten(1).all(1).view(-1, query_len)
        assert is_equal[:, :place].all() and not is_equal[:, place:].any()


@requires_nvidia
@raw_or_stored
@pytest.mark.parametrize(
    "kernel, query_lens",
    [
        KERNELS[x].case(lens, name=kind)
        for x, *both in (
            ("decode", 3, [3, 1, 2, 3]),
            ("decode_wgmma", 6, [9, 1, 2, 6]),
            ("extend_mma", 16, [16, 1, 2, 9]),
            ("extend_wgmma", 16, [33, 1, 2, 9]),
            ("outputs", 16, [70, 1, 2, 9]),
        )
        for kind, lens in zip(("uniform", "ragged"), both)
    ],
)
def test_a_graph_takes_other_lengths(with_raw, kernel, query_lens):
    """The grid is constant, and kernels read lengths from the device alone."""
    batch = Sequences(LAYOUT, [300, 35, 1000, 0], query_lens)
    expected = batch.attend(kernel, with_raw)
    launch = batch.launch(with_raw)
    call = launch.call
    seq_lens = call.batch.seq_lens.clone()
    # Before the lengths are there, the grid is launched with others.
    call.batch.seq_lens.fill_(1)
    call.batch.block_table.clamp_(max=batch.cache.shape[0] - 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.attend(*launch)
    call.batch.seq_lens.copy_(seq_lens)
    graph.replay()
    end = batch.starts[-1]
    assert torch.equal(call.output[:end], expected[:end])


@pytest.mark.parametrize(
    "kernel",
    [cuda_decode, triton_decode, extend_mma],
    ids=["cuda", "triton", "extend_mma"],
)
def test_room_for_partial_results(kernel):
    """More query tokens have fewer splits each, down to one or two."""
    splits = kernel.num_kv_splits
    for num_seqs in (1, 32, 128, 1024):
        counts = [splits(num_seqs, 8, 132, query_len) for query_len in (1, 2, 4, 8)]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] == splits(num_seqs, 8, 132) and counts[-1] >= 1


@requires_hopper
@pytest.mark.parametrize("exponent", [-100, 40])
@model_dtypes
@raw_or_stored
def test_queries_of_any_size(dtype, exponent, with_raw):
    """``extend_outputs`` rotates queries of any size: each row has a power of two."""
    batch = Sequences(LAYOUT, [40, STEP + 3], 16, features=Features(dtype=dtype))
    # As far as the dtype reaches; fp16 needs its denormal numbers. Every other token's
    # queries keep their size, and one head's queries are zero.
    if dtype == FP16:
        exponent = min(max(exponent, -20), 8)
    batch.query[::2] *= 2.0**exponent
    assert batch.query.any(-1).all()
    batch.query[:, 1] = 0.0
    kernel = KERNELS["outputs"]
    batch.compare(kernel, with_raw, batch.attend(kernel, with_raw))


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
def test_tensors_copied_by_sixteen_bytes(name, places, pad, message):
    """Queries and outputs of ``extend_outputs`` must be aligned to 16 bytes."""
    launch = Sequences(LAYOUT, [STEP + 3], 16, features=IN_BF16).launch(True)
    tensor = moved(getattr(launch.call, name), places, pad)
    call = launch.call._replace(**{name: tensor})
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        KERNELS["outputs"].attend(*launch._replace(call=call))


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_shared_memory_has_room_for_two_stages(capability):
    """All architectures have room, and for two blocks with 64 queries of 128."""
    limit = ARCHITECTURES[capability]
    for name in TURBO_PRESETS:
        for size in extend_mma.SUPPORTED_HEAD_SIZES:
            layout = TurboFormat.from_cache_dtype(name, size)
            for num_queries in (1, 33, 65):
                plan = extend_mma.plan_for(layout, num_queries)
                assert 2 <= extend_mma.num_stages(layout, plan, limit) <= 4
    plan = extend_mma.plan_for(LAYOUT, 64)
    half = (limit + 1024) // 2 - 1024
    assert plan.rows == 64 and extend_mma.num_stages(LAYOUT, plan, half) >= 2


@pytest.mark.parametrize(
    "kernel, how, sizes",
    [
        (DECODE, 64, (64, 128, 256, 512)),
        (EXTEND_MMA, extend_mma.plan_for(LAYOUT, 64), (64, 128, 256)),
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


def test_constants_are_those_of_the_format():
    """K's two byte tables, looked up as prmt does, add up to the levels."""
    header = layout_header(LAYOUT)
    defined = dict(line.split(maxsplit=2)[1:] for line in header.splitlines()[2:])

    def table(side: str) -> list[int]:
        words = (int(defined[f"KEY_{side}_{half}"][:-1], 0) for half in ("LOW", "HIGH"))
        data = b"".join(word.to_bytes(4, "little") for word in words)
        return [byte - 256 if byte > 127 else byte for byte in data]

    def looked_up(entries: list[int], nibble: int) -> int:
        entry = entries[nibble & 7]
        return entry if nibble < 8 else -1 if entry < 0 else 0

    negative, positive = table("NEGATIVE"), table("POSITIVE")
    unit = float(defined["KEY_LEVEL_UNIT"][:-1])
    levels = [
        (looked_up(negative, code) + looked_up(positive, 15 - code)) / unit
        for code in range(16)
    ]
    assert levels == list(LAYOUT.key_codebook.levels)
