# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measures what each KV cache dtype costs in quality, through the real engine.

Every arm is an engine in a process of its own, and all arms run the same cases:

* held-out text, prefilled in chunks: each chunk attends to the ones before it through
  the cache, and positions of the first chunk, which read no cache, do not count;
* the end of the same text, decoded a token at a time as if it had been sampled;
* texts that give one name eight codes, far apart: the distribution of an answer's first
  digit, which all the codes decide together;
* retrieval tasks in long chats, and greedy continuations of text.

Distributions are compared over the whole vocabulary with those of the first arm, the
reference. An arm is a --kv-cache-dtype with options behind colons:

* "stored": turbo_prefill is "stored";
* "window": turbo_window is "auto", and not 0;
* "no-means": turbo_means is "off";
* "skip-windows": layers with sliding windows stay in the model's dtype;
* "all": vLLM's turboquant presets also compress the four layers that they keep in bf16;
* an attention backend's name, as in "fp8:TRITON_MLA";
* another chunk size: "auto:512" against "auto" shows the noise of unquantised caches.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, run_facts
from env import has_gpu
from turbo_process.arm import (
    ALL_LAYERS,
    NO_MEANS,
    TURBO_DTYPES,
    WINDOW,
    read_result,
    run_arm,
)
from turbo_process.runner import engine_variables, exit_when_told, side_by_side
from turbo_quality.cases import HEAD, HELD_OUT, MODEL, Plan, build_cases
from turbo_quality.metrics import common_prefix, compare, score_tasks
from turbo_quality.report import bars, markdown
from vllm_turbo_cpu_standins.settings import ENGINE_ARGS

PARTS = ROOT / "scripts" / "turbo_quality"
CHILD = PARTS / "child.py"
PICTURES = PARTS / "pictures.py"
# Options of an arm, in the order of its flags.
OPTIONS = ("stored", WINDOW, NO_MEANS, "skip-windows", ALL_LAYERS)
CPU_ARMS = ("auto", "auto:48", "turbo4", "k4v3", "turbo3")
GPU_ARMS = (
    "auto", "auto:512", "fp8", "int4_per_token_head",
    "turbo4", "turbo4:stored", "k4v3", "turbo3",
    "turboquant_4bit_nc", "turboquant_4bit_nc:all",
    "turboquant_3bit_nc", "turboquant_3bit_nc:all",
    "turboquant_k3v4_nc", "turboquant_k3v4_nc:all",
    "turboquant_k8v4", "turboquant_k8v4:all",
)  # fmt: skip
FULL = Plan(
    texts=30,
    context=8000,
    decode_steps=2048,
    continuation_steps=128,
    lengths=(512, 1024, 2048, 4096, 8192),
    depths=(0.0, 0.25, 0.5, 0.75, 1.0),
    cases=20,
    rivals=20,
)
# Two cores take two or three minutes.
QUICK = Plan(
    texts=4,
    context=384,
    decode_steps=64,
    continuation_steps=24,
    lengths=(512,),
    depths=(0.0, 0.5, 1.0),
    cases=1,
    rivals=4,
)
CHUNK = {"full": 256, "quick": 64}


@dataclass(frozen=True)
class Arm:
    """One engine.

    Attributes:
        name: As on the command line.
        cache_dtype: As on vLLM's command line.
        chunk: Tokens of a prompt that a step prefills.
        stored: Whether turbo_prefill is "stored".
        has_window: Whether turbo_window is "auto", and not 0.
        lacks_means: Whether turbo_means is "off".
        skips_windows: Whether layers with sliding windows stay in the model's dtype.
        compress_all_layers: Whether vLLM's turboquant presets keep no layer in bf16.
        backend: The attention backend; None for vLLM's choice.

    """

    name: str
    cache_dtype: str
    chunk: int
    stored: bool
    has_window: bool
    lacks_means: bool
    skips_windows: bool
    compress_all_layers: bool
    backend: str | None

    @classmethod
    def parse(cls, name: str, chunk: int) -> "Arm":
        cache_dtype, *options = name.split(":")
        backend = None
        for option in options:
            if option.isdigit():
                chunk = int(option)
            elif option.isupper():
                backend = option
            elif option not in OPTIONS:
                raise ValueError(f"arm {name!r} has no option {option!r}")
            elif option in (WINDOW, NO_MEANS) and cache_dtype not in TURBO_DTYPES:
                raise ValueError(f"arm {name!r}: {cache_dtype} has no {option}")
        flags = (option in options for option in OPTIONS)
        return cls(name, cache_dtype, chunk, *flags, backend)


