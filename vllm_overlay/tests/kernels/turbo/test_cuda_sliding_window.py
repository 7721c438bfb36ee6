# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sliding windows and attention sinks of CUDA's kernels.

Tokens that no query token sees are not there: blocks do not exist, and tiles hold NaN.
"""

import pytest
import torch

from vllm.v1.attention.ops.turbo import interface, reference
from vllm.v1.attention.ops.turbo.interface import StoreCall

from .test_cuda_multi import (
    BLOCK_SIZE,
    LAYOUT,
    NUM_KV_HEADS,
    Batch,
    decodes,
    extends,
    newest_or_stored,
)
from .test_cuda_offset import (
    EXTENDS,
    OffsetBatch,
    any_kernel,
    directions,
    kernels,
    some_layouts,
)
from .utils import (
    BF16,
    DEVICE,
    FP16,
    gaussian,
    requires_cuda,
    requires_hopper,
    slots_of,
)

pytestmark = requires_cuda

all_windows = pytest.mark.parametrize("window", [1, 15, 16, 17, 128])
# Lengths around tiles and windows; some are shorter than the queries.
SEQ_LENS = [130, 0, 2, 15, 16, 17, 33, 128, 300]
SEGMENT = interface.OFFSET_SEGMENT
# Windows that begin within segments, and that span several.
SEGMENT_WINDOWS = [17, SEGMENT, 2 * SEGMENT + 5]
LONG = [SEGMENT + 20, 5, 3 * SEGMENT + 56, 2 * SEGMENT, 0]
# Sinks of a KV head's query heads in turn: they have none, hardly any, some and
# nearly all of the weight. The next KV head begins one further on.
SINKS = [float("-inf"), -20.0, 0.0, 20.0]


def check(
    batch: Batch, kernel: str, with_newest: bool, num_splits: int = 8
) -> torch.Tensor:
    """Compare the output to the reference, and two runs bit for bit."""
    output = batch.decode(kernel, with_newest, num_splits)
    batch.check(kernel, with_newest, output)
    again = batch.decode(kernel, with_newest, num_splits)
    end = batch.starts[-1]
    assert torch.equal(output[:end], again[:end])
    return output


def check_offset(
    batch: OffsetBatch, kernel: str, with_newest: bool, num_splits: int = 8
) -> None:
    output = batch.run(kernel, with_newest, num_splits)
    batch.check(kernel, with_newest, output)


def sinks_of(batch: Batch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    heads = torch.arange(batch.num_heads)
    turns = heads + heads // (batch.num_heads // NUM_KV_HEADS)
    return torch.tensor(SINKS, dtype=dtype)[turns % len(SINKS)].to(DEVICE)


@decodes
@some_layouts
@newest_or_stored
@all_windows
@pytest.mark.parametrize(
    "query_len, group", [(1, 4), (1, 5), (1, 16), (3, 1), (3, 4), (8, 1), (2, 16)]
)
def test_decodes(layout, with_newest, window, query_len, group, kernel):
    """Each of several query tokens sees a window of its own."""
    batch = Batch(layout, SEQ_LENS, query_len, group)
    batch.slide(window)
    check(batch, kernel, with_newest)


@decodes
@some_layouts
@newest_or_stored
@all_windows
@pytest.mark.parametrize("group", [1, 4])
def test_ragged_drafts(layout, with_newest, window, group, kernel):
    batch = Batch(layout, SEQ_LENS, [1, 3, 2, 4, 1, 0, 2, 3, 3], group, BF16)
    batch.slide(window)
    check(batch, kernel, with_newest)


@extends
@some_layouts
@newest_or_stored
@all_windows
@pytest.mark.parametrize("query_len", [7, 16, 33])
def test_extends(layout, with_newest, window, query_len, kernel):
    """Extends with as many queries as each plan has, and in several passes."""
    batch = Batch(layout, SEQ_LENS, query_len, 4)
    batch.slide(window)
    check(batch, kernel, with_newest)


@extends
@some_layouts
@newest_or_stored
@all_windows
def test_ragged_extends(layout, with_newest, window, kernel):
    batch = Batch(layout, SEQ_LENS, [16, 1, 9, 33, 64, 0, 2, 17, 64], 4, BF16)
    batch.slide(window)
    check(batch, kernel, with_newest)


@any_kernel
@newest_or_stored
@pytest.mark.parametrize("num_splits", [1, 2, 64])
@pytest.mark.parametrize("window", [40, 300])
def test_splits(kernel, with_newest, num_splits, window):
    """Ranges of warps, teams and blocks begin anywhere in a window."""
    batch = Batch(LAYOUT, [1000, 40, 613, 350], 3, 4)
    batch.slide(window)
    check(batch, kernel, with_newest, num_splits)


def leave_nan(batch: OffsetBatch, kernel: str, with_newest: bool) -> None:
    """Have blocks read pages of NaN, which stay in shared memory for the next blocks.

    A tile that a block weighs without having read it then gives NaN.
    """
    cache = batch.cache
    batch.cache = torch.full_like(cache, 0xFF)
    output = batch.run(kernel, with_newest)
    batch.cache = cache
    assert output.isnan().any()


@some_layouts
@kernels
@newest_or_stored
@pytest.mark.parametrize("window", SEGMENT_WINDOWS)
def test_offsets(layout, kernel, with_newest, window):
    """A step has one offset, so it may begin with tiles that no query sees."""
    query_len = 33 if kernel in EXTENDS else 3
    batch = OffsetBatch(LONG, query_len, 4, layout)
    leave_nan(batch, kernel, with_newest)
    batch.slide(window)
    check_offset(batch, kernel, with_newest)


@kernels
def test_scores_far_below_zero(kernel):
    """Queries see no token of the first step, and have low scores with later ones."""
    query_len = 33 if kernel in EXTENDS else 3
    length = SEGMENT + 20
    batch = OffsetBatch([length], query_len, 4)
    direction = directions(NUM_KV_HEADS, LAYOUT.head_size, seed=3)
    batch.query += (60 * direction).repeat_interleave(4, 0).to(BF16)
    shape = (length, NUM_KV_HEADS, LAYOUT.head_size)
    key, value = gaussian(*shape, seed=4) - 40 * direction, gaussian(*shape, seed=5)
    slots = slots_of(batch.table[0], 0, length, BLOCK_SIZE)
    reference.store(StoreCall(batch.cache, slots, key.to(BF16), value.to(BF16), LAYOUT))
    batch.slide(17)
    check_offset(batch, kernel, False)


@kernels
@newest_or_stored
@pytest.mark.parametrize("num_splits", [1, 3, 64])
def test_splits_with_offsets(kernel, with_newest, num_splits):
    lens = [6 * SEGMENT + 57, 40, SEGMENT]
    # A window spans several; all segments past the table have the last offset.
    batch = OffsetBatch(lens, 3, 4, kind="far", num_offsets=7)
    batch.slide(2 * SEGMENT + 5)
    check_offset(batch, kernel, with_newest, num_splits)


@any_kernel
@newest_or_stored
def test_a_window_that_does_not_bind_changes_no_bit(kernel, with_newest):
    batch = Batch(LAYOUT, SEQ_LENS, 3, 4)
    expected = batch.decode(kernel, with_newest)
    batch.sliding_window = max(SEQ_LENS)
    assert torch.equal(batch.decode(kernel, with_newest), expected)


@some_layouts
@any_kernel
@newest_or_stored
@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("window", [None, 17])
def test_sinks(layout, kernel, with_newest, num_splits, window):
    """Sinks alone, where no token is seen, give zeros."""
    query_len = 16 if kernel in EXTENDS else 2
    batch = Batch(layout, SEQ_LENS, query_len, 4)
    if window is not None:
        batch.slide(window)
    without = check(batch, kernel, with_newest, num_splits)
    batch.sinks = sinks_of(batch, FP16)
    output = check(batch, kernel, with_newest, num_splits)
    none = batch.sinks.isneginf()
    assert torch.equal(output[:, none], without[:, none])
    batch.sinks = None
    with pytest.raises(AssertionError, match="allowed"):
        batch.check(kernel, with_newest, output)


@requires_hopper
@newest_or_stored
@pytest.mark.parametrize("num_splits", [1, 8])
def test_sinks_of_each_kv_head(with_newest, num_splits):
    """Both KV heads have a pass, which a block has whole or in parts."""
    batch = Batch(LAYOUT, [300], 16, 4)
    batch.sinks = sinks_of(batch, FP16)
    check(batch, "outputs", with_newest, num_splits)


@kernels
@newest_or_stored
@pytest.mark.parametrize("window", [None, 17])
def test_sinks_beside_offsets(kernel, with_newest, window):
    """Sinks are weighed against scores that include the offset's part."""
    query_len = 16 if kernel in EXTENDS else 2
    batch = OffsetBatch(LONG, query_len, 4)
    if window is not None:
        batch.slide(window)
    batch.sinks = sinks_of(batch)
    check_offset(batch, kernel, with_newest)


@any_kernel
def test_windows_that_are_not_taken(kernel):
    batch = Batch(LAYOUT, [40], 1, 4)
    batch.sliding_window = 0
    with pytest.raises(AssertionError):
        batch.decode(kernel, True)
