# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs a mode of `equality.py` in a process, and says what it ended of."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "cpu_standins"))

from equality_modes import MODELS, MODES, SCARCE_REQUESTS, Mode  # noqa: E402
from quickstart import stop_group  # noqa: E402
from seeded_drafts import WEIGHTS, target_overrides, write_draft  # noqa: E402
from seeded_model import build_parser, write_model  # noqa: E402
from vllm_turbo_cpu_standins.settings import (  # noqa: E402
    ENGINE_ARGS,
    engine_environment,
)

CHILD = Path(__file__).with_name("equality_child.py")
# In bf16 logits are up to 1/16 apart, which is more than TIE.
HEAD = {"head_dtype": "float32"}
BLOCK = {"cpu": 32, "gpu": 16}
MAX_BLOCK = 128
# One GPU's sums are held to several's, so theirs have to be the same in every run: NCCL
# alone. The others also want NVLink multicast, which not every host has.
SEVERAL_GPUS_ARGS = {"disable_custom_all_reduce": True}
SEVERAL_GPUS_VARIABLES = {
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
}
# Of a log, in a message.
LAST_LINES = 60
LINES_BEFORE = 16
MAX_ERRORS = 4
# The line that ends a traceback, with what vLLM writes before it.
ERROR = re.compile(r"(^|\] )[\w.]*(Error|Exception|Interrupt)(:|$)")
# For all processes to say where they are.
STACKS_S = 5


def model_folder(name: str, folder: Path, args: argparse.Namespace) -> Path:
    """Returns where a model is, which is written first if it is a seeded one."""
    options = MODELS[name]
    if options is None:
        return args.model
    target = folder / name
    if not target.exists():
        write_model(target, build_parser().parse_args([str(target), *options]))
    return target


def drafter_args(mode: Mode, folder: Path, model: Path) -> dict[str, Any]:
    """Returns what `LLM` is told of a mode's drafter, which is written if need be."""
    speculative = mode.speculative_config
    overrides: dict[str, Any] = {}
    if mode.drafts == "draft_model":
        speculative["model"] = str(model)
    elif mode.drafts in WEIGHTS:
        write_draft(folder, mode.drafts, model)
        speculative["model"] = str(folder)
        overrides = target_overrides(mode.drafts, model)
    return {"speculative_config": speculative, "hf_overrides": HEAD | overrides}


def engine_args(
    mode: Mode, longest: int, prefill: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns the arguments of a mode's engine.

    Args:
        mode: The mode.
        longest: Tokens of the longest prompt.
        prefill: `turbo_prefill`.
        args: Of the command line.

    """
    options: dict[str, Any] = {
        "dtype": "float32" if args.on_cpu else mode.dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "block_size": BLOCK["cpu" if args.on_cpu else "gpu"],
        # vLLM counts what a cache holds in sequences of this length: whole blocks.
        "max_model_len": -(-(longest + args.tokens) // MAX_BLOCK) * MAX_BLOCK,
        "max_num_seqs": 64,
        "max_num_batched_tokens": max(longest, 8192),
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "async_scheduling": False,
        "enforce_eager": True,
        "max_logprobs": -1,
        "hf_overrides": HEAD,
        "kv_cache_memory_bytes": (64 << 20) if args.on_cpu else (2 << 30),
        "gpu_memory_utilization": 0.1,
    }
    attention = {}
    if args.kv_cache_dtype in ("turbo4", "k4v3", "turbo3"):
        attention["turbo_prefill"] = prefill
    own = dict(mode.args)
    if args.on_cpu:
        options |= ENGINE_ARGS
        own.pop("moe_backend", None)
    if mode.gpus > 1:
        options |= SEVERAL_GPUS_ARGS
    attention |= own.pop("attention_config", {})
    options |= own | {"attention_config": attention}
    if mode.scarce:
        # One block is vLLM's own.
        blocks = SCARCE_REQUESTS * -(-longest // options["block_size"]) + 1
        options["num_gpu_blocks_override"] = blocks
    return options


def child_environment(folder: Path, mode: Mode, on_cpu: bool) -> dict[str, str]:
    variables = dict(os.environ) | {
        # Of compiled graphs, which modes shall not share; a CPU compiles none.
        "VLLM_CACHE_ROOT": str((folder.parent if on_cpu else folder) / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # SIGABRT then prints where each thread is.
        "PYTHONFAULTHANDLER": "1",
    }
    if mode.defect:
        # The engine has to be in the process that is changed.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if mode.gpus > 1:
        variables |= SEVERAL_GPUS_VARIABLES
    if mode.fresh_kernels:
        variables["FLASHINFER_WORKSPACE_BASE"] = str(folder)
    if on_cpu:
        variables |= engine_environment("v2") | {"OMP_NUM_THREADS": "1"}
        # Ranks share the cores.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return variables


def what_happened(log: Path) -> str:
    """Returns a log's first errors, which are the cause of later ones, and its end.

    A worker's lines begin with its rank, so that ranks can be told apart.
    """
    lines = log.read_text(errors="replace").splitlines()
    errors = [number for number, line in enumerate(lines) if ERROR.search(line)]
    shown = set(range(max(len(lines) - LAST_LINES, 0), len(lines)))
    for number in errors[:MAX_ERRORS]:
        shown |= set(range(max(number - LINES_BEFORE, 0), number + 1))
    text, last = [], -1
    for number in sorted(shown):
        if number > last + 1:
            text.append(f"... {number - last - 1} lines")
        text.append(lines[number])
        last = number
    return "\n".join(text)


def wait(process: subprocess.Popen, time_limit: float) -> str | None:
    """Waits for a mode's process, and returns what is wrong with its end."""
    try:
        status = process.wait(time_limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        time.sleep(STACKS_S)
        return f"no end after {time_limit:g} s"
    return f"status {status}" if status else None


def built_kernels(log: Path) -> dict[str, int]:
    """Returns how often each module of CUDA kernels was built, by all processes."""
    text = log.read_text(errors="replace")
    pattern = r"Building the turbo CUDA kernel (\w+) for (\S+);"
    return dict(Counter(" ".join(found) for found in re.findall(pattern, text)))


def run_mode(
    name: str,
    model: Path,
    tasks: list[dict[str, Any]],
    prefill: str,
    folder: Path,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Returns what a mode's process left (see the child), and `built`.

    Raises:
        RuntimeError: If it failed; with what its log says of it.

    """
    mode = MODES[name]
    folder.mkdir(parents=True)
    options = engine_args(
        mode, max(len(task["prompt"]) for task in tasks), prefill, args
    )
    if mode.drafts:
        options |= drafter_args(mode, folder / "drafter", model)
    copies = -(-options["max_num_seqs"] // len(tasks)) if mode.fill else 1
    job = {
        "model": str(model),
        "engine_args": options,
        "prompts": [task["prompt"] for task in tasks] * copies,
        "answers": [task["answer"] for task in tasks] * copies,
        "tokens": args.tokens,
        "batch": mode.batch,
        "repeat": mode.repeat,
        "from_cpu": mode.from_cpu,
        "sleep": mode.sleep,
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
            wrong = wait(process, args.time_limit)
        finally:
            stop_group(process)
    if wrong:
        raise RuntimeError(f"{name}: {wrong}\n{what_happened(folder / 'log')}")
    with np.load(folder / "result.npz") as result:
        return dict(result) | {"built": built_kernels(folder / "log")}
