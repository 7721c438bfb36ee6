# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""--kv-cache-dtype-skip-layers: some layers in the model's dtype, the others packed."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import Call, Engine, Jobs, requests_of, tokens_of
from scenarios import GAIN, PROMPTS

DTYPE = "turbo4"


@pytest.fixture(scope="module")
def num_layers(model: Path) -> int:
    return json.loads((model / "config.json").read_text())["num_hidden_layers"]


@pytest.fixture(scope="module")
def outcome(jobs: Jobs, num_layers: int) -> dict[str, Any]:
    def engine(dtype: str, num_skipped: int) -> Engine:
        skipped = [str(layer) for layer in range(num_skipped)]
        args = {"kv_cache_dtype": dtype, "kv_cache_dtype_skip_layers": skipped}
        return Engine(args, {"batched": Call(PROMPTS, 8)})

    engines = {
        "auto": engine("auto", 0),
        "none": engine(DTYPE, 0),
        "one": engine(DTYPE, 1),
        "all": engine(DTYPE, num_layers),
    }
    return jobs.start("skip-layers", "v1", engines).result()


def test_all_skipped_is_the_models_dtype(outcome: dict[str, Any]):
    tokens = {name: tokens_of(requests_of(outcome[name])) for name in outcome}
    assert tokens["all"] == tokens["auto"] != tokens["none"]


def test_one_skipped_costs_its_own_bytes(outcome: dict[str, Any], num_layers: int):
    def capacity(name: str) -> int:
        return outcome[name]["num_blocks"] * outcome[name]["block_size"]

    packed_share = 1 / GAIN[DTYPE]
    share = (1 + (num_layers - 1) * packed_share) / num_layers
    assert capacity("one") / capacity("auto") == pytest.approx(1 / share, rel=0.02)
