# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks that answers do not depend on how vLLM runs the requests.

The trained model, and seeded models of other shapes, are asked for facts in text. Each
mode (turbo_equality/modes.py) is an engine in a process of its own. "quiet" runs one
request at a time, eagerly and on one GPU, and the others are compared with it:

* Greedy answers are equal up to the first position where the quiet run's two likeliest
  tokens are no more than TIE apart in log-probability, because other shapes round
  differently. The report counts the positions that this excuses; too many are a fault.
  Tokens behind an answer only keep requests running, and are not compared.
* The mean divergence of distributions has a bound: the divergence that swaps two
  likeliest tokens that are TIE apart. It also holds under turbo_prefill "raw", where a
  mode decides which tokens are seen quantised: those of prefix hits, chunks, preempted
  requests and drafts.
* A mode ran as asked, by its engine's own account.
* Drafts are verified. Nearly all that the model makes for itself are right.
* Modes with a defect must fail, or the comparison shows nothing.

With --window each running request also has its newest tokens in 8 bits, and blocks have
64 tokens.

With --texts the prompts are texts to continue, whose next tokens are seldom certain.
Rounding changes some of them, under any cache dtype. The report has the number of
requests whose tokens are all the same, and the gap of the two likeliest tokens where
the others part. These figures have no bounds.

It ends with status 1 if a mode has a fault.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from common import Report
from env import has_gpu
from tasks import IM_END
from turbo_equality.modes import LEAST_FILLED, MODES
from turbo_equality.run import TURBO_DTYPES, model_folder, run_mode
from turbo_process.runner import exit_when_told, side_by_side
from turbo_quality.cases import (
    HELD_OUT,
    MODEL,
    SEPARATOR,
    Plan,
    Vocabulary,
    build_tasks,
    cut,
)
from turbo_quality.metrics import common_prefix, kl_divergence

# Log-probabilities that rounding may bring into another order.
TIE = 0.05
# Mean nats: the KL of two tokens of probability 1/2 each whose log-probabilities move
# by d = TIE against each other (KL = d^2 / 8).
KL_BOUND = TIE**2 / 8
# The least share of all answers' positions that are compared, and not excused. Seeded
# models have learnt nothing, and so are seldom certain.
LEAST_COMPARED = {"trained": 0.9, "skipped": 0.9, "dense": 0.5, "experts": 0.5}
# The least share of accepted drafts, where the model makes them for itself.
LEAST_ACCEPTED = 0.9
# Relative, for the tokens that a mode's cache holds: blocks are whole.
CAPACITY_TOLERANCE = 0.01
PREFILL = ("stored", "raw")
# Kernels that serve every layer on any GPU. The kernel of extends depends on the GPU.
KERNELS = {"store", "decode", "merge"}
# The quiet runs of seeded models come with the modes that need them.
NAMES = [name for name in MODES if not name.startswith("quiet_")]
CPU_MODES = [name for name in NAMES if MODES[name].gpus == 0]
GPU_MODES = [name for name in NAMES if MODES[name].gpus < 2]


def first(found: np.ndarray) -> np.ndarray:
    """Returns each row's first true column, or the number of columns."""
    return np.where(found.any(axis=1), found.argmax(axis=1), found.shape[1])


def answer_lengths(tokens: np.ndarray) -> np.ndarray:
    """Returns the number of tokens of each answer, with the one that ends it."""
    return np.minimum(first(tokens == IM_END) + 1, tokens.shape[1])


def gaps(logprobs: np.ndarray) -> np.ndarray:
    """Returns the gap of the two likeliest tokens at each position.

    Args:
        logprobs: (request, position, token).

    """
    best = np.partition(logprobs, -2, axis=-1)[..., -2:]
    return best[..., 1] - best[..., 0]


def decided(logprobs: np.ndarray) -> np.ndarray:
    """Returns how many tokens of each quiet request no rounding decides."""
    return first(gaps(logprobs) <= TIE)


