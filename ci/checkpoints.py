# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs `check_model.py` on checkpoints of every kind, on a GPU.

Two models are written in each tool's format: the trained Qwen2, whose biases of K are
long, and a seeded one with experts, for the kernels of a MoE. With a turbo dtype, each
checkpoint has to find as many facts as with its unquantised cache. Its KL divergence
from that cache has a bound: a few times the divergence of the same model with plain
weights.

Rounded activations can turn the smallest difference into a whole step. A finer cache
shows the size of this effect: 8 bits with a scale for each token and head. The effect
is its divergence, less its divergence with plain weights. The bound is then twice the
sum of the effect and of turbo's divergence with plain weights. The fp8 cache's
divergence is reported beside it.

Each checkpoint's row is written when it is known. The status is 1 if a checkpoint
fails, or did not run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

from common import Report  # noqa: E402
from turbo_seeded.checkpoints import (  # noqa: E402
    KINDS,
    without_cache,
    write_checkpoint,
)
from turbo_seeded.model import build_parser as model_parser  # noqa: E402
from turbo_seeded.model import write_model  # noqa: E402

TRAINED = ROOT / "models" / "needle-qwen2"
EXPERTS = ["--experts", "8", "--initializer-range", "0.1"]
MODELS = ("trained", "experts")
PLAIN = "plain"
DTYPE = "turbo4"
FINER = "int8_per_token_head"
BESIDE = ("fp8", FINER)
# Ends the name of a checkpoint without cache scales.
WITHOUT = "-without-cache"
# The largest divergence of a checkpoint, over that with plain weights.
GROWTH = 4.0
# The same with rounded activations, over the sum of plain weights' and rounding's.
SUM_GROWTH = 2.0
# Short texts; --top is the whole small vocabulary.
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
    if serves_finer_without_scales(kind):
        other = without_cache(KINDS[kind])
        write_checkpoint(source, folder.with_name(folder.name + WITHOUT), other)
    return folder


def serves_finer_without_scales(kind: str) -> bool:
    """Returns whether vLLM refuses FINER because of the checkpoint's cache scales.

    Only FlashAttention has a scale for each head.
    """
    return KINDS[kind].rounds_activations and KINDS[kind].scale_per_head


def run_check(
    folder: Path, dtypes: Sequence[str], output: Path, engine_args: str
) -> dict[str, dict[str, Any]]:
    """Returns check_model.py's figures on a checkpoint, by the cache's dtype.

    Raises:
        RuntimeError: If the command, or a dtype, did not run.

    """
    command = [sys.executable, str(ROOT / "scripts" / "check_model.py"), str(folder)]
    command += ["--kv-cache-dtype", *dtypes, "--engine-args", engine_args]
    done = subprocess.run(
        [*command, *OPTIONS, "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:])
    arms = json.loads((output / "check.json").read_text())["arms"]
    found = {arm["cache_dtype"]: arm for arm in arms}
    if any("error" in found[dtype] for dtype in dtypes):
        raise RuntimeError(json.dumps(arms)[-2000:])
    return found


def check(kind: str, folder: Path, output: Path, engine_args: str) -> dict[str, Any]:
    """Returns check_model.py's figures on a checkpoint, or `error`."""
    beside = BESIDE if kind == PLAIN or KINDS[kind].rounds_activations else ()
    runs = {folder: [DTYPE, *beside]}
    if kind != PLAIN and serves_finer_without_scales(kind):
        runs[folder].remove(FINER)
        runs[folder.with_name(folder.name + WITHOUT)] = [FINER]
    arms = {}
    try:
        for place, dtypes in runs.items():
            arms |= run_check(place, dtypes, output / dtypes[0], engine_args)
    except RuntimeError as error:
        return {"error": str(error)}
    packed = arms[DTYPE]
    return {
        "kl_mean": packed["kl_mean"],
        "top1": packed["top1"],
        "lost": packed["needles"]["lost"],
        "found": packed["needles"]["found"],
        "capacity": packed["capacity"],
        "backends": packed["backends"],
        **{f"{dtype}_kl_mean": arms[dtype]["kl_mean"] for dtype in beside},
    }


def judge(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """Returns a checkpoint's fault, or "".

    Args:
        row: The checkpoint's row.
        plain: The row of the same model with plain weights; it may be the same.

    """
    for each in (row, plain):
        if "error" in each:
            return f"{each['kind']} did not run"
    if row["kind"] != PLAIN and KINDS[row["kind"]].rounds_activations:
        finer = f"{FINER}_kl_mean"
        rounding = max(0.0, row[finer] - plain[finer])
        if row["kl_mean"] > SUM_GROWTH * (plain["kl_mean"] + rounding):
            return f"more than {SUM_GROWTH} times as far off as {PLAIN} and rounding"
    elif row["kl_mean"] > GROWTH * plain["kl_mean"]:
        return f"more than {GROWTH} times as far off as {PLAIN}"
    if row["lost"] > plain["lost"]:
        return "facts lost"
    if row["capacity"] != plain["capacity"]:
        return "another capacity"
    return ""


def run(args: argparse.Namespace, scratch: Path, report: Report) -> bool:
    """Checks all checkpoints, and returns whether none has a fault."""
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
        help="checks at a time; several need kv_cache_memory_bytes in --engine-args, "
        "because one engine's profile of the memory would see the others'",
    )
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if run(args, Path(scratch), Report(args.output)) else 1


if __name__ == "__main__":
    sys.exit(main())
