# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""benchmarks/turbo_transfers.py: comparisons of two engines' answers and times."""

from typing import Any

import pytest
from turbo_transfers import TIE, compared, ratio_rows, visible


def answers(tokens: list[int], margins: list[float]) -> dict[str, Any]:
    return {"tokens": [tokens], "margins": [margins]}


def test_tokens_count_up_to_a_tie() -> None:
    sure, tied = 1.0, TIE / 2
    own = answers([1, 2, 3, 4], [sure, sure, tied, sure])
    assert compared(own, answers([1, 2, 9, 9], [sure] * 4)) == (2, 2)
    assert compared(own, answers([1, 2, 3, 4], [sure, tied, sure, sure])) == (1, 1)


def test_another_token_is_wrong_once() -> None:
    """The tokens after it have another context."""
    own, other = answers([1, 2, 3], [1.0] * 3), answers([1, 7, 8], [1.0] * 3)
    assert compared(own, other) == (1, 2)


def test_gpus() -> None:
    assert [visible(role, 1) for role in ("producer", "consumer")] == ["0", "1"]
    assert visible("consumer", 2) == "0,1"


def test_ratios_have_bounds() -> None:
    base = {"arm": "auto", "block_size": 16, "bytes": 4.0, "gap_ms": 10.0}
    own = {"arm": "turbo4@BLHNC@64", "block_size": 64, "bytes": 1.0, "gap_ms": 6.0}
    found = {row["of"]: row for row in ratio_rows([base, own])}
    assert found["bytes"]["times_bf16"] == pytest.approx(0.25)
    assert found["bytes"]["is_met"] and not found["gap_ms"]["is_met"]
    assert all(row["block_size"] == 64 for row in found.values())
    assert list(ratio_rows([own])) == []