def compare(
    quiet: dict[str, np.ndarray], other: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Counts the positions that are equal, different and excused; KL in nats.

    `identical_requests` have the same tokens throughout, also behind the answer.
    `parted_gaps` are the gaps of the two likeliest tokens where the others part.
    """
    parted = first(quiet["tokens"] != other["tokens"])
    where = parted < quiet["tokens"].shape[1]
    lengths = answer_lengths(quiet["tokens"])
    limits = np.minimum(decided(quiet["logprobs"]), lengths)
    unequal, divergences = [], []
    for i, (limit, length) in enumerate(zip(limits, lengths)):
        own, theirs = quiet["tokens"][i, :length], other["tokens"][i, :length]
        agreed = common_prefix(own.tolist(), theirs.tolist())
        if agreed < limit:
            unequal.append({"request": i, "position": agreed})
        # Distributions behind different tokens differ; the first of them still counts.
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
        "identical_requests": int((~where).sum()),
        "parted_gaps": sorted(
            gaps(quiet["logprobs"])[where, parted[where]].astype(float).tolist()
        ),
        "kl_mean": float(all_divergences.mean()),
        "kl_max": float(all_divergences.max()),
    }


def built_once(built: dict[str, int]) -> bool:
    """Whether each kernel was built, and no instance of one twice.

    Args:
        built: The number of builds, by "<kernel> <instance>".

    """
    kernels = {name.split()[0] for name in built}
    extends = {kernel for kernel in kernels if kernel.startswith("extend")}
    is_all = kernels - extends == KERNELS and bool(extends)
    return is_all and set(built.values()) == {1}


def unfulfilled(
    name: str, quiet: dict[str, Any], result: dict[str, Any], requests: int
) -> str | None:
    """Returns the purpose that a mode's run missed, if any."""
    mode = MODES[name]
    if result["unlike_asked"]:
        return f"ran with {result['unlike_asked']}, which was not asked for"
    alone = mode.batch == 1 or mode.args.get("max_num_seqs") == 1
    replays, at_once = result["ran"]["replays"], int(result["most_at_once"])
    wanted = LEAST_FILLED * requests
    capacity = mode.capacity * int(quiet["capacity"])
    off = abs(int(result["capacity"]) - capacity) > CAPACITY_TOLERANCE * capacity
    # A recent window takes a block, so larger blocks leave less room.
    off &= not (result["ran"].get("turbo_window") and "block_size" in mode.args)
    room = result["room"] or int(result["capacity"])
    padded = abs(int(result["capacity"]) - room) > CAPACITY_TOLERANCE * room
    share = int(result["accepted"]) / max(int(result["drafted"]), 1)
    checks = {
        "no CUDA graph was replayed": mode.graphs and not replays,
        f"{replays} CUDA graphs were replayed": not mode.graphs and replays,
        f"{at_once} requests ran at once": alone != (at_once == 1),
        "not every request hit the prefix cache": mode.repeat
        and not result["cached_tokens"].all(),
        "nothing came from the CPU's memory": mode.from_cpu and not result["from_cpu"],
        "no request was preempted": mode.scarce and not result["preemptions"],
        f"only {at_once} requests ran at once": mode.fill and at_once < wanted,
        f"the cache holds {result['capacity']} tokens, not {capacity:g}": mode.capacity
        and off,
        f"the cache holds {result['capacity']} tokens, and has room for {room}": padded,
        "no draft was verified": mode.drafts and not result["drafted"],
        f"{share:.0%} of the model's own drafts were accepted": (
            mode.drafts == "draft_model" and share < LEAST_ACCEPTED
        ),
        f"kernels were not built once: {result['built'] or 'an archive has them'}": (
            mode.fresh_kernels and not built_once(result["built"])
        ),
    }
    return next((text for text, wrong in checks.items() if wrong), None)


def judge(name: str, row: dict[str, Any], fault: str | None = None) -> str | None:
    """Returns a mode's fault, if any.

    Args:
        name: The mode's name.
        row: Its comparison with the quiet run.
        fault: The fault of its run, if any.

    """
    mode = MODES[name]
    if fault is not None:
        return fault
    compared = row["positions"] - row["excused_positions"]
    least = LEAST_COMPARED[mode.model] * row["positions"]
    if compared < least or not compared:
        return f"only {compared} of {row['positions']} positions are compared"
    if mode.defect:
        return None if row["unequal_requests"] else "the defect was not noticed"
    if row["unequal_requests"]:
        return f"{row['unequal_requests']} requests have other tokens"
    # Written so that NaN is a fault.
    if not row["kl_mean"] <= KL_BOUND:
        return f"KL is above {KL_BOUND:g}"
    return None


def repeated(run: dict[str, Any], requests: int) -> dict[str, Any]:
    """Returns a run whose tokens and log-probabilities repeat up to `requests`."""
    order = np.arange(requests) % len(run["tokens"])
    return run | {name: run[name][order] for name in ("tokens", "logprobs")}


def quiet_name(model: str) -> str:
    """Returns the name of the quiet run of a model."""
    return "quiet" if model == "trained" else f"quiet_{model}"


def compared(
    name: str,
    prefill: str,
    quiet: dict[str, Any],
    result: dict[str, Any],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Returns a mode's comparison with the quiet run, and its fault as `wrong`."""
    requests = len(result["tokens"])
    row = {"kv_cache_dtype": args.kv_cache_dtype}
    row |= {"turbo_prefill": prefill, "turbo_window": args.window, "mode": name}
    row |= {"requests": requests, "right_answers": int(result["right"].sum())}
    for count in ("capacity", "preemptions", "from_cpu", "most_at_once"):
        row[count] = int(result[count])
    if MODES[name].drafts:
        row |= {count: int(result[count]) for count in ("drafted", "accepted")}
    row |= {"kernels_built": result["built"], "ran": result["ran"]}
    row |= compare(repeated(quiet, requests), result)
    fault = unfulfilled(name, quiet, result, requests)
    return row | {"wrong": fault if args.texts else judge(name, row, fault)}


def run_modes(
    scratch: Path, args: argparse.Namespace, report: Report
) -> list[dict[str, Any]]:
    """Reports and returns a row for each turbo_prefill and mode, in the given order,
    after the rows of the quiet runs.

    A mode has a fault if its quiet run failed.
    """
    text = HELD_OUT.read_text(encoding="utf-8")
    vocabulary = Vocabulary(args.model)
    if args.texts:
        tokens = vocabulary.documents(text.split(SEPARATOR))
        texts = cut(tokens, args.texts, max(args.lengths))
        # Lengths that end anywhere in a block.
        random = Random(args.seed)
        tasks = [
            {"prompt": x[: random.randint(len(x) // 2, len(x))], "answer": []}
            for x in texts
        ]
    else:
        plan = Plan(0, 0, 0, 0, tuple(args.lengths), (0.2, 0.5, 0.8), args.cases)
        tasks = build_tasks(text, plan, args.seed, vocabulary)
    models = {MODES[name].model: None for name in args.modes}
    quiets = [quiet_name(model) for model in models]
    names = [*quiets, *(name for name in args.modes if name not in quiets)]
    folders = {name: model_folder(name, scratch, args) for name in models}
    rows = []
    with side_by_side(args.jobs) as pool:
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
                row = compared(name, prefill, quiet, result, args)
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
        "--prefill", nargs="+", choices=PREFILL, help="of turbo dtypes (all)"
    )
    parser.add_argument(
        "--window", action="store_true", help="with recent windows, which are for raw"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--lengths", nargs="+", type=int, help="of prompts, tokens")
    parser.add_argument("--cases", type=int, help="tasks of a kind and length")
    parser.add_argument("--texts", type=int, default=0, help="to go on with instead")
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
    parser = build_parser()
    args = parser.parse_args()
    args.prefill = args.prefill or (["raw"] if args.window else list(PREFILL))
    if args.window and args.prefill != ["raw"]:
        parser.error("--window is for --prefill raw: stored reads all as it is stored")
    if args.window and args.kv_cache_dtype not in TURBO_DTYPES:
        parser.error(f"--window: {args.kv_cache_dtype} has no recent window")
    args.on_cpu = not has_gpu()
    args.modes = args.modes or (CPU_MODES if args.on_cpu else GPU_MODES)
    args.lengths = args.lengths or ([512] if args.on_cpu else [512, 2048, 7680])
    args.cases = args.cases or (1 if args.on_cpu else 8)
    exit_when_told()
    with tempfile.TemporaryDirectory() as folder:
        rows = run_modes(args.logs or Path(folder), args, Report(args.output))
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
