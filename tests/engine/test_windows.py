# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sliding windows: one that never binds is served, and the flag that a refusal names
serves the rest.
"""

from typing import Any

import pytest
from harness import Call, Engine, Jobs
from scenarios import MAX_LEN, PROMPTS

DTYPE = "turbo4"
ALL, SOME = ["sliding_attention"] * 2, ["sliding_attention", "full_attention"]
SKIP = {"kv_cache_dtype_skip_layers": ["sliding_window"]}


def engine(llama: str, window: int, kinds: list[str], **args: Any) -> Engine:
    overrides = {"sliding_window": window, "layer_types": kinds} if window else {}
    args = {"kv_cache_dtype": DTYPE, "hf_overrides": overrides} | args
    return Engine(args, {"batched": Call(PROMPTS, 8)}, model=llama, may_fail=True)


@pytest.fixture(scope="module", params=["v1", "v2"])
def long(request: pytest.FixtureRequest, jobs: Jobs, llama: str) -> dict[str, Any]:
    engines = {
        "none": engine(llama, 0, ALL),
        "all": engine(llama, MAX_LEN, ALL),
        "some": engine(llama, MAX_LEN, SOME),
    }
    name = f"long-windows-{request.param}"
    return jobs.start(name, request.param, engines).result()


@pytest.fixture(scope="module")
def short(jobs: Jobs, llama: str) -> dict[str, Any]:
    engines = {
        "all": engine(llama, MAX_LEN - 1, ALL),
        "some": engine(llama, 64, SOME),
        "skipped": engine(llama, 64, SOME, **SKIP),
        "auto": engine(llama, 64, SOME, kv_cache_dtype="auto"),
    }
    return jobs.start("short-windows", "v1", engines).result()


@pytest.mark.parametrize("name", ["all", "some"])
def test_window_that_never_binds(long: dict[str, Any], name: str):
    """It is planned and answers as full attention does."""
    assert long[name] == long["none"]
    assert long[name]["num_kv_cache_groups"] == 1


@pytest.mark.parametrize("name", ["all", "some"])
def test_window_that_binds(short: dict[str, Any], name: str):
    error = short[name]["error"]
    assert f"--kv-cache-dtype {DTYPE}" in error
    assert "--kv-cache-dtype-skip-layers sliding_window" in error


def test_windows_are_skipped(short: dict[str, Any]):
    """The flag leaves one of two layers in the model's dtype, with its window."""
    skipped, auto = short["skipped"], short["auto"]
    assert skipped["num_kv_cache_groups"] == auto["num_kv_cache_groups"] == 2
    assert skipped["calls"] != auto["calls"]
    requests = [engine["calls"]["batched"]["requests"] for engine in (skipped, auto)]
    first = [[request["tokens"][0] for request in each] for each in requests]
    assert first[0] == first[1]
