# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs a mode of `equality.py` in a process, and reports the settings it ran with."""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cpu_standins"))

from turbo_process.log import what_happened  # noqa: E402
from turbo_process.runner import engine_variables, run_child  # noqa: E402
from turbo_quality.cases import HEAD  # noqa: E402
from turbo_seeded.drafts import WEIGHTS, target_overrides, write_draft  # noqa: E402
from turbo_seeded.model import build_parser, write_model  # noqa: E402
from vllm_turbo_cpu_standins.settings import ENGINE_ARGS  # noqa: E402

from turbo_equality.modes import (  # noqa: E402
    BLOCK,
    MODELS,
    MODES,
    SCARCE_REQUESTS,
    Mode,
)

# Average bits of a coordinate of K or V, with its part of the scales.
BITS = {"turbo4": 4.25, "k4v3": 3.75, "turbo3": 3.25}
TURBO_DTYPES = tuple(BITS)
CHILD = Path(__file__).with_name("child.py")
MAX_BLOCK = 128
# Tokens of a block, where recent windows are wanted.
WINDOW_BLOCK = 64
# Sums on several GPUs are compared with those on one, so they have to be the same in
# every run: NCCL alone. Other all-reduces also need NVLink multicast, which not every
# host has.
SEVERAL_GPUS_ARGS = {
    "disable_custom_all_reduce": True,
    # This pass uses FlashInfer's all-reduce, whatever the variables below say.
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
}
SEVERAL_GPUS_VARIABLES = {
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
}


def model_folder(name: str, folder: Path, args: argparse.Namespace) -> Path:
    """Returns a model's folder; a seeded model is written first."""
    options = MODELS[name]
    if options is None:
        return args.model
    target = folder / name
    if not target.exists():
        write_model(target, build_parser().parse_args([str(target), *options]))
    return target


def drafter_args(mode: Mode, folder: Path, model: Path) -> dict[str, Any]:
    """Returns `LLM`'s arguments of a mode's drafter, and writes the drafter's model."""
    speculative = mode.speculative_config
    overrides: dict[str, Any] = {}
    if mode.drafts == "draft_model":
        speculative["model"] = str(model)
    elif mode.drafts in WEIGHTS:
        write_draft(folder, mode.drafts, model)
        speculative["model"] = str(folder)
        overrides = target_overrides(mode.drafts, model)
    return {"speculative_config": speculative, "hf_overrides": HEAD | overrides}


def attention_config(
    dtype: str, prefill: str, has_window: bool = False
) -> dict[str, Any]:
    """Returns vLLM's `attention_config` of a cache dtype."""
    if dtype not in TURBO_DTYPES:
        return {}
    return {"turbo_prefill": prefill, "turbo_window": "auto" if has_window else 0}


def block_size(args: argparse.Namespace) -> int:
    """Returns the tokens of a block; recent windows need larger blocks."""
    return WINDOW_BLOCK if args.window else BLOCK["cpu" if args.on_cpu else "gpu"]


def soaked_cache(args: argparse.Namespace) -> dict[str, Any]:
    """Returns vLLM's arguments of the cache that a soak asks for.

    Args:
        args: The command line's. Tokens are read as they are stored, so answers do not
            depend on earlier prefix hits. With `window`, raw tokens are read too, which
            a recent window needs.

    """
    prefill = "raw" if args.window else "stored"
    return {
        "kv_cache_dtype": args.kv_cache_dtype,
        "attention_config": attention_config(args.kv_cache_dtype, prefill, args.window),
        "block_size": block_size(args),
    }


