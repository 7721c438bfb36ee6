# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Seconds until `vllm serve` is ready, by cache dtype, with empty caches and full ones.

The model has dummy weights. In every round, an arm has cache folders of its own, for
the compiled code of vLLM, PyTorch, Triton, FlashInfer and the driver. Its first start
finds them empty. Its second start, and more with `--full-starts N`, find the results of
the first. A round has each arm, and begins with another arm than the round before. It
prints one JSON object per line:

* `start`: seconds from the command to an answer of /health. `phases` add up to it, and
  each ends with a line of the log. `reported` are the seconds in lines of the log, some
  of them within a phase.
* `median`: medians of the starts in the --output file with this commit, GPU, model and
  arguments, so that rounds may come from several commands. `beyond_fp8_s` is the
  difference from fp8's.

An arm is a --kv-cache-dtype; `turbo4:triton` also sets turbo_kernel.

With `--at-once N`, N arms run side by side, from one round or from several. Each has
one of the visible GPUs, and an equal share of the cores, to itself.
"""

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from common import CONFIGS, Report
from quickstart import QuickstartError, free_port, wait_until_up
from turbo_process.runner import engine_variables, exit_when_told, running, side_by_side
from turbo_serve import write_model

# The folders below the one of a pair of starts, by the variable that names each.
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "XDG_CACHE_HOME": "xdg",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "driver",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
}
EMPTY, FULL = "empty", "full"
# The first line that matches ends the phase that it is named for.
PHASES = {
    "import": r"Initializing a V1 LLM engine",
    "initialise": r"Starting to load model",
    "load": r"Model loading took",
    "compile": r"torch\.compile took",
    "profile": r"Available KV cache memory",
    "allocate": r"GPU KV cache size|Overriding num_gpu_blocks",
    "capture": r"Graph capturing finished",
    "warm_up": r"init engine \(",
    "serve": r"Application startup complete",
}
# The last phase, which ends with the answer of /health.
READY = "ready"
# Each pattern has one group, seconds; those of all matching lines are added up.
REPORTED = {
    "model_loading": r"Model loading took .* and ([\d.]+) seconds",
    "torch_compile": r"torch\.compile took ([\d.]+) s in total",
    "profile_run": r"Initial profiling/warmup run took ([\d.]+) s",
    "graph_capture": r"Graph capturing finished in ([\d.]+) secs",
    "init_engine": r"init engine \([^)]*\) took ([\d.]+) s",
    "cuda_kernels": r"CUDA kernels.*\bbuilt in ([\d.]+) s",
    "waited_for_kernels": r"CUDA kernels.*\bwaited for ([\d.]+) s",
}
# Packages that a start reads; they are read before, so that no arm waits for the disk.
READ_PACKAGES = ("vllm", "torch", "triton", "nvidia", "flashinfer", "transformers")
POLL_S = 0.02


def count_gpus() -> int:
    """Returns the number of the host's GPUs."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return 0
    return listed.stdout.count("GPU ")


def read_packages(names: Iterable[str] = READ_PACKAGES) -> int:
    """Reads packages into the host's page cache; returns their bytes."""
    total = 0
    for name in names:
        spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in Path(folder).rglob("*"):
                if path.is_file():
                    total += len(path.read_bytes())
    return total


