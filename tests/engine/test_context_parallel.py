# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Two ranks with a trained model's one KV head share the tokens of sequences."""

import statistics
from typing import Any

import pytest
from equality import KL_BOUND, TIE
from harness import Call, Engine, decided_tokens, kl_divergences, run_job
from tasks import IM_END
from turbo_quality.cases import HELD_OUT, MODEL, Plan, Vocabulary, build_tasks

# Tokens of a prompt that asks for a fact: its answer is certain. Other texts may go on
# otherwise when a rounding moves a stored code.
LENGTH = 480
# Prompts whose hits have as many tokens in blocks of one rank as in the longer ones of
# two.
NUM_PROMPTS = 3
MAX_TOKENS = 12
# The second time all prompts hit what the first has cached.
WAYS: dict[str, dict[str, Any]] = {
    "hits": {"enable_prefix_caching": True},
    "chunks": {"enable_chunked_prefill": True, "max_num_batched_tokens": 64},
}
# Each rank has the KV head, and all tokens.
WHOLE = {"tensor_parallel_size": 2}
SHARED = {
    "hits": WHOLE | {"decode_context_parallel_size": 2},
    "chunks": WHOLE
    | {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 16},
}


def engine(**args: Any) -> Engine:
    text = HELD_OUT.read_text(encoding="utf-8")
    plan = Plan(0, 0, 0, 0, (LENGTH,), (0.2, 0.8), 1)
    tasks = build_tasks(text, plan, 0, Vocabulary(MODEL))
    prompts = [task["prompt"] for task in tasks[:NUM_PROMPTS]]
    calls = {"first": Call(prompts, MAX_TOKENS), "again": Call(prompts, MAX_TOKENS)}
    settings = {"kv_cache_dtype": "turbo4", "dtype": "float32"}
    settings |= {"attention_config": {"turbo_window": 0}}
    return Engine(settings | args, calls, model=str(MODEL))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results by way: of ranks with all tokens each, and of ranks that share them."""
    folder = tmp_path_factory.mktemp("ranks")
    # Ranks share the cores. A process can have one group of ranks.
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    found: dict[str, dict[str, Any]] = {}
    for way, args in WAYS.items():
        found[way] = {}
        for name, own in (("whole", WHOLE), ("shared", SHARED[way])):
            job = {name: engine(**args, **own)}
            found[way] |= run_job(folder / way / name, MODEL, "v2", job, variables)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
def test_answers_and_capacity(results: dict[str, dict[str, Any]], way: str):
    """Ranks that share tokens answer alike, and have room for twice the tokens."""
    whole, shared = results[way]["whole"], results[way]["shared"]
    assert shared["num_tokens"] == pytest.approx(2 * whole["num_tokens"], rel=0.01)
    for call in ("first", "again"):
        runs = [result["calls"][call]["requests"] for result in (whole, shared)]
        divergences = []
        for own, other in zip(*runs):
            length = (own["tokens"] + [IM_END]).index(IM_END) + 1
            decided = decided_tokens(own, TIE)[:length]
            assert other["tokens"][: len(decided)] == decided
            assert own["num_cached_tokens"] == other["num_cached_tokens"]
            divergences += kl_divergences(own, other)[:length]
        assert statistics.mean(divergences) <= KL_BOUND
    hits = [request["num_cached_tokens"] for request in runs[1]]
    assert any(hits) == (way == "hits")
