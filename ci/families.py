#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs a seeded model of each family on a GPU, by CUDA's and by Triton's kernels.

Both store the same codes, so that texts diverge from the unquantised cache by about as
much, unless one of them leaves out what makes a family another: windows, sinks, a soft
cap, shared caches, chunks, states. fp8's divergence stands beside them.

A row a family is written as it is known. The status is 1 if one is not as it should be,
or did not run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "engine")]

from common import Report  # noqa: E402
from families import FAMILIES, write_family  # noqa: E402

DTYPE = "turbo4"
# Other caches that are measured beside those of one's kernels.
PEERS = {"cuda": ("fp8",), "triton": ()}
# Prompts come in chunks; engines start side by side.
ENGINE_ARGS = {
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.1,
}
OPTIONS = [
    "--max-context", "1024", "--texts", "6", "--decode-steps", "64",
    "--needles", "1", "--top", "259",
]  # fmt: skip
# How many times as far off as the other kernels' divergence one's may be: scores of
# CUDA's are of queries in 8 bits.
RATIO = 1.5


def check(folder: Path, output: Path, kernel: str) -> dict[str, Any]:
    """Returns check_model.py's figures with one's kernels, or `error`."""
    attention = {"attention_config": {"turbo_kernel": kernel}}
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts" / "check_model.py"), str(folder)),
            *OPTIONS,
            *("--kv-cache-dtype", DTYPE, *PEERS[kernel]),
            *("--engine-args", json.dumps(ENGINE_ARGS | attention)),
            *("--output", str(output)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    report = output / "check.json"
    if not report.exists():
        return {"error": done.stdout[-2000:]}
    return figures(json.loads(report.read_text())["arms"], kernel)


def figures(arms: list[dict[str, Any]], kernel: str) -> dict[str, Any]:
    """Returns what a family's row has of check.json's arms."""
    by_name = {arm["arm"]: arm for arm in arms}
    packed = by_name[DTYPE]
    if "error" in packed:
        return {"error": packed["error"]}
    found = {f"{kernel}_kl_mean": packed["kl_mean"]}
    found |= {fact: packed[fact] for fact in ("backends", "window_layers", "capacity")}
    for name in PEERS[kernel]:
        # What others cannot serve is no fault of ours.
        for key in {"error", "kl_mean"} & by_name[name].keys():
            found[f"{name}_{key}"] = by_name[name][key]
    return found


def judge(row: dict[str, Any]) -> str:
    """Returns what is wrong with a family, or nothing."""
    if "error" in row:
        return "did not run"
    if not {"TURBO", "TURBO_MLA"} & set(row["backends"]):
        return "packed by another backend"
    few, many = sorted(row[f"{kernel}_kl_mean"] for kernel in PEERS)
    # Not a number is wrong, too.
    if not 0 < many <= RATIO * few:
        return f"one's kernels are more than {RATIO} times as far off as the other's"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--output", type=Path, help="rows are added to it")
    args = parser.parse_args()
    names = args.names or list(FAMILIES)
    report, is_right = Report(args.output), True
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        folders = {name: write_family(Path(scratch) / name, name) for name in names}
        checks = {
            (name, kernel): pool.submit(
                check, folder, Path(scratch) / f"{name}-{kernel}", kernel
            )
            for name, folder in folders.items()
            for kernel in PEERS
        }
        for name in names:
            row: dict[str, Any] = {"family": name}
            for kernel in PEERS:
                row |= checks[name, kernel].result()
            wrong = judge(row)
            report.row(**row, wrong=wrong)
            is_right = is_right and not wrong
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
