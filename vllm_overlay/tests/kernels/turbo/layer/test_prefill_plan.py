# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefill: plans in slices and pieces, made on the host."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo.planning.cuts import (
    plan_runs,
    plan_slices,
)
from vllm.v1.attention.ops.turbo.planning.prefill import (
    PIECE_BYTES,
    ROW_BYTES,
    PrefillLimits,
    PrefillPlanner,
    plan_context,
    prefill_limits,
)
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape

from ..utils import BF16, DEVICE

CONTEXTS = {
    "no request has context": [0, 0, 0],
    "one request": [37],
    "one token": [0, 1, 0],
    "between empty ones": [0, 100, 0, 0, 31, 0],
    "whole pieces": [16, 32, 16],
    "long": [1000, 1, 999],
}


@pytest.mark.parametrize("tokens_per_piece", [1, 16, 48, 10**6])
@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
def test_plan_covers_each_token_once(contexts, tokens_per_piece):
    """Context is covered in order, in pieces that are all full except the last."""
    lens = torch.tensor(contexts, dtype=torch.int32)
    pieces = plan_context(lens, tokens_per_piece)
    assert len(pieces) == math.ceil(sum(contexts) / tokens_per_piece)
    covered = [0] * len(contexts)
    for index, (starts, cu_lens) in enumerate(pieces):
        assert starts.dtype == cu_lens.dtype == torch.int32
        assert cu_lens[0] == 0 and len(cu_lens) == len(starts) + 1
        total = int(cu_lens[-1])
        assert 0 < total <= tokens_per_piece
        assert total == tokens_per_piece or index == len(pieces) - 1
        for row, length in enumerate(cu_lens.diff().tolist()):
            assert length >= 0
            if length > 0:
                # The piece continues where the last one stopped, after complete
                # contexts of earlier requests.
                assert starts[row] == covered[row]
                assert covered[:row] == contexts[:row]
            covered[row] += length
    assert covered == contexts


def test_random_plans():
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        count = int(torch.randint(1, 9, (), generator=generator))
        lens = torch.randint(0, 90, (count,), generator=generator, dtype=torch.int32)
        size = int(torch.randint(1, 200, (), generator=generator))
        test_plan_covers_each_token_once(lens.tolist(), size)


@pytest.mark.parametrize("max_tokens", [1, 7, 16, 10**6])
@pytest.mark.parametrize(
    "query_lens", [[16], [1, 40], [7, 7, 7], [3, 0, 1, 20, 5, 0]], ids=str
)
def test_slices_cover_each_token_once(query_lens, max_tokens):
    """Slices are in order and of similar size, with the requests of their tokens."""
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).int()
    owners = [row for row, length in enumerate(query_lens) for _ in range(length)]
    slices = plan_slices(starts, max_tokens)
    assert len(slices) == math.ceil(len(owners) / min(max_tokens, len(owners)))
    end = 0
    for tokens, requests in slices:
        assert tokens.start == end
        end = tokens.stop
        own = owners[tokens]
        assert 0 < len(own) <= max_tokens
        assert requests == slice(own[0], own[-1] + 1)
    assert end == len(owners)


def test_limits():
    """With stored K and V, a slice's own tokens fit one piece."""
    of_llama = [
        prefill_limits(LayerShape(32, 8, 128, BF16), stored) for stored in (False, True)
    ]
    slice_tokens = ROW_BYTES // (32 * 128 * 2)
    piece_tokens = PIECE_BYTES // (2 * 8 * 128 * 2)
    assert of_llama == [PrefillLimits(slice_tokens, piece_tokens)] * 2
    piece_tokens = PIECE_BYTES // (2 * 32 * 128 * 2)
    of_mha = [
        prefill_limits(LayerShape(32, 32, 128, BF16), stored)
        for stored in (False, True)
    ]
    assert of_mha == [
        PrefillLimits(slice_tokens, piece_tokens),
        PrefillLimits(piece_tokens, piece_tokens),
    ]


