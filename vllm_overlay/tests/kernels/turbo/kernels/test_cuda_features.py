# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Features of layers in CUDA's attention kernels: sliding windows, soft caps of scores,
sinks, and offsets of K, one for each segment of a sequence.

Tokens that no query token sees are not there: blocks do not exist, and tiles hold NaN.
A cap bounds scores by cap * tanh(s / cap). A kernel adds the part of scores that cached
keys lack because of an offset.
"""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda.merge import merge_splits
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    DecodeBatch,
    Partials,
    RawTokens,
    StoreCall,
)

from ..attention_kernels import (
    CUDA,
    DECODES,
    EXTENDS,
    kernels,
    kernels_and_features,
)
from ..attention_utils import merge_call
from ..kernel_under_test import Kernel
from ..sequences import (
    CAPS,
    LAYOUT,
    NUM_KV_HEADS,
    OFFSETS,
    PLAIN,
    SOME_LAYOUTS,
    Features,
    Sequences,
    directions,
    raw_or_stored,
)
from ..utils import BF16, DEVICE, FP16, SEGMENT, gaussian, requires_cuda

pytestmark = requires_cuda

FP32 = torch.float32
NEAR = Features(offset="near", dtype=BF16)
FEATURES = {
    **{f"window{n}": Features(n) for n in (1, 15, 16, 17, 128)},
    **{f"cap{cap:.0f}": Features(soft_cap=cap) for cap in CAPS},
    "offset-bf16": NEAR,
    "offset-fp16": NEAR._replace(dtype=FP16),
}
SINKS = {
    "sinks": Features(sinks=FP16),
    "sinks-window17": Features(17, sinks=FP16),
}
# Windows that begin within segments, and that span several.
PAIRS = {
    f"offset-window{n}": NEAR._replace(sliding_window=n)
    for n in (17, SEGMENT, 2 * SEGMENT + 5)
}
PAIRS |= {
    "offset-sinks": NEAR._replace(sinks=FP32),
    "offset-sinks-window17": NEAR._replace(sliding_window=17, sinks=FP32),
}
PAIRS |= {f"cap-sinks-window{n}": Features(n, 2.0, FP32) for n in (1, 17, 128)}
# Lengths around tiles and windows; some are shorter than the queries.
SEQ_LENS = [130, 0, 2, 15, 16, 17, 33, 128, 300]
# Lengths around borders of segments and below; some are shorter than the queries.
SEGMENT_LENS = [SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 4, 3 * SEGMENT + 56]
SEGMENT_LENS += [0, 2, 130]
LONG = [SEGMENT + 20, 5, 3 * SEGMENT + 56, 2 * SEGMENT, 0]
RAGGED = {
    "drafts": [1, 3, 2, 4, 1, 0, 2, 3, 3],
    "tails": [16, 1, 9, 33, 64, 0, 2, 17, 64],
}


def check_lengths(
    kernel: Kernel,
    layout: TurboFormat,
    features: Features,
    with_raw: bool,
    query_lens: int | str,
    group: int = 4,
) -> None:
    """Check a step; ragged ones, of names in ``RAGGED``, are in bf16."""
    seq_lens = SEGMENT_LENS if features.offset else SEQ_LENS
    if isinstance(query_lens, str):
        query_lens = RAGGED[query_lens][: len(seq_lens)]
        features = features if features.offset else features._replace(dtype=BF16)
    batch = Sequences(layout, seq_lens, query_lens, group, features)
    batch.check(kernel, with_raw)


@kernels_and_features(DECODES, FEATURES, SOME_LAYOUTS)
@raw_or_stored
@pytest.mark.parametrize(
    "query_lens, group",
    [(1, 4), (1, 5), (1, 16), (3, 1), (3, 4), (8, 1), (2, 16)]
    + [("drafts", 1), ("drafts", 4)],
)
def test_decodes(kernel, layout, features, with_raw, query_lens, group):
    """Each of several query tokens sees a window of its own."""
    check_lengths(kernel, layout, features, with_raw, query_lens, group)


@kernels_and_features(EXTENDS, FEATURES, SOME_LAYOUTS)
@raw_or_stored
@pytest.mark.parametrize("query_lens", [7, 16, 33, "tails"])
def test_extends(kernel, layout, features, with_raw, query_lens):
    """Extends with as many queries as each plan has, and in several passes."""
    check_lengths(kernel, layout, features, with_raw, query_lens)


# With an offset a window spans segments, of which the last have one offset.
@kernels_and_features(
    CUDA,
    {
        "window40": Features(40),
        "window300": Features(300),
        "cap2": Features(soft_cap=2.0),
        "offset-window": Features(2 * SEGMENT + 5, None, None, "far", 7, BF16),
    },
)
@raw_or_stored
@pytest.mark.parametrize("num_splits", [1, 2, 3, 64])
def test_splits(kernel, layout, features, with_raw, num_splits):
    """Ranges of warps, teams and blocks begin anywhere in a window."""
    seq_lens = [6 * SEGMENT + 57, 40, SEGMENT]
    if not features.offset:
        seq_lens = [1000, 40, 613, 350]
    batch = Sequences(layout, seq_lens, 3, features=features)
    batch.check(kernel, with_raw, num_splits)


@kernels_and_features(
    CUDA, {x: NEAR._replace(offset=x, num_offsets=6) for x in ("near", "far")}
)
@raw_or_stored
@pytest.mark.parametrize("num_splits", [1, 2, 3, 64])
@pytest.mark.parametrize(
    "seq_lens",
    [
        [6 * SEGMENT + 57],
        [SEGMENT - 8 + i for i in range(20)],
        [3 * SEGMENT + 56] + [40] * 63,
    ],
    ids=["one", "many", "ragged"],
)
def test_splits_with_offsets(kernel, layout, features, with_raw, num_splits, seq_lens):
    """Ranges of warps, teams and blocks begin anywhere and span several offsets."""
    batch = Sequences(layout, seq_lens, 3, features=features)
    batch.check(kernel, with_raw, num_splits)


@kernels_and_features(
    CUDA,
    {x.replace(" ", "-"): NEAR._replace(offset=x) for x in OFFSETS}
    | {f"{n}-offsets": NEAR._replace(num_offsets=n) for n in (1, 2, 3, 4, 7)},
)
@raw_or_stored
def test_offsets(kernel, layout, features, with_raw):
    """The last offset is that of all segments that follow."""
    seq_lens = [*SEGMENT_LENS, SEGMENT + 52, 4 * SEGMENT + 808]
    query_len = 8 if kernel.is_extend else 2
    batch = Sequences(layout, seq_lens, query_len, features=features)
    batch.check(kernel, with_raw)


@kernels_and_features(CUDA, {"far-first": NEAR._replace(offset="far first")})
@raw_or_stored
@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("window", [None, 17, SEGMENT])
def test_first_token(kernel, layout, features, with_raw, num_splits, window):
    """Some query tokens see the first token, others no longer."""
    query_len = 33 if kernel.is_extend else 3
    seq_lens = [1, 2, query_len + 1, query_len + 2, SEGMENT + 5, 2 * SEGMENT + 4]
    if window is not None:
        seq_lens += [window + query_len + i for i in range(-3, 2)]
        features = features._replace(sliding_window=window)
    batch = Sequences(layout, seq_lens, query_len, features=features)
    batch.check(kernel, with_raw, num_splits)


@kernels_and_features(CUDA, SINKS, SOME_LAYOUTS)
@raw_or_stored
@pytest.mark.parametrize("num_splits", [1, 8])
def test_sinks(kernel, layout, features, with_raw, num_splits):
    """Sinks alone, where no token is seen, give zeros. Without a sink, a head's output
    is as without sinks.
    """
    batch = Sequences(layout, SEQ_LENS, 16 if kernel.is_extend else 2, 4, features)
    output = batch.check(kernel, with_raw, num_splits)
    none = batch.scoring.sinks.isneginf()
    batch.scoring = batch.scoring._replace(sinks=None)
    without_sinks = batch.check(kernel, with_raw, num_splits)
    assert torch.equal(output[:, none], without_sinks[:, none])


@kernels(["outputs"])
@raw_or_stored
@pytest.mark.parametrize("num_splits", [1, 8])
def test_sinks_of_each_kv_head(kernel, with_raw, num_splits):
    """Both KV heads have a pass, which a block has whole or in parts."""
    batch = Sequences(LAYOUT, [300], 16, features=SINKS["sinks"])
    batch.check(kernel, with_raw, num_splits)


def leave_nan(batch: Sequences, kernel: Kernel, with_raw: bool) -> None:
    """Have blocks read pages of NaN, which stay in shared memory for the next blocks.

    A tile that a block weighs without having read it then gives NaN.
    """
    launch = batch.launch(with_raw)
    call = launch.call._replace(
        kv_cache=torch.full_like(batch.cache, 0xFF),
        batch=launch.call.batch._replace(block_table=batch.table),
        scoring=batch.scoring._replace(sliding_window=None),
    )
    kernel.attend(*launch._replace(call=call))
    assert call.output.isnan().any()


@kernels_and_features(CUDA, PAIRS, SOME_LAYOUTS)
@raw_or_stored
def test_pairs(kernel, layout, features, with_raw):
    """A step has one offset, so it may begin with tiles that no query sees. Sinks are
    weighed against scores that include the offset's part, and have no cap. Hidden
    tokens have no score, rather than minus the cap.
    """
    seq_lens = LONG if features.offset else SEQ_LENS
    few, many = (3, 33) if features.offset else (2, 16)
    query_len = many if kernel.is_extend else few
    batch = Sequences(layout, seq_lens, query_len, features=features)
    if features.offset:
        leave_nan(batch, kernel, with_raw)
    batch.check(kernel, with_raw)


@kernels(CUDA)
def test_scores_far_below_zero(kernel):
    """Queries see no token of the first step, and have low scores with later ones."""
    length = SEGMENT + 20
    batch = Sequences(LAYOUT, [length], 33 if kernel.is_extend else 3, features=NEAR)
    direction = directions(NUM_KV_HEADS, LAYOUT.head_size, seed=3)
    batch.query += (60 * direction).repeat_interleave(4, 0).to(BF16)
    shape = (length, NUM_KV_HEADS, LAYOUT.head_size)
    key, value = gaussian(*shape, seed=4) - 40 * direction, gaussian(*shape, seed=5)
    slots = batch.slots(0, 0, length)
    reference.store(StoreCall(batch.cache, slots, key.to(BF16), value.to(BF16), LAYOUT))
    batch.slide(17)
    batch.compare(kernel, False, batch.attend(kernel, False))


@kernels_and_features(CUDA, {"plain": PLAIN, "offset": NEAR})
@pytest.mark.parametrize("query_len", [3, 16, 33])
def test_one_split_does_not_depend_on_the_batch(kernel, layout, features, query_len):
    seq_lens = [40, 0, 1700, 300]
    if features.offset:
        seq_lens = [SEGMENT + 1, 0, 2 * SEGMENT + 4]
    Sequences(layout, seq_lens, query_len, features=features).check_alone(kernel)


@kernels(CUDA)
@raw_or_stored
def test_a_window_that_does_not_bind_changes_no_bit(kernel, with_raw):
    batch = Sequences(LAYOUT, SEQ_LENS, 3)
    expected = batch.attend(kernel, with_raw)
    batch.scoring = batch.scoring._replace(sliding_window=max(SEQ_LENS))
    assert torch.equal(batch.attend(kernel, with_raw), expected)


@kernels(CUDA)
@raw_or_stored
def test_a_cap_far_above_all_scores(kernel, with_raw):
    """A large cap keeps small scores, up to an error that is relative to the cap."""
    batch = Sequences(LAYOUT, SEQ_LENS, 3)
    expected, scoring = batch.attend(kernel, with_raw), batch.scoring
    batch.scoring = scoring._replace(soft_cap=1000.0)
    output = batch.attend(kernel, with_raw)
    batch.scoring = scoring
    assert not torch.equal(output.nan_to_num(), expected.nan_to_num())
    batch.compare(kernel, with_raw, output)


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
    raw = RawTokens(query, key, value, 1.0)
    call = merge_call(batch, output, 1, raw, soft_cap=cap)
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


@kernels(CUDA)
def test_windows_that_are_not_taken(kernel):
    batch = Sequences(LAYOUT, [40], 1)
    batch.scoring = batch.scoring._replace(sliding_window=0)
    with pytest.raises(AssertionError):
        batch.attend(kernel, True)


@kernels(CUDA)
def test_a_cap_is_not_with_an_offset(kernel):
    batch = Sequences(LAYOUT, [40], 1, features=NEAR)
    batch.scoring = batch.scoring._replace(soft_cap=50.0)
    with pytest.raises(AssertionError, match="capped scores with an offset"):
        batch.attend(kernel, True)
