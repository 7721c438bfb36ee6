# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The comparisons and complaints of `soak.py`, and a small run of it."""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soak
from harness import ROOT, TIMEOUT_S, as_words
from soak import LEAST_USAGE, Soak, complaints
from soak_transfers import for_nobody, transfer_config
from turbo_process import runner
from turbo_process.log import ROW
from turbo_quality.cases import MODEL

from vllm.config import KVTransferConfig
from vllm.outputs import CompletionOutput, RequestOutput

REQUESTS = 24


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
        "window": True,
        "recent_window": [16],
        "drafts": "ngram",
        "accepted_drafts": 7,
        "offload": 4.0,
        "loaded_bytes": 1 << 20,
        "transfers": 0.1,
        "for_nobody": 5,
        "from_nobody": 6,
        "aborted_transfers": 1,
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
        ("recent_window", [], "no request had a recent window"),
        ("accepted_drafts", 0, "no draft was accepted"),
        ("loaded_bytes", 0, "no page came back"),
        ("for_nobody", 0, "no transfer went wrong"),
        ("from_nobody", 0, "no transfer went wrong"),
        ("aborted_transfers", 0, "none was aborted"),
        ("blocks_lost", 1, "1 blocks are lost"),
        ("blocks_lost", -1, "-1 blocks are lost"),
        ("reserved_bytes_grown", 1, "memory grew"),
    ],
)
def test_each_fault_is_named(row, field, value, said):
    row[field] = value
    assert any(said in text for text in complaints(row))


@pytest.mark.parametrize("field", ["window", "drafts", "offload", "transfers"])
def test_what_is_not_asked_for_need_not_be(row, field):
    row |= {"accepted_drafts": 0, "loaded_bytes": 0, "for_nobody": 0}
    row["recent_window"] = []
    said = complaints(row)
    row[field] = None
    assert len(complaints(row)) == len(said) - 1 == 3


class Ending:
    """An engine whose next step ends request 3 with some tokens."""

    def __init__(self, tokens: list[int]) -> None:
        answer = CompletionOutput(0, "", tokens, None, None)
        self.output = RequestOutput("3", None, None, None, [answer], finished=True)

    def step(self) -> list[RequestOutput]:
        return [self.output]


def soak_step(tokens: list[int], **fields: Any) -> Soak:
    """Makes a step that ends request 3, and returns the run."""
    run = object.__new__(Soak)
    run.args, run.random = argparse.Namespace(tokens=4, aborted=1.0), random.Random(0)
    run.engine, run.streaming = Ending(tokens), {"3"}
    run.counts = {"answered": 0, "positions": 0, "unequal": 0}
    run.unequal, run.transfers = [], {}
    vars(run).update(fields)
    run.step()
    return run


@pytest.mark.parametrize(
    "tokens, answered, unequal",
    [
        ([5, 6, 7, 8], 1, 0),
        # A token that rounding decides, and other tokens behind it.
        ([5, 6, 9, 1], 1, 0),
        ([5, 9, 7, 8], 1, 1),
        ([9, 6, 7, 8], 1, 1),
        ([5, 6], 0, 0),
        ([5], 0, 1),
    ],
)
def test_an_answer_is_held_to_the_quiet_one(tokens, answered, unequal):
    run = soak_step(tokens, quiet=[[1, 2], [5, 6]], waiting={"3": 1})
    assert run.counts == {"answered": answered, "positions": 2, "unequal": unequal}
    assert [found["prompt"] for found in run.unequal] == [1] * unequal
    assert not run.waiting and not run.streaming


@pytest.mark.parametrize(
    "tokens, answered, unequal", [([5], 1, 0), ([9], 1, 1), ([5, 6], 0, 0)]
)
def test_a_prefill_for_another_engine_has_one_token(tokens, answered, unequal):
    state = {"quiet": [[5, 6, 7]], "waiting": {"3": 0}, "streaming": set()}
    args = argparse.Namespace(tokens=4, aborted=0.0)
    run = soak_step(tokens, args=args, transfers={"3": for_nobody()}, **state)
    assert run.counts == {"answered": answered, "positions": 1, "unequal": unequal}


@pytest.mark.parametrize(
    "transfers, offload, names",
    [
        (0.0, 0.0, []),
        (0.1, 0.0, ["NixlConnector"]),
        (0.0, 2.0, ["OffloadingConnector"]),
        (0.1, 2.0, ["NixlConnector", "OffloadingConnector"]),
    ],
)
def test_connectors(transfers, offload, names):
    config = transfer_config(transfers, offload, on_cpu=False)
    if not names:
        assert config is None
        return
    # vLLM checks names and policies.
    made = KVTransferConfig(**config)
    assert made.kv_load_failure_policy == "recompute"
    assert all(map(made.has_connector, names))
    assert made.has_connector("MultiConnector") == (len(names) > 1)


@pytest.mark.parametrize(
    "changes, ended, status",
    [
        ({}, None, 0),
        ({"unequal": 1}, None, 1),
        ({}, "status 1", 1),
        (None, None, 1),
    ],
)
def test_the_exit_status_says_whether_all_is_well(
    row, changes, ended, status, tmp_path, monkeypatch, capsys
):
    def run_child(_: Any, log: Path, *__: Any) -> str | None:
        text = "Turbo KV cache: recent window: 16 tokens of each request\n"
        text += "" if changes is None else f"{ROW}{json.dumps(row | changes)}\n"
        log.write_text(text)
        return ended

    monkeypatch.setattr(runner, "run_child", run_child)
    monkeypatch.setattr(sys, "argv", ["soak.py", "--log", str(tmp_path / "log")])
    assert soak.main() == status
    assert bool(json.loads(capsys.readouterr().out)["wrong"]) == bool(status)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "more",
    [
        ["--kv-cache-dtype", "turbo4"],
        ["--kv-cache-dtype", "k4v3", "--window", "--drafts", "ngram"]
        # With drafts answers are soon whole, so that more of them have to be cut off.
        + ["--tokens", "12", "--aborted", "0.2"],
        ["--kv-cache-dtype", "turbo3", "--window", "--transfers", "0.3"],
    ],
    ids=lambda more: more[1],
)
def test_a_small_run(model: Path, tmp_path: Path, more: list[str]):
    """All is checked but the share of used blocks, which is low in so small a run.

    With a recent window the load decides which tokens a request sees as codes. Only a
    trained model is certain of its answers then.
    """
    output = tmp_path / "soak.jsonl"
    options = {
        "--model": MODEL if "--window" in more else model,
        "--requests": REQUESTS,
        "--at-once": 14,
        "--lengths": 512,
        "--cases": 1,
        "--tokens": 8,
        "--longest-at-once": 3,
        "--aborted": 0.1,
        "--impossible": 0.1,
        "--max-num-seqs": 8,
        "--max-num-batched-tokens": 1024,
        "--time-limit": TIMEOUT_S,
        "--output": output,
        "--log": tmp_path / "log",
    }
    command = [sys.executable, ROOT / "benchmarks/soak.py", *as_words(options), *more]
    run = subprocess.run(command)
    result = json.loads(output.read_text())
    others = [
        text for text in result["wrong"] if "of the blocks were taken" not in text
    ]
    assert others == [] and run.returncode == bool(result["wrong"])
    assert result["answered"] > REQUESTS / 2 and result["positions"] > 0
