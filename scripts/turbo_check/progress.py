# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prints the progress of a long command every few seconds, without a terminal."""

import sys
import threading
import time
from collections.abc import Callable

EVERY_S = 10.0


class Heartbeat:
    """Prints a line of status every so many seconds, from a thread of its own.

    On a terminal it prints none: a bar is shown there.
    """

    def __init__(self, status: str, every_s: float = EVERY_S) -> None:
        self.status: Callable[[], str] = lambda: status
        self.every_s = every_s
        self.start = time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.beat, daemon=True)

    def beat(self) -> None:
        while not self.ended.wait(self.every_s):
            took = time.monotonic() - self.start
            print(f"{took:.0f} s: {self.status()}", flush=True)

    def __enter__(self) -> "Heartbeat":
        if not sys.stderr.isatty():
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()
