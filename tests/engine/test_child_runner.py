# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Children end as they should, and leave nothing behind when they do not."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import SCRIPTS, TIMEOUT_S
from turbo_process import runner
from turbo_process.log import last_error, rows_of, what_happened
from turbo_process.runner import run_child, run_for_row, running
from vllm_turbo_cpu_standins.settings import engine_environment

# A child with a child of its own. Both outlive SIGTERM.
STUBBORN = """
import faulthandler, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not os.fork():
    # Only one prints its stack: the lines of two would be mixed.
    faulthandler.disable()
open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
time.sleep(10_000)
"""
# Runs three of these, two at a time.
PARENT = """
import sys
from pathlib import Path
from turbo_process import runner
from turbo_process.runner import exit_when_told, run_child, side_by_side

runner.STOP_TIMEOUT_S = 0.2
exit_when_told()
folder, program = sys.argv[1:]
with side_by_side(2) as pool:
    runs = [
        pool.submit(
            run_child, [sys.executable, "-c", program, folder],
            Path(folder, f"log-{i}"), {}, 10_000,
        )
        for i in range(3)
    ]
    [run.result() for run in runs]
"""


def python(program: str, *args: str | Path) -> list[str | Path]:
    return [sys.executable, "-c", program, *args]


def alive(folder: Path) -> list[int]:
    """The processes that left their numbers in a folder and still run."""
    numbers = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
    return [number for number in numbers if Path(f"/proc/{number}").exists()]


def wait_for(folder: Path, count: int) -> None:
    """Waits until `count` processes have left their numbers, and run."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(alive(folder)) != count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch):
    """Little for children that ignore signals, and enough for others to end."""
    monkeypatch.setattr(runner, "STOP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(runner, "STACKS_S", TIMEOUT_S)


def test_what_a_child_ended_of(tmp_path: Path):
    log = tmp_path / "folder" / "log"
    program = "import os, sys; print(os.environ['OWN']); sys.exit(int(sys.argv[1]))"
    assert run_child(python(program, "0"), log, {"OWN": "mine"}, TIMEOUT_S) is None
    assert log.read_text() == "mine\n"
    assert run_child(python(program, "3"), log, {"OWN": "x"}, TIMEOUT_S) == "status 3"
    # The child has the rest of this process's environment.
    assert "OWN" not in os.environ


def test_rows_are_read_from_among_the_log(tmp_path: Path):
    program = (
        "from turbo_process.log import emit; import sys\n"
        "emit(a=1); print('RESULTS', end=''); emit(b=[2.5]); sys.exit('TypeError: no')"
    )
    log = tmp_path / "log"
    variables = {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path])}
    assert run_child(python(program), log, variables, TIMEOUT_S) == "status 1"
    assert rows_of(log) == [{"a": 1}, {"b": [2.5]}]
    assert last_error(log) == "TypeError: no"


@pytest.mark.parametrize(
    "lines, found",
    [
        (["KeyError: 'a'", "(Worker pid=7) ValueError: no.", 2, 3], "ValueError: no."),
        (["TypeError: no", "EngineDeadError: See above for the root cause."], None),
        ([2, 3], "RuntimeError: Engine core failed. See root cause above."),
        (["fine"], "see {log}"),
    ],
)
def test_the_error_is_the_cause(tmp_path: Path, lines: list, found: str | None):
    """Processes that wait for the one that failed print their errors after its own."""
    waiting = {
        2: "Exception: A worker failed. See stack trace for root cause.",
        3: "RuntimeError: Engine core failed. See root cause above.",
    }
    log = tmp_path / "log"
    log.write_text("\n".join(waiting.get(line, line) for line in lines) + "\n")
    assert last_error(log) == (found or "TypeError: no").format(log=log)


@pytest.mark.parametrize(
    "program, found",
    [
        ("emit(a=1); emit(b=2)", {"b": 2}),
        ("emit(a=1); sys.exit('TypeError: no')", "status 1\n\nRESULT .*TypeError: no"),
        ("print('ValueError: all')", "no row\nValueError: all"),
    ],
)
def test_a_child_leaves_a_row_or_what_is_wrong(
    tmp_path: Path, program: str, found: dict | str
):
    variables = {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path])}
    program = f"from turbo_process.log import emit; import sys\n{program}"
    row = run_for_row(python(program), tmp_path / "log", variables, TIMEOUT_S)
    if isinstance(found, dict):
        assert row == found
        return
    ((name, (text,)),) = row.items()
    assert name == "wrong" and re.fullmatch(found, text, re.DOTALL)


def test_a_child_that_hangs_says_where_and_ends_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Impatient(subprocess.Popen):
        """A process whose time is over once both processes run."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == TIMEOUT_S:
                wait_for(tmp_path, 2)
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(timeout)

    monkeypatch.setattr(runner.subprocess, "Popen", Impatient)
    log = tmp_path / "log"
    wrong = run_child(python(STUBBORN, tmp_path), log, {}, TIMEOUT_S)
    assert wrong == f"no end after {TIMEOUT_S} s"
    wait_for(tmp_path, 0)
    assert "Fatal Python error: Aborted" in log.read_text()
    assert 'File "<string>", line' in what_happened(log)


