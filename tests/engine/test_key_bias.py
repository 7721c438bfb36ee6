# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A Qwen2 whose bias of K is longer than the turbo dtypes bear."""

import json
import subprocess
import sys

import pytest
import torch
from harness import WRITE_MODEL, Call, Engine, Jobs
from safetensors.torch import load_file, save_file
from scenarios import PROMPTS

SHAPE = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64"]
LONG = 1


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The seeded model as a Qwen2 with a bias of K of 23 a head, 181 in one layer."""
    folder = tmp_path_factory.mktemp("qwen2") / "seeded-qwen2"
    subprocess.run([sys.executable, WRITE_MODEL, folder, *SHAPE], check=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for kind in "qkv":
            name = f"model.layers.{layer}.self_attn.{kind}"
            bias = torch.zeros(weights[f"{name}_proj.weight"].shape[0])
            if kind == "k":
                # Four slow pairs of each head.
                bias.view(2, 2, 32)[..., -4:] = 64 if layer == LONG else 8
            weights[f"{name}_proj.bias"] = bias.to(torch.bfloat16)
            weights.pop(f"{name}_norm.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def log(jobs: Jobs, qwen2: str) -> str:
    def engine(dtype: str, *skipped: int) -> Engine:
        args = {
            "kv_cache_dtype": dtype,
            "kv_cache_dtype_skip_layers": [str(layer) for layer in skipped],
        }
        return Engine(args, {"batched": Call(PROMPTS[:2], 4)}, model=qwen2)

    # What is said once a process would be said in the first engine.
    engines = {
        "auto": engine("auto"),
        "skipped": engine("turbo4", LONG),
        "all": engine("turbo4"),
    }
    jobs.start("key-bias", "v1", engines).result()
    return (jobs.folder / "key-bias" / "log").read_text()


def test_long_bias_is_named(log: str):
    before, _, after = log.partition("engine all\n")
    assert "bias of K" not in before
    (line,) = (line for line in after.splitlines() if "bias of K" in line)
    assert f"layers {LONG} of Qwen2ForCausalLM is up to 181 long a head" in line
    assert line.endswith(f"--kv-cache-dtype-skip-layers {LONG}")
