# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What to do about an engine's error."""

from pathlib import Path

MEMORY = (
    "too little GPU memory: take --jobs 1 or a smaller --max-context, or end other "
    "processes on the GPU"
)
TIME = "--time-limit SECONDS gives more"
# Of errors, what tells them.
CURES = {
    "No available memory for the cache blocks": MEMORY,
    "available KV cache memory": MEMORY,
    "Free memory on device": MEMORY,
    "Error in memory profiling": MEMORY,
    "out of memory": MEMORY,
    "no end after": TIME,
    "no time left": TIME,
}


def with_cure(error: str, log: Path | None = None) -> str:
    """Returns an error with what to do, and where the engine's log is."""
    cures = [cure for part, cure in CURES.items() if part in error][:1]
    kept = [f"log: {log}"] if log and str(log) not in error else []
    more = "; ".join(cures + kept)
    return f"{error} ({more})" if more else error
