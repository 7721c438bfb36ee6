# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KV connectors that run in one engine bring back the pages that were stored.

NIXL's run between two engines: see test_disaggregated.py.
"""

from typing import Any

import pytest
import trained
from harness import Call, Engine, Jobs, mean_divergence, requests_of, tokens_of
from turbo_quality.cases import MODEL

BLOCK = 64
MAX_TOKENS = 7
# Tokens of texts: they end at a block's border, beside one, and within a block.
LENGTHS = (128, 65, 148, 100)


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
    calls = {name: Call(trained.texts(LENGTHS), MAX_TOKENS) for name in names}
    return Engine(args, calls, model=str(MODEL))


@pytest.fixture(scope="module")
def result(
    jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The results of an engine with each connector."""
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
    return jobs.start("connectors", "v2", engines).result()


def computed(result: dict[str, Any], call: str) -> list[int]:
    """Tokens of each prompt that were in the cache before its first step."""
    return [cached for _, cached in result["calls"][call]["steps"][0]]


@pytest.mark.parametrize("name", ["example", "multi"])
def test_blocks_come_back(result, name):
    assert computed(result[name], "stored") == [0] * len(LENGTHS)
    # The connector keeps whole blocks, of all tokens but the last two.
    whole = [(n - 2) // BLOCK * BLOCK for n in LENGTHS]
    assert computed(result[name], "loaded") == whole
    stored, loaded = (requests_of(result[name], call) for call in ("stored", "loaded"))
    assert tokens_of(loaded) == tokens_of(stored)
    assert mean_divergence(stored, loaded) < 1e-6


def test_what_comes_back_is_read(result):
    """Pages that are filled with a constant give other answers."""
    assert computed(result["bench"], "loaded") == [n - 1 for n in LENGTHS]
    filled = requests_of(result["bench"], "loaded")
    assert mean_divergence(requests_of(result["example"], "stored"), filled) > 0.1
