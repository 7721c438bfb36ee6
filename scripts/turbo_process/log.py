# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reads a child's log: rows of JSON, and the errors that ended it."""

import json
import re
from pathlib import Path
from typing import Any

# The mark of a line of JSON, in the log of a child that reports there.
ROW = "RESULT "
# Lines and errors of a log that a message has.
LAST_LINES = 60
LINES_BEFORE = 16
MAX_ERRORS = 4
# The line that ends a traceback, with what vLLM writes before it.
ERROR = re.compile(r"(^|\] )[\w.]*(Error|Exception|Interrupt)(:|$)")


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
    """Returns the last error that a log names, on one line.

    Processes that wait for a failed one also fail. Their errors only point to the root
    cause, so they come last.
    """
    text = log.read_text(errors="replace")
    errors = re.findall(r"\b(?:\w+Error|\w*Exception): .*$", text, re.MULTILINE)
    causes = [error for error in errors if "root cause" not in error]
    return (causes or errors or [f"see {log}"])[-1].strip()[:300]


def emit(**fields: Any) -> None:
    """Sends a row from a child to the process that reports it."""
    print(f"\n{ROW}{json.dumps(fields)}", flush=True)


def rows_of(log: Path) -> list[dict[str, Any]]:
    """Returns the rows that a child emitted into its log."""
    lines = log.read_text(errors="replace").splitlines()
    return [json.loads(x.removeprefix(ROW)) for x in lines if x.startswith(ROW)]
