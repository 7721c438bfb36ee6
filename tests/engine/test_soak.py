# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What `soak.py` complains of, and a small run of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from soak import LEAST_USAGE, complaints  # noqa: E402

TIMEOUT_S = 300
REQUESTS = 40


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


def test_a_small_run(tmp_path: Path):
    """All but how full the cache is, which so few blocks cannot show."""
    output = tmp_path / "soak.jsonl"
    options = {
        "--requests": REQUESTS,
        "--at-once": 16,
        "--lengths": 512,
        "--cases": 1,
        "--tokens": 16,
        "--longest-at-once": 3,
        "--impossible": 0.1,
        "--max-num-seqs": 8,
        "--max-num-batched-tokens": 1024,
        "--output": output,
    }
    words = [str(word) for pair in options.items() for word in pair]
    run = subprocess.run(
        [sys.executable, str(SCRIPTS / "soak.py"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert output.exists(), run.stdout
    row = json.loads(output.read_text())
    row["mean_usage"] = LEAST_USAGE
    assert complaints(row) == [], row
    assert row["answered"] > REQUESTS / 2 and row["positions"] > 0
