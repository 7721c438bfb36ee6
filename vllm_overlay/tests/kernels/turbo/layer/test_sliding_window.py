# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layers with a sliding window, through the backend.

Blocks before a window may belong to another sequence: none of their bytes may count.
"""

import random
from itertools import product

import pytest
import torch

from vllm.config import VllmConfig
from vllm.v1.attention.ops.turbo.planning.sliding_window import plan_window_slices

from ..backend_utils import (
    all_paths,
    kernel_paths,
    make_impl,
    make_vllm_config,
    prefill_modes,
    set_scratch,
    with_drafts,
)
from ..batch_utils import RAGGED_DRAFTS, check_requests
from ..utils import BF16, FP16, ON_GPU, requires_triton

WINDOWS = [1, 15, 16, 17, 128]
all_windows = pytest.mark.parametrize("window", WINDOWS)
# Lengths around windows and blocks; prefills after prefixes that end within a window,
# and one with more tokens than a buffer has room for.
REQUESTS = {
    "decodes": [(1, 15), (1, 16), (1, 17), (1, 0), (1, 127), (1, 129), (1, 300)],
    "mixed": [(1, 130), (5, 14), (20, 150), (2, 64), (33, 0), (150, 31)],
    "one first chunk": [(150, 0)],
}
# Requests with up to two drafts, of equal and of different lengths.
DRAFTED = {
    "uniform": [(3, 31), (3, 0), (3, 14), (3, 129)],
    "ragged": RAGGED_DRAFTS,
}
# Some of all cases, because the interpreter takes seconds for each.
KERNEL_CASES = [
    ("decodes", "raw", 15),
    ("decodes", "raw", 16),
    ("decodes", "stored", 17),
    ("mixed", "raw", 1),
    ("mixed", "raw", 128),
    ("mixed", "stored", 17),
    ("one first chunk", "raw", 17),
]
DRAFT_CASES = [
    ("uniform", "raw", 1),
    ("uniform", "stored", 2),
    ("ragged", "raw", 3),
    ("ragged", "stored", 17),
    ("ragged", "raw", 128),
]
if ON_GPU:
    modes = ("raw", "stored")
    KERNEL_CASES = list(product(REQUESTS, modes, WINDOWS))
    DRAFT_CASES = list(product(DRAFTED, modes, (1, 2, 3, 17, 128)))
LONG_WINDOWS = [1000, 1024, 4096]
LONG = [(1, 1023), (1, 1024), (1, 5000), (64, 1500), (3000, 900), (2, 4096), (1, 15)]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have room for 12 tokens more than the longest window."""
    set_scratch(monkeypatch, piece_tokens=140, least_tokens=12)


def check(
    config: VllmConfig, requests: list[tuple[int, int]], window: int, path: str
) -> None:
    impl = make_impl(config, sliding_window=window, path=path)
    assert impl.runner.scoring.sliding_window == window
    check_requests(config, impl, requests)


@requires_triton
@pytest.mark.parametrize("case", REQUESTS)
@prefill_modes
@all_windows
def test_batches_in_pytorch(folder, case, mode, window, small_buffers):
    config = make_vllm_config(folder, "turbo4", FP16, mode, max_num_batched_tokens=512)
    check(config, REQUESTS[case], window, "torch")


@pytest.mark.parametrize("case, mode, window", KERNEL_CASES)
@kernel_paths
def test_batches(folder, case, mode, window, path, small_buffers):
    config = make_vllm_config(folder, "turbo4", FP16, mode, max_num_batched_tokens=512)
    check(config, REQUESTS[case], window, path)


@pytest.mark.parametrize("case, mode, window", DRAFT_CASES)
@all_paths
def test_drafts(folder, case, mode, window, path):
    """Each draft sees its own window; some windows have only the query token."""
    config = with_drafts(make_vllm_config(folder, "turbo4", FP16, mode))
    check(config, DRAFTED[case], window, path)


@pytest.mark.parametrize("name", ["k4v3"] + ["turbo3"] * ON_GPU)
@kernel_paths
def test_presets(folder, name, path, small_buffers):
    config = make_vllm_config(folder, name, BF16, max_num_batched_tokens=512)
    check(config, REQUESTS["mixed"], 17, path)


@pytest.mark.skipif(not ON_GPU, reason="thousands of tokens take a GPU")
@prefill_modes
@pytest.mark.parametrize("window", LONG_WINDOWS)
@kernel_paths
def test_long_windows(folder, mode, window, path):
    config = make_vllm_config(
        folder,
        "turbo4",
        BF16,
        mode,
        max_num_batched_tokens=8192,
        max_position_embeddings=8192,
    )
    # Sequences may be longer than in other tests, so that the windows bind.
    config.model_config.max_model_len = 8192
    check(config, LONG, window, path)


@pytest.mark.parametrize("window", [1, 2, 17, 128])
@pytest.mark.parametrize("stored", [False, True])
def test_slices(window, stored):
    """Each query token is in one slice, in order, with all tokens that it sees.

    No slice has more tokens than there is room for.
    """
    draw, room = random.Random(window), window + 12
    for _ in range(50):
        lens = [draw.choice([0, 1, 2, 13, 40, 200]) for _ in range(draw.randint(1, 6))]
        contexts = [draw.choice([0, 1, window - 1, 300]) for _ in lens]
        starts = torch.tensor([0, *lens]).cumsum(0).int()
        seq_lens = torch.tensor(lens, dtype=torch.int32) + torch.tensor(contexts).int()
        table = torch.arange(len(lens), dtype=torch.int32)[:, None]
        slices = plan_window_slices(
            starts, seq_lens, table, stored, window, room, torch.device("cpu")
        )
        found = []
        for each in slices:
            runs = each.runs
            begins = (each.queries.cu_lens + each.tokens.start).tolist()
            assert begins[-1] == each.tokens.stop
            assert each.queries.max_len == max(each.queries.cu_lens.diff())
            if runs is None:
                assert (len(lens), contexts[0], stored) == (1, 0, False)
                found += [(0, token) for token in range(each.tokens.stop)]
                continue
            cu_lens, cached_lens = runs.lens.cu_lens, runs.cached.cached_lens
            run_lens = cu_lens.diff().tolist()
            assert sum(run_lens) == runs.lens.num_tokens <= room
            assert torch.equal(runs.cached.lens.cu_lens, cu_lens)
            assert runs.lens.max_len == max(run_lens)
            assert runs.cached.lens.max_len == max(cached_lens)
            ends = (cu_lens[:-1] + cached_lens)[cached_lens > 0]
            assert runs.num_rotated == max(ends.tolist(), default=0)
            rows = zip(begins, begins[1:], each.block_table[:, 0].tolist(), run_lens)
            for run, (begin, end, request, length) in enumerate(rows):
                first = int(starts[request])
                found += [(request, token) for token in range(begin, end)]
                start = int(runs.cached.starts[run])
                num_cached = int(cached_lens[run])
                position = contexts[request] + begin - first
                assert start == max(position + 1 - window, 0)
                assert start + length == contexts[request] + end - first
                cached_end = start + length if stored else contexts[request]
                assert num_cached == max(cached_end - start, 0)
                assert int(runs.raw_starts[run]) == end - (length - num_cached)
        expected = [
            (request, token)
            for request, length in enumerate(lens)
            for token in range(int(starts[request]), int(starts[request]) + length)
        ]
        assert found == expected
