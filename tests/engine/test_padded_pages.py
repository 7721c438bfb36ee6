# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Packed pages that share a pool with larger ones, and therefore end in padding.

A layer with a window, left in the model's dtype, makes a group of its own, and vLLM
gives both groups' pages one size. The window is longer than any prompt here. Answers
are those of the same layers in one group, whose pages have no padding.
"""

from typing import Any

import pytest
from harness import (
    Call,
    Engine,
    Jobs,
    decided_tokens,
    largest_divergences,
    requests_of,
    tie,
)
from scenarios import BLOCK, MAX_LEN, NUM_GENERATED, PROMPTS, SLOT_BYTES
from ways import KL_TOLERANCE

KINDS = ["sliding_attention", "full_attention"]
WINDOW = {"sliding_window": MAX_LEN - 1, "layer_types": KINDS}
ARGS: dict[str, Any] = {
    "kv_cache_dtype": "turbo4",
    "dtype": "float32",
    "attention_config": {"turbo_prefill": "stored"},
    "enable_prefix_caching": True,
}


@pytest.fixture(scope="module")
def outcome(jobs: Jobs, llama: str) -> dict[str, Any]:
    def engine(skipped: str, overrides: dict[str, Any]) -> Engine:
        own = {"kv_cache_dtype_skip_layers": [skipped], "hf_overrides": overrides}
        calls = {name: Call(PROMPTS, NUM_GENERATED) for name in ("cold", "warm")}
        return Engine(ARGS | own, calls, model=llama)

    engines = {"padded": engine("sliding_window", WINDOW), "plain": engine("0", {})}
    return jobs.start("padded-pages", "v2", engines).result()


def test_pages_are_padded(outcome: dict[str, Any]):
    padded, plain = (list(outcome[name]["pages"].values()) for name in outcome)
    (window, full), (skipped, packed) = padded, plain
    assert skipped == window and not window[1]
    assert full == [window[0], True] and not packed[1]
    assert packed[0] == 2 * SLOT_BYTES["turbo4"] * BLOCK < full[0]


@pytest.mark.parametrize("call", ["cold", "warm"])
def test_padding_changes_no_answer(outcome: dict[str, Any], call: str):
    requests = [requests_of(outcome[name], call) for name in ("padded", "plain")]
    assert max(largest_divergences(*requests[::-1])) < KL_TOLERANCE
    num_decided = 0
    for padded, plain in zip(*requests, strict=True):
        assert padded["num_cached_tokens"] == plain["num_cached_tokens"]
        decided = decided_tokens(plain, tie(KL_TOLERANCE))
        assert padded["tokens"][: len(decided)] == decided
        num_decided += len(decided)
    assert 2 * num_decided > NUM_GENERATED * len(PROMPTS)
    cached = sum(request["num_cached_tokens"] for request in requests[0])
    assert bool(cached) == (call == "warm")
