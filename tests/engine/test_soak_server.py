# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The answers and complaints of `soak_server.py`, and a small run of it."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, as_words
from soak_common import decided_tokens
from soak_server import Broken, Clients, ask, complaints


def chunk(tokens: list[int], reason: str | None = None) -> str:
    choice = {"token_ids": tokens, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


DONE = "data: [DONE]\n\n"
ERROR = 'data: {"error": {"message": "EngineCore died"}}\n\n'
# A response, its tokens, and whether the answer is whole.
STREAMS: dict[str, tuple[str, list[int], bool]] = {
    "whole": (chunk([1, 2]) + chunk([3], "length") + DONE, [1, 2, 3], True),
    "cut": (chunk([1, 2]), [1, 2], False),
    "cut in a line": (chunk([1]) + chunk([2])[:15], [1], False),
    "error": (chunk([1]) + ERROR + DONE, [1], False),
    "aborted": (chunk([1]) + chunk([], "abort") + DONE, [1], False),
    "empty": ("", [], False),
}


class Handler(BaseHTTPRequestHandler):
    """Answers all requests with one body and status."""

    answer, status = "", 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.answer.encode())

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("answer, tokens, is_whole", STREAMS.values(), ids=STREAMS)
def test_streams(port, monkeypatch, answer, tokens, is_whole):
    monkeypatch.setattr(Handler, "answer", answer)
    if is_whole:
        assert ask(port, {"stream": True})["token_ids"] == tokens
        return
    with pytest.raises(Broken) as error:
        ask(port, {"stream": True})
    assert error.value.tokens == tokens


@pytest.mark.parametrize(
    "status, reason, is_whole",
    [(200, "length", True), (200, "abort", False), (500, "length", False)],
)
def test_answers(port, monkeypatch, status, reason, is_whole):
    choice = {"token_ids": [1, 2], "finish_reason": reason}
    monkeypatch.setattr(Handler, "answer", json.dumps({"choices": [choice]}))
    monkeypatch.setattr(Handler, "status", status)
    if is_whole:
        assert ask(port, {}) == choice
    else:
        with pytest.raises(Broken):
            ask(port, {})


def test_nobody_listens(port):
    with pytest.raises(Broken):
        ask(1, {})


@pytest.mark.parametrize(
    "tokens, is_whole, unequal",
    [
        ([5, 6, 7], True, 0),
        # The last token is decided by rounding.
        ([5, 6, 9], True, 0),
        ([5, 9, 7], True, 1),
        ([5], True, 1),
        ([5], False, 0),
        ([9], False, 1),
        ([], False, 0),
    ],
)
def test_an_answer_is_held_to_the_quiet_one(tokens, is_whole, unequal):
    clients = object.__new__(Clients)
    clients.lock, clients.decided, clients.unequal = threading.Lock(), [[5, 6]], []
    names = ("answers", "errors", "broken_streams", "positions", "unequal")
    clients.counts = dict.fromkeys(names, 0)
    clients.compare(0, tokens, is_whole)
    assert clients.counts["unequal"] == len(clients.unequal) == unequal
    assert clients.counts["answers"] == is_whole
    assert clients.counts["errors"] == (not is_whole)


def test_tokens_are_decided_up_to_a_tie():
    likeliest = [[-0.1, -3.0], [-0.69, -0.69], [0.0, -9.0]]
    assert decided_tokens([1, 2, 3], likeliest) == [1]
    # Two tokens have the same text.
    likeliest[0] = [-0.1]
    assert decided_tokens([1, 2, 3], likeliest) == []


@pytest.fixture
def row() -> dict[str, Any]:
    kill = {"how": "all", "answers": 20, "errors": 3, "is_gone": True}
    last = {"how": None, "answers": 20}
    return {
        "unequal": 0,
        "positions": 9,
        "broken_streams": 2,
        "window": True,
        "recent_window": [16],
        "kills": [kill, last],
    }


def test_nothing_is_wrong(row):
    assert complaints(row, 20) == []


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("unequal", 1, "1 answers are not"),
        ("positions", 0, "no position"),
        ("broken_streams", 0, "no stream broke off"),
        ("recent_window", [], "no request had a recent window"),
    ],
)
def test_each_fault_is_named(row, field, value, said):
    row[field] = value
    assert any(said in text for text in complaints(row, 20))


@pytest.mark.parametrize(
    "index, field, value, said",
    [
        (0, "answers", 19, "did not answer"),
        (1, "answers", 19, "did not answer"),
        (0, "errors", 0, "was not felt"),
        (0, "is_gone", False, "did not end"),
    ],
)
def test_each_fault_of_a_kill_is_named(row, index, field, value, said):
    row["kills"][index][field] = value
    assert any(said in text for text in complaints(row, 20))


@pytest.mark.matrix
def test_a_small_run(tmp_path: Path):
    """All is checked but that a stream breaks off, which few clients cannot promise."""
    output = tmp_path / "soak.jsonl"
    options = {
        "--kv-cache-dtype": "k4v3", "--kills": 3, "--answers": 3, "--clients": 3,
        "--lengths": 512, "--cases": 1, "--tokens": 8, "--max-num-seqs": 4,
        "--output": output, "--logs": tmp_path,
    }  # fmt: skip
    script = ROOT / "benchmarks/soak_server.py"
    subprocess.run([sys.executable, script, *as_words(options)])
    row = json.loads(output.read_text())
    assert [text for text in row["wrong"] if "stream broke" not in text] == []
    assert row["positions"] > 0 and len(row["kills"]) == 4
