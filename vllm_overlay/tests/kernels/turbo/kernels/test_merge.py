# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The merges of decode attention's splits, compared to sums in fp64. The module
test_cuda_merge.py has more of CUDA's merge.
"""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import Partials

from ..attention_utils import assert_within
from ..utils import BF16, DEVICE, FP16
from .merge_utils import (
    FP32,
    TOLERANCES,
    Expected,
    Merge,
    Splits,
    merges,
    output_dtypes,
    with_raw,
)

# Query tokens of each sequence.
BATCHES = {
    "one token each": [1] * 5,
    "several each": [3] * 4,
    "ragged": [3, 1, 0, 2],
    "rows that do not exist": [3, 2, 0, 1],
}
# Splits with tokens of each sequence, and all splits of a sequence.
COUNTS = [([1, 0, 1], 1), ([3, 1, 2], 3), ([8, 3, 0, 1, 9], 51), ([64, 33, 32], 64)]


@merges()
@pytest.mark.parametrize("num_splits", [1, 9, 64])
@with_raw
@pytest.mark.parametrize("query_lens", BATCHES.values(), ids=BATCHES)
def test_every_split_counts(kernel, head_size, query_lens, with_raw, num_splits):
    """Each split counts, with few splits and the most, and if the last splits have no
    tokens.
    """
    counts = [max(1, num_splits - 3 * row) for row in range(len(query_lens))]
    raw_dtype = kernel.raw_dtype if with_raw else None
    Splits(counts, num_splits, query_lens, 2, head_size, raw_dtype).check(kernel)


@merges(None, 1, 2, 4, 8)
@output_dtypes
@with_raw
@pytest.mark.parametrize("counts, num_splits", COUNTS, ids=str)
def test_against_fp64(kernel, head_size, dtype, with_raw, counts, num_splits):
    for group in (1, 4, 5):
        raw_dtype = dtype if with_raw else None
        Splits(counts, num_splits, None, group, head_size, raw_dtype).check(
            kernel, dtype
        )


@merges()
@with_raw
def test_many_sequences(kernel, head_size, with_raw):
    counts, raw_dtype = [40, 0, 7, 1] * 20, FP16 if with_raw else None
    Splits(counts, 40, None, 4, head_size, raw_dtype).check(kernel, FP16)


@merges(1, 8)
@with_raw
@pytest.mark.parametrize("counts, num_splits", COUNTS[::2], ids=str)
@pytest.mark.parametrize("sinks_dtype", TOLERANCES, ids=str)
def test_sinks(kernel, head_size, with_raw, counts, num_splits, sinks_dtype):
    """Sinks count as one more split, whose values are zero; alone they give zero."""
    # Both KV heads' query heads have the same sinks, in different places.
    sinks = torch.tensor([-math.inf, -20.0, 0.0, 20.0], device=DEVICE)
    sinks = torch.cat([sinks, sinks.roll(1)]).to(sinks_dtype)
    raw_dtype = FP32 if with_raw else None
    splits = Splits(counts, num_splits, None, 4, head_size, raw_dtype)
    splits.check(kernel, FP32, sinks)


@merges()
@output_dtypes
@pytest.mark.parametrize(
    "query_lens",
    [[1, 1, 1, 1], [3, 3, 3, 3], [3, 3, 2, 3]],
    ids=["one", "uniform", "ragged"],
)
def test_tokens_that_padding_lacks(kernel, head_size, dtype, query_lens):
    """A padded request is shorter than its query: only the last query tokens exist.

    Rows before them may hold anything, and give zeros. One token gives its value.
    """
    seq_lens, counts = [1, 2, 0, 100], [0, 0, 0, 2]
    raw_dtype = kernel.raw_dtype if dtype == FP32 else dtype
    splits = Splits(counts, 4, query_lens, 4, head_size, raw_dtype, seq_lens)
    missing = [
        token
        for start, end, seq_len in zip(splits.starts, splits.starts[1:], seq_lens)
        for token in range(start, end - seq_len)
    ]
    for x in splits.raw[:3]:
        x[missing] = math.nan
    output = splits.check(kernel, dtype)
    assert (output[missing] == 0).all()
    first = splits.starts[1] - 1
    value = splits.raw.value[first].to(dtype)
    assert torch.equal(output[first], value.repeat_interleave(4, 0))


def merge_part(splits: Splits, kernel: Merge) -> Partials:
    """A rank's results of all query slots, (B * Q, Hq, D) and LSEs, in rotated space.

    They are compared to sums in fp64. Rows that a sequence does not have are not read.
    """
    num_seqs, _, query_len, num_heads = splits.shape
    shape = (num_seqs * query_len, num_heads)
    own = Partials(
        torch.full((*shape, splits.head_size), math.nan, device=DEVICE),
        torch.full(shape, math.nan, device=DEVICE),
    )
    kernel.merge(splits.partials, splits.call(own.output, lse=own.lse))
    lse = splits.lse.view(splits.shape).double() * math.log(2)
    lse = lse.nan_to_num(-math.inf, neginf=-math.inf)
    weights = lse.softmax(1).nan_to_num()[..., None]
    partial = splits.partial.view(*splits.shape, -1).double().where(weights > 0, 0)
    output = (weights * partial).sum(1).flatten(0, 1)
    largest = partial.abs().amax((1, 4)).flatten(0, 1)[..., None]
    allowed = kernel.allowed(Expected(output, largest), FP32)
    assert_within(own.output, output, allowed)
    expected_lse = (lse.logsumexp(1) / math.log(2)).flatten(0, 1)
    is_empty = expected_lse == -math.inf
    assert torch.equal(own.lse == -math.inf, is_empty)
    assert (own.output[is_empty] == 0).all()
    torch.testing.assert_close(own.lse.double(), expected_lse, rtol=0, atol=2**-18)
    return own


@merges(1, 8)
@pytest.mark.parametrize("query_lens", BATCHES.values(), ids=BATCHES)
def test_parts_of_ranks(kernel, head_size, query_lens):
    """Ranks merge their splits, and then their results are merged like splits.

    The last rank has no tokens of some sequences, and no rank has any of another.
    """
    counts = [9, 4, 3, 0, 1][: len(query_lens)]
    splits = Splits(counts, 9, query_lens, head_size=head_size)
    missing = torch.arange(splits.shape[2]) >= torch.tensor(query_lens)[:, None]
    missing = missing.to(DEVICE)[:, None].expand(splits.shape[:3]).flatten()
    splits.lse[missing] = math.nan
    shares = torch.arange(9, device=DEVICE).chunk(3)
    parts = [merge_part(splits.of_splits(x), kernel) for x in shares]
    merge_part(splits, kernel)
    merged = Splits([0] * len(counts), 3, query_lens, 2, head_size, kernel.raw_dtype)
    for result, own in zip(merged.partials, zip(*parts)):
        rows = torch.stack([x.unflatten(0, (len(counts), -1)) for x in own], 1)
        result.copy_(rows.view_as(result))
    splits.raw = merged.raw
    expected = splits.expected()
    output = merged.merge(kernel)
    assert_within(output, expected.output, kernel.allowed(expected, FP32))


@merges(sizes=[128])
def test_large_lses(kernel, head_size):
    """Only differences of LSEs count: bit for bit if they are exact."""
    splits = Splits([40, 3], 64, None, 4, head_size)
    exact = (splits.lse * 64).round() / 64
    splits.lse = exact
    expected = splits.merge(kernel)
    for offset in (2.0**14, -(2.0**14)):
        splits.lse = exact + offset
        assert torch.equal(splits.merge(kernel), expected)


@merges(sizes=[128])
@pytest.mark.parametrize("broken", ["lse", "partial", "query", "key", "value"])
def test_nan_stays_in_its_row(kernel, head_size, broken):
    splits = Splits([5, 5], 8, None, 4, head_size, BF16)
    whole = splits.merge(kernel, BF16)
    tensors = {"lse": splits.lse, "partial": splits.partial, **splits.raw._asdict()}
    tensors[broken][0, 0] = math.nan
    output = splits.merge(kernel, BF16)
    assert output[0, 0].isnan().all()
    assert torch.equal(output[0, 4:], whole[0, 4:])
    assert torch.equal(output[1], whole[1])


@merges(sizes=[128])
def test_one_split_does_not_depend_on_the_batch(kernel, head_size):
    splits = Splits([1] * 300, 1, None, 4, head_size)
    together = splits.merge(kernel, BF16)
    alone = Splits([1], 1, None, 4, head_size)
    alone.partial, alone.lse = (x[7:8] for x in splits.partials)
    assert torch.equal(together[7:8], alone.merge(kernel, BF16))


@merges()
@pytest.mark.parametrize("num_splits", [1, 2, 64])
@pytest.mark.parametrize("lse", [0.0, 14427.0, -14427.0])
def test_equal_lses_give_the_mean(kernel, head_size, num_splits, lse):
    """Equal LSEs give the mean, even with scores of 1e4 or -1e4."""
    splits = Splits([num_splits], num_splits, None, 4, head_size)
    splits.lse.fill_(lse)
    matrix = rotation_matrix(head_size, DEVICE, torch.float64, inverse=True)
    mean = splits.partial.double().mean(0) @ matrix * head_size**-0.5
    allowed = kernel.allowed(splits.expected(), FP32)
    assert_within(splits.merge(kernel)[0], mean, allowed)


@merges()
@pytest.mark.parametrize("place", [0, 1, 31, 32, 63])
def test_a_dominating_split_is_alone(kernel, head_size, place):
    """Other splits have no weight, even if their partial results are huge."""
    splits = Splits([64], 64, None, 4, head_size)
    splits.partial *= 1e30
    splits.partial[place] /= 1e30
    splits.lse[place] = splits.lse.max() + 200
    only = splits.of_splits(torch.tensor([place], device=DEVICE)).merge(kernel)
    allowed = 2.0**-20 * only.abs().max()
    assert_within(splits.merge(kernel), only, allowed)


@merges(sizes=[128])
def test_weights_that_vanish_are_not_read(kernel, head_size):
    splits = Splits([4], 4, None, 1, head_size)
    splits.lse[2] = splits.lse[0] - 1000
    splits.partial[2] = 0.0
    expected = splits.expected()
    splits.partial[2] = math.nan
    allowed = kernel.allowed(expected, FP32)
    assert_within(splits.merge(kernel), expected.output, allowed)
