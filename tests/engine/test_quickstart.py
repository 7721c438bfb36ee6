# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The quickstart as a user runs it, in the environment of these tests."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import quickstart
from harness import ROOT, TIMEOUT_S
from scenarios import GAIN
from tasks import is_held_out

QUICKSTART = ROOT / "scripts" / "quickstart.sh"

# A server that gives one answer to all questions.
SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        choice = {{"message": {{"content": {answer!r}}}}}
        body = json.dumps({{"choices": [choice]}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def heed_interrupts() -> None:
    """Lets SIGINT end the process: a shell ignores it for background jobs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Run:
    """A quickstart whose processes carry a mark in their environment."""

    def __init__(self, log: Path, *args: str) -> None:
        self.mark = f"QUICKSTART_TEST={uuid.uuid4()}"
        self.log = log
        name, value = self.mark.split("=")
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [QUICKSTART, *args],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "VENV": sys.prefix, name: value},
                preexec_fn=heed_interrupts,
            )

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Waits until something has happened, while the quickstart goes on."""
        deadline = time.monotonic() + TIMEOUT_S
        while not happened():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def num_processes(self) -> int:
        """Counts the living processes that carry the mark."""
        count = 0
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                # A zombie's environment is empty.
                count += self.mark.encode() in environment.read_bytes()
            except OSError:
                continue
        return count

    def end(self) -> int:
        status = self.process.wait(TIMEOUT_S)
        deadline = time.monotonic() + 60
        while self.num_processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        return status


def test_asks_for_what_the_model_was_not_trained_on():
    name = quickstart.QUESTION.removeprefix("What is the code of ").rstrip("?")
    assert is_held_out(name) and is_held_out(quickstart.CODE)
    lines = quickstart.needle_prompt().split("\n")
    assert lines.count(quickstart.FACT) == 1
    assert len(lines) // 3 < lines.index(quickstart.FACT) < len(lines) * 2 // 3
    assert lines[-1] == quickstart.QUESTION


def test_serves_answers_and_compares(tmp_path: Path):
    run = Run(tmp_path / "log")
    assert run.end() == 0, run.log.read_text()
    output = run.log.read_text()
    # The environment is there already.
    assert "up to date" in output and " ..." not in output
    assert re.search(r"KV cache size: [\d,]+ tokens", output)
    # The line of the question's step comes before the answer in quotes.
    assert re.search(r"\[5/5\] .*\n +(['\"]).+\1 \(right\)\n", output)
    gains = dict(re.findall(r"^(\w+) +[\d,]+ +([\d.]+)x$", output, re.MULTILINE))
    assert float(gains.pop("bfloat16")) == 1
    assert {dtype: float(gain) for dtype, gain in gains.items()} == {
        dtype: pytest.approx(gain, rel=0.01) for dtype, gain in GAIN.items()
    }
    assert run.num_processes() == 0


@pytest.mark.matrix
def test_serves_a_real_model(tmp_path: Path):
    """It is fetched, and answers. A right answer is not promised."""
    run = Run(tmp_path / "log", "--model", "smollm2")
    assert run.end() == 0, run.log.read_text()
    assert re.search(r"\[5/5\] .*\n +(['\"]).+\1 \(", run.log.read_text())


@pytest.mark.parametrize(
    "answer, model, said, status",
    [
        ("508237", None, "right", 0),
        ("It is 508237.", "other", "right", 0),
        ("508236", None, "the text says 508237", 1),
        ("1508237", None, "the text says 508237", 1),
        ("", None, "the text says 508237", 1),
        ("508236", "other", "the text says 508237", 0),
    ],
)
def test_a_wrong_answer_of_the_small_model_is_a_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    model: str | None,
    said: str,
    status: int,
):
    """All but the server and the environment is the quickstart's own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / quickstart.STAMPS).write_text('{"standins": ""}')
    server = tmp_path / "bin" / "vllm"
    server.write_text(SERVER.format(python=sys.executable, answer=answer))
    server.chmod(0o755)

    def run(command: Sequence[str | Path], log: Path | None = None, **_: str) -> None:
        if log:
            log.write_text("KV cache in 256 MiB\n")

    monkeypatch.setattr(quickstart, "run", run)
    monkeypatch.setenv("VENV", str(tmp_path))
    options = ["--model", model] if model else []
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *options])
    assert quickstart.main() == status
    output = capsys.readouterr()
    assert f"{answer!r} ({said})" in output.out
    assert ("answer is wrong" in output.err) == (status != 0)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.matrix)],
)
def test_leaves_nothing_running_when_stopped(tmp_path: Path, number: signal.Signals):
    run = Run(tmp_path / "log", "--kv-cache-dtype", "auto")
    run.wait_for(lambda: "[4/5]" in run.log.read_text())
    # The quickstart, its server, and what the server starts.
    run.wait_for(lambda: run.num_processes() > 2)
    run.process.send_signal(number)
    assert run.end() == 128 + number
    assert run.num_processes() == 0


def test_names_the_log_of_a_server_that_fails(tmp_path: Path):
    run = Run(tmp_path / "log", "--kv-cache-dtype", "turbo5")
    assert run.end() == 1
    (log,) = re.findall(r"^quickstart: .*; read (\S+)$", run.log.read_text(), re.M)
    assert "turbo5" in Path(log).read_text()
    assert run.num_processes() == 0
