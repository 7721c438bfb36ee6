# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A Qwen2 whose bias of K is longer than the turbo dtypes bear without an offset."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WRITE_MODEL, Call, Engine, Jobs, kl_divergences
from safetensors.torch import load_file, save_file
from scenarios import PROMPTS

SHAPE = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64"]
LONG = 1


def write_qwen2(folder: Path, scale: float) -> str:
    """The seeded model as a Qwen2 with a bias of K of 23 a head, 181 in one layer, both
    times ``scale``: long beside what else is in its keys.
    """
    subprocess.run([sys.executable, WRITE_MODEL, folder, *SHAPE], check=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for kind in "qkv":
            name = f"model.layers.{layer}.self_attn.{kind}"
            bias = torch.zeros(weights[f"{name}_proj.weight"].shape[0])
            if kind == "k":
                # Four slow pairs of each head.
                bias.view(2, 2, 32)[..., -4:] = scale * (64 if layer == LONG else 8)
                weights[f"{name}_proj.weight"] *= 0.1
            weights[f"{name}_proj.bias"] = bias.to(torch.bfloat16)
            weights.pop(f"{name}_norm.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def result(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("qwen2")
    biased, other = (
        write_qwen2(folder / f"seeded-qwen2-{scale}", scale) for scale in (1, 1.25)
    )

    def engine(dtype: str, **options: Any) -> Engine:
        calls = {
            "batched": Call(PROMPTS[:3], 16),
            "reloaded": Call(PROMPTS[:3], 16, reloaded=other),
        }
        return Engine({"kv_cache_dtype": dtype}, calls, model=biased, **options)

    remade = Call(PROMPTS[:3], 16, reloaded=other, remade_key_offset=True)
    turbo4 = {"kv_cache_dtype": "turbo4"}

    # What is said once a process would be said in the first engine.
    engines = {
        "auto": engine("auto"),
        "offset": engine("turbo4"),
        "none": engine("turbo4", without_key_offset=True),
        "remade": Engine(turbo4, {"reloaded": remade}, model=biased),
    }
    return jobs.start("key-bias", "v1", engines).result()


@pytest.fixture
def logs(result: dict[str, Any], jobs: Jobs) -> tuple[str, str]:
    """Of the engine with offsets and of that without."""
    log = (jobs.folder / "key-bias" / "log").read_text()
    _, _, after = log.partition("engine offset\n")
    first, _, rest = after.partition("engine none\n")
    return first, rest.partition("engine remade")[0]


def test_layers_with_an_offset_are_counted(logs: tuple[str, str]):
    assert "bias of K" not in logs[0]
    assert re.search(r"K offset: (\d+) of \1 layers", logs[0])


def test_long_bias_without_an_offset_is_named(logs: tuple[str, str]):
    (line,) = (line for line in logs[1].splitlines() if "bias of K" in line)
    assert f"layers {LONG} of Qwen2ForCausalLM is up to 181 long a head" in line
    assert line.endswith(f"--kv-cache-dtype-skip-layers {LONG}")


def divergence(
    result: dict[str, Any], reference: str, name: str, call: str = "batched"
) -> float:
    """Of an engine from another, in nats a token."""
    pairs = zip(
        result[reference]["calls"][call]["requests"],
        result[name]["calls"][call]["requests"],
    )
    return statistics.fmean(kl for pair in pairs for kl in kl_divergences(*pair))


def test_the_offset_brings_answers_back(result: dict[str, Any]):
    """Nothing of this model is learnt, so that a little of its keys and values is
    enough to move its answers: without a bias it diverges by 0.16 nats, too.
    """
    found = divergence(result, "auto", "offset")
    assert found < 0.25
    assert divergence(result, "auto", "none") > 3 * found


def test_another_bias_in_mid_request(result: dict[str, Any]):
    """Pages keep the offset that they were stored with, which stays the layer's: with
    another, all that was stored would be as many nats off as the biases are apart.
    """
    for name in ("auto", "offset"):
        calls = result[name]["calls"]
        assert calls["reloaded"] != calls["batched"]
    found = divergence(result, "auto", "offset", "reloaded")
    assert found < 1.5 * divergence(result, "auto", "offset")
    assert divergence(result, "auto", "remade", "reloaded") > 3 * found
