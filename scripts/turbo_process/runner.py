# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs commands in process groups of their own, and reports how they ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpu_standins"))

from vllm_turbo_cpu_standins.settings import engine_environment  # noqa: E402

from turbo_process.fork_client import (  # noqa: E402
    CHILD_VARIABLES,
    OWN_VARIABLES,
    ForkedChild,
    ForkServer,
)
from turbo_process.log import rows_of, what_happened  # noqa: E402

STOP_TIMEOUT_S = 10
# Seconds in which all processes of a group print their stacks.
STACKS_S = 5
# The beginning of a time-out's message.
NO_END = "no end after"
# Children of all threads.
running_now: set["subprocess.Popen | ForkedChild"] = set()
# Servers without a child, by their variables.
idle_servers: defaultdict[frozenset, list[ForkServer]] = defaultdict(list)


def raise_exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def exit_when_told() -> None:
    """Lets `finally` clauses run when SIGTERM or SIGHUP ends this process."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, raise_exit)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignores further signals while the first one is handled.

    Only the main thread gets signals; another thread has nothing to do.
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
    """Signals a process and all that it started; returns whether they end in time."""
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
        log: The file of its output, whose folder is made; None for our output.
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


def take_server(variables: Mapping[str, str], log: Path) -> ForkServer:
    """Takes an idle fork server with these variables; starts one if there is none."""
    idle = idle_servers[frozenset(variables.items())]
    while True:
        try:
            # A single step, because other threads take servers as well.
            server = idle.pop()
        except IndexError:
            return ForkServer(variables, log)
        if server.process.poll() is None:
            return server


@contextmanager
def forked(
    argv: Sequence[str | Path], log: Path, variables: Mapping[str, str]
) -> Iterator[ForkedChild]:
    """Does the same as `running`, for a Python file that a fork server runs.

    Each set of variables has as many servers as files ran at a time, in any thread.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    shared = {name: v for name, v in variables.items() if name not in OWN_VARIABLES}
    own = {name: v for name, v in variables.items() if name in OWN_VARIABLES}
    server = take_server(shared, log.with_name(f"{log.name}.server"))
    child = server.fork(argv, log, own)
    running_now.add(child)
    try:
        yield child
    finally:
        with uninterrupted():
            stop_group(child)
            child.wait()
        running_now.discard(child)
        idle_servers[frozenset(shared.items())].append(server)


@contextmanager
def side_by_side(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yields a pool of threads that run children; no child outlives the block."""
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

    On a CPU the engine takes a GPU's model runner, and one core.
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
    """Runs a Python command to its end, or for `time_limit` seconds.

    Args:
        command: Python, a file and its arguments.
        log: The file of its output.
        variables: Added to the environment.
        time_limit: Seconds.
        is_forked: Whether a fork server may run it, which needs a command that imports
            vLLM, and no GPU.

    Returns:
        The fault of its end, if any.

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
            return f"{NO_END} {time_limit:.0f} s"
    return f"status {status}" if status else None


def run_for_row(
    command: Sequence[str | Path],
    log: Path,
    variables: Mapping[str, str],
    time_limit: float,
) -> dict[str, Any]:
    """Does the same as `run_child`, for a command that emits a row.

    Returns:
        The last row. Without a row, or after a bad end, the dict has only `wrong`: a
        list of one text, the fault and the errors of the log.

    """
    wrong = run_child(command, log, variables, time_limit)
    rows = rows_of(log)
    if wrong or not rows:
        return {"wrong": [f"{wrong or 'no row'}\n{what_happened(log)}"]}
    return rows[-1]
