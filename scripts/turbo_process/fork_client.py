# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Asks a process that has imported vLLM (fork_server.py) to fork others, for speed."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from turbo_process.log import what_happened

FORK_SERVER = Path(__file__).with_name("fork_server.py")
# SIGABRT then prints each thread's stack.
CHILD_VARIABLES = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
# Variables that vLLM reads when an engine starts, not when it is imported. A server's
# children may differ in these.
OWN_VARIABLES = {
    "VLLM_CACHE_ROOT",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
}


class ForkedChild:
    """A process that a fork server has forked, with some of Popen's methods."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.server = server
        self.pid = pid
        self.status: int | None = None

    def poll(self) -> None:
        """Does nothing, because the server waits for the process."""

    def wait(self, timeout: float | None = None) -> int:
        """Returns its status, after up to `timeout` seconds.

        Raises:
            subprocess.TimeoutExpired: If it has not ended by then.

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
        # A byte at a time: select does not see bytes in a buffer.
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self.process.stdout.fileno(), 1)
            if not byte:
                raise RuntimeError(f"no fork server:\n{what_happened(self.log)}")
            line += byte
        return int(line)

    def fork(
        self, argv: Sequence[str | Path], log: Path, variables: Mapping[str, str]
    ) -> ForkedChild:
        """Runs a Python file with more variables, once the last process has ended."""
        assert self.process.stdin is not None
        words = [str(word) for word in argv]
        request = {"argv": words, "log": str(log), "variables": dict(variables)}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return ForkedChild(self, self.answer())