@pytest.mark.parametrize("stored", [False, True], ids=["raw", "stored"])
def test_limits_without_flash_attention(stored):
    """Attention with heads of 512 takes memory by the square of a slice's tokens."""
    limits = prefill_limits(LayerShape(8, 2, 512, BF16), stored)
    starts = torch.tensor([0, 3, 8192], dtype=torch.int32)
    table = torch.zeros(2, 8, dtype=torch.int32)
    planner = PrefillPlanner(stored, limits, DEVICE)
    plan = planner.plan(starts, starts.diff(), table)
    assert [part.tokens.stop for part in plan.slices] == [2048, 4096, 6144, 8192]
    assert plan.max_buffered_tokens() == (2048 if stored else 0)


@pytest.mark.parametrize("stored", [False, True], ids=["raw", "stored"])
def test_scratch_of_a_plan(stored):
    """A first chunk with raw K and V needs no scratch; other prefills are cut up."""
    starts = torch.tensor([0, 40, 60], dtype=torch.int32)
    table = torch.zeros(2, 8, dtype=torch.int32)
    limits = PrefillLimits(16, 32)
    raw_lens = [40, 20], [40, 10, 10], [14, 14, 12, 20]
    for contexts, lens in zip(([0, 0], [0, 9], [70, 0]), raw_lens):
        seq_lens = torch.tensor(contexts, dtype=torch.int32) + starts.diff()
        plan = PrefillPlanner(stored, limits, DEVICE).plan(starts, seq_lens, table)
        found = [part.tokens.stop - part.tokens.start for part in plan.slices]
        assert found == ([15] * 4 if stored else lens)
        own = [length for part, length in zip(plan.slices, found) if part.cached]
        assert plan.max_buffered_tokens() == (max(own) if own else None)
        for part in plan.slices:
            assert (part.raw is None) == stored
            for cached in part.cached:
                assert all(piece.lens.num_tokens <= 32 for piece in cached.pieces)
                assert stored == (cached.own is not None)


@pytest.mark.parametrize("max_tokens", [1, 7, 16, 10**6])
@pytest.mark.parametrize(
    "query_lens", [[16], [1, 40, 2, 3], [7, 7, 7], [8] * 9], ids=str
)
def test_runs_have_each_request_once(query_lens, max_tokens):
    """A run of several requests has no more tokens than a piece, and the next request
    would not fit.
    """
    runs = plan_runs(query_lens, max_tokens)
    assert [first for first, _ in runs] == [0, *(last for _, last in runs[:-1])]
    assert runs[-1][1] == len(query_lens)
    for first, last in runs:
        assert sum(query_lens[first:last]) <= max_tokens or last - first == 1
    for (first, last), (following, _) in zip(runs, runs[1:]):
        assert sum(query_lens[first:last]) + query_lens[following] > max_tokens


def test_neighbours_fit_into_the_scratch_of_a_piece():
    """Raw K and V of several requests are copied into a piece's scratch. A single
    request's are used without a copy, for any number of tokens.
    """
    query_lens = torch.tensor([5, 9, 3, 70, 8, 8, 8, 8, 8], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0).int()])
    table = torch.zeros(9, 8, dtype=torch.int32)
    planner = PrefillPlanner(False, PrefillLimits(16, 32), DEVICE)
    for contexts in (0, 9):
        plan = planner.plan(starts, query_lens + contexts, table)
        assert any(part.has_neighbours for part in plan.slices)
        assert plan.max_buffered_tokens() == (0 if contexts == 0 else 16)
        for part in plan.slices:
            assert part.raw is not None
            assert not part.has_neighbours or part.raw.num_tokens <= 32
    alone = planner.plan(starts[:2], query_lens[:1], table[:1])
    assert alone.max_buffered_tokens() is None


@pytest.mark.parametrize("piece_tokens", [1, 40, 10**6])
@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
def test_side_by_side_has_each_request_once(contexts, piece_tokens):
    """Several requests share a range only if one piece holds all their context.

    Each range has context, so that each request's output is written.
    """
    ranges = plan_runs(contexts, piece_tokens, may_be_empty=False)
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ranges[-1][1] == len(contexts)
    for first, last in ranges:
        lens = [length for length in contexts[first:last] if length]
        assert sum(lens) <= piece_tokens or len(lens) == 1
        assert lens or not any(contexts)
    pairs = zip(ranges, ranges[1:])
    # Ranges are as few as possible: none has room for the next one's first request.
    assert all(
        sum(contexts[a:b]) + next(filter(None, contexts[c:d])) > piece_tokens
        for (a, b), (c, d) in pairs
    )