def test_nothing_outlives_the_block(tmp_path: Path):
    with (
        pytest.raises(ZeroDivisionError),
        running(python(STUBBORN, tmp_path), tmp_path / "log", {}),
    ):
        wait_for(tmp_path, 2)
        raise ZeroDivisionError
    # A killed process takes a moment to end.
    wait_for(tmp_path, 0)


def test_a_parent_that_is_told_to_end_takes_its_children_along(tmp_path: Path):
    variables = {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path])}
    parent = subprocess.Popen(
        python(PARENT, tmp_path, STUBBORN), env=os.environ | variables
    )
    try:
        wait_for(tmp_path, 4)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        wait_for(tmp_path, 0)
    finally:
        parent.kill()
        for number in alive(tmp_path):
            os.kill(number, signal.SIGKILL)
    # The third one has not begun either.
    assert not (tmp_path / "log-2").exists()


def test_a_forked_child_is_as_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It has arguments, variables and a log of its own, and vLLM is imported before.

    A child that hangs is ended with all that it started, and the next one runs. One
    server forks all children, whichever thread asks.
    """
    monkeypatch.setattr(runner, "idle_servers", defaultdict(list))
    name = "VLLM_NIXL_SIDE_CHANNEL_PORT"
    program, log = tmp_path / "program.py", tmp_path / "folder" / "log"
    program.write_text(
        "import faulthandler, os, sys, time\n"
        "assert 'vllm.v1.worker.cpu_worker' in sys.modules and __name__ == '__main__'\n"
        f"own = os.environ['OWN'], os.environ.get('{name}')\n"
        "print(*own, *sys.argv, os.getpgrp() == os.getpid())\n"
        "open(f'{sys.argv[1]}/{os.getpid()}', 'w').close()\n"
        "if sys.argv[2] == 'hang':\n"
        "    os.fork() or faulthandler.disable()\n"
        "    time.sleep(10_000)\n"
        "sys.exit(int(sys.argv[2]))\n"
    )

    def run(word: str, time_limit: float = TIMEOUT_S, **own: str) -> str | None:
        command = [sys.executable, program, tmp_path, word]
        variables = engine_environment("v1") | {"OWN": "mine"} | own
        return run_child(command, log, variables, time_limit, is_forked=True)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, "0", **{name: "7"}).result() is None
    assert log.read_text() == f"mine 7 {program} {tmp_path} 0 True\n"
    assert run("0") is None
    assert log.read_text() == f"mine None {program} {tmp_path} 0 True\n"
    assert run("3") == "status 3"
    assert run("hang", 5) == "no end after 5 s"
    assert f'File "{program}", line 8 in <module>' in log.read_text()
    wait_for(tmp_path, 0)
    assert run("0") is None
    ((server,),) = runner.idle_servers.values()  # of them all
    server.process.kill()
    server.process.wait()
    assert run("3") == "status 3"


def test_a_log_is_shown_from_its_first_error(tmp_path: Path):
    """The first error counts, whichever rank's it is."""
    (tmp_path / "log").write_text(
        "\n".join(
            [
                *(f"before {i}" for i in range(50)),
                "(Worker_TP1 pid=7) ERROR 11-21 [executor.py:1] ValueError: the cause",
                *(f"after {i}" for i in range(200)),
                "RuntimeError: See root cause above.",
            ]
        )
    )
    shown = what_happened(tmp_path / "log").splitlines()
    assert shown[0] == "... 34 lines"
    assert shown[1] == "before 34"
    assert shown[17].endswith("ValueError: the cause")
    assert shown[-1] == "RuntimeError: See root cause above."
    assert len(shown) < 100
