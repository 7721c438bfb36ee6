# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention to the tail, in CUDA, Triton and PyTorch."""

from typing import Any

import pytest
import torch

from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.tail import MAX_ROWS
from vllm.v1.attention.ops.turbo.interface import DecodeBatch, Partials, RotatedQuery

from ..attention_kernels import EXTENDS, kernels, kernels_and_layouts, without
from ..attention_utils import attend_by
from ..kernel_under_test import DECODE_KERNEL, Kernel
from ..sequences import LAYOUT, LAYOUTS, SOME_LAYOUTS, ints
from ..tail_attention import AttendingSequences, kernels_with_tails
from ..utils import BF16, DEVICE, FP16, PACKINGS, SEGMENT, model_dtypes, requires_cuda
from .tails import CONTEXTS, DECODES, RAGGED, make_offset, small

pytestmark = pytest.mark.usefixtures("short_segments")

with_offset = pytest.mark.parametrize(
    "with_offset", [False, True], ids=["plain", "offset"]
)
splits = pytest.mark.parametrize("num_splits", [1, 8])


def at_borders(
    kernel: Kernel, layout: TurboFormat, with_offset: bool = False, **options: Any
) -> AttendingSequences:
    if with_offset:
        options["offset"] = make_offset(3, layout.head_size)
    return AttendingSequences.at_borders(kernel, layout, **options)


@kernels_with_tails(
    [
        small(*x)
        for x in (("turbo4", 64), ("turbo3", 64), ("turbo4", 80), ("turbo3", 128))
        + (("turbo4", 192, 128), ("turbo4", 64, 80))
    ]
)
@pytest.mark.parametrize("num_tokens", [0, 5, MAX_ROWS - 1])
def test_decoding(kernel, layout, num_tokens):
    """Contexts are longer or shorter than the tail; one request has no page."""
    scene = AttendingSequences(kernel, layout, 4, num_tokens, dtype=FP16)
    rows = scene.format.num_rows
    scene.blocks[3] = 0
    contexts = [40, rows - 2, 1, 9]
    scene.step(contexts)
    counts = [min(num_tokens, rows - 1, context) for context in contexts[:3]]
    assert scene.step([1] * 4) == [*counts, 0]
    scene.check()


QUERIES = {
    "three each": ([30, 2, 17], [3, 3, 3]),
    "ragged": ([30, 17, 9, 20], [3, 1, 0, 2]),
    "padded": ([20, 0, 0], [2, 2, 2]),
}


@kernels_with_tails()
@pytest.mark.parametrize("contexts, query_lens", QUERIES.values(), ids=QUERIES)
def test_several_query_tokens(kernel, layout, contexts, query_lens):
    """Each query token sees all of the tail, which their number does not shift."""
    scene = AttendingSequences(kernel, layout, len(contexts), 4, 32)
    scene.step(contexts)
    scene.blocks[[row for row, context in enumerate(contexts) if context == 0]] = 0
    lengths = [
        context + count if context else 0
        for context, count in zip(contexts, query_lens)
    ]
    counts = [min(4, context) for context in contexts]
    assert scene.step(query_lens, lengths=lengths) == counts
    scene.check(num_splits=1)


@kernels_with_tails([*(small(name, 128) for name in PACKINGS), small("k4v3", 128, 80)])
@with_offset
def test_tail_of_the_whole_context(kernel, layout, with_offset):
    """No token is packed, so that the output is exact up to roundings to fp32. Kernels
    take several steps for the longest context. The first token has its own offset.
    """
    offset = make_offset(2, 128) if with_offset else None
    size = {"num_seqs": 3, "block_size": 48, "max_blocks": 1, "offset": offset}
    scene = AttendingSequences(kernel, layout, **size)
    contexts = [11, 1, 5]
    scene.step(contexts)
    assert scene.step([2] * 3) == contexts
    output = scene.attend(dtype=torch.float32)
    for row in range(3):
        expected = scene.expected(row)
        error = (output[scene.part(row)] - expected).abs().max()
        _, value, _, _ = scene.seen(row)
        assert error <= 2**-16 * value.abs().max()


@kernels_and_layouts(without("tail"))
@splits
@with_offset
def test_attention(kernel, layout, num_splits, with_offset):
    """Short sequences are read from the tail alone, in fp32."""
    scene = at_borders(kernel, layout, with_offset)
    for query_lens in (DECODES, RAGGED):
        counts = scene.step(query_lens)
        output = scene.check(num_splits)
        for row, length in enumerate(scene.lengths):
            if counts[row] == length - query_lens[row]:
                expected = scene.expected(row)
                error = (output[scene.part(row)] - expected).abs().max()
                assert error <= 2**-14 * expected.abs().max(), row


@requires_cuda
@pytest.mark.parametrize("num_warps", [1, 2, 8])
@pytest.mark.parametrize("group", [1, 3, 5, 8, 16])
@with_offset
@model_dtypes
def test_query_heads(dtype, with_offset, group, num_warps, monkeypatch):
    """A block's rows may be a part of a group or belong to several groups, with one or
    several warps a row. Operands in the model's dtype are tested beside fp32.
    """
    monkeypatch.setattr(cuda_merge, "warps_a_row_with_tail", lambda *_: num_warps)
    scene = at_borders(DECODE_KERNEL, LAYOUT, with_offset, dtype=dtype, group=group)
    scene.step(RAGGED)
    output = scene.check(8)
    rounded = scene.attend(8, dtype).float()
    rounding = 2**-8 if dtype == BF16 else 2**-11
    bound = rounding * output.abs() + 2**-14 * output.abs().max()
    assert ((rounded - output).abs() <= bound).all()


