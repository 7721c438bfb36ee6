# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse models of the quality lab serve as their training saw them.

The engine has vLLM's indexer, whose scores a stand-in for CPUs computes, in each layer.
"""

from pathlib import Path
from typing import Any

import torch
from harness import Call, Engine, mean_divergence, requests_of, run_job
from indexer import attend_to_all
from needle_model import load_model, needle_config, new_model, save_model
from scenarios import text
from transformers import PreTrainedModel
from turbo_quality.cases import HELD_OUT, MODEL, Plan, Vocabulary, build_tasks

TRAINED = MODEL.with_name("needle-deepseek-v32")
# The length of its lists, of which its own are four times as long.
LIST = 128
LAYERS, TOPK = 2, 24
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64}
SHAPE |= {"num_hidden_layers": LAYERS, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 4, "q_lora_rank": 32, "index_n_heads": 16}
SHAPE |= {"index_topk": TOPK, "initializer_range": 0.1}
PROMPT = text(150, 900)
STEPS = 16


@torch.no_grad()
def predictions(model: PreTrainedModel, tokens: list[int]) -> list[dict[str, Any]]:
    """Returns the model's distributions of the tokens behind the prompt."""
    row = torch.tensor([PROMPT + tokens[:-1]])
    logits = model(row, use_cache=False).logits[0, len(PROMPT) - 1 :]
    return [{"tokens": tokens, "logprobs": logits.log_softmax(-1).tolist()}]


def test_the_engine_lists_what_training_lists(tmp_path: Path):
    folder = tmp_path / "model"
    save_model(new_model(needle_config("deepseek_v32", **SHAPE), 0), folder)
    args = {"kv_cache_dtype": "turbo4", "dtype": "float32", "block_size": 64}
    engine = Engine(args, {"call": Call([PROMPT], STEPS)})
    result = run_job(tmp_path / "run", folder, "v2", {"sparse": engine})
    requests = requests_of(result["sparse"], "call")
    model = load_model(folder).float()
    (tokens,) = (request["tokens"] for request in requests)
    assert len(tokens) == STEPS
    listed = predictions(model, tokens)
    attend_to_all(model)
    dense = predictions(model, tokens)
    # Packed latents round, which costs less than attention to all tokens would.
    noise = mean_divergence(listed, requests)
    assert noise < 0.25 * mean_divergence(dense, requests)


def test_a_trained_model_finds_facts_through_short_lists(tmp_path: Path):
    """Each list leaves out three quarters of a text, and has its fact."""
    plan = Plan(0, 0, 0, 0, (LIST * 4,), (0.1, 0.4), 1)
    held_out = HELD_OUT.read_text(encoding="utf-8")
    tasks = build_tasks(held_out, plan, 7, Vocabulary(TRAINED))
    tasks = [task for task in tasks if task["kind"] == "needle"]
    # A text comes in chunks, and both are decoded together.
    args = {"kv_cache_dtype": "turbo4", "block_size": 64, "max_model_len": LIST * 8}
    args |= {"enable_chunked_prefill": True, "max_num_batched_tokens": LIST * 3}
    args |= {"hf_overrides": {"index_topk": LIST}, "kv_cache_memory_bytes": 32 << 20}
    prompts = [task["prompt"] for task in tasks]
    engine = Engine(args, {"call": Call(prompts, max(len(x["answer"]) for x in tasks))})
    result = run_job(tmp_path, TRAINED, "v2", {"sparse": engine})
    requests = requests_of(result["sparse"], "call")
    assert len(tasks) == 2 and min(map(len, prompts)) > LIST * 3
    for task, request in zip(tasks, requests, strict=True):
        assert request["tokens"][: len(task["answer"])] == task["answer"]
