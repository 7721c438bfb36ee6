# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs one arm of a comparison: a process that reads a job and leaves a result."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turbo_process.log import last_error
from turbo_process.runner import NO_END, run_child

JOB, RESULT, LOG = "job.json", "result.json", "log"

TURBO_DTYPES = ("turbo4", "k4v3", "turbo3")
# Suffixes of such a dtype, after a colon: turbo_window at "auto", and at 0.
WINDOW, NO_WINDOW = "window", "no-window"
# Its suffix that leaves the means of K and latents in.
NO_MEANS = "no-means"
# The suffix of a turboquant preset that leaves no layer in bf16.
ALL_LAYERS = "all"


def run_arm(
    child: Path,
    job: Mapping[str, Any],
    folder: Path,
    variables: Mapping[str, str],
    time_limit: float,
    is_forked: bool,
) -> str | None:
    """Runs `child JOB FOLDER` to its end.

    Args:
        child: A Python file.
        job: Its input.
        folder: A new folder for its `result.json` and its log.
        variables: Added to the environment.
        time_limit: Seconds.
        is_forked: As for `run_child`.

    Returns:
        The error, if there is no result.

    """
    folder.mkdir()
    (folder / JOB).write_text(json.dumps(job))
    if time_limit <= 0:
        return "no time left"
    command = [sys.executable, child, folder / JOB, folder]
    log = folder / LOG
    wrong = run_child(command, log, variables, time_limit, is_forked=is_forked)
    if (folder / RESULT).exists():
        return None
    if not wrong:
        return "ended without a result"
    # After a time-out its log ends with stacks, which are no error.
    return wrong if wrong.startswith(NO_END) else last_error(log)


def read_result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RESULT).read_text())


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Writes an arm's result; the file appears when it is complete."""
    (folder / "result.tmp").write_text(json.dumps(result))
    (folder / "result.tmp").rename(folder / RESULT)