class StampedLog:
    """The lines of a growing log, each with its time.

    Attributes:
        lines: Seconds since `start`, and the line.

    """

    def __init__(self, path: Path, start: float) -> None:
        self.path, self.start = path, start
        self.lines: list[tuple[float, str]] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follows the log until the block ends."""
        ended = threading.Event()
        thread = threading.Thread(target=self._follow, args=(ended,))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _follow(self, ended: threading.Event) -> None:
        rest = ""
        with self.path.open(errors="replace") as file:
            while True:
                is_last = ended.wait(POLL_S)
                now = time.perf_counter() - self.start
                *whole, rest = (rest + file.read()).split("\n")
                self.lines += [(now, line) for line in whole]
                if is_last:
                    return


def phases(lines: Iterable[tuple[float, str]], seconds: float) -> dict[str, float]:
    """Returns the seconds of each phase; one without its line is part of the next.

    Args:
        lines: Seconds since the start, and a line of the log.
        seconds: Seconds from the start until the server was ready.

    """
    lines = list(lines)
    found: dict[str, float] = {}
    reached = 0.0
    for name, pattern in PHASES.items():
        at = next((at for at, line in lines if re.search(pattern, line)), None)
        if at is not None and at >= reached:
            found[name], reached = at - reached, at
    return found | {READY: seconds - reached}


def reported(lines: Iterable[str]) -> dict[str, float]:
    """Returns the seconds that lines of the log report."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        for name, pattern in REPORTED.items():
            if match := re.search(pattern, line):
                found[name] += float(match[1])
    return dict(found)


def cache_variables(folder: Path) -> dict[str, str]:
    """Returns the variables that keep all caches in a folder."""
    return {variable: str(folder / name) for variable, name in CACHES.items()}


def serve_command(args: argparse.Namespace, arm: str, model: Path) -> list[str]:
    """Returns an arm's command, without the address."""
    cache_dtype, _, kernel = arm.partition(":")
    options = ["--attention-config.turbo_kernel", kernel] if kernel else []
    return [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model),
        "--kv-cache-dtype", cache_dtype, "--load-format", "dummy",
        "--max-model-len", str(args.max_model_len), *options, *args.serve_args,
    ]  # fmt: skip


class Place(NamedTuple):
    """The GPU and cores of an arm's servers.

    Attributes:
        gpu: The GPU's name in CUDA_VISIBLE_DEVICES; None for all visible GPUs.
        cores: Numbers of this host's cores that the servers may take.

    """

    gpu: str | None
    cores: tuple[int, ...]


def places(count: int) -> list[Place]:
    """Returns `count` places, which share the GPUs and cores of this process.

    Raises:
        ValueError: If there are fewer GPUs or cores.

    """
    cores = sorted(os.sched_getaffinity(0))
    if count == 1:
        return [Place(None, tuple(cores))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = [str(i) for i in range(count_gpus())]
    else:
        gpus = [name for name in visible.split(",") if name]
    share = len(cores) // count
    if len(gpus) < count or not share:
        raise ValueError(
            f"--at-once {count}: an arm takes a GPU and a core, and there are "
            f"{len(gpus)} and {len(cores)}"
        )
    return [
        Place(gpu, tuple(cores[i * share : (i + 1) * share]))
        for i, gpu in enumerate(gpus[:count])
    ]


def measure_start(
    command: list[str], log: Path, caches: Path, place: Place
) -> dict[str, Any]:
    """Starts a server, and ends it when it is ready.

    Returns:
        The seconds of the start, in all and by phase.

    Raises:
        QuickstartError: If the server ends, or is not ready in time.

    """
    port = free_port()
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    variables = engine_variables(on_cpu=False) | cache_variables(caches)
    if place.gpu is not None:
        cores = ",".join(map(str, place.cores))
        command = ["taskset", "--cpu-list", cores, *command]
        variables["CUDA_VISIBLE_DEVICES"] = place.gpu
    start = time.perf_counter()
    with running(command, log, variables) as server:
        stamped = StampedLog(log, start)
        with stamped.followed():
            wait_until_up(server, port, log)
            seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "phases": phases(stamped.lines, seconds),
        "reported": reported(line for _, line in stamped.lines),
    }


def run_arm(
    args: argparse.Namespace,
    arm: str,
    number: int,
    model: Path,
    report: Report,
    place: Place,
) -> int:
    """Starts an arm of a round, and reports; returns the number of failed starts."""
    with tempfile.TemporaryDirectory(dir=args.folder) as caches:
        for i in range(1 + args.full_starts):
            state = FULL if i else EMPTY
            again = f"-{i}" if i > 1 else ""
            log = args.logs / f"{arm.replace(':', '-')}-{number}-{state}{again}.log"
            common = {"part": "start", "arm": arm, "caches": state, "round": number}
            command = serve_command(args, arm, model)
            try:
                row = measure_start(command, log, Path(caches), place)
            except (OSError, QuickstartError) as error:
                report.row(**common, error=str(error))
                # After a failed start the caches are neither empty nor full.
                return 1
            report.row(**common, **row)
    return 0


