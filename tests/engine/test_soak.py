# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What `soak.py` complains of."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from soak import LEAST_USAGE, complaints  # noqa: E402


@pytest.fixture
def row() -> dict[str, Any]:
    return {
        "requests": 100,
        "answered": 90,
        "aborted": 7,
        "aborted_streams": 2,
        "refused": 3,
        "accepted_impossible": 0,
        "unequal": 0,
        "preemptions": 50,
        "mean_usage": LEAST_USAGE,
        "blocks_lost": 0,
        "reserved_bytes_grown": 0,
    }


def test_nothing_is_wrong(row):
    assert complaints(row) == []


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("answered", 89, "1 requests got nothing"),
        ("unequal", 1, "1 answers are not"),
        ("accepted_impossible", 1, "impossible request was taken"),
        ("aborted", 0, "nothing was aborted"),
        ("refused", 0, "nothing was aborted or refused"),
        ("aborted_streams", 0, "no stream"),
        ("preemptions", 0, "no request was preempted"),
        ("mean_usage", LEAST_USAGE - 0.001, "of the blocks were taken"),
        ("blocks_lost", 1, "1 blocks are lost"),
        ("blocks_lost", -1, "-1 blocks are lost"),
        ("reserved_bytes_grown", 1, "memory grew"),
    ],
)
def test_each_fault_is_named(row, field, value, said):
    row[field] = value
    assert any(said in text for text in complaints(row))
