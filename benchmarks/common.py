# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Helpers of the engine benchmarks: facts of a run, and rows of results.

Its import lets a module import the packages of `scripts/` and the tasks of the tests.
"""

import json
import os
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIRST_TOKEN = 1000
CONFIGS = ROOT / "benchmarks" / "configs"
sys.path[:0] = [str(ROOT / x) for x in ("scripts", "cpu_standins", "tests/quality")]


def first_line(*command: str) -> str | None:
    """Returns the first line that a command prints; None if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return None
    lines = result.stdout.splitlines()
    return lines[0].strip() if result.returncode == 0 and lines else None


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def run_facts() -> dict[str, Any]:
    """Returns the facts of the run that every row has."""
    commit = os.environ.get("COMMIT") or first_line("git", "rev-parse", "HEAD")
    gpu = first_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    packages = ("vllm", "torch", "triton")
    return {
        "gpu": gpu,
        "commit": commit,
        "command": shlex.join(["python", *sys.argv]),
        **{name: package_version(name) for name in packages},
    }


def rounded(value: Any) -> Any:
    """Returns a row with six digits of its floats, because no timing has more."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def plain_tokens(vocab_size: int) -> range:
    """Returns the token ids for prompts, without small ones, which may be special."""
    return range(min(FIRST_TOKEN, vocab_size // 2), vocab_size)


class Report:
    """Writes rows as JSON lines, at once, to the standard output and a file."""

    def __init__(self, path: Path | None) -> None:
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a") if path else None
        self.facts = run_facts()

    def row(self, **fields: Any) -> None:
        line = json.dumps(rounded(fields) | self.facts)
        for stream in (sys.stdout, self.file):
            if stream:
                # One write, because rows come from several threads.
                stream.write(f"{line}\n")
                stream.flush()
