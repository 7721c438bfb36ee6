# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA merge of a rank's share of the sequences, compared to sums in fp64."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.interface import DecodeBatch, Partials

from .attention_utils import assert_within, merge_call
from .test_cuda_merge import (
    NUM_KV_HEADS,
    TOLERANCES,
    all_sizes,
    batch_of,
    lengths,
    partial_results,
    requires_cuda,
)
from .utils import BF16, DEVICE


@requires_cuda
@all_sizes
@pytest.mark.parametrize("num_warps", [1, 8])
def test_parts(head_size, num_warps):
    """Ragged sequences: one has no tokens on this rank, and one has no query tokens.

    Rows that a sequence does not have are not read.
    """
    query_lens, num_splits, query_len = [3, 2, 0, 1], 9, 3
    num_heads = 2 * NUM_KV_HEADS
    rows = len(query_lens) * query_len
    partial, lse = partial_results([9, 4, 3, 0], num_splits, query_len * num_heads, 1)
    shape = (len(query_lens), num_splits, query_len, num_heads)
    generator = torch.Generator().manual_seed(4)
    partial = torch.randn(*shape, head_size, generator=generator).to(DEVICE)
    lse = lse.view(shape)
    partial[lse == -math.inf] = math.nan
    places = torch.arange(query_len, device=DEVICE)
    is_row = places < torch.tensor(query_lens, device=DEVICE)[:, None]
    lse = torch.where(is_row[:, None, :, None], lse, math.nan)
    starts = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    table = torch.empty(0, 0, dtype=torch.int32, device=DEVICE)
    batch = DecodeBatch(len(query_lens), table, lengths([9] * 4), query_len, starts)
    output = torch.full((rows, num_heads, head_size), math.nan, device=DEVICE)
    own_lse = torch.full((rows, num_heads), math.nan, device=DEVICE)
    partials = Partials(
        partial.view(-1, num_heads, head_size), lse.reshape(-1, num_heads)
    )
    call = merge_call(batch, output, NUM_KV_HEADS, lse=own_lse)
    num_warps = min(num_warps, cuda_merge.block_warps(head_size))
    cuda_merge.merge_splits(partials, call, num_warps)
    known = lse.double().nan_to_num(-math.inf, neginf=-math.inf) * math.log(2)
    weights = known.softmax(1).nan_to_num()[..., None]
    expected = (weights * partial.double().where(weights > 0, 0)).sum(1).flatten(0, 1)
    expected_lse = (known.logsumexp(1) / math.log(2)).flatten(0, 1)
    allowed = TOLERANCES[torch.float32] * expected.abs().max()
    assert_within(output, expected, allowed)
    is_empty = expected_lse == -math.inf
    assert torch.equal(own_lse == -math.inf, is_empty) and is_empty.any()
    assert (output[is_empty] == 0).all()
    torch.testing.assert_close(own_lse.double(), expected_lse, rtol=0, atol=2**-18)


@requires_cuda
def test_parts_that_are_not_taken():
    """Parts must be fp32, with one row and LSE for each token slot and head."""
    partial, lse = partial_results([1], 1, 4, 128)
    output = torch.empty(1, 4, 128, device=DEVICE)
    own_lse = torch.empty(1, 4, device=DEVICE)
    partials, batch = Partials(partial, lse), batch_of(lengths([1]))
    cuda_merge.merge_splits(partials, merge_call(batch, output, 2, lse=own_lse))
    for wrong, wrong_lse in (
        (output.to(BF16), own_lse),
        (output, own_lse[:, :2]),
        (output.expand(2, -1, -1), own_lse.expand(2, -1)),
    ):
        with pytest.raises(AssertionError):
            call = merge_call(batch, wrong, 2, lse=wrong_lse)
            cuda_merge.merge_splits(partials, call)
