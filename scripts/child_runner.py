# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs commands in process groups of their own, and says what they ended of."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cpu_standins"))

from vllm_turbo_cpu_standins.settings import engine_environment  # noqa: E402

# Before a line of JSON, of a child that reports in its log.
ROW = "RESULT "
STOP_TIMEOUT_S = 10
# For all processes of a group to say where they are.
STACKS_S = 5
# Of a log, in a message.
LAST_LINES = 60
LINES_BEFORE = 16
MAX_ERRORS = 4
# The line that ends a traceback, with what vLLM writes before it.
ERROR = re.compile(r"(^|\] )[\w.]*(Error|Exception|Interrupt)(:|$)")
FORK_SERVER = Path(__file__).with_name("fork_server.py")
# SIGABRT then prints where each thread is.
CHILD_VARIABLES = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}


class ForkedChild:
    """A process that a fork server has forked: of a Popen, what is needed here."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.server = server
        self.pid = pid
        self.status: int | None = None

    def poll(self) -> None:
        """Does nothing: the server waits for it."""

    def wait(self, timeout: float | None = None) -> int:
        """Returns its status.

        Raises:
            subprocess.TimeoutExpired: If it has not ended by then, in seconds.

        """
        if self.status is None:
            if not self.server.has_answer(timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.status = self.server.answer()
        return self.status


class ForkServer:
    """A process that has imported vLLM (fork_server.py), and forks one at a time.

    It ends when this process does.
    """

    def __init__(self, variables: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, FORK_SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | CHILD_VARIABLES | dict(variables),
                start_new_session=True,
            )

    def has_answer(self, timeout: float | None) -> bool:
        return bool(select.select([self.process.stdout], [], [], timeout)[0])

    def answer(self) -> int:
        """Returns its next answer.

        Raises:
            RuntimeError: If the server has ended instead.

        """
        assert self.process.stdout is not None
        # A byte at a time: nothing may be left where select does not see it.
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self.process.stdout.fileno(), 1)
            if not byte:
                raise RuntimeError(f"no fork server:\n{what_happened(self.log)}")
            line += byte
        return int(line)

    def fork(self, argv: Sequence[str | Path], log: Path) -> ForkedChild:
        """Runs a Python file, of which the server's last has ended."""
        assert self.process.stdin is not None
        request = {"argv": [str(word) for word in argv], "log": str(log)}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return ForkedChild(self, self.answer())


# Of all threads.
running_now: set["subprocess.Popen | ForkedChild"] = set()
# A thread's, by their variables.
servers = threading.local()


def raise_exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def exit_when_told() -> None:
    """Lets SIGTERM and SIGHUP end this process by way of its `finally` clauses."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, raise_exit)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Lets a second Ctrl-C wait until the first has been dealt with.

    Signals are the main thread's; in another one nothing has to be done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, former):
            signal.signal(number, handler)


def signal_group(
    process: subprocess.Popen | ForkedChild, number: int, patience_s: float
) -> bool:
    """Sends a signal to a process and all that it started; whether they end of it."""
    deadline = time.monotonic() + patience_s
    try:
        os.killpg(process.pid, number)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    except ProcessLookupError:
        return True
    return False


def stop_group(process: subprocess.Popen | ForkedChild) -> None:
    """Ends a process and all that it started."""
    if not signal_group(process, signal.SIGTERM, STOP_TIMEOUT_S):
        signal_group(process, signal.SIGKILL, STOP_TIMEOUT_S)


@contextmanager
def running(
    command: Sequence[str | Path], log: Path | None, variables: Mapping[str, str]
) -> Iterator[subprocess.Popen]:
    """Runs a command in a process group that never outlives the block.

    Args:
        command: Program and arguments.
        log: Where its output goes, in a folder that is made; None for ours.
        variables: Added to the environment.

    Yields:
        The process.

    """
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    output = log.open("w") if log else None
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        env=os.environ | dict(variables),
        start_new_session=True,
    )
    running_now.add(process)
    try:
        yield process
    finally:
        with uninterrupted():
            stop_group(process)
        running_now.discard(process)
        if output:
            output.close()


@contextmanager
def forked(
    argv: Sequence[str | Path], log: Path, variables: Mapping[str, str]
) -> Iterator[ForkedChild]:
    """As `running`, of a Python file that this thread's fork server runs.

    Each set of variables has a server, which is started for its first file, and again
    if it has ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    key = frozenset(variables.items())
    by_variables = vars(servers).setdefault("by_variables", {})
    server = by_variables.get(key)
    if server is None or server.process.poll() is not None:
        log_of_server = log.with_name(f"{log.name}.server")
        server = by_variables[key] = ForkServer(variables, log_of_server)
    child = server.fork(argv, log)
    running_now.add(child)
    try:
        yield child
    finally:
        with uninterrupted():
            stop_group(child)
            child.wait()
        running_now.discard(child)


