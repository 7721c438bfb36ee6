# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How many engines `check_model.py` runs side by side, and each one's share of memory.

vLLM measures the free memory of a GPU, and takes a neighbour's memory for its own. So a
share is fixed: the cache has a given size, and nothing is measured.
"""

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

GIB = 1 << 30
# Share of the free memory that all engines have together.
USED_SHARE = 0.95
# An engine's bytes beside weights and cache: CUDA's context, activations, workspaces.
OTHER_BYTES = 4 * GIB
# Cores of an engine.
CORES = 2
# Requests that an engine runs at once: arms.engine_args sets it.
MAX_NUM_SEQS = 16
OWN_SHARES = ("gpu_memory_utilization", "kv_cache_memory_bytes")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def free_memory() -> int | None:
    """Returns the free bytes of the visible GPU with fewest; None without a driver."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        command += ["-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return min(int(line) for line in done.stdout.split("\n") if line.strip()) << 20
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def weights_bytes(model: str) -> int | None:
    """Returns the bytes of a model's weights, if they are on this machine."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except Exception:
            return None
    found = (sum(x.stat().st_size for x in folder.glob(each)) for each in WEIGHTS)
    return next((size for size in found if size), None)


def token_bytes(config: Any) -> int:
    """Returns the bytes of a token's K and V in bf16, of all layers."""
    heads = 1 if config.use_mla else 2 * config.get_total_num_kv_heads()
    return 2 * config.get_total_num_hidden_layers() * heads * config.get_head_size()


def split(
    free: int, weights: int, wanted: int, least: int, engines: int, asked: int | None
) -> tuple[int, int]:
    """Returns the engines at a time, and the bytes of each one's cache.

    Args:
        free: Free bytes of a GPU.
        weights: Bytes of an engine's weights there.
        wanted: Bytes of a cache that holds all sequences of a step.
        least: Bytes of a cache that holds one sequence.
        engines: The most engines that are to run and have cores.
        asked: The user's number of engines, if any.

    Returns:
        The cache's bytes are 0 for an engine alone, which takes the memory left.

    Raises:
        ValueError: If there is no room for so many.

    """
    usable, beside = int(USED_SHARE * free), weights + OTHER_BYTES
    jobs = asked or max(1, min(engines, usable // (beside + wanted)))
    if jobs == 1:
        return 1, 0
    cache = usable // jobs - beside
    if cache < least:
        most = max(1, usable // (beside + least))
        raise ValueError(
            f"--jobs {jobs} leaves {usable / jobs / GIB:.1f} GiB of the GPU to an "
            f"engine, which needs {(beside + least) / GIB:.1f}: --jobs {most} at most"
        )
    return jobs, cache


def share_memory(args: argparse.Namespace, config: Any) -> None:
    """Sets `jobs` and `cache_bytes`, each engine's, where 0 leaves it to vLLM.

    Args:
        args: All other arguments.
        config: vLLM's configuration of the model.

    Raises:
        ValueError: If there is no room for the engines that were asked for.

    """
    args.cache_bytes = 0
    if args.on_cpu or args.jobs == 1 or set(OWN_SHARES) & set(args.engine_args):
        args.jobs = args.jobs or 1
        return
    free, weights = free_memory(), weights_bytes(args.model)
    if free is None or weights is None:
        if args.jobs:
            unknown = "the GPU's free memory" if free is None else "the weights' size"
            raise ValueError(
                f"--jobs {args.jobs}: {unknown} is not known; give each engine its "
                'share: --engine-args \'{"kv_cache_memory_bytes": 4000000000, '
                '"gpu_memory_utilization": 0.02}\''
            )
        args.jobs = 1
        return
    ranks = args.engine_args.get("tensor_parallel_size", 1)
    sequence = args.plan.max_context * token_bytes(config) // ranks
    engines = min(len(set(args.kv_cache_dtype)) + 1, (os.cpu_count() or 1) // CORES)
    args.jobs, args.cache_bytes = split(
        free, weights // ranks, MAX_NUM_SEQS * sequence, sequence, engines, args.jobs
    )
