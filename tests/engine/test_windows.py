# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sliding windows that never bind, that are not packed, and that are beside drafts.

See test_families.py for the ways of running.
"""

from typing import Any

import pytest
from harness import Call, Engine, Jobs, largest_divergences, requests_of
from scenarios import DRAFTED, MAX_LEN, NGRAMS, NUM_DRAFTS, PROMPTS
from ways import KL_TOLERANCE

DTYPE = "turbo4"
ALL, SOME = ["sliding_attention"] * 2, ["sliding_attention", "full_attention"]
SKIP = {"kv_cache_dtype_skip_layers": ["sliding_window"]}
# Shorter than the prompts with drafts.
WINDOW = 64


def engine(
    llama: str,
    window: int,
    kinds: list[str],
    prompts: list[list[int]] = PROMPTS,
    **args: Any,
) -> Engine:
    overrides = {"sliding_window": window, "layer_types": kinds} if window else {}
    args = {"kv_cache_dtype": DTYPE, "hf_overrides": overrides} | args
    return Engine(args, {"batched": Call(prompts, 8)}, model=llama)


@pytest.fixture(scope="module", params=["v1", "v2"])
def long(request: pytest.FixtureRequest, jobs: Jobs, llama: str) -> dict[str, Any]:
    # Recent windows would have groups as well.
    plain = {"attention_config": {"turbo_window": 0}}
    engines = {
        "none": engine(llama, 0, ALL, **plain),
        "all": engine(llama, MAX_LEN, ALL, **plain),
        "some": engine(llama, MAX_LEN, SOME, **plain),
    }
    name = f"long-windows-{request.param}"
    return jobs.start(name, request.param, engines).result()


@pytest.fixture(scope="module")
def short(jobs: Jobs, llama: str) -> dict[str, Any]:
    stored: dict[str, Any] = {
        "prompts": DRAFTED,
        "dtype": "float32",
        "attention_config": {"turbo_prefill": "stored"},
    }
    engines = {
        "skipped": engine(llama, WINDOW, SOME, **SKIP),
        "auto": engine(llama, WINDOW, SOME, kv_cache_dtype="auto"),
        "stored": engine(llama, WINDOW, SOME, **stored),
        "full": engine(llama, 0, SOME, **stored),
        # No engine can follow it in the process: see scenarios.py.
        "drafted": engine(llama, WINDOW, SOME, speculative_config=NGRAMS, **stored),
    }
    return jobs.start("short-windows", "v1", engines).result()


@pytest.mark.parametrize("name", ["all", "some"])
def test_window_that_never_binds(long: dict[str, Any], name: str):
    """Answers are full attention's; windows have a group of their own."""
    assert long[name]["calls"] == long["none"]["calls"]
    assert long[name]["num_kv_cache_groups"] == {"all": 1, "some": 2}[name]


def test_windows_are_skipped(short: dict[str, Any]):
    """The flag leaves one of two layers in the model's dtype, with its window."""
    skipped, auto = short["skipped"], short["auto"]
    assert skipped["num_kv_cache_groups"] == auto["num_kv_cache_groups"] == 2
    assert skipped["calls"] != auto["calls"]
    first = [
        [request["tokens"][0] for request in requests_of(engine)]
        for engine in (skipped, auto)
    ]
    assert first[0] == first[1]


def test_drafts(short: dict[str, Any]):
    """Drafts are verified with the same windows as tokens without drafts."""
    steps = short["drafted"]["calls"]["batched"]["steps"]
    assert any(1 < new <= NUM_DRAFTS + 1 for step in steps for new, _ in step)

    def divergence(name: str) -> float:
        runs = (requests_of(short[each]) for each in ("stored", name))
        return max(largest_divergences(*runs))

    assert divergence("drafted") < KL_TOLERANCE
    assert divergence("full") > 100 * KL_TOLERANCE
