# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The log line about all ranks' kernels, which one rank writes once."""

import logging

import pytest
import torch

from vllm.v1.attention.ops.turbo.serving import rank_report
from vllm.v1.attention.ops.turbo.serving.rank_report import describe_ranks, exchange

from ..rank_utils import RankGroup, Ranks

CUDA = "CUDA kernels, because they could be loaded"
TRITON = "Triton kernels, because there is no nvcc"


def test_ranks_report_all_kernels_once(log, monkeypatch):
    """Ranks report once, even if each one's builders report again."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(rank_report, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(rank_report, "_get_default_store", lambda: store)
    for rank in (3, 0, 2, 1):
        world = RankGroup(Ranks(4), rank)
        monkeypatch.setattr(rank_report, "get_world_group", lambda world=world: world)
        rank_report.report_kernels.cache_clear()
        for _ in range(2):
            rank_report.report_kernels(TRITON if rank == 2 else CUDA)
    rank_report.report_kernels.cache_clear()
    (line,) = log
    assert line.level == logging.WARNING
    assert f"{CUDA} (ranks 0-1, 3); {TRITON} (ranks 2). A step waits" in line.text


def test_the_last_rank_has_all_reports():
    store = torch.distributed.HashStore()
    assert exchange("b", 1, 3, store) is None
    assert exchange("c", 2, 3, store) is None
    assert exchange("a", 0, 3, store) == ["a", "b", "c"]
    assert exchange("a", 0, 3, store) is None


def test_nobody_waits_for_a_rank_without_a_report():
    """A rank may report nothing: it may have no attention, or another may restart."""
    store = torch.distributed.HashStore()
    assert [exchange("a", rank, 3, store) for rank in (0, 2, 2)] == [None] * 3


def test_line():
    assert describe_ranks([CUDA] * 8) == (
        f"Turbo KV cache, kernels of 8 ranks: {CUDA} (ranks 0-7)."
    )


@pytest.mark.parametrize(
    "used, levels",
    [
        ([CUDA, CUDA], [logging.INFO]),
        ([CUDA, CUDA.replace("built", "loaded")], [logging.INFO]),
        ([CUDA, TRITON], [logging.WARNING]),
    ],
    ids=["alike", "for other reasons", "not alike"],
)
def test_unlike_kernels_get_a_warning(log, used, levels):
    rank_report.log_ranks(used)
    assert [line.level for line in log] == levels
