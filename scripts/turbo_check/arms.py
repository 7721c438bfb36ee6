# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The engines that `check_model.py` compares."""

import argparse
from dataclasses import dataclass, replace
from typing import Any

from turbo_process.arm import ALL_LAYERS, NO_MEANS, NO_WINDOW
from turbo_quality.cases import HEAD
from vllm_turbo_cpu_standins.settings import ENGINE_ARGS

from turbo_check.args import CPU_ARGS, REFERENCE
from turbo_check.jobs import MAX_NUM_SEQS

CPU_CACHE_BYTES = 256 << 20
# Share of a GPU's memory that an engine with a cache of given bytes finds free.
MIN_FREE = 0.02


@dataclass(frozen=True)
class Arm:
    """One engine.

    Attributes:
        name: Its name in tables.
        cache_dtype: As on vLLM's command line.
        skip_layers: Layers whose cache has the model's dtype.
        has_window: Whether turbo_window is vLLM's default, and not 0.
        has_means: Whether turbo_means is vLLM's default, and not "off".
        chunk: Tokens that a step prefills; None for the plan's.
        compresses_all: Whether vLLM's turboquant presets keep no layer in bf16.

    """

    name: str
    cache_dtype: str
    skip_layers: tuple[str, ...] = ()
    has_window: bool = True
    has_means: bool = True
    chunk: int | None = None
    compresses_all: bool = False

    def without(self, layer: str) -> "Arm":
        return replace(
            self, name=f"{self.name}, layer {layer} in bf16", skip_layers=(layer,)
        )


def arm_of(name: str) -> Arm:
    """Returns the arm of a dtype, with an option that `check_arm` allows."""
    dtype, _, option = name.partition(":")
    if dtype == REFERENCE:
        if not option:
            return Arm(f"{dtype}, again", dtype)
        return Arm(f"{dtype} in chunks of {option}", dtype, chunk=int(option))
    all_layers = option == ALL_LAYERS
    flags = {"has_window": option != NO_WINDOW, "has_means": option != NO_MEANS}
    return Arm(name, dtype, **flags, compresses_all=all_layers)


def arms_of(names: list[str]) -> list[Arm]:
    """Returns the reference, then an arm for each name; auto again shows noise."""
    return [Arm(REFERENCE, REFERENCE), *map(arm_of, dict.fromkeys(names))]


def engine_args(arm: Arm, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of an arm's `LLM`."""
    is_reference = arm.cache_dtype == REFERENCE
    options: dict[str, Any] = {
        "kv_cache_dtype": args.unquantised if is_reference else arm.cache_dtype,
        "max_model_len": args.plan.max_context,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": arm.chunk or args.plan.chunk,
        # The reference's likeliest tokens, and a prompt's own.
        "max_logprobs": args.plan.top + 1,
        "enable_prefix_caching": False,
        # Compilation and graph capture take longer than the cases.
        "enforce_eager": True,
        "hf_overrides": HEAD,
        # The recorder's workspace is not in vLLM's account.
        "gpu_memory_utilization": 0.85,
        "seed": args.seed,
        "disable_log_stats": True,
    }
    if arm.skip_layers:
        options["kv_cache_dtype_skip_layers"] = list(arm.skip_layers)
    if args.cache_bytes:
        # Other processes' memory then does not count; the share must be free at start.
        options["kv_cache_memory_bytes"] = args.cache_bytes
        options["gpu_memory_utilization"] = MIN_FREE
    if args.on_cpu:
        options |= CPU_ARGS | {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
        options |= ENGINE_ARGS
    options |= args.engine_args
    attention = dict(options.get("attention_config", {}))
    if not arm.has_window:
        attention["turbo_window"] = 0
    if not arm.has_means:
        attention["turbo_means"] = "off"
    return options | ({"attention_config": attention} if attention else {})