def run_rounds(
    args: argparse.Namespace, model: Path, report: Report, where: list[Place]
) -> int:
    """Runs the rounds, with an arm at a time in each place; returns the failures."""
    free: SimpleQueue[Place] = SimpleQueue()
    for place in where:
        free.put(place)

    def run_next(arm: str, number: int) -> int:
        place = free.get()
        try:
            return run_arm(args, arm, number, model, report, place)
        finally:
            free.put(place)

    ordered = []
    for number in range(args.first_round, args.first_round + args.rounds):
        first = number % len(args.arms)
        arms = args.arms[first:] + args.arms[:first]
        ordered += [(arm, number) for arm in arms]
    with side_by_side(len(where)) as pool:
        return sum(pool.map(run_next, *zip(*ordered, strict=True)))


def medians(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows with the medians of starts, those with empty caches first."""
    starts: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("part") == "start" and "error" not in row:
            starts[row["caches"], row["arm"]].append(row)
    seconds = {
        key: statistics.median(row["seconds"] for row in alike)
        for key, alike in starts.items()
    }
    found = []
    for state, arm in sorted(starts):
        alike = starts[state, arm]
        names = dict.fromkeys(name for row in alike for name in row["phases"])
        row: dict[str, Any] = {
            "part": "median",
            "arm": arm,
            "caches": state,
            "starts": len(alike),
            "seconds": seconds[state, arm],
            "all_seconds": sorted(row["seconds"] for row in alike),
            "phases": {
                name: statistics.median(row["phases"].get(name, 0.0) for row in alike)
                for name in names
            },
        }
        if (state, "fp8") in seconds:
            row["beyond_fp8_s"] = seconds[state, arm] - seconds[state, "fp8"]
        found.append(row)
    return found


def rows_alike(output: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a file's rows of runs with these facts, from any command."""
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    same = facts.items() - {("command", facts["command"])}
    return [row for row in rows if same <= row.items()]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIGS / "llama-8b")
    parser.add_argument("--arms", nargs="+", default=["auto", "fp8", "turbo4"])
    parser.add_argument(
        "--rounds", type=int, default=1, help="one takes six minutes on an H100"
    )
    parser.add_argument(
        "--first-round", type=int, default=0, help="number of the first"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="arms side by side, each with a GPU of its own (default: 1)",
    )
    parser.add_argument(
        "--full-starts",
        type=int,
        default=1,
        metavar="N",
        help="an arm's starts with full caches in a round (default: 1)",
    )
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--folder", type=Path, help="where cache folders are made")
    parser.add_argument("--output", type=Path, help="file that rows are added to")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/turbo-start"))
    parser.add_argument(
        "serve_args", nargs="*", help="after --: more arguments of vllm serve"
    )
    return parser


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    try:
        where = places(args.at_once)
    except ValueError as error:
        parser.error(str(error))
    exit_when_told()
    with tempfile.TemporaryDirectory() as folder:
        output = args.output or Path(folder) / "rows.jsonl"
        report = Report(output)
        report.facts |= {
            "model": args.config.name,
            "serve_args": " ".join(
                ["--max-model-len", str(args.max_model_len), *args.serve_args]
            ),
            "at_once": args.at_once,
            "cores": len(where[0].cores),
        }
        model = Path(folder) / "model"
        model.mkdir()
        write_model(args.config, model)
        if args.folder:
            args.folder.mkdir(parents=True, exist_ok=True)
        read_packages()
        failed = run_rounds(args, model, report, where)
        for row in medians(rows_alike(output, report.facts)):
            report.row(**row)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
