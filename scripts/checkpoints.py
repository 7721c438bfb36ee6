# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Puts checkpoints of every kind through `check_model.py`, on a GPU.

Two models are written as each tool would: the trained Qwen2, whose biases of K are
long, and a seeded one with experts, for the kernels of a MoE. With a turbo dtype each
is to find as many facts as with its unquantised cache, and its divergence from that to
be no more than a few times what it is of the same model with plain weights. Where
activations are rounded, which makes a difference larger, it is held to the divergence
of the fp8 cache with the same weights, too.

A row a checkpoint is written as it is known. The status is 1 if one is not as it should
be, or did not run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checkpoint_kinds import KINDS, write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from common import Report  # noqa: E402
from seeded_model import build_parser as model_parser  # noqa: E402
from seeded_model import write_model  # noqa: E402

TRAINED = ROOT / "models" / "needle-qwen2"
EXPERTS = ["--experts", "8", "--initializer-range", "0.1"]
MODELS = ("trained", "experts")
PLAIN = "plain"
DTYPE = "turbo4"
PEER = "fp8"
# How far off a checkpoint may be where activations are rounded, times the peer.
PEER_GROWTH = 1.5
# Short texts, of which all of a small vocabulary is told apart.
OPTIONS = [
    "--max-context", "1024", "--texts", "4", "--decode-steps", "64", "--needles", "2",
    "--top", "259",
]  # fmt: skip


def write(model: str, kind: str, scratch: Path) -> Path:
    """Writes a model's checkpoint of a kind, and returns its folder."""
    source = TRAINED
    if model == "experts":
        source = scratch / "experts"
        if not source.exists():
            write_model(source, model_parser().parse_args([str(source), *EXPERTS]))
    if kind == PLAIN:
        return source
    folder = scratch / f"{model}-{kind}"
    write_checkpoint(source, folder, KINDS[kind])
    return folder


def rounds_activations(kind: str) -> bool:
    return kind != PLAIN and KINDS[kind].rounds_activations


def check(kind: str, folder: Path, output: Path, engine_args: str) -> dict[str, Any]:
    """Returns what check_model.py says of a checkpoint: `error`, or its figures."""
    command = [sys.executable, str(ROOT / "scripts" / "check_model.py"), str(folder)]
    dtypes = [DTYPE, PEER] if rounds_activations(kind) else [DTYPE]
    command += ["--kv-cache-dtype", *dtypes, "--engine-args", engine_args]
    done = subprocess.run(
        [*command, *OPTIONS, "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        return {"error": done.stdout[-2000:]}
    report = json.loads((output / "check.json").read_text())
    arms = {row["cache_dtype"]: row for row in report["arms"]}
    packed = arms[DTYPE]
    if any("error" in arms[dtype] for dtype in dtypes):
        return {"error": json.dumps(report["arms"])[-2000:]}
    peer = {f"{PEER}_kl_mean": arms[PEER]["kl_mean"]} if PEER in dtypes else {}
    return {
        "kl_mean": packed["kl_mean"],
        "top1": packed["top1"],
        "lost": packed["needles"]["lost"],
        "found": packed["needles"]["found"],
        "capacity": packed["capacity"],
        "backends": packed["backends"],
        **peer,
    }


def judge(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """Returns what is wrong with a checkpoint, or nothing.

    Args:
        row: The checkpoint's.
        plain: That of the same model with plain weights; it may be the same.

    """
    for each in (row, plain):
        if "error" in each:
            return f"{each['kind']} did not run"
    growth = 1.0 if row is plain else KINDS[row["kind"]].kl_growth
    if row["kl_mean"] > growth * plain["kl_mean"]:
        return f"more than {growth} times as far off as {PLAIN}"
    peer = f"{PEER}_kl_mean"
    if rounds_activations(row["kind"]) and row["kl_mean"] > PEER_GROWTH * row[peer]:
        return f"more than {PEER_GROWTH} times as far off as {PEER}"
    if row["lost"] > plain["lost"]:
        return "facts lost"
    if row["capacity"] != plain["capacity"]:
        return "another capacity"
    return ""


def run(args: argparse.Namespace, scratch: Path, report: Report) -> bool:
    """Checks all checkpoints, and returns whether all are as they should be."""
    is_right = True
    with ThreadPoolExecutor(args.jobs) as pool:
        checks = {
            (model, kind): pool.submit(
                check,
                kind,
                write(model, kind, scratch),
                scratch / f"{model}-{kind}-check",
                args.engine_args,
            )
            for model in args.models
            for kind in (PLAIN, *args.kinds)
        }
        for (model, kind), found in checks.items():
            row = {"model": model, "kind": kind} | found.result()
            if kind == PLAIN:
                plain = row
            wrong = judge(row, plain)
            report.row(**row, wrong=wrong)
            is_right = is_right and not wrong
    return is_right


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="rows are added to it")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--engine-args", default="{}", help="as check_model.py's")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="at a time; several want kv_cache_memory_bytes in --engine-args, else "
        "one's profile of the memory sees what the others take",
    )
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if run(args, Path(scratch), Report(args.output)) else 1


if __name__ == "__main__":
    sys.exit(main())
