#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs the checks that need a GPU, or many cores, in sections. `--list` describes them.

It runs with the vLLM that $PYTHON (python3) imports; the series must be applied to it.
Results go to $OUT (benchmarks/results), and rows name $COMMIT (HEAD). Without a section
it runs all sections that need no second GPU. Arguments behind `--` are for one section:

    ci/gpu.py kernels -- -n 16 --dist worksteal
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from common import ROOT, first_line  # noqa: E402

PYTHON = os.environ.get("PYTHON") or "python3"
OUT = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# The exit status of a tool of compute-sanitizer that has found something.
FOUND = 9
RACECHECK_PARTS = 4
# Small kernels without a race, and the kernels that racecheck does not watch if it
# reports hazards there.
RACE_FREE = {"sets": "decode_wgmma", "ring": "extends"}
PIPES = ("alu", "fma", "fmaheavy", "lsu", "tensor")
STALLS = (
    "long_scoreboard", "short_scoreboard", "math_pipe_throttle", "wait",
    "not_selected", "barrier", "no_instruction",
)  # fmt: skip
METRICS = (
    "gpu__time_duration.sum",
    "smsp__inst_executed.sum",
    "dram__bytes.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    *(f"sm__inst_executed_pipe_{x}.avg.pct_of_peak_sustained_active" for x in PIPES),
    *(f"smsp__average_warps_issue_stalled_{x}_per_issue_active.ratio" for x in STALLS),
)
# Not every host has NVLink multicast.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
RANKS = (
    '"tensor_parallel_size":2,'
    '"compilation_config":{"pass_config":{"fuse_allreduce_rms":false}}'
)
SHARED = f'{RANKS},"decode_context_parallel_size":2'
DCP_ENGINES = (RANKS, SHARED, f'{SHARED},"dcp_comm_backend":"a2a"')

Commands = list[list[str]]
Variables = dict[str, str]


def run(command: list[str], variables: Variables, log: Path | None = None) -> int:
    """Runs a command with its output in a log, or as ours, and returns its status."""
    with log.open("w") if log else nullcontext() as output:
        errors = subprocess.STDOUT if output else None
        try:
            return subprocess.run(
                command, env=os.environ | variables, stdout=output, stderr=errors
            ).returncode
        except OSError as error:
            print(error, file=output or sys.stderr)
            return 127


def passes(command: list[str], variables: Variables | None = None) -> bool:
    return run(command, variables or {}) == 0


def passes_with_log(
    command: list[str], name: str, num_lines: int, variables: Variables | None = None
) -> bool:
    """Run a command, show the last lines of its log, and say whether it passed.

    The log is OUT/NAME.txt.
    """
    status = run(command, variables or {}, OUT / f"{name}.txt")
    lines = (OUT / f"{name}.txt").read_text(errors="replace").splitlines()
    print(*lines[-num_lines:], sep="\n", flush=True)
    return status == 0


def in_turn(commands: Commands, args: list[str]) -> bool:
    """Runs all commands, also those behind one that fails."""
    first, *others = commands
    return all([passes([*first, *args]), *map(passes, others)])


