# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prints how many tokens of KV cache fit into the same memory, by cache dtype.

The numbers come from vLLM's own block manager: the model is built without weights, its
layers state the pages of their cache, and vLLM divides the memory among them.
"""

import argparse
import copy
import json
import sys
import tempfile
from typing import Any

import torch

from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core.kv_cache_planning import (
    get_global_kv_cache_groups,
    get_kv_cache_configs,
)
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

BASELINE = "bfloat16"
DTYPES = ("turbo4", "k4v3", "turbo3")


def start_parallel_state() -> None:
    """Makes this process a world of one, in which layers find their share of heads."""
    with tempfile.NamedTemporaryFile() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        initialize_model_parallel(1, 1)


def build(config: VllmConfig) -> None:
    """Builds the model without weights; its layers then state their pages."""
    dtype = config.model_config.dtype
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(dtype),
        torch.device("meta"),
    ):
        initialize_model(config)
        current_platform.update_block_size_for_backend(config)


def supported_layouts(config: VllmConfig) -> list[str]:
    """Returns the layouts of pages that a built model's backends share."""
    backends = get_current_attn_backends(config)
    return [layout.name for layout in get_supported_kv_cache_layouts(backends)]


def capacity(config: VllmConfig, memory: int) -> int | None:
    """Returns the tokens that fit into `memory` bytes; None if no sequence fits."""
    build(config)
    with set_current_vllm_config(config):
        register_all_kvcache_specs(config)
        specs = [get_kv_cache_spec(config)]
        layouts = supported_layouts(config)
        resolve_kv_cache_layout(config, [layouts], specs[0].values())
        groups = get_global_kv_cache_groups(config, specs)
        try:
            (cache,) = get_kv_cache_configs(config, specs, [memory], groups)
        except ValueError:
            return None
    tokens, _ = get_kv_cache_capacity(config, cache)
    return tokens


def capacities(model: str, memory: int, **args: Any) -> dict[str, int | None]:
    """Returns the tokens that fit into `memory` bytes, by cache dtype."""
    tokens: dict[str, int | None] = {}
    for dtype in (BASELINE, *DTYPES):
        engine_args = EngineArgs(model, kv_cache_dtype=dtype, **copy.deepcopy(args))
        config = engine_args.create_engine_config()
        if not tokens:
            with set_current_vllm_config(config):
                start_parallel_state()
        tokens[dtype] = capacity(config, memory)
    return tokens


def table(tokens: dict[str, int | None], memory: int) -> str:
    """Returns the capacities as text, with the gain over bf16."""
    lines = [f"KV cache in {memory / 2**20:,.0f} MiB", "dtype           tokens  gain"]
    baseline = tokens[BASELINE]
    for dtype, count in tokens.items():
        shown = "no sequence" if count is None else f"{count:,}"
        gain = f"{count / baseline:5.2f}x" if count and baseline else ""
        lines.append(f"{dtype:10} {shown:>11} {gain}".rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--memory", type=int, required=True, help="bytes")
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON")
    args = parser.parse_args()
    tokens = capacities(args.model, args.memory, **args.engine_args)
    print(table(tokens, args.memory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
