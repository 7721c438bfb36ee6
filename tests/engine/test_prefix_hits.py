# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""benchmarks/prefix_hits.py: the part of chats that a hybrid's prefix cache holds."""

import csv
import subprocess
import sys

import pytest
from harness import ROOT

COMMITTED = ROOT / "benchmarks/results/cpu/prefix_hits.csv"
MODEL, TURN = "qwen3.5-35b-a3b", "1000"


def read(text: str) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of one model and length of turns, by dtype and unit."""
    rows = [row for row in csv.DictReader(text.splitlines()) if row["turn"] == TURN]
    return {
        (row["kv_cache_dtype"], row["prefix_match_unit"]): row
        for row in rows
        if row["model"] == MODEL and row["chats"] == "1"
    }


@pytest.mark.matrix
def test_rows_are_the_committed_ones():
    command = [sys.executable, ROOT / "benchmarks/prefix_hits.py"]
    command += ["--models", MODEL, "--turns", TURN]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert read(output.stdout) == read(COMMITTED.read_text())


def test_a_unit_makes_up_for_long_blocks():
    """With equal flags as many tokens are reused as with the model's dtype.

    They are more than that dtype reuses by whole blocks.
    """
    rows = {key: int(row["reused"]) for key, row in read(COMMITTED.read_text()).items()}
    assert rows["turbo4", ""] < rows["fp8", ""] < rows["auto", ""]
    assert rows["turbo4", "16"] == rows["fp8", "16"] == rows["auto", "16"]
    assert rows["turbo4", "16"] > rows["auto", ""]
