# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measures what KV cache dtypes cost a model of yours in quality, on your GPU.

Each dtype is an engine in a process of its own. The first engine has the model's
unquantised cache, and is the reference. All engines run the same cases: stretches of
text, whose end is decoded token by token as if it had been sampled; greedy
continuations; and needles, which are facts in a text that a question asks for. KL
divergence is computed over the reference's likeliest tokens and the sum of the rest. It
is a lower bound of the divergence over the whole vocabulary.

The status is 0 whatever the advice, 1 if an engine failed, 2 if an argument is wrong.
"""

import argparse
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from turbo_check.needs import require_series

# Before the first package is imported.
require_series("check_model.py")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "cpu_standins"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
from common import rounded, run_facts  # noqa: E402
from quickstart import is_right  # noqa: E402
from tqdm import tqdm  # noqa: E402
from turbo_check.advice import advise, layers_to_skip, ran  # noqa: E402
from turbo_check.args import (  # noqa: E402
    REFERENCE,
    build_parser,
    check_early,
    complete,
)
from turbo_check.arms import Arm, arm_of, arms_of, engine_args  # noqa: E402
from turbo_check.cases import build_cases  # noqa: E402
from turbo_check.cures import with_cure  # noqa: E402
from turbo_check.metrics import (  # noqa: E402
    Records,
    compare_needles,
    compare_records,
    greedy_agreement,
    rank_layers,
)
from turbo_check.progress import Heartbeat  # noqa: E402
from turbo_check.report import markdown  # noqa: E402
from turbo_process.arm import LOG, TURBO_DTYPES, read_result, run_arm  # noqa: E402
from turbo_process.runner import (  # noqa: E402
    engine_variables,
    exit_when_told,
    side_by_side,
)

PARTS = ROOT / "scripts" / "turbo_check"
CHILD = PARTS / "child.py"
GSM8K_CHILD = PARTS / "gsm8k.py"
PICTURES = PARTS / "pictures.py"
# The stages of child.py, one after the other.
STAGES = ("start", "keys", "decode", "prefill", "greedy", "needles")
GSM8K_CONTEXT = 4096
POLL_S = 0.5


class Checks:
    """The cases, a scratch folder, and the arms' processes."""

    child = CHILD

    def __init__(
        self, args: argparse.Namespace, scratch: Path, pool: ThreadPoolExecutor
    ) -> None:
        self.args = args
        self.scratch = scratch
        self.pool = pool
        text, tokenizer = args.text_content, args.tokenizer
        self.cases = build_cases(text, args.plan, tokenizer, args.seed)
        self.deadline = time.monotonic() + args.time_limit
        self.reference = Arm(REFERENCE, REFERENCE)
        self.running: dict[Arm, float] = {}
        self.ended = 0
        self.variables = engine_variables(args.on_cpu) | {
            # Probes are then called directly, and need not be serialised.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        if not Path(args.model).is_dir():
            del self.variables["HF_HUB_OFFLINE"]

    def folder(self, arm: Arm, part: str = "") -> Path:
        return self.scratch / re.sub(r"\W+", "-", f"{arm.name} {part}".strip())

    def run_arm(self, arm: Arm) -> str | None:
        """Runs an arm in a process, and returns its error, if any."""
        options = engine_args(arm, self.args)
        job = {
            "model": self.args.model,
            "engine_args": {
                "enable_trace_replay": True,
                "logits_processors": ["turbo_check.probe:Recorder"],
                # A rank samples all rows, or none.
                "enable_batch_sharded_sampling": False,
                **options,
            },
            "compress_all_layers": arm.compresses_all,
            "reference": (
                None
                if arm == self.reference
                else str(self.folder(self.reference).absolute())
            ),
        }
        return self.run_child(
            self.child, job | self.cases.for_child(), self.folder(arm)
        )

    def run_gsm8k(self, arm: Arm) -> str | None:
        job = {
            "model": self.args.model,
            # Prompts of five examples are longer than short contexts.
            "engine_args": engine_args(arm, self.args)
            | {"max_model_len": min(self.args.model_context, GSM8K_CONTEXT)}
            | {"max_num_seqs": 256}
            | self.args.engine_args,
            "limit": self.args.gsm8k or None,
        }
        return self.run_child(GSM8K_CHILD, job, self.folder(arm, "gsm8k"))

    def run_child(self, child: Path, job: dict[str, Any], folder: Path) -> str | None:
        left = self.deadline - time.monotonic()
        forked = self.args.on_cpu
        error = run_arm(child, job, folder, self.variables, left, is_forked=forked)
        log = folder / LOG
        if not error or not log.exists():
            return error and with_cure(error)
        kept = self.args.output / "logs" / f"{folder.name}.log"
        kept.parent.mkdir(exist_ok=True)
        shutil.copyfile(log, kept)
        return with_cure(error.replace(str(log), str(kept)), kept)

    def records(self, arm: Arm, indices: list[int], part: str = "text") -> Records:
        """Returns an arm's records of some texts, or of their prefill."""
        texts = [np.load(self.folder(arm) / f"{part}-{i}.npz") for i in indices]
        parts = ("logprobs", "target", "top")
        return {part: np.stack([text[part] for text in texts]) for part in parts}

    def found(self, result: dict[str, Any]) -> list[bool]:
        """Returns for each needle whether the arm's answer holds it."""
        answers = (self.args.tokenizer.decode(x) for x in result["answers"])
        pairs = zip(answers, self.cases.needles, strict=True)
        return [is_right(answer, needle["answer"]) for answer, needle in pairs]

    def measure(self, arm: Arm) -> dict[str, Any]:
        """Returns the reported figures of an arm that ran."""
        result = read_result(self.folder(arm))
        reference = read_result(self.folder(self.reference))

        def compared(indices: list[int], part: str = "text") -> dict[str, Any]:
            pair = (self.records(x, indices, part) for x in (self.reference, arm))
            return compare_records(*pair)

        contexts = [text["context"] for text in self.cases.texts]
        overall = compared([*range(len(contexts))])
        by_context = {
            str(context): compared([i for i, x in enumerate(contexts) if x == context])
            for context in self.cases.plan.contexts
        }
        prefilled = self.cases.prefilled
        continued = [part["continuations"] for part in (reference, result)]
        found = [self.found(part) for part in (reference, result)]
        facts = ("bytes_per_token", "layers", "window_layers", "mixed_layers")
        facts += ("backends", "overrides")
        return overall | {
            "decode": by_context,
            "prefill": compared(prefilled, "prefill") if prefilled else None,
            "greedy_prefix": greedy_agreement(*continued),
            "greedy_steps": self.cases.plan.greedy_steps,
            "needles": compare_needles(self.cases.needles, *found),
            "capacity": reference["bytes_per_token"] / result["bytes_per_token"],
            "keys": rank_layers(result["keys"]),
            "seconds": result["seconds"],
            **{fact: result[fact] for fact in facts},
        }

    def stages(self, arm: Arm) -> int:
        """Returns how many stages an arm has finished."""
        path = self.folder(arm) / "stages"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def status(self) -> str:
        """Returns the stage of each running engine, on one line."""
        now = time.monotonic()
        parts = [
            f"{arm.name}: {STAGES[min(self.stages(arm), len(STAGES) - 1)]}, "
            f"{now - start:.0f} s"
            for arm, start in list(self.running.items())
        ]
        return "; ".join([f"{self.ended} ended", *parts])

    def run_whole(self, arm: Arm) -> tuple[str | None, dict[str, Any], float]:
        """Runs an arm, and GSM8K if that is asked for.

        Returns:
            The error, if any; GSM8K's part of the row; the seconds that the arm took.

        """
        start = self.running[arm] = time.monotonic()
        try:
            error = self.run_arm(arm)
            asked = self.args.gsm8k is not None and not error and not arm.skip_layers
            more = self.measure_gsm8k(arm) if asked else {}
        finally:
            self.running.pop(arm)
            self.ended += 1
        return error, more, time.monotonic() - start

    def row(self, arm: Arm, run: Future) -> dict[str, Any]:
        """Returns the row of an arm that has ended."""
        error, more, seconds = run.result()
        row = {"arm": arm.name, **asdict(arm)}
        row.pop("name")
        row |= {"error": error} if error else self.measure(arm)
        tqdm.write(f"{arm.name}: {error or 'ran'} ({seconds:.0f} s)", file=sys.stdout)
        sys.stdout.flush()
        return row | more

    def run(self, arms: list[Arm]) -> Iterator[dict[str, Any]]:
        """Yields each arm's row when it has ended, with progress on a terminal.

        The reference's row comes first, because the others are compared with it.
        """
        runs = {self.pool.submit(self.run_whole, arm): arm for arm in arms}
        waiting = set(runs)
        first = {run for run, arm in runs.items() if arm == self.reference}
        with tqdm(total=len(arms) * len(STAGES), disable=None, unit="part") as bar:
            while waiting:
                ended, _ = wait(first & waiting or waiting, POLL_S, FIRST_COMPLETED)
                bar.update(sum(map(self.stages, arms)) - bar.n)
                bar.set_description(", ".join(arm.name for arm in list(self.running)))
                for run in ended:
                    waiting.remove(run)
                    yield self.row(runs[run], run)

    def measure_gsm8k(self, arm: Arm) -> dict[str, Any]:
        error = self.run_gsm8k(arm)
        if error:
            return {"gsm8k_error": error}
        return {"gsm8k": read_result(self.folder(arm, "gsm8k"))}


def check_layers(checks: Checks, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Leaves each of the worst layers of the first turbo dtype in bf16.

    The worst layers are those whose stored K changes scores most. Each layer has a row.
    Several layers that are worth their bytes have one more row together.
    """
    turbo = [row for row in rows if row["cache_dtype"] in TURBO_DTYPES and ran(row)]
    if not turbo or not ran(rows[0]):
        return None
    packed = turbo[0]
    arm = arm_of(packed["arm"])
    worst = [layer["layer"] for layer in packed["keys"]][: checks.args.layers]
    rows_of = {row["arm"]: row for row in checks.run([arm.without(x) for x in worst])}
    measured = [rows_of[arm.without(layer).name] for layer in worst]
    skip = layers_to_skip(measured, packed)
    if len(skip) > 1:
        name = f"{arm.name}, layers {', '.join(skip)} in bf16"
        together = replace(arm, name=name, skip_layers=tuple(skip))
        measured += checks.run([together])
    return {"packed": arm.name, "rows": measured, "skip": skip}


def report_of(
    checks: Checks, rows: list[dict[str, Any]], layers: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the report of the arms that have ended."""
    args = checks.args
    # Only layers of turbo dtypes know the offset that they take off K.
    turbo = [row for row in rows if row["cache_dtype"] in TURBO_DTYPES and ran(row)]
    return {
        "facts": run_facts(),
        "model": args.model,
        "plan": asdict(args.plan),
        "contexts": args.plan.contexts,
        "is_exact": args.plan.top >= args.vocab_size,
        "engine_args": args.engine_args,
        "arms": rows,
        "keys": (turbo or rows)[0]["keys"],
        "layers": layers,
        "advice": advise(rows),
    }


def check(
    checks: Checks,
    arms: list[Arm],
    keep: Callable[[dict[str, Any]], object] = lambda report: None,
) -> dict[str, Any]:
    """Returns the report, whose `arms` has a row for each arm, in the given order.

    At the end of each arm, `keep` gets a report of the arms that have ended.
    """
    order = {arm.name: number for number, arm in enumerate(arms)}
    rows: list[dict[str, Any]] = []
    for row in checks.run(arms):
        rows.append(row)
        rows.sort(key=lambda row: order[row["arm"]])
        if not ran(rows[0]):
            raise SystemExit(f"check_model: no reference: {row['error']}")
        keep(report_of(checks, rows))
    layers = check_layers(checks, rows) if checks.args.layers else None
    return report_of(checks, rows, layers)


def failed(report: dict[str, Any]) -> bool:
    """Whether an engine did not run to its end."""
    rows = report["arms"] + (report["layers"] or {"rows": []})["rows"]
    return any("error" in row or "gsm8k_error" in row for row in rows)


def write_files(report: dict[str, Any], output: Path) -> str:
    """Writes check.json and check.md, and returns the latter's text."""
    text = markdown(report)
    (output / "check.json").write_text(json.dumps(rounded(report), indent=1) + "\n")
    (output / "check.md").write_text(text)
    return text


def write_report(report: dict[str, Any], output: Path) -> None:
    """Writes check.json, check.md and kl.svg, and prints the tables."""
    path, text = output / "check.json", write_files(report, output)
    print(f"\n{text}", flush=True)
    if not importlib.util.find_spec("matplotlib"):
        print(f"{path}; no picture: matplotlib is not installed")
    elif subprocess.run([sys.executable, PICTURES, path]).returncode:
        print(f"{path}; no picture: see above")
    else:
        print(f"{path}, {output / 'kl.svg'}")


def check_or_stop(checks: Checks, arms: list[Arm], output: Path) -> dict[str, Any]:
    """Returns the report. If the run is stopped, prints the report so far."""
    kept: dict[str, Any] = {}

    def keep(report: dict[str, Any]) -> None:
        kept.update(report)
        write_files(report, output)

    try:
        return check(checks, arms, keep)
    except (KeyboardInterrupt, SystemExit) as stopped:
        if isinstance(stopped, SystemExit) and isinstance(stopped.code, str):
            raise
        ended = len(kept.get("arms", []))
        said = f"check_model: stopped when {ended} of {len(arms)} engines had ended"
        if not kept:
            print(f"{said}: there is no report", file=sys.stderr, flush=True)
            raise
        print(f"\n{markdown(kept)}\n{said}; {output / 'check.json'}", flush=True)
        raise


def main(words: list[str] | None = None) -> int:
    parser = build_parser(__doc__)
    args = parser.parse_args(words)
    try:
        check_early(args)
    except ValueError as error:
        parser.error(str(error))
    if not Path(args.model).is_dir():
        print(
            f"check_model: no folder {args.model} is here: vLLM asks the Hub for the "
            "model",
            file=sys.stderr,
            flush=True,
        )
    with Heartbeat("reading the model and the text") as beat:
        try:
            complete(args)
        except ValueError as error:
            parser.error(str(error))
        with tempfile.TemporaryDirectory() as folder, side_by_side(args.jobs) as pool:
            try:
                checks = Checks(args, Path(folder), pool)
            except ValueError as error:
                parser.error(str(error))
            arms = arms_of(args.kv_cache_dtype)
            beat.status = checks.status
            report = check_or_stop(checks, arms, args.output)
        write_report(report, args.output)
    return 1 if failed(report) else 0


if __name__ == "__main__":
    exit_when_told()
    # A process in the background would ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("check_model: interrupted", file=sys.stderr)
        sys.exit(130)
