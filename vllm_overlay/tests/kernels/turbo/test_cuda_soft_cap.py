# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A soft cap of attention logits in CUDA's kernels: cap * tanh(s / cap)."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo.cuda.merge import merge_splits
from vllm.v1.attention.ops.turbo.interface import (
    DecodeBatch,
    NewestTokens,
    OffsetScores,
    Partials,
)

from .test_cuda_multi import LAYOUT, Batch, decodes, extends, newest_or_stored
from .test_cuda_offset import EXTENDS, any_kernel, kernels, some_layouts
from .test_cuda_sliding_window import SEQ_LENS, check, sinks_of
from .utils import (
    BF16,
    DEVICE,
    merge_call,
    requires_cuda,
)

pytestmark = requires_cuda

# Factors of the queries by cap. A cap of 2 hardly tells scores of up to +-12 apart. A
# cap as large as models' bends them.
CAPS = {2.0: 3.0, 50.0: 12.0}
caps = pytest.mark.parametrize("cap", CAPS)


def capped(batch: Batch, cap: float) -> Batch:
    batch.logits_soft_cap = cap
    batch.query *= CAPS[cap]
    return batch


def check_cap(batch: Batch, kernel: str, with_newest: bool, num_splits: int = 8):
    """Compare to the reference with the cap, and fail without it."""
    output = check(batch, kernel, with_newest, num_splits)
    batch.logits_soft_cap = None
    with pytest.raises(AssertionError, match="allowed"):
        batch.check(kernel, with_newest, output)


@decodes
@some_layouts
@newest_or_stored
@caps
@pytest.mark.parametrize(
    "query_len, group", [(1, 4), (1, 5), (1, 16), (3, 1), (3, 4), (8, 1), (2, 16)]
)
def test_decodes(layout, with_newest, cap, query_len, group, kernel):
    batch = Batch(layout, SEQ_LENS, query_len, group)
    check_cap(capped(batch, cap), kernel, with_newest)


@decodes
@some_layouts
@newest_or_stored
@pytest.mark.parametrize("group", [1, 4])
def test_ragged_drafts(layout, with_newest, group, kernel):
    batch = Batch(layout, SEQ_LENS, [1, 3, 2, 4, 1, 0, 2, 3, 3], group, BF16)
    check_cap(capped(batch, 2.0), kernel, with_newest)


@extends
@some_layouts
@newest_or_stored
@caps
@pytest.mark.parametrize("query_len", [7, 16, 33])
def test_extends(layout, with_newest, cap, query_len, kernel):
    """Extends with as many queries as each plan has, and in several passes."""
    batch = Batch(layout, SEQ_LENS, query_len, 4)
    check_cap(capped(batch, cap), kernel, with_newest)


@any_kernel
@newest_or_stored
@pytest.mark.parametrize("num_splits", [1, 2, 64])
def test_splits(kernel, with_newest, num_splits):
    batch = Batch(LAYOUT, [1000, 40, 613, 350], 3, 4)
    check_cap(capped(batch, 2.0), kernel, with_newest, num_splits)


@some_layouts
@any_kernel
@newest_or_stored
@pytest.mark.parametrize("window", [1, 17, 128])
def test_windows_and_sinks(layout, kernel, with_newest, window):
    """Hidden tokens have no score, rather than minus the cap; sinks have no cap."""
    batch = Batch(layout, SEQ_LENS, 16 if kernel in EXTENDS else 2, 4)
    batch.slide(window)
    batch.sinks = sinks_of(batch)
    check_cap(capped(batch, 2.0), kernel, with_newest)


@any_kernel
@newest_or_stored
def test_a_cap_far_above_all_scores(kernel, with_newest):
    """A large cap keeps small scores, up to an error that is relative to the cap."""
    batch = Batch(LAYOUT, SEQ_LENS, 3, 4)
    expected = batch.decode(kernel, with_newest)
    batch.logits_soft_cap = 1000.0
    output = batch.decode(kernel, with_newest)
    batch.logits_soft_cap = None
    assert not torch.equal(output.nan_to_num(), expected.nan_to_num())
    batch.check(kernel, with_newest, output)


@pytest.mark.parametrize("cap", [2.0, 50.0])
def test_capped_scores(cap):
    """Capped scores are exact to 2**-21 of the cap; the hardware's own tanh is off by
    up to 2**-11. Each is found from its weight beside a score of zero.
    """
    largest = 4 * cap
    scores = torch.linspace(-largest, largest, 4001, dtype=torch.float64)
    scores = torch.cat([scores, 2.0 ** -torch.arange(20)]).float().to(DEVICE)
    num_seqs, size = len(scores), 128
    query, key = (torch.zeros(num_seqs, 1, size, device=DEVICE) for _ in range(2))
    value = torch.ones(num_seqs, 1, size, device=DEVICE)
    query[:, 0, 5], key[:, 0, 5] = scores, 1.0
    lse = torch.zeros(num_seqs, 1, device=DEVICE)
    output = torch.empty_like(query)
    batch = DecodeBatch(
        num_seqs,
        torch.empty(0, 0, dtype=torch.int32, device=DEVICE),
        torch.full((num_seqs,), 2, dtype=torch.int32, device=DEVICE),
    )
    newest = NewestTokens(query, key, value, 1.0)
    call = merge_call(batch, output, 1, newest, soft_cap=cap)
    merge_splits(Partials(torch.zeros_like(query), lse), call)
    weights = output[:, 0, 0].double().cpu()
    exact = cap * torch.tanh(scores.double().cpu() / cap)
    # A weight determines its score if it is neither 0 nor 1.
    told = exact.abs() < 7
    error = (weights.logit() - exact)[told].abs().max()
    # The weight itself is rounded as well.
    rounding = 2.0**-22 * math.exp(7)
    assert error <= cap * 2.0**-21 + rounding
    assert (weights[exact > 14] > 1 - 2.0**-19).all()
    assert (weights[exact < -14] < 2.0**-19).all()


@kernels
def test_not_with_an_offset(kernel):
    batch = Batch(LAYOUT, [40], 1, 4)
    batch.logits_soft_cap = 50.0
    table = torch.zeros(1, 2, LAYOUT.head_size, device=DEVICE)
    offset = OffsetScores(batch.query, table, batch.scale)
    with pytest.raises(AssertionError, match="capped scores with an offset"):
        batch.decode(kernel, True, offset=offset)
