# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checkpoints that bring scales for an FP8 cache: none is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Call, Engine, Jobs
from safetensors.torch import load_file, save_file
from scenarios import PROMPTS

STRATEGIES = ["tensor", "attn_head"]


def write_checkpoint(model: Path, folder: Path, strategy: str) -> str:
    """Writes the seeded model as LLM-Compressor would, with scales of 0.01."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme | {"symmetric": True, "dynamic": False},
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for kind in ("k", "v"):
            heads = config["num_key_value_heads"] if strategy == "attn_head" else 1
            scale = torch.full((heads, 1, 1) if heads > 1 else (1,), 0.01)
            weights[f"model.layers.{layer}.self_attn.{kind}_scale"] = scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def outcome(
    model: Path, jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("checkpoints")

    def engine(folder: str | None) -> Engine:
        args = {"kv_cache_dtype": "turbo4"}
        return Engine(args, {"batched": Call(PROMPTS, 8)}, model=folder)

    engines = {"none": engine(None)} | {
        strategy: engine(write_checkpoint(model, root / strategy, strategy))
        for strategy in STRATEGIES
    }
    return jobs.start("checkpoints", "v1", engines).result()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scales_are_not_read(outcome: dict[str, Any], strategy: str):
    assert outcome[strategy] == outcome["none"]
