# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A hybrid, whose other layers keep a state instead of K and V, in all ways of running.

LFM2: every other layer is a short convolution. Its attention layers are packed.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import WRITE_MODEL, Call, Engine, Jobs, kl_divergences, run_job
from scenarios import text

# vLLM makes a hybrid's blocks as large as its states; these are small.
BLOCK = 128
NUM_GENERATED = 6
# Around a block, several blocks, and one token alone.
PROMPTS = [
    text(length, seed)
    for seed, length in enumerate((1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5))
]
# Of several, which outgrow the blocks below while they generate; a state is a block.
SCARCE = [text(3 * BLOCK - 4, 300 + index) for index in range(4)]
NUM_SCARCE_BLOCKS = 9
CHUNK = 48
# Tokens that a hit within a block comes in steps of.
UNIT = 16
# Nats at any position: a code that flips by rounding, of many. See test_engine.py.
KL_TOLERANCE = {"turbo4": 1e-3}


def engines(dtype: str) -> dict[str, Engine]:
    common: dict[str, Any] = {
        "kv_cache_dtype": dtype,
        "dtype": "float32",
        "block_size": BLOCK,
    }
    if dtype != "auto":
        common["attention_config"] = {"turbo_prefill": "stored"}
    cached = {
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
        "enable_chunked_prefill": True,
    }
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK}

    def call(prompts: list[list[int]] = PROMPTS, one_by_one: bool = False) -> Call:
        return Call(prompts, NUM_GENERATED, one_by_one=one_by_one)

    alone = call(PROMPTS + SCARCE, one_by_one=True)
    within = cached | {"prefix_match_unit": UNIT}
    scarce = {"num_gpu_blocks_override": NUM_SCARCE_BLOCKS}
    return {
        "plain": Engine(common, {"alone": alone, "batched": call()}),
        "prefix": Engine(common | cached, {"cold": call(), "warm": call()}),
        "within": Engine(common | within, {"cold": call(), "warm": call()}),
        "chunked": Engine(common | chunks, {"chunked": call()}),
        "scarce": Engine(common | scarce, {"scarce": call(SCARCE)}),
        "zeroed": Engine(common, {"batched": call()}, zero_attention=True),
    }


class Outcome:
    """What a cache dtype's engines have answered."""

    def __init__(self, dtype: str, result: dict[str, Any]) -> None:
        self.tolerance = KL_TOLERANCE[dtype]
        self.engines = result
        alone = self.call("plain", "alone")["requests"]
        self.alone = dict(zip(map(tuple, PROMPTS + SCARCE), alone, strict=True))

    def call(self, engine: str, call: str) -> dict[str, Any]:
        return self.engines[engine]["calls"][call]

    def divergences(
        self, engine: str, call: str, prompts: list[list[int]] = PROMPTS
    ) -> list[float]:
        """Each prompt's largest, from its run alone, in nats."""
        requests = self.call(engine, call)["requests"]
        return [
            max(kl_divergences(self.alone[tuple(prompt)], request))
            for prompt, request in zip(prompts, requests, strict=True)
        ]


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lfm2") / "seeded-lfm2"
    shape = ("--lfm2", "--layers", "4", "--heads", "4", "--head-dim", "64")
    subprocess.run([sys.executable, WRITE_MODEL, folder, *shape], check=True)
    return folder


@pytest.fixture(scope="module", params=KL_TOLERANCE)
def hybrid(
    request: pytest.FixtureRequest,
    jobs: Jobs,
    lfm2: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcome:
    dtype = request.param
    folder = tmp_path_factory.mktemp(f"hybrid-{dtype}")
    run = jobs.pool.submit(run_job, folder, lfm2, "v2", engines(dtype))
    return Outcome(dtype, run.result())


def test_batched_as_alone(hybrid: Outcome):
    first_step = hybrid.call("plain", "batched")["steps"][0]
    assert first_step == [[len(prompt), 0] for prompt in PROMPTS]
    assert max(hybrid.divergences("plain", "batched")) < hybrid.tolerance


def test_prefix_hits(hybrid: Outcome):
    """Pages and the state at their end; the last token is always computed."""
    assert max(hybrid.divergences("prefix", "cold")) < hybrid.tolerance
    warm = hybrid.call("prefix", "warm")["requests"]
    cached = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
    assert [request["num_cached_tokens"] for request in warm] == cached
    assert max(hybrid.divergences("prefix", "warm")) < hybrid.tolerance


def test_hits_within_a_block(hybrid: Outcome):
    """The block that a hit ends in is copied, state and pages."""
    assert max(hybrid.divergences("within", "cold")) < hybrid.tolerance
    warm = hybrid.call("within", "warm")["requests"]
    cached = [request["num_cached_tokens"] for request in warm]
    assert all(num % UNIT == 0 for num in cached)
    assert sum(num % BLOCK > 0 for num in cached) >= 2
    assert max(hybrid.divergences("within", "warm")) < hybrid.tolerance


def test_chunked_prefill(hybrid: Outcome):
    steps = hybrid.call("chunked", "chunked")["steps"]
    assert sum(new > 1 and computed > 0 for step in steps for new, computed in step) > 3
    assert max(hybrid.divergences("chunked", "chunked")) < hybrid.tolerance


def test_preemption(hybrid: Outcome):
    assert hybrid.call("scarce", "scarce")["num_preemptions"] > 0
    divergences = hybrid.divergences("scarce", "scarce", SCARCE)
    assert max(divergences) < hybrid.tolerance


def test_attention_decides_every_answer(hybrid: Outcome):
    """Guards the tests above: were attention ignored, they would all pass."""
    assert min(hybrid.divergences("zeroed", "batched")) > 100 * hybrid.tolerance