def engine_args(
    mode: Mode, longest: int, prefill: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns the arguments of a mode's engine.

    Args:
        mode: The mode.
        longest: Tokens of the longest prompt.
        prefill: `turbo_prefill`.
        args: The command line's.

    """
    options: dict[str, Any] = {
        "dtype": "float32" if args.on_cpu else mode.dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "block_size": block_size(args),
        # vLLM states a cache's capacity in sequences of this length: whole blocks.
        "max_model_len": -(-(longest + args.tokens) // MAX_BLOCK) * MAX_BLOCK,
        "max_num_seqs": 64,
        "max_num_batched_tokens": max(longest, 8192),
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "async_scheduling": False,
        "enforce_eager": not mode.graphs,
        "max_logprobs": -1,
        "hf_overrides": HEAD,
        "kv_cache_memory_bytes": (64 << 20) if args.on_cpu else (2 << 30),
        "gpu_memory_utilization": 0.1,
    }
    own = dict(mode.args)
    if args.on_cpu:
        options |= ENGINE_ARGS
        own.pop("moe_backend", None)
    if mode.gpus > 1:
        options |= SEVERAL_GPUS_ARGS
    attention = attention_config(args.kv_cache_dtype, prefill, args.window)
    attention |= own.pop("attention_config", {})
    options |= own | {"attention_config": attention}
    if mode.scarce:
        blocks = -(-longest // options["block_size"]) + args.window
        # One block is vLLM's own.
        options["num_gpu_blocks_override"] = SCARCE_REQUESTS * blocks + 1
    return options


def child_environment(folder: Path, mode: Mode, on_cpu: bool) -> dict[str, str]:
    """Returns the variables of a mode's process."""
    variables = engine_variables(on_cpu) | {
        # The folder of compiled graphs, which modes must not share; a CPU has none.
        "VLLM_CACHE_ROOT": str((folder.parent if on_cpu else folder) / "cache"),
        # Workers get a function, which counts the graphs that they replay.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    if mode.defect:
        # The engine has to be in the process that is changed.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if mode.gpus > 1:
        variables |= SEVERAL_GPUS_VARIABLES
    if mode.fresh_kernels:
        variables["FLASHINFER_WORKSPACE_BASE"] = str(folder)
    if on_cpu:
        # Ranks share the cores.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return variables


def room(options: dict[str, Any], model: Path) -> int | None:
    """Returns the tokens that the memory of a cache holds if no page is padded.

    It is None unless some layers are not packed. No other mode has such a capacity to
    compare with.

    Args:
        options: The arguments of `LLM`.
        model: The model's folder.

    """
    skipped = len(options.get("kv_cache_dtype_skip_layers", []))
    if not skipped or options["kv_cache_dtype"] not in BITS:
        return None
    config = json.loads((model / "config.json").read_text())
    coordinates = 2 * config["num_key_value_heads"] * config["head_dim"]
    packed = config["num_hidden_layers"] - skipped
    dense_bits = 8 * (4 if options["dtype"] == "float32" else 2)
    bits = skipped * dense_bits + packed * BITS[options["kv_cache_dtype"]]
    return int(8 * options["kv_cache_memory_bytes"] / (coordinates * bits))


def built_kernels(log: Path) -> dict[str, int]:
    """Returns how often each module of CUDA kernels was built, by all processes."""
    text = log.read_text(errors="replace")
    pattern = r"Building the turbo CUDA kernel (\w+) for (\S+);"
    return dict(Counter(" ".join(found) for found in re.findall(pattern, text)))


# The part of a layer's start line before its kernels; an MLA layer has a rotary key.
_LAST_SAID = r"\b(?:head size|rotary): [^;)]*; "


def used_kernels(log: Path) -> set[str]:
    """Returns the kinds of kernels that the engine's start lines name."""
    text = log.read_text(errors="replace")
    said = re.findall(r"KV cache \w+: .*(?:head size|rotary): .*", text)
    return set(re.findall(_LAST_SAID + r"(\w+)", "\n".join(said)))


def window_lengths(log: Path) -> set[int]:
    """Returns the tokens of recent windows, by the engine's log, over all layers."""
    text = log.read_text(errors="replace")
    said = re.findall(r"recent window: ([\d or]+) tokens", text)
    return {int(number) for numbers in said for number in numbers.split(" or ")}


def kernel_reasons(log: Path) -> list[str]:
    """Returns the kernels that each process took and why, without repetition.

    The warning of a process that fell back names the cause, and comes first.
    """
    text = log.read_text(errors="replace")
    said = re.findall(r"Turbo KV cache: (\w+ kernels, because .*)", text)
    said += re.findall(_LAST_SAID + r"(\w+ kernels, because .*?)\)", text)
    return list(dict.fromkeys(said))


def unlike_asked(
    asked: dict[str, Any], ran: dict[str, Any], kernels: set[str], on_cpu: bool
) -> dict[str, Any]:
    """Returns the settings of an engine that differ from those asked for.

    Args:
        asked: The arguments of `LLM`.
        ran: The settings by the engine's account (see the child).
        kernels: The kinds of kernels that its layers take.
        on_cpu: Whether the kernels have to be PyTorch's operators.

    """
    attention = asked["attention_config"]
    wanted: dict[str, Any] = {"turbo_prefill": "raw", "kv_cache_dtype_skip_layers": []}
    wanted |= {"enable_adaptive_verification": False, "turbo_window": 0}
    wanted |= {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    wanted |= {"decode_context_parallel_size": 1, "cp_kv_cache_interleave_size": 1}
    is_turbo = asked["kv_cache_dtype"] in TURBO_DTYPES
    if not is_turbo:
        # No other dtype reads these options.
        del wanted["turbo_prefill"], wanted["turbo_window"]
    wanted |= asked | attention | asked.get("speculative_config", {})
    wanted["ranks"] = wanted["tensor_parallel_size"] * wanted["pipeline_parallel_size"]
    found = {
        name: value
        for name, value in ran.items()
        if name in wanted and value != wanted[name]
    }
    if is_turbo:
        own = "Triton" if attention.get("turbo_kernel") == "triton" else "CUDA"
        if kernels != {"PyTorch" if on_cpu else own}:
            found["kernels"] = sorted(kernels)
    return found


def run_mode(
    name: str,
    model: Path,
    tasks: list[dict[str, Any]],
    prefill: str,
    folder: Path,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Returns the result of a mode's process (see the child), `room`, `built` and
    `unlike_asked`.

    Raises:
        RuntimeError: If it failed; the message has the errors of its log.

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
    log = folder / "log"
    wrong = run_child(
        [sys.executable, CHILD, folder / "job.json", folder / "result.npz"],
        log,
        child_environment(folder, mode, args.on_cpu),
        args.time_limit,
    )
    if wrong:
        raise RuntimeError(f"{name}: {wrong}\n{what_happened(log)}")
    with np.load(folder / "result.npz") as arrays:
        result: dict[str, Any] = dict(arrays)
    result["ran"] = json.loads(result["ran"].item())
    kernels = used_kernels(log)
    unlike = unlike_asked(options, result["ran"], kernels, args.on_cpu)
    if "kernels" in unlike:
        unlike["kernels"] = kernel_reasons(log)
    # A drafter's own layers have no window.
    if args.window and not any(window_lengths(log)):
        unlike["recent_window"] = 0
    return result | {
        "room": room(options, model),
        "built": built_kernels(log),
        "unlike_asked": unlike,
    }
