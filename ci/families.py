#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs a seeded model of each family on a GPU, with CUDA's and with Triton's kernels.

Both store the same codes, so texts diverge from the unquantised cache by about as much.
A set of kernels that ignores a family's feature diverges more: windows, sinks, a soft
cap, shared caches, chunks, states. fp8's divergence stands beside them.

Each family's row is written when it is known. The status is 1 if a family fails, or did
not run.
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
# Other cache dtypes to measure, by the kernels of the turbo dtype in the same run.
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
# The largest ratio of the two divergences: CUDA's kernels score with queries in 8 bits.
RATIO = 1.5


def check(folder: Path, output: Path, kernel: str) -> dict[str, Any]:
    """Returns check_model.py's figures with the given kernels, or `error`."""
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
    """Returns the figures of a family's row, from check.json's arms."""
    by_name = {arm["arm"]: arm for arm in arms}
    packed = by_name[DTYPE]
    if "error" in packed:
        return {"error": packed["error"]}
    found = {f"{kernel}_kl_mean": packed["kl_mean"]}
    found |= {fact: packed[fact] for fact in ("backends", "window_layers", "capacity")}
    for name in PEERS[kernel]:
        # It is no fault of ours if another dtype cannot serve a family.
        for key in {"error", "kl_mean"} & by_name[name].keys():
            found[f"{name}_{key}"] = by_name[name][key]
    return found


def judge(row: dict[str, Any]) -> str:
    """Returns a family's fault, or ""."""
    if "error" in row:
        return "did not run"
    if not {"TURBO", "TURBO_MLA"} & set(row["backends"]):
        return "packed by another backend"
    few, many = sorted(row[f"{kernel}_kl_mean"] for kernel in PEERS)
    # Written so that NaN is a fault.
    if not 0 < many <= RATIO * few:
        return f"one set of kernels is more than {RATIO} times as far off as the other"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--jobs", type=int, default=2, help="engines at a time")
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
