# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The small model with windows and attention sinks, the same in vLLM as in training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Call, Engine, Jobs, requests_of
from needle_model import needle_config, new_model, save_model
from transformers import AutoModelForCausalLM, PreTrainedModel

WINDOW, STEPS = 24, 8
PROMPTS = [
    torch.randint(0, 256, (size,), generator=torch.manual_seed(size)).tolist()
    for size in (20, 70, 95)
]
# The error of float32's sums in another order.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windowed") / "model"
    config = needle_config(
        "granite_swa",
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        layer_rope_theta=[10000.0, 500000.0, 10000.0],
        sliding_window=WINDOW,
        hidden_size=64,
        intermediate_size=64,
        initializer_range=0.3,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    )
    model = new_model(config, 0)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.uniform_(0, 4)
    save_model(model, folder)
    return folder


@pytest.fixture(scope="module")
def requests(jobs: Jobs, folder: Path) -> list[dict[str, Any]]:
    args = {"kv_cache_dtype": "auto", "dtype": "float32"}
    calls = {"batched": Call(PROMPTS, STEPS)}
    engines = {"auto": Engine(args, calls, model=str(folder))}
    return requests_of(jobs.start("windowed-model", "v1", engines).result()["auto"])


def furthest(
    model: PreTrainedModel, prompt: list[int], request: dict[str, Any]
) -> float:
    """Returns the largest distance of log-probabilities from the engine's."""
    tokens = torch.tensor([prompt + request["tokens"]])
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    found = torch.tensor(request["logprobs"])
    return (logits.log_softmax(-1) - found).abs().max().item()


def test_trained_as_served(folder: Path, requests: list[dict[str, Any]]):
    """Prompts are longer than windows, and sinks take much of the probability."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="causal_attention"
    )
    pairs = list(zip(PROMPTS, requests, strict=True))
    assert max(furthest(model, *pair) for pair in pairs) < TOLERANCE
    windowed = [m for m in model.modules() if getattr(m, "sliding_window", None)]
    for layer in windowed:
        layer.sliding_window += 1
    far = [furthest(model, *pair) for pair in pairs]
    # The first prompt and its answer reach the window's end, the others begin past it.
    assert min(far) > 100 * TOLERANCE
    for layer in windowed:
        layer.sliding_window -= 1
        layer.sinks.data -= 1
    assert min(furthest(model, *pair) for pair in pairs) > 100 * TOLERANCE
