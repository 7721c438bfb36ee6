# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton's attention where V has another head size than K, with a layer's features.

Other modules have these layouts among others: bytes of the store and of tails, decodes
and pieces of context that are gathered.
"""

import math

import pytest
import torch

from ..attention_kernels import KERNELS, rounded_to_fp16
from ..sequences import Features, Sequences, ints, raw_or_stored
from ..utils import (
    DEVICE,
    FP16,
    UNEVEN,
    gaussian,
    layout_id,
    load_context,
    requires_triton,
)

pytestmark = [requires_triton, pytest.mark.usefixtures("short_segments")]

# It takes queries in fp16.
TRITON = KERNELS["triton"]._replace(rounded=rounded_to_fp16)
FEATURES = {
    "window": Features(sliding_window=20),
    "window and sinks": Features(sliding_window=20, sinks=torch.bfloat16),
    "sinks": Features(sinks=torch.float32),
    "cap": Features(soft_cap=50.0),
    "offset": Features(offset="far"),
}


@raw_or_stored
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features(features, with_raw):
    """Requests of one and of several query tokens, with MiMo-V2's sizes."""
    batch = Sequences(UNEVEN[0], [70, 33, 5], [3, 1, 2], 2, features)
    batch.check(TRITON, with_raw, 2)


@pytest.mark.parametrize("layout", UNEVEN[1:], ids=layout_id)
def test_raw_tokens(layout):
    batch = Sequences(layout, [40, 3], 2, 4, Features(dtype=FP16))
    batch.check(TRITON, True, 2)


def test_a_part_of_a_rank():
    """A part is in rotated space and has V's size, as has its LSE's output."""
    launch = Sequences(UNEVEN[0], [60, 20], 1, 2).launch(False, 2)
    output = launch.call.output.float()
    lse = torch.full(output.shape[:2], math.nan, device=DEVICE)
    call = launch.call._replace(output=output, lse=lse)
    TRITON.attend(*launch._replace(call=call))
    assert output.shape[2] == UNEVEN[0].head_size_v
    assert output.isfinite().all() and lse.isfinite().all()


def test_runs():
    """Runs of cached tokens, rotated back, and of raw ones, one of which is broken."""
    from vllm.v1.attention.ops.turbo.planning.tokens import (
        CachedPiece,
        KeyRuns,
        SeqLens,
    )
    from vllm.v1.attention.ops.turbo.triton.runs import lay_out_runs

    layout, cached_lens, raw_lens = UNEVEN[0], [36, 27], [4, 3]
    batch = Sequences(layout, cached_lens, 1, 1)
    sizes = layout.head_size, layout.head_size_v
    raw = [gaussian(7, 2, size, dtype=FP16, seed=3) for size in sizes]
    raw[1][2, 1, -1] = math.inf
    lens = [cached + own for cached, own in zip(cached_lens, raw_lens)]
    bounds = ints([0, lens[0], sum(lens)])
    piece = CachedPiece(
        ints([0, 0]), SeqLens(bounds, max(cached_lens), sum(lens)), ints(cached_lens)
    )
    runs = KeyRuns(
        piece, ints([0, 4]), SeqLens(bounds, max(lens), sum(lens)), sum(lens)
    )
    found = [
        torch.zeros(sum(lens), 2, size, dtype=FP16, device=DEVICE) for size in sizes
    ]
    lay_out_runs(batch.cache, batch.table, runs, *raw, layout, *found)
    cached = [
        load_context(batch.cache, batch.table[row], length, layout)
        for row, length in enumerate(cached_lens)
    ]
    raw[0][2, 1], raw[1][2, 1] = math.nan, 0
    for side, own in enumerate(found):
        first, second = raw[side].split(raw_lens)
        expected = [cached[0][side], first, cached[1][side], second]
        error = (own.float() - torch.cat([x.float() for x in expected])).abs()
        broken = error.isnan()
        assert broken.sum() == (layout.head_size if side == 0 else 0)
        assert (error <= 2**-8)[~broken].all()