def child_variables(folder: Path, on_cpu: bool) -> dict[str, str]:
    """Returns the variables of an engine's process, whose files go to `folder`."""
    return engine_variables(on_cpu) | {
        # Engines that start side by side would compile into the same files. On a CPU
        # nothing is compiled, and engines share vLLM's inspection of the model.
        "VLLM_CACHE_ROOT": str((folder.parent if on_cpu else folder) / "cache"),
        # In one process, arrays of distributions are not copied.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def engine_args(arm: Arm, longest: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of an arm's `LLM`."""
    options: dict[str, Any] = {
        "dtype": args.dtype,
        "kv_cache_dtype": arm.cache_dtype,
        "max_model_len": longest,
        "max_num_seqs": args.max_num_seqs,
        # Each sequence gets its chunk in each step, whatever the others do.
        "long_prefill_token_threshold": arm.chunk,
        "max_num_batched_tokens": (arm.chunk + 1) * args.max_num_seqs,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        "enable_trace_replay": True,
        "max_logprobs": -1,
        "hf_overrides": HEAD,
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
        # The cache has a given size; this share only has to be free at the start.
        "gpu_memory_utilization": 0.1,
        "disable_log_stats": True,
    }
    if args.on_cpu:
        options |= ENGINE_ARGS
    if arm.skips_windows:
        options["kv_cache_dtype_skip_layers"] = ["sliding_window"]
    options |= args.engine_args
    attention = dict(options.get("attention_config", {}))
    if arm.stored:
        attention["turbo_prefill"] = "stored"
    if arm.lacks_means:
        attention["turbo_means"] = "off"
    if arm.backend:
        attention["backend"] = arm.backend
    if arm.cache_dtype in TURBO_DTYPES:
        attention["turbo_window"] = "auto" if arm.has_window else 0
    return options | {"attention_config": attention}


class Lab:
    """The cases, a scratch folder, and the arms' processes."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args = args
        self.scratch = scratch
        self.cases = build_cases(args.text, args.plan, args.seed, args.model)
        self.deadline = time.monotonic() + args.time_limit

    def run_arm(self, arm: Arm) -> str | None:
        """Runs an arm in a process, and returns its error, if any."""
        folder = self.folder(arm)
        job = {
            "model": str(self.args.model),
            "engine_args": engine_args(arm, self.cases.longest(), self.args),
            "compress_all_layers": arm.compress_all_layers,
        }
        return run_arm(
            CHILD,
            job | self.cases.for_child(),
            folder,
            child_variables(folder, self.args.on_cpu),
            self.deadline - time.monotonic(),
            is_forked=self.args.on_cpu,
        )

    def run(self, arms: list[Arm]) -> Iterator[tuple[Arm, str | None]]:
        """Yields each arm when its process has ended, with its error, if any."""
        with side_by_side(self.args.jobs) as pool:
            runs = {pool.submit(self.run_arm, arm): arm for arm in arms}
            for run in as_completed(runs):
                yield runs[run], run.result()

    def folder(self, arm: Arm) -> Path:
        return self.scratch / arm.name.replace(":", "-")

    def result(self, arm: Arm) -> dict[str, Any]:
        return read_result(self.folder(arm))

    def distributions(self, arm: Arm, part: str) -> np.ndarray:
        return np.load(self.folder(arm) / f"{part}.npy", mmap_mode="r")

    def measure(self, arm: Arm, reference: Arm) -> dict[str, Any]:
        """Returns the reported figures of an arm that ran."""
        result, of_reference = self.result(arm), self.result(reference)
        texts = np.asarray(self.cases.texts)
        steps = self.cases.plan.decode_steps
        # Earlier positions have read no cache, in at least one of the two.
        first = max(arm.chunk, reference.chunk)
        slices = {
            "prefill": (slice(first, None), texts[:, 1 + first :]),
            "decode": (slice(None), texts[:, -steps:]),
            "rivals": (slice(None), np.array([x[-1:] for x in self.cases.rivals])),
        }
        measured = {
            part: compare(
                self.distributions(reference, part)[:, positions],
                self.distributions(arm, part)[:, positions],
                targets,
            )
            for part, (positions, targets) in slices.items()
        }
        pairs = zip(result["continuations"], of_reference["continuations"])
        shared = [common_prefix(*pair) for pair in pairs]
        return {
            **measured,
            "tasks": score_tasks(self.cases.tasks, result["answers"]),
            "greedy_prefix": float(np.mean(shared)),
            **{
                key: result[key]
                for key in result
                if key not in ("continuations", "answers")
            },
        }


def run_lab(lab: Lab, arms: list[Arm]) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of the arms that have ended, in the given order.

    It does so whenever an arm ends, once the reference has run.
    """
    rows: dict[str, dict[str, Any]] = {}
    reference = arms[0]
    for arm, error in lab.run(arms):
        rows[arm.name] = {"arm": arm.name, "chunk": arm.chunk}
        if error:
            rows[arm.name]["error"] = error
        print(f"{arm.name}: {error or 'ran'}", flush=True)
        if reference.name not in rows:
            continue
        if "error" in rows[reference.name]:
            raise SystemExit(f"quality: no reference: {error}")
        ended = [arm for arm in arms if arm.name in rows]
        for other in ended:
            if not rows[other.name].keys() & {"error", "decode"}:
                rows[other.name] |= lab.measure(other, reference)
        yield [rows[arm.name] for arm in ended]


def write_report(rows: list[dict[str, Any]], lab: Lab, args: argparse.Namespace) -> str:
    """Writes quality.json and quality.md, and returns the latter's text."""
    args.output.mkdir(parents=True, exist_ok=True)
    report = {
        "facts": run_facts(),
        "model": args.model.name,
        "dtype": args.dtype,
        "seed": args.seed,
        "plan": lab.cases.plan.as_dict(),
        "engine_args": args.engine_args,
        "arms": rows,
        "bars": bars(rows),
    }
    (args.output / "quality.json").write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(report)
    (args.output / "quality.md").write_text(text)
    return text


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--text", type=Path, default=HELD_OUT, help="held-out text")
    parser.add_argument("--arms", nargs="+", help="the first is the reference")
    parser.add_argument("--quick", action="store_true", help="for a CPU: minutes")
    parser.add_argument("--cases", type=int, help="tasks per length and depth")
    parser.add_argument("--texts", type=int, help="stretches of held-out text")
    parser.add_argument(
        "--rivals", type=int, help="texts per length that give one name eight codes"
    )
    parser.add_argument(
        "--continuation-steps", type=int, help="greedy tokens after a text's first half"
    )
    parser.add_argument(
        "--only-needles", action="store_true", help="give no other kinds of tasks"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help="the model's (bfloat16; on a CPU float16)")
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help="more for LLM, as JSON"
    )
    parser.add_argument(
        "--time-limit", type=float, default=3600, help="seconds for all arms"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs")
    parser.add_argument("--no-pictures", dest="pictures", action="store_false")
    return parser


def parse_args() -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args()
    args.on_cpu = not has_gpu()
    plan = QUICK if args.quick else FULL
    args.plan = plan.changed(
        cases=args.cases,
        texts=args.texts,
        rivals=args.rivals,
        continuation_steps=args.continuation_steps,
        kinds=("needle",) if args.only_needles else None,
    )
    args.dtype = args.dtype or ("float16" if args.on_cpu else "bfloat16")
    if args.kv_cache_memory_bytes is None:
        args.kv_cache_memory_bytes = (64 << 20) if args.on_cpu else (4 << 30)
    chunk = CHUNK["quick" if args.quick else "full"]
    try:
        names = args.arms or (CPU_ARMS if args.on_cpu else GPU_ARMS)
        args.parsed_arms = [Arm.parse(name, chunk) for name in names]
    except ValueError as error:
        parser.error(str(error))
    return args


def check_disk(lab: Lab, scratch: Path, num_arms: int) -> None:
    """Prints how much disk the arms take.

    Raises:
        ValueError: If the disk has less.

    """
    vocab_size = json.loads((lab.args.model / "config.json").read_text())["vocab_size"]
    arm = lab.cases.disk_bytes(vocab_size)
    free = shutil.disk_usage(scratch).free
    said = (
        f"{arm / 1e9:.2f} GB an arm, {num_arms * arm / 1e9:.2f} GB in all, in {scratch}"
    )
    if num_arms * arm > free:
        raise ValueError(
            f"{said}, where {free / 1e9:.1f} GB are free: set TMPDIR, or give fewer "
            "--arms or --texts"
        )
    print(f"distributions take {said}", flush=True)


def keep_logs(scratch: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for log in scratch.glob("*/log"):
        shutil.copyfile(log, folder / f"{log.parent.name}.log")


def main() -> int:
    args = parse_args()
    exit_when_told()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        try:
            lab = Lab(args, scratch)
            check_disk(lab, scratch, len(args.parsed_arms))
        except (OSError, ValueError) as error:
            print(f"quality: {error}", file=sys.stderr)
            return 2
        try:
            # A run that is stopped leaves the report of the arms before.
            for rows in run_lab(lab, args.parsed_arms):
                text = write_report(rows, lab, args)
        finally:
            if args.logs:
                keep_logs(scratch, args.logs)
    print(text, end="", flush=True)
    if args.pictures:
        picture = [sys.executable, PICTURES, args.output / "quality.json"]
        subprocess.run(picture, check=True)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
