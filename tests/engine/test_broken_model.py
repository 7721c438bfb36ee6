# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A model that gives NaN for one request, beside requests that it answers."""

import math
from typing import Any

import pytest
from harness import Call, Engine, Jobs
from scenarios import BLOCK, text

# A token that no text here has. Its embedding is NaN, or like others.
BROKEN_TOKEN = 1
NUM_GENERATED = 6
# So few that the next requests are written where the first ones were.
NUM_BLOCKS = 16
BROKEN = [
    *(*text(BLOCK + 3, 500), BROKEN_TOKEN),
    *(*text(BLOCK + 7, 501), BROKEN_TOKEN),
]
FIRST = [text(2 * BLOCK - 5, 502), BROKEN, text(BLOCK + 1, 503)]
# These take nearly all blocks, and the last tokens of each have a block of their own.
NEXT = [text(4 * BLOCK + 3, 510 + index) for index in range(3)]


def engine(prefill: str, nan_token: int | None) -> Engine:
    return Engine(
        {
            "kv_cache_dtype": "turbo4",
            "dtype": "float32",
            "attention_config": {"turbo_prefill": prefill},
            "num_gpu_blocks_override": NUM_BLOCKS,
            "max_model_len": 5 * BLOCK,
        },
        {
            "first": Call(FIRST, NUM_GENERATED),
            "next": Call(NEXT, NUM_GENERATED),
        },
        nan_token=nan_token,
    )


@pytest.fixture(scope="module")
def outcome(jobs: Jobs) -> dict[str, Any]:
    engines = {
        f"{prefill}-{name}": engine(prefill, token)
        for prefill in ("raw", "stored")
        for name, token in (("sound", None), ("broken", BROKEN_TOKEN))
    }
    return jobs.start("broken-model", "v2", engines).result()


@pytest.mark.parametrize("prefill", ["raw", "stored"])
def test_others_get_the_same_bits(outcome: dict[str, Any], prefill: str):
    calls = {
        name: outcome[f"{prefill}-{name}"]["calls"] for name in ("sound", "broken")
    }
    first = {name: call["first"]["requests"] for name, call in calls.items()}
    assert all(map(math.isnan, first["broken"][1]["logprobs"][0]))
    assert not any(map(math.isnan, first["sound"][1]["logprobs"][0]))
    for index in (0, 2):
        assert first["broken"][index] == first["sound"][index]
    # All were in one batch.
    assert len(calls["broken"]["first"]["steps"][0]) == len(FIRST)
    assert calls["broken"]["next"] == calls["sound"]["next"]