def kernels(commands: Commands, args: list[str]) -> bool:
    """Runs the tests, and records that all of them, or those of $FAMILIES, passed."""
    ((*words, tests),) = commands
    native = [PYTHON, "ci/native_kernels.py"]
    families = os.environ.get("FAMILIES", "").split()
    paths = [tests]
    if families:
        listing = [*native, "--tests", *families]
        found = subprocess.run(listing, stdout=subprocess.PIPE, text=True)
        if found.returncode:
            return False
        paths = found.stdout.split()
    shard = args[args.index("--shard") + 1 :][:1] if "--shard" in args else []
    number = "".join(f"-{x.partition('/')[0]}" for x in shard)
    is_whole = not any(x in ("-k", "-m") or "test_" in x for x in args)
    search = os.pathsep.join(filter(None, ("ci", os.environ.get("PYTHONPATH"))))
    # Otherwise each process of -n takes all cores for references on the CPU.
    variables = {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    command = [*words, *args, *paths]
    passed = passes_with_log(command, f"kernels{number}", 40, variables)
    if not passed or not is_whole:
        return passed
    gpu = first_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    record = [*native, "--record", str(OUT / "native_kernels.json")]
    record += [word for x in shard for word in ("--shard", x)]
    record += ["--passed", *families]
    return passes([*record, "--commit", os.environ["COMMIT"], "--gpu", gpu or ""])


def sanitize(tool: str, words: list[str], log: Path) -> int:
    """Runs a command under a tool of compute-sanitizer, and returns the status."""
    cuda = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    command = [
        shutil.which("compute-sanitizer") or str(cuda / "bin/compute-sanitizer"),
        *("--tool", tool),
        # An access past an allocation's end is to be in no other.
        *(("--padding", "4096") if tool == "memcheck" else ()),
        # Each of the tools beside it takes one of the ports, of which ten are tried.
        *("--max-connections", "100", "--launch-timeout", "0"),
        *("--target-processes", "application-only"),
        *("--error-exitcode", str(FOUND), "--print-limit", "10", *words),
    ]
    return run(command, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, log)


def note(line: str) -> None:
    """Adds a line to sanitizer.txt, and prints it."""
    with (OUT / "sanitizer.txt").open("a") as output:
        output.write(f"{line}\n")
    print(line, flush=True)


def watch(name: str, words: list[str], wanted: int) -> bool:
    """Run the kernels under the tool that begins a name, and compare the status."""
    tool = name.partition("-")[0]
    log = OUT / "sanitizer-logs" / f"{name}.txt"
    status = sanitize(tool, words, log)
    summary = re.search(r"^=* (.*SUMMARY: .*)", log.read_text(errors="replace"), re.M)
    said = summary[1] if summary else f"see {log}"
    note(f"{' '.join([tool, *words[2:]])}: {said} (status {status}, to be {wanted})")
    return status == wanted


def racecheck_errs(kernel: str) -> bool:
    """Returns whether racecheck reports hazards in a kernel that has none."""
    source, logs = f"ci/racecheck_{kernel}.cu", OUT / "sanitizer-logs"
    built = ["nvcc", "-arch=native", "-o", str(logs / kernel), source]
    if run(built, {}, logs / f"{kernel}-build.txt"):
        note(f"{source} was not built: see {logs / f'{kernel}-build.txt'}")
        return False
    status = sanitize("racecheck", [str(logs / kernel)], logs / f"{kernel}.txt")
    verb = "reports hazards" if status == FOUND else "finds nothing"
    note(f"racecheck {verb} in {source}, which has no race")
    return status == FOUND


def sanitizer(commands: Commands, args: list[str]) -> bool:
    """Watches the kernels with each tool, and defects that each is to find."""
    (words,) = commands
    tools = [x for x in args if x in TOOLS] or TOOLS
    args = [x for x in args if x not in TOOLS]
    (OUT / "sanitizer-logs").mkdir(exist_ok=True)
    # Builds the kernels.
    if not passes_with_log([*words, *args], "sanitizer", 20):
        return False
    watched = [(x, [*words, *args], 0) for x in tools if x != "racecheck"]
    without = []
    if "racecheck" in tools:
        errs = [kernels for x, kernels in RACE_FREE.items() if racecheck_errs(x)]
        # The emulated GPU watches these kernels.
        without = ["--without", *errs] if errs else []
        # It is the slowest tool.
        for i in range(1, RACECHECK_PARTS + 1):
            part = [*args, *without, "--part", f"{i}/{RACECHECK_PARTS}"]
            watched.append((f"racecheck-{i}", [*words, *part], 0))
    listing = [*words, "--defects", *without]
    listed = subprocess.run(listing, stdout=subprocess.PIPE, text=True)
    planted = [x for x in listed.stdout.split() if x.partition("-")[0] in tools]
    watched += [(name, [*words, "--defect", name], FOUND) for name in planted]
    with ThreadPoolExecutor(len(watched)) as pool:
        found = [*pool.map(lambda each: watch(*each), watched)]
    return all(found) and listed.returncode == 0


def defects(commands: Commands, args: list[str]) -> bool:
    return passes_with_log([*commands[0], *args], "defects", 20)


def profile(commands: Commands, args: list[str]) -> bool:
    decode, table = commands
    ncu = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv"]
    ncu += ["--page", "raw", "--metrics", ",".join(METRICS)]
    ncu += ["--log-file", str(OUT / "profile-raw.csv")]
    return passes([*ncu, *decode, *args]) and passes(table)


def dcp(commands: Commands, args: list[str]) -> bool:
    """Times engines whose ranks share a context, or not, and compares answers."""
    decode, equality = commands
    found = []
    for arm, options in enumerate(DCP_ENGINES):
        command = [*decode, "--shapes", *args, "--engine-args", f"{{{options}}}"]
        command += ["--logs", str(OUT / "dcp-logs" / str(arm))]
        found.append(passes(command, NO_MULTICAST))
    return all([*found, passes(equality, NO_MULTICAST)])


class Section(NamedTuple):
    """A row of the table.

    Attributes:
        does: Its work, and the use of arguments.
        commands: Commands of $PYTHON, one after the other, on files in OUT. Arguments
            go to the first.
        needs: Needs beside GPUs and a vLLM with the series.
        gpus: GPUs that it takes.
        takes: The time on an H200, where it is known.
        default: The arguments if none are given.
        run: Runs the commands with the arguments, and returns whether all passed.

    """

    does: str
    commands: str
    needs: str = ""
    gpus: int = 1
    takes: str = ""
    default: str = ""
    run: Callable[[Commands, list[str]], bool] = in_turn


KERNEL_TESTS = "vllm_overlay/tests/kernels/turbo"
TIMES = "vllm_overlay/benchmarks/kernels/benchmark_turbo"
CACHE = "--kv-cache-memory-bytes 8589934592"
REAL = "build/smollm2"
SECTIONS = {
    "kernels": Section(
        "runs the kernels' tests. Compilers take most of the time: `-n 16 --dist "
        "worksteal` is for 16 cores, which share the GPUs. `--shard 1/2` runs the "
        "first of two parts, and the second finds its kernels built. When all tests "
        "have passed, native_kernels.json gets the digests of the sources. "
        'FAMILIES="cuda/store triton/merge" runs and records those of some kernels.',
        "-m pytest -q -p no:cacheprovider -p failures_at_once -p shards "
        f"{KERNEL_TESTS}",
        needs="nvcc, cores",
        run=kernels,
    ),
    "architectures": Section(
        "compiles every CUDA kernel for every architecture, packs them for "
        "scripts/apply.sh --kernels, and fails if they take too many bytes. `--arch "
        "9.0` is for one architecture. `--folder DIR` keeps the kernels of former "
        "runs, so that a run can be ended and continued.",
        f"{KERNEL_TESTS}/builds/compile_kernels.py --output OUT/cuda_resources.json "
        "--archive OUT/turbo-kernels.tar.xz",
        needs="nvcc",
        gpus=0,
        takes="hours of one core",
    ),
    "sanitizer": Section(
        "watches stores, decodes, extends, merges and recent windows with "
        "compute-sanitizer, and makes sure that it finds planted defects. "
        "`racecheck` is for that tool alone.",
        "ci/sanitize.py",
        needs="nvcc, compute-sanitizer",
        takes="over 10 minutes",
        run=sanitizer,
    ),
    "defects": Section(
        "plants defects in the kernels, one at a time, and makes sure that the "
        "kernels' tests find them.",
        "ci/cuda_defects.py",
        needs="nvcc, cores",
        takes="9 minutes",
        run=defects,
    ),
    "bench": Section(
        "times the kernels of stores and decodes.",
        f"{TIMES}_decode.py --output OUT/decode.jsonl",
    ),
    "extend": Section(
        "times attention of several query tokens per sequence to cached context.",
        f"{TIMES}_extend.py --output OUT/extend.jsonl",
    ),
    "mla": Section(
        "times the kernels of MLA beside FlashAttention's and FlashMLA's, and new "
        "tokens behind cached latents, absorbed and projected up.",
        f"{TIMES}_mla.py --output OUT/mla.jsonl\n"
        f"{TIMES}_latent_store.py --output OUT/mla_store.jsonl\n"
        f"{TIMES}_mla_extend.py --output OUT/mla_extend.jsonl",
    ),
    "profile": Section(
        "asks Nsight Compute for the bottlenecks of a decode step's kernels.",
        f"{TIMES}_decode.py --profile --arms turbo4 k4v3 turbo3\n"
        "benchmarks/profile_table.py OUT/profile-raw.csv OUT/profile.csv",
        needs="ncu",
        run=profile,
    ),
    "engine": Section(
        "measures the capacity of caches, and times prefills and decode steps of an "
        "engine.",
        "benchmarks/turbo_engine.py --output OUT/engine.jsonl --logs OUT/engine-logs",
    ),
    "throughput": Section(
        "times the engine's throughput, with a cache of 8 GiB.",
        f"benchmarks/turbo_engine.py --shapes --throughput 96 4096 512 {CACHE} "
        "--output OUT/engine.jsonl --logs OUT/engine-logs",
    ),
    "models": Section(
        "times decode steps of a model of another kind: `--model "
        "benchmarks/configs/... --layers 12`. With `--quantization awq` its weights "
        "have 4 bits. `--parts prefix [--prefix-match-unit 16]` continues chats "
        "instead, and counts their tokens in the prefix cache.",
        "benchmarks/turbo_models.py --output OUT/models.jsonl --logs OUT/models-logs",
    ),
    "offload": Section(
        "copies pages to the host's memory and back, restores prompts from there, and "
        "times decoding in the layouts that suit copies. Three engines start side by "
        "side.",
        f"benchmarks/turbo_offload.py --together OUT/offload-turns {CACHE} "
        "--gpu-memory-utilization 0.25 --output OUT/offload.jsonl "
        "--logs OUT/offload-logs\n"
        f"{TIMES}_decode.py --rounds 50 --shapes 32x32768x32x8x128 --arms turbo4 "
        "turbo4_BLHNC turbo4_BHLNC --output OUT/offload_layouts.jsonl",
        needs="90 GB of its memory",
    ),
    "pictures": Section(
        "draws the results in OUT.",
        "benchmarks/pictures.py OUT",
        needs="no vLLM, matplotlib (requirements/test.txt)",
        gpus=0,
    ),
    "serve": Section(
        "times a server's streams over HTTP.",
        "benchmarks/turbo_serve.py --output OUT/serve.jsonl --log OUT/serve.log",
    ),
    "start": Section(
        "times a server's start, with nothing built before and with everything built. "
        "`--first-round 1` adds another round to the medians. `--arms fp8 turbo4 "
        "--at-once 2 --full-starts 3` is for two GPUs, and takes 7 minutes.",
        "benchmarks/turbo_start.py --output OUT/start.jsonl --logs OUT/start-logs",
        takes="6 minutes a round",
    ),
    "quality": Section(
        "measures what each dtype costs in quality, on the trained model.",
        "benchmarks/quality.py --jobs 5 --output OUT/quality --logs OUT/quality-logs",
        needs="matplotlib (requirements/test.txt), or `--no-pictures`",
        takes="under 10 minutes",
    ),
    "lab": Section(
        "compares each choice of the formats with its alternatives.",
        "tests/quality/lab/choices.py --device cuda --output OUT/lab",
        takes="1 to 2 minutes",
    ),
    "latents": Section(
        "compares formats of MLA's latents: the model's predictions on the latents "
        "that each reads back, by the same arithmetic.",
        "tests/quality/lab/latents.py --device cuda --output OUT/lab",
    ),
    "equality": Section(
        "compares every way to run requests with one request at a time. `--prefill "
        "stored --jobs 4 --modes tensor_parallel tensor_parallel_heads "
        "pipeline_parallel expert_parallel data_parallel` is for two GPUs.",
        "benchmarks/equality.py --jobs 8 --output OUT/equality.jsonl",
    ),
    "families": Section(
        "compares CUDA's kernels with Triton's on seeded models with windows, sinks, a "
        "soft cap, shared caches, chunks and states.",
        "ci/families.py --output OUT/families.jsonl",
    ),
    "checkpoints": Section(
        "checks AWQ, GPTQ, compressed-tensors, FP8 and ModelOpt, with and without "
        "experts: 52 starts of an engine.",
        "ci/checkpoints.py --output OUT/checkpoints.jsonl",
    ),
    "check": Section(
        "checks a model, which the arguments name.",
        "scripts/check_model.py --output OUT/check",
        default="models/needle-qwen3",
    ),
    "real": Section(
        "checks SmolLM2 with every cache, on manuals, and looks for pass keys in "
        "sentences that repeat.",
        f"scripts/check_model.py {REAL} --text build/texts/manuals.txt "
        "--output OUT/check-smollm2 --kv-cache-dtype auto auto:512 fp8 "
        "int4_per_token_head turboquant_4bit_nc turboquant_4bit_nc:all turbo4 k4v3 "
        "turbo3 turbo4:no-window k4v3:no-window turbo3:no-window "
        "turbo4:no-means k4v3:no-means turbo3:no-means\n"
        f"scripts/check_model.py {REAL} --text build/texts/repeated.txt "
        "--output OUT/passkeys-smollm2 --kv-cache-dtype fp8 turbo4 k4v3 turbo3 "
        "turbo4:no-means k4v3:no-means turbo3:no-means --texts 2 --needles 8 "
        "--passkeys",
        needs="build/smollm2 (scripts/smollm2.py), build/texts (lab/texts.py)",
    ),
    "means": Section(
        "compares the means of K and of latents with those of Transformers.",
        "benchmarks/pass_means.py lfm2 nemotron_h needle-deepseek-v3 "
        "needle-granite-swa --output OUT/pass_means.jsonl",
    ),
    "memory": Section(
        "looks for memory that grows after the start, at the model's context and at a "
        "million tokens.",
        "benchmarks/memory.py --output OUT/memory.jsonl --logs OUT/memory-logs",
    ),
    "soak": Section(
        "runs requests that share a cache which is too small. `--kv-cache-dtype k4v3 "
        "--window --drafts ngram --offload 8 --transfers 0.05` adds other features.",
        "benchmarks/soak.py --output OUT/soak.jsonl",
        takes="60 minutes at most",
    ),
    "restarts": Section(
        "kills a server under load, and starts it again.",
        "benchmarks/soak_server.py --output OUT/restarts.jsonl "
        "--logs OUT/restarts-logs",
    ),
    "image": Section(
        "builds kernels like docker/Dockerfile, and starts an engine that has no nvcc.",
        "ci/image.py --output OUT/image.jsonl",
        needs="nvcc",
    ),
    "dcp": Section(
        "runs ranks that share sequences, or not: counts the tokens that they hold, "
        "times a step of a model with one KV head in the shapes that the arguments "
        "name, and compares answers.",
        "benchmarks/turbo_models.py --model benchmarks/configs/one-kv-head --arms "
        "turbo4 --parts decode --output OUT/dcp.jsonl\n"
        "benchmarks/equality.py --jobs 3 --prefill raw --output OUT/equality.jsonl "
        "--modes tensor_parallel dcp dcp_graphs dcp_chunked dcp_prefix "
        "dcp_ngram_graphs dcp_mtp_graphs",
        gpus=2,
        default="64x32768 16x131072 16x65536 16x32768",
        run=dcp,
    ),
    "transfers": Section(
        "runs engines that go on from another engine's pages, also with other "
        "tensor-parallel sizes: compares answers, and times a prompt's way from one to "
        "the other, beside bf16's.",
        "benchmarks/turbo_transfers.py --output OUT/transfers.jsonl "
        "--logs OUT/transfers-logs",
        needs="NIXL",
        gpus=2,
    ),
}


def words_of(command: str) -> list[str]:
    """Returns the words of a section's command, with this run's folder for OUT."""
    return [re.sub(r"^OUT(?=/|$)", str(OUT), word) for word in command.split()]


def print_table() -> None:
    for name, section in SECTIONS.items():
        gpus = ("no GPU", "a GPU", "two GPUs")[section.gpus]
        facts = ", ".join(filter(None, (gpus, section.needs, section.takes)))
        print(f"{name}: {facts}")
        print(textwrap.indent(textwrap.fill(section.does, 84), "    "))
        first, *others = section.commands.splitlines()
        for command in (f"{first} {section.default}".rstrip(), *others):
            print(f"    $ python {command}")


def main() -> int:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--list] [SECTION]... [-- ARG...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION")
    parser.add_argument("--list", action="store_true", help="print the sections")
    asked = parser.parse_args(words[:end])
    args = words[end + 1 :]
    if asked.list:
        print_table()
        return 0
    names = asked.sections or [x for x in SECTIONS if SECTIONS[x].gpus < 2]
    for name in names:
        if name not in SECTIONS:
            print(f"gpu.py: no section '{name}'", file=sys.stderr)
            return 2
    if args and len(names) > 1:
        print("gpu.py: arguments are for one section", file=sys.stderr)
        return 2
    os.chdir(ROOT)
    OUT.mkdir(parents=True, exist_ok=True)
    if names != ["pictures"] and not passes(
        [PYTHON, "-c", "import vllm.v1.attention.ops.turbo"]
    ):
        hint = f"apply the series to {PYTHON}'s vLLM first: scripts/apply.sh"
        print(f"gpu.py: {hint}", file=sys.stderr)
        return 1
    commit = os.environ.get("COMMIT") or first_line("git", "rev-parse", "HEAD") or ""
    os.environ.update(COMMIT=commit, PYTHONUNBUFFERED="1", VLLM_NO_USAGE_STATS="1")
    failed = []
    for name in names:
        start = time.monotonic()
        print(f"[{name}]", flush=True)
        section = SECTIONS[name]
        commands = [[PYTHON, *words_of(x)] for x in section.commands.splitlines()]
        if not section.run(commands, args or section.default.split()):
            failed.append(name)
        print(f"[{name}] took {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        print("failed:", *failed, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
