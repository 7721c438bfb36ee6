# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KV connectors that run in one engine bring back the pages that were stored.

NIXL's run between two engines: see test_disaggregated.py.
"""

import statistics
from typing import Any

import pytest
from harness import Call, Engine, Jobs, kl_divergences
from turbo_quality.cases import HELD_OUT, MODEL

BLOCK = 64
MAX_TOKENS = 7
# Tokens of texts: they end at a block's border, beside one, and within a block.
LENGTHS = (128, 65, 148, 100)


def prompts() -> list[list[int]]:
    text = HELD_OUT.read_bytes()
    return [list(text[i * 1000 : i * 1000 + n]) for i, n in enumerate(LENGTHS)]


def engine(transfer: dict[str, Any], *names: str) -> Engine:
    args = {
        "kv_cache_dtype": "turbo4",
        "block_size": BLOCK,
        # On CPUs with AMX the number of rows decides how products of bf16 round.
        "dtype": "float16",
        "max_model_len": 256,
        "attention_config": {"turbo_prefill": "stored"},
        "kv_transfer_config": transfer | {"kv_role": "kv_both"},
    }
    calls = {name: Call(prompts(), MAX_TOKENS) for name in names}
    return Engine(args, calls, model=str(MODEL))


@pytest.fixture(scope="module")
def result(
    jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The calls of an engine with each connector."""
    folder = tmp_path_factory.mktemp("stored")

    def example(name: str) -> dict[str, Any]:
        extra = {"shared_storage_path": str(folder / name)}
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    multi = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [example("one"), example("two")]},
    }
    engines = {
        "example": engine(example("alone"), "stored", "loaded"),
        "multi": engine(multi, "stored", "loaded"),
        "bench": engine({"kv_connector": "DecodeBenchConnector"}, "loaded"),
    }
    found = jobs.start("connectors", "v2", engines).result()
    return {name: found[name]["calls"] for name in engines}


def computed(call: dict[str, Any]) -> list[int]:
    """Tokens of each prompt that were in the cache before its first step."""
    return [cached for _, cached in call["steps"][0]]


def divergence(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The second call's divergence from the first, in nats a token."""
    pairs = zip(first["requests"], second["requests"], strict=True)
    return statistics.fmean(kl for pair in pairs for kl in kl_divergences(*pair))


def tokens(call: dict[str, Any]) -> list[list[int]]:
    return [request["tokens"] for request in call["requests"]]


@pytest.mark.parametrize("name", ["example", "multi"])
def test_blocks_come_back(result, name):
    stored, loaded = result[name]["stored"], result[name]["loaded"]
    assert computed(stored) == [0] * len(LENGTHS)
    # The connector keeps whole blocks, of all tokens but the last two.
    assert computed(loaded) == [(n - 2) // BLOCK * BLOCK for n in LENGTHS]
    assert tokens(loaded) == tokens(stored)
    assert divergence(stored, loaded) < 1e-6


def test_what_comes_back_is_read(result):
    """Pages that are filled with a constant give other answers."""
    filled = result["bench"]["loaded"]
    assert computed(filled) == [n - 1 for n in LENGTHS]
    assert divergence(result["example"]["stored"], filled) > 0.1
