# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A LoRA adapter on every linear layer, Q, K and V among them, beside the base model.

K has a long bias in the base model, below the adapter, so that it has an offset.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from harness import Call, Engine, Jobs, mean_divergence, requests_of
from safetensors.torch import load_file, save_file
from trained import MAX_TOKENS, TRAINED

pytestmark = pytest.mark.matrix

DTYPE, OWN = "turbo4", "float16"
RANK = 8
# The deviation of an adapter's addition to a weight, over the weight's own. The model
# still finds its facts, and other answers change.
STRENGTH = 0.2
# Nats a token.
KL_BOUND = 0.01


def write_adapter(folder: Path) -> str:
    """Writes a seeded adapter as PEFT would."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors, modules = {}, set()
    for name, weight in load_file(TRAINED / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            continue
        n, k = weight.shape
        size = STRENGTH * weight.float().std() / RANK**0.5
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {
            f"{layer}.lora_A.weight": torch.randn(RANK, k, generator=generator),
            f"{layer}.lora_B.weight": size * torch.randn(n, RANK, generator=generator),
        }
        modules.add(name.split(".")[-2])
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": sorted(modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def result(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "seeded")
    prompts = trained.prompts()
    calls = {
        "base": Call(prompts, MAX_TOKENS),
        "adapted": Call(prompts, MAX_TOKENS, adapters=[adapter] * len(prompts)),
        "mixed": Call(
            [prompt for prompt in prompts for _ in range(2)],
            1,
            adapters=[None, adapter] * len(prompts),
        ),
    }
    args = {"enable_lora": True, "max_lora_rank": RANK, "enable_prefix_caching": True}
    engines = {
        dtype: Engine(args | {"kv_cache_dtype": dtype}, calls, model=str(TRAINED))
        for dtype in (OWN, DTYPE)
    }
    return jobs.start("adapters", "v1", engines).result()


@pytest.mark.parametrize("call", ["base", "adapted"])
def test_answers_as_with_its_own_dtype(result: dict[str, Any], call: str):
    own, packed = (requests_of(result[dtype], call) for dtype in (OWN, DTYPE))
    assert all(trained.right(own)) and all(trained.right(packed))
    assert 0 < mean_divergence(own, packed) < KL_BOUND


def test_adapter_matters(result: dict[str, Any]):
    """Guards the tests above. The adapter's requests hit no page of the base model."""
    base, adapted = (requests_of(result[DTYPE], call) for call in ("base", "adapted"))
    assert mean_divergence(base, adapted) > 2 * KL_BOUND
    assert not any(request["num_cached_tokens"] for request in adapted)


def test_adapter_beside_the_base_model(result: dict[str, Any]):
    """Both answer in one batch, each from its own pages."""
    own, packed = (requests_of(result[dtype], "mixed") for dtype in (OWN, DTYPE))
    assert all(request["num_cached_tokens"] for request in packed)
    for place in range(2):
        assert 0 < mean_divergence(own[place::2], packed[place::2]) < KL_BOUND
