# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Plans engines that were started on an H200, and prints a row for each.

It reads a JSON list of `test_plan.Run`, as dicts.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

from model_config import cut_layers  # noqa: E402
from turbo_plan.gpus import GPUS  # noqa: E402
from turbo_recipes import device  # noqa: E402

GPU = GPUS["H200"]
device.pretend(GPU.device, packages=["flashinfer"])

from turbo_plan.planner import plan  # noqa: E402
from turbo_recipes import build  # noqa: E402


def plan_run(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    path = ROOT / "benchmarks/configs" / run["model"] / "config.json"
    config = cut_layers(json.loads(path.read_text()), run["layers"])
    (folder / "config.json").write_text(json.dumps(config))
    dtype, _, window = run["arm"].partition(":")
    attention = {"turbo_kernel": "triton", "turbo_window": "auto" if window else 0}
    planned = plan(
        str(folder),
        dtype,
        GPU,
        run["cache_bytes"],
        attention_config=attention,
        enable_prefix_caching=run["prefix_caching"],
        gpu_memory_utilization=run["utilization"],
        max_model_len=run["context"],
        max_num_batched_tokens=8192,
        max_num_seqs=64,
    )
    if planned.model is None:
        return {"refused": planned.refused}
    tpots = {
        shape: 1e3 * planned.model.tpot(GPU, dtype, *map(int, shape.split("x")))
        for shape in run["tpots"]
    }
    weights = planned.model.weights
    experts = [asdict(each) for each in weights.experts]
    read = {"dense": weights.dense, "experts": experts}
    return {"tokens": planned.tokens, "tpots": tpots, **read}


def main() -> None:
    build.inspect_in_this_process()
    for run in json.load(sys.stdin):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(plan_run(run, Path(folder))))


main()
