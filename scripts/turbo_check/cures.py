# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Advice on an engine's error."""

from pathlib import Path

MEMORY = (
    "too little GPU memory: take --jobs 1 or a smaller --max-context, or end other "
    "processes on the GPU"
)
TIME = "--time-limit SECONDS gives more"
# Advice by a part of an error's message.
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
    """Returns an error with advice, and with the path of the engine's log."""
    cures = [cure for part, cure in CURES.items() if part in error][:1]
    kept = [f"log: {log}"] if log and str(log) not in error else []
    more = "; ".join(cures + kept)
    return f"{error} ({more})" if more else error