@kernels_with_tails()
@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize("context", [1, 6, 7, 8, SEGMENT + 3])
def test_offset_in_scores(kernel, layout, num_rows, context):
    """A tail has the first token, begins behind it, or begins in one segment of the
    offset and ends in the next.
    """
    offset, blocks = make_offset(num_rows, 64), SEGMENT // 32 + 1
    size = 1, 6, 32, blocks, FP16
    scene = AttendingSequences(kernel, layout, *size, offset=offset)
    scene.step([context])
    assert scene.step([2]) == [min(context, 6)]
    scene.check()


@kernels_with_tails([small()], LAYOUTS)
@splits
def test_soft_cap(kernel, layout, num_splits):
    """The cap applies to packed tokens, the tail and the raw tokens."""
    scene, cap = at_borders(kernel, layout), {"logits_soft_cap": 2.0}
    scene.step(RAGGED)
    scene.query *= 4
    output = scene.check(num_splits, **cap)
    for row, length in enumerate(scene.lengths):
        if length > RAGGED[row]:
            without, expected = (
                scene.expected(row, **options) for options in ({}, cap)
            )
            assert (without - expected).norm() > 2**-4 * expected.norm(), row
            with pytest.raises(AssertionError, match="allowed"):
                scene.check_row(row, output)


# Sliding windows with more tokens than rows, and with fewer. The short ones leave some
# queries no packed token.
SLIDING = [(40, [1] * 4), (9, [3, 1, 2, 3]), (7, [1] * 4), (5, [3] * 4)]


@kernels_with_tails()
@pytest.mark.parametrize("window, query_lens", SLIDING)
def test_short_sliding_windows(kernel, layout, window, query_lens):
    """The tail lies in the sliding window; packed tokens before it stay."""
    options = {"block_size": 32, "dtype": FP16, "sliding_window": window}
    scene = AttendingSequences(kernel, layout, 4, **options)
    contexts = [60, window, 6, 33]
    scene.step(contexts)
    rows = scene.format.num_rows
    assert rows <= window
    counts = [min(rows - own, context) for own, context in zip(query_lens, contexts)]
    assert scene.step(query_lens) == counts
    scene.check()


def make_sinks(scene: AttendingSequences) -> torch.Tensor:
    """Sinks from one that has hardly any weight to one that has nearly all of it."""
    return torch.linspace(-10, 5, scene.heads[0], device=DEVICE)


# Some queries see only the tail of the short ones, and more of the long one.
@pytest.mark.parametrize("sliding_window", [16, 20, 100])
@kernels_and_layouts(without("tail"), SOME_LAYOUTS)
@splits
@with_offset
def test_sliding_window(kernel, layout, num_splits, sliding_window, with_offset):
    """Windows beside sinks, of drafts and of longer extends."""
    scene = at_borders(kernel, layout, with_offset, sliding_window=sliding_window)
    longest = 33 if kernel.is_extend else 3
    rows = scene.format.num_rows
    assert rows <= sliding_window
    for query_lens in (DECODES, [2, 1, longest, 1, 2, 1, longest, 1, 1]):
        assert scene.step(query_lens)[8] == rows - query_lens[8]
        scene.check(num_splits, sinks=make_sinks(scene))


@kernels_with_tails([small()], SOME_LAYOUTS)
@pytest.mark.parametrize(
    "window, query_lens", [(24, [1] * 9), (24, [2] * 9), (70, RAGGED)]
)
@pytest.mark.parametrize("feature", ["sinks", "offset", "soft cap"])
def test_features_beside_a_sliding_window(kernel, layout, window, query_lens, feature):
    """Tails that cross a border of the offset's segments, or lie in one."""
    options: dict[str, Any] = {}
    if feature == "soft cap":
        options["logits_soft_cap"] = 2.0
    if feature == "sinks":
        options["sinks"] = torch.tensor([-20.0, 0.0, 2.0, 20.0], device=DEVICE)
        options["sinks"] = options["sinks"].repeat(2)
    scene = at_borders(kernel, layout, feature == "offset", sliding_window=window)
    scene.num_tokens = num_tokens = 10 if window == 24 else MAX_ROWS - 1
    counts = scene.step(query_lens)
    assert counts[8] == min(num_tokens, scene.format.num_rows - query_lens[8])
    if feature == "soft cap":
        scene.query *= 4
    scene.check(8, **options)


@kernels([x for x in without("tail") if x in EXTENDS])
@pytest.mark.parametrize("sliding_window", [None, 20])
@with_offset
def test_raw_tokens_that_are_attended_to_before(kernel, sliding_window, with_offset):
    """The raw tokens' result is added to the tail's, once."""
    scene = at_borders(kernel, LAYOUT, with_offset, sliding_window=sliding_window)
    assert max(scene.step([2, 1, 33, 1, 2, 1, 33, 1, 1])) > 0
    options = {"sinks": make_sinks(scene)}
    one_by_one = scene.attend(8, **options)
    output = scene.attend(8, attends_before=True, **options)
    assert (output - one_by_one).norm() <= 2**-14 * one_by_one.norm()


@requires_cuda
def test_a_tail_is_only_with_raw_tokens():
    scene = at_borders(DECODE_KERNEL, LAYOUT)
    scene.step(DECODES)
    query = scene.query[: len(CONTEXTS)]
    partial = torch.zeros(len(CONTEXTS), *query.shape[1:], device=DEVICE)
    with pytest.raises(AssertionError, match="without raw tokens"):
        attend_by(
            DECODE_KERNEL.attend,
            RotatedQuery(query.half().contiguous(), partial[..., 0].contiguous()),
            scene.cache,
            scene.layout,
            DecodeBatch(len(CONTEXTS), scene.block_table, ints(scene.lengths)),
            Partials(partial, partial[..., 0].contiguous()),
            torch.empty_like(query),
            tail=scene.tails[0],
        )
