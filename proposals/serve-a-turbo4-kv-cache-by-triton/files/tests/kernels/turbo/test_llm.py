# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""turbo4 in an engine: answers near those of the unquantised cache."""

from typing import Any

import torch

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.metrics.reader import Counter

from .utils import engine_args, write_model

PREFIX = [(7 * i) % 251 for i in range(70)]
PROMPTS = [PREFIX + [1, 2, 3], PREFIX + [9] * 20, [5, 6], list(range(150))]
VOCABULARY = 256
# Answers are given, so that runs differ in the distributions before this alone.
GIVEN = SamplingParams(
    temperature=0,
    max_tokens=6,
    logprobs=VOCABULARY,
    allowed_token_ids=[7],
    ignore_eos=True,
    detokenize=False,
)
MOST_KL = 0.011  # nats, on average of the positions


def distributions(llm: LLM) -> torch.Tensor:
    """Log probabilities at each position of the answers: (positions, vocabulary)."""
    outputs = llm.generate([{"prompt_token_ids": x} for x in PROMPTS], GIVEN)
    rows = [row for output in outputs for row in output.outputs[0].logprobs]
    tokens = range(VOCABULARY)
    return torch.tensor([[row[token].logprob for token in tokens] for row in rows])


def run(folder: str, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The distributions of a first run and of one whose prompts are cached."""
    args = engine_args(folder, max_logprobs=VOCABULARY, **changes)
    llm = LLM(**args, disable_log_stats=False)
    first, second = distributions(llm), distributions(llm)
    hits = (x for x in llm.get_metrics() if x.name == "vllm:prefix_cache_hits")
    assert sum(x.value for x in hits if isinstance(x, Counter)) > 150
    del llm
    cleanup_dist_env_and_memory()
    return first, second


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL in nats of q from p, on average of the positions."""
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_answers(tmp_path, monkeypatch):
    """Decodes, chunks, and prompts whose beginning is cached, with a window."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    folder = write_model(tmp_path)
    expected, again = run(folder, kv_cache_dtype="auto")
    # The model tells its positions apart, and is run alike twice.
    assert divergence(expected, expected.roll(1, 0)) > 20 * MOST_KL
    assert divergence(expected, again) < 1e-3
    # The longest prompt takes three chunks.
    for found in run(folder, max_num_batched_tokens=64):
        assert divergence(expected, found) < MOST_KL
