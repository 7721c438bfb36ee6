# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether answers depend on how vLLM runs the requests.

The trained model is asked for facts in text. Each mode (equality_modes.py) is an engine
in a process of its own; "quiet" runs one request at a time, eagerly, and the others are
held to it:

* Greedy answers are equal up to the first position where the quiet run's two likeliest
  tokens are no more than TIE apart in log-probability: other shapes round differently.
  The report counts the positions that this excuses. What is generated behind an answer
  keeps requests running, and nothing decides it: it is not compared.
* Modes in which other tokens are seen quantised (prefix hits, chunks, preemption) are
  held to that under turbo_prefill "stored". Under "raw" their KL divergence is bounded.
* Modes with a defect must fail, or the comparison shows nothing.

It ends with status 1 if a mode is not as it should be.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "cpu_standins"), str(ROOT / "benchmarks")]

from common import run_facts  # noqa: E402
from env import has_gpu  # noqa: E402
from equality_modes import MODES, SCARCE_REQUESTS, Mode  # noqa: E402
from quality_cases import HELD_OUT, MODEL, Plan, build_tasks  # noqa: E402
from quality_metrics import common_prefix, kl_divergence  # noqa: E402
from quickstart import raise_exit, stop_group  # noqa: E402
from tasks import IM_END  # noqa: E402
from vllm_turbo_cpu_standins.settings import (  # noqa: E402
    ENGINE_ARGS,
    engine_environment,
)

CHILD = Path(__file__).with_name("equality_child.py")
# Log-probabilities that rounding may bring into another order.
TIE = 0.05
# Nats, mean, of modes that see other tokens quantised.
KL_BOUND = {"turbo4": 0.02, "k4v3": 0.04, "turbo3": 0.08}
BLOCK = {"cpu": 32, "gpu": 16}
CPU_MODES = [name for name, mode in MODES.items() if mode.gpus == 0]
GPU_MODES = [name for name, mode in MODES.items() if mode.gpus < 2]


def engine_args(
    mode: Mode, tasks: list[dict[str, Any]], prefill: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns the arguments of a mode's `LLM`."""
    block = BLOCK["cpu" if args.on_cpu else "gpu"]
    longest = max(len(task["prompt"]) for task in tasks)
    options: dict[str, Any] = {
        "dtype": "float32" if args.on_cpu else "bfloat16",
        "kv_cache_dtype": args.kv_cache_dtype,
        "block_size": block,
        "max_model_len": longest + args.tokens,
        "max_num_seqs": 64,
        "max_num_batched_tokens": max(longest, 8192),
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "async_scheduling": False,
        "enforce_eager": True,
        "max_logprobs": -1,
        # In bf16 logits are up to 1/16 apart, which is more than TIE.
        "hf_overrides": {"head_dtype": "float32"},
        "kv_cache_memory_bytes": (64 << 20) if args.on_cpu else (2 << 30),
        "gpu_memory_utilization": 0.1,
    }
    attention = {}
    if args.kv_cache_dtype in KL_BOUND:
        attention["turbo_prefill"] = prefill
    if args.on_cpu:
        options |= ENGINE_ARGS
    if mode.scarce:
        # One block is vLLM's own.
        blocks = SCARCE_REQUESTS * -(-longest // block) + 1
        options["num_gpu_blocks_override"] = blocks
    own = dict(mode.args)
    attention |= own.pop("attention_config", {})
    return options | own | {"attention_config": attention}


def child_environment(folder: Path, mode: Mode, on_cpu: bool) -> dict[str, str]:
    variables = dict(os.environ) | {
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if mode.defect:
        # The engine has to be in the process that is changed.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if on_cpu:
        variables |= engine_environment("v2") | {"OMP_NUM_THREADS": "1"}
    return variables


def run_mode(
    name: str,
    tasks: list[dict[str, Any]],
    prefill: str,
    folder: Path,
    args: argparse.Namespace,
) -> dict[str, np.ndarray]:
    """Returns what a mode's process left: `tokens`, `logprobs` and counts.

    Raises:
        RuntimeError: If it failed; with the end of its log.

    """
    mode = MODES[name]
    folder.mkdir(parents=True)
    job = {
        "model": str(args.model),
        "engine_args": engine_args(mode, tasks, prefill, args),
        "prompts": [task["prompt"] for task in tasks],
        "answers": [task["answer"] for task in tasks],
        "tokens": args.tokens,
        "batch": mode.batch,
        "repeat": mode.repeat,
        "defect": mode.defect,
    }
    (folder / "job.json").write_text(json.dumps(job))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, CHILD, folder / "job.json", folder / "result.npz"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(folder, mode, args.on_cpu),
            start_new_session=True,
        )
        try:
            status = process.wait(args.time_limit)
        except subprocess.TimeoutExpired:
            status = f"no end after {args.time_limit:g} s"
        finally:
            stop_group(process)
    if status:
        lines = (folder / "log").read_text(errors="replace").splitlines()[-60:]
        raise RuntimeError(f"{name}: {status}\n" + "\n".join(lines))
    with np.load(folder / "result.npz") as result:
        return dict(result)


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


def judge(
    name: str, row: dict[str, Any], prefill: str, result: dict[str, np.ndarray]
) -> str | None:
    """Returns what is wrong with a mode, if anything."""
    mode = MODES[name]
    if mode.defect:
        return None if row["unequal_requests"] else "the defect was not noticed"
    if mode.repeat and not result["cached_tokens"].all():
        return "not every request hit the prefix cache"
    if mode.scarce and not result["preemptions"]:
        return "no request was preempted"
    bound = KL_BOUND.get(row["kv_cache_dtype"])
    if mode.only_bounded and prefill == "raw" and bound is not None:
        return None if row["kl_mean"] <= bound else f"KL is above {bound:g}"
    if row["unequal_requests"]:
        return f"{row['unequal_requests']} requests have other tokens"
    return None


def run_modes(scratch: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row a mode and turbo_prefill, in the order given after the quiet run.

    Raises:
        RuntimeError: If the quiet run failed.

    """
    plan = Plan(0, 0, 0, 0, tuple(args.lengths), (0.2, 0.5, 0.8), args.cases)
    tasks = build_tasks(HELD_OUT.read_text(encoding="utf-8"), plan, args.seed)
    names = ["quiet", *(name for name in args.modes if name != "quiet")]
    rows = []
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = {
            (prefill, name): pool.submit(
                run_mode, name, tasks, prefill, scratch / prefill / name, args
            )
            for prefill in args.prefill
            for name in names
        }
        for (prefill, name), run in runs.items():
            row: dict[str, Any] = {
                "kv_cache_dtype": args.kv_cache_dtype,
                "turbo_prefill": prefill,
                "mode": name,
                "requests": len(tasks),
            }
            quiet = runs[prefill, "quiet"].result()
            try:
                result = run.result()
            except RuntimeError as error:
                row["wrong"] = str(error)
            else:
                row |= compare(quiet, result)
                row["right_answers"] = int(result["right"].sum())
                row["wrong"] = judge(name, row, prefill, result)
            print(json.dumps(row), flush=True)
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
    parser.add_argument("--output", type=Path, help="JSON file")
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
        rows = run_modes(Path(folder), args)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        report = {"facts": run_facts(), "tie": TIE, "kl_bound": KL_BOUND, "rows": rows}
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