@contextmanager
def side_by_side(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yields a pool of threads that run children, of which none outlives the block."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        with uninterrupted():
            pool.shutdown(wait=False, cancel_futures=True)
            with ThreadPoolExecutor(count) as stopping:
                stopping.map(stop_group, list(running_now))
            pool.shutdown()


def engine_variables(on_cpu: bool) -> dict[str, str]:
    """Returns the variables of an engine's process.

    On a CPU it takes the model runner that GPUs take, and one core.
    """
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if on_cpu:
        variables |= engine_environment("v2") | {"OMP_NUM_THREADS": "1"}
    return variables


def run_child(
    command: Sequence[str | Path],
    log: Path,
    variables: Mapping[str, str],
    time_limit: float,
    is_forked: bool = False,
) -> str | None:
    """Runs a command of Python's to its end, or for so many seconds.

    Args:
        command: Python, a file and its arguments.
        log: Where its output goes.
        variables: Added to the environment.
        time_limit: Seconds.
        is_forked: Whether this thread's fork server may run it: there is no GPU, and it
            imports vLLM.

    Returns:
        What is wrong with its end, if anything.

    """
    started = (
        forked(command[1:], log, variables)
        if is_forked
        else running(command, log, CHILD_VARIABLES | dict(variables))
    )
    with started as process:
        try:
            status = process.wait(time_limit)
        except subprocess.TimeoutExpired:
            signal_group(process, signal.SIGABRT, STACKS_S)
            return f"no end after {time_limit:.0f} s"
    return f"status {status}" if status else None


def what_happened(log: Path) -> str:
    """Returns a log's first errors, which are the cause of later ones, and its end.

    A worker's lines begin with its rank, so that ranks can be told apart.
    """
    lines = log.read_text(errors="replace").splitlines()
    errors = [number for number, line in enumerate(lines) if ERROR.search(line)]
    shown = set(range(max(len(lines) - LAST_LINES, 0), len(lines)))
    for number in errors[:MAX_ERRORS]:
        shown |= set(range(max(number - LINES_BEFORE, 0), number + 1))
    text, last = [], -1
    for number in sorted(shown):
        if number > last + 1:
            text.append(f"... {number - last - 1} lines")
        text.append(lines[number])
        last = number
    return "\n".join(text)


def last_error(log: Path) -> str:
    """Returns the last error that a log names, on one line."""
    text = log.read_text(errors="replace")
    errors = re.findall(r"\b\w+(?:Error|Exception): .*$", text, re.MULTILINE)
    return errors[-1].strip()[:300] if errors else f"see {log}"


def emit(**fields: Any) -> None:
    """Sends a row from a child to the process that reports it."""
    print(f"\n{ROW}{json.dumps(fields)}", flush=True)


def rows_of(log: Path) -> list[dict[str, Any]]:
    """Returns what a child emitted into its log."""
    lines = log.read_text(errors="replace").splitlines()
    return [json.loads(x.removeprefix(ROW)) for x in lines if x.startswith(ROW)]


def run_for_row(
    command: Sequence[str | Path],
    log: Path,
    variables: Mapping[str, str],
    time_limit: float,
) -> dict[str, Any]:
    """As `run_child`, of a command that emits a row.

    Returns:
        The last row. If there is none, or the command did not end well, `wrong` alone:
        a list of one text, with what the log says of it.

    """
    wrong = run_child(command, log, variables, time_limit)
    rows = rows_of(log)
    if wrong or not rows:
        return {"wrong": [f"{wrong or 'no row'}\n{what_happened(log)}"]}
    return rows[-1]
