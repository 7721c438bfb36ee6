# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Short runs of `soak_scheduler.py`, with and without a leak, in one process."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from soak_scheduler import MODELS, Soak, build_parser, complaints  # noqa: E402

from vllm.v1.request import Request, RequestStatus  # noqa: E402


def keep_blocks(run: Soak) -> None:
    """The KV manager frees no blocks of aborted requests."""
    free = run.manager.free

    def free_unless_aborted(request: Request) -> None:
        if request.status != RequestStatus.FINISHED_ABORTED:
            free(request)

    run.manager.free = free_unless_aborted


def keep_objects(run: Soak) -> None:
    """The names of aborted requests stay, each in a list of its own."""
    kept: list[list[str]] = []
    finish = run.scheduler.finish_requests

    def finish_and_keep(names: list[str], status: RequestStatus) -> object:
        kept.append([*names])
        return finish(names, status)

    run.scheduler.finish_requests = finish_and_keep


def never_plan(run: Soak) -> None:
    """No block is found again, and none is taken from another request."""
    run.manager.enable_caching = False


LEAKS: dict[str, Callable[[Soak], None]] = {
    "blocks": keep_blocks,
    "objects": keep_objects,
    "unused": never_plan,
}


def complaints_of(
    model: str, args: argparse.Namespace, plant: Callable[[Soak], None] | None = None
) -> list[str]:
    """Returns the complaints about a run, with a leak or without."""
    run = Soak(model, args)
    try:
        if plant:
            plant(run)
        return complaints(run.run())
    finally:
        run.stop()


def main() -> None:
    args = build_parser().parse_args(["--requests", sys.argv[2]])
    found = {model: complaints_of(model, args) for model in MODELS}
    for name, plant in LEAKS.items():
        found[name] = complaints_of("llama-8b", args, plant)
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
