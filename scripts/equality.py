# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether answers depend on how vLLM runs the requests.

The trained model is asked for facts in text, and seeded ones of other shapes the same.
Each mode (equality_modes.py) is an engine in a process of its own; "quiet" runs one
request at a time, eagerly and on one GPU, and the others are held to it:

* Greedy answers are equal up to the first position where the quiet run's two likeliest
  tokens are no more than TIE apart in log-probability: other shapes round differently.
  The report counts the positions that this excuses. What is generated behind an answer
  keeps requests running, and nothing decides it: it is not compared.
* Modes in which other tokens are seen quantised (prefix hits, chunks, preemption) are
  held to that under turbo_prefill "stored". Under "raw" their KL divergence is bounded.
* Modes with drafts are held likewise. Drafts must be verified; of those that the model
  itself made, nearly all must be right.
* Modes with a defect must fail, or the comparison shows nothing.

It ends with status 1 if a mode is not as it should be.
"""

import argparse
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from common import Report  # noqa: E402
from env import has_gpu  # noqa: E402
from equality_modes import LEAST_FILLED, MODES  # noqa: E402
from equality_run import model_folder, run_mode  # noqa: E402
from quality_cases import HELD_OUT, MODEL, Plan, build_tasks  # noqa: E402
from quality_metrics import common_prefix, kl_divergence  # noqa: E402
from quickstart import raise_exit  # noqa: E402
from tasks import IM_END  # noqa: E402

# Log-probabilities that rounding may bring into another order.
TIE = 0.05
# Nats, mean, of modes that see other tokens quantised.
KL_BOUND = {"turbo4": 0.02, "k4v3": 0.04, "turbo3": 0.08}
# Of the drafts that the model makes for itself, what has to be accepted.
LEAST_ACCEPTED = 0.9
# Of the tokens that a mode's cache holds: blocks are whole.
CAPACITY_TOLERANCE = 0.01
# The quiet runs of seeded models come with the modes that need them.
NAMES = [name for name in MODES if not name.startswith("quiet_")]
CPU_MODES = [name for name in NAMES if MODES[name].gpus == 0]
GPU_MODES = [name for name in NAMES if MODES[name].gpus < 2]


def first(found: np.ndarray) -> np.ndarray:
    """Each row's first true column, or how many columns there are."""
    return np.where(found.any(axis=1), found.argmax(axis=1), found.shape[1])


def answer_lengths(tokens: np.ndarray) -> np.ndarray:
    """Tokens of each request's answer, with the one that ends it."""
    return np.minimum(first(tokens == IM_END) + 1, tokens.shape[1])


def decided(logprobs: np.ndarray) -> np.ndarray:
    """How many tokens of each request no rounding decides.

    Args:
        logprobs: Of the quiet run, (request, position, token).

    """
    best = np.partition(logprobs, -2, axis=-1)[..., -2:]
    return first(best[..., 1] - best[..., 0] <= TIE)


