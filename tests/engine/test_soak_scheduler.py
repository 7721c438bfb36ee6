# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The complaints of `soak_scheduler.py`, short runs of it, and leaks that it finds."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import TIMEOUT_S, child_variables
from soak_scheduler import GROWN_MIB, MODELS, complaints
from turbo_process.log import what_happened
from turbo_process.runner import run_child

CHILD = Path(__file__).with_name("soak_scheduler_child.py")
REQUESTS = 2000


@pytest.fixture
def row() -> dict[str, Any]:
    return {
        "added": 1000,
        "finished": 900,
        "aborted": 100,
        "aborted_streams": 40,
        "cached_tokens": 10,
        "preemptions": 3,
        "most_blocks_lost": 0,
        "most_known_requests": 0,
        "objects": [5000, 5210, 4000],
        "resident_bytes": [1 << 30, (1 << 30) + (GROWN_MIB << 20), 0],
    }


def test_nothing_is_wrong(row):
    assert complaints(row) == []


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("finished", 899, "1 requests did not end"),
        ("most_known_requests", 2, "2 requests are known"),
        ("most_blocks_lost", 1, "1 blocks are lost"),
        ("most_blocks_lost", -1, "-1 blocks are lost"),
        ("objects", [5000, 5211, 5000], "211 objects were added"),
        ("resident_bytes", [0, 1, (GROWN_MIB << 20) + 1], "MiB of memory were added"),
        ("aborted_streams", 100, "no waiting request was aborted"),
        ("aborted_streams", 0, "no stream was aborted"),
        ("preemptions", 0, "no request was preempted"),
        ("cached_tokens", 0, "no block was found again"),
    ],
)
def test_each_fault_is_named(row, field, value, said):
    row[field] = value
    assert any(said in text for text in complaints(row))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The complaints, by run."""
    folder = tmp_path_factory.mktemp("soak")
    result, log = folder / "result.json", folder / "log"
    command = [sys.executable, CHILD, result, str(REQUESTS)]
    variables = child_variables("v2")
    wrong = run_child(command, log, variables, TIMEOUT_S, is_forked=True)
    assert not wrong, what_happened(log)
    return json.loads(result.read_text())


@pytest.mark.parametrize("model", MODELS)
def test_nothing_leaks(found, model):
    assert found[model] == []


@pytest.mark.parametrize(
    "leak, said",
    [
        ("blocks", "blocks are lost"),
        ("blocks", "requests are known that ended"),
        ("objects", "objects were added"),
        ("unused", "no block was found again"),
    ],
)
def test_a_leak_is_found(found, leak, said):
    assert any(said in text for text in found[leak])