def compare(
    quiet: dict[str, np.ndarray], other: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Counts the positions that are equal, different and excused; KL in nats."""
    lengths = answer_lengths(quiet["tokens"])
    limits = np.minimum(decided(quiet["logprobs"]), lengths)
    unequal, divergences = [], []
    for i, (limit, length) in enumerate(zip(limits, lengths)):
        own, theirs = quiet["tokens"][i, :length], other["tokens"][i, :length]
        agreed = common_prefix(own.tolist(), theirs.tolist())
        if agreed < limit:
            unequal.append({"request": i, "position": agreed})
        # What follows other tokens is another distribution; the first of them is not.
        shared = slice(0, min(agreed + 1, length))
        divergences.append(
            kl_divergence(quiet["logprobs"][i, shared], other["logprobs"][i, shared])
        )
    all_divergences = np.concatenate(divergences)
    return {
        "positions": int(lengths.sum()),
        "excused_positions": int((lengths - limits).sum()),
        "unequal_requests": len(unequal),
        "first_unequal": unequal[:3],
        "kl_mean": float(all_divergences.mean()),
        "kl_max": float(all_divergences.max()),
    }


def unfulfilled(
    name: str, quiet: dict[str, Any], result: dict[str, Any], requests: int
) -> str | None:
    """Returns what a mode is for and did not do, if anything."""
    mode = MODES[name]
    wanted = LEAST_FILLED * requests
    capacity = mode.capacity * int(quiet["capacity"])
    off = abs(int(result["capacity"]) - capacity) > CAPACITY_TOLERANCE * capacity
    share = int(result["accepted"]) / max(int(result["drafted"]), 1)
    checks = {
        "not every request hit the prefix cache": mode.repeat
        and not result["cached_tokens"].all(),
        "nothing came from the CPU's memory": mode.from_cpu and not result["from_cpu"],
        "no request was preempted": mode.scarce and not result["preemptions"],
        f"only {result['most_at_once']} requests ran at once": mode.fill
        and result["most_at_once"] < wanted,
        f"the cache holds {result['capacity']} tokens, not {capacity:g}": mode.capacity
        and off,
        "no draft was verified": mode.drafts and not result["drafted"],
        f"{share:.0%} of the model's own drafts were accepted": (
            mode.drafts == "draft_model" and share < LEAST_ACCEPTED
        ),
        f"kernels were not built once: {result['built']}": mode.fresh_kernels
        and set(result["built"].values()) != {1},
    }
    return next((text for text, wrong in checks.items() if wrong), None)


def judge(
    name: str, row: dict[str, Any], prefill: str, fault: str | None = None
) -> str | None:
    """Returns what is wrong with a mode, if anything.

    Args:
        name: Of the mode.
        row: Its comparison with the quiet run.
        prefill: `turbo_prefill`.
        fault: What is wrong with how it ran.

    """
    mode = MODES[name]
    if mode.defect:
        return None if row["unequal_requests"] else "the defect was not noticed"
    if fault is not None:
        return fault
    bound = KL_BOUND.get(row["kv_cache_dtype"])
    if mode.only_bounded and prefill == "raw" and bound is not None:
        return None if row["kl_mean"] <= bound else f"KL is above {bound:g}"
    if row["unequal_requests"]:
        return f"{row['unequal_requests']} requests have other tokens"
    return None


def repeated(run: dict[str, Any], requests: int) -> dict[str, Any]:
    """Returns a run's tokens and log-probabilities as of so many requests."""
    order = np.arange(requests) % len(run["tokens"])
    return run | {name: run[name][order] for name in ("tokens", "logprobs")}


def quiet_name(model: str) -> str:
    """Returns the name of the quiet run of a model."""
    return "quiet" if model == "trained" else f"quiet_{model}"


def compared(
    name: str, prefill: str, quiet: dict[str, Any], result: dict[str, Any], dtype: str
) -> dict[str, Any]:
    """Returns a mode's comparison with the quiet run, and what is wrong with it."""
    requests = len(result["tokens"])
    row = {"kv_cache_dtype": dtype, "turbo_prefill": prefill, "mode": name}
    row |= {"requests": requests, "right_answers": int(result["right"].sum())}
    for count in ("capacity", "preemptions", "from_cpu", "most_at_once"):
        row[count] = int(result[count])
    if MODES[name].drafts:
        row |= {count: int(result[count]) for count in ("drafted", "accepted")}
    row |= {"kernels_built": result["built"]}
    row |= compare(repeated(quiet, requests), result)
    fault = unfulfilled(name, quiet, result, requests)
    return row | {"wrong": judge(name, row, prefill, fault)}


def run_modes(
    scratch: Path, args: argparse.Namespace, report: Report
) -> list[dict[str, Any]]:
    """Reports and returns a row a mode and turbo_prefill, in the order given, after
    those of the quiet runs.

    A mode is wrong if its quiet run failed.
    """
    plan = Plan(0, 0, 0, 0, tuple(args.lengths), (0.2, 0.5, 0.8), args.cases)
    tasks = build_tasks(HELD_OUT.read_text(encoding="utf-8"), plan, args.seed)
    models = {MODES[name].model: None for name in args.modes}
    quiets = [quiet_name(model) for model in models]
    names = [*quiets, *(name for name in args.modes if name not in quiets)]
    folders = {name: model_folder(name, scratch, args) for name in models}
    rows = []
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = {
            (prefill, name): pool.submit(
                run_mode,
                name,
                folders[MODES[name].model],
                tasks,
                prefill,
                scratch / prefill / name,
                args,
            )
            for prefill in args.prefill
            for name in names
        }
        for (prefill, name), run in runs.items():
            quiet_run = runs[prefill, quiet_name(MODES[name].model)]
            try:
                quiet, result = quiet_run.result(), run.result()
            except RuntimeError as error:
                row = {"turbo_prefill": prefill, "mode": name, "wrong": str(error)}
            else:
                row = compared(name, prefill, quiet, result, args.kv_cache_dtype)
            report.row(**row)
            rows.append(row)
    return rows


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--kv-cache-dtype", default="turbo4")
    parser.add_argument(
        "--prefill", nargs="+", choices=("stored", "raw"), default=["stored", "raw"]
    )
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--lengths", nargs="+", type=int, help="of prompts, tokens")
    parser.add_argument("--cases", type=int, help="tasks of a kind and length")
    parser.add_argument("--tokens", type=int, default=24, help="generated a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time")
    parser.add_argument(
        "--time-limit", type=float, default=280, help="seconds of a mode"
    )
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    parser.add_argument("--logs", type=Path, help="new folder that keeps every log")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    args.on_cpu = not has_gpu()
    args.modes = args.modes or (CPU_MODES if args.on_cpu else GPU_MODES)
    args.lengths = args.lengths or ([512] if args.on_cpu else [512, 2048, 7680])
    args.cases = args.cases or (1 if args.on_cpu else 8)
    signal.signal(signal.SIGTERM, raise_exit)
    signal.signal(signal.SIGHUP, raise_exit)
    with tempfile.TemporaryDirectory() as folder:
        rows = run_modes(args.logs or Path(folder), args, Report(args.output))
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
