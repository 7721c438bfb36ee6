# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Models that give vectors and scores instead of tokens, with causal attention.

Prompts come in chunks: whole prompts would not read the cache.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from harness import Call, Engine, Jobs, requests_of
from safetensors.torch import load_file, save_file
from trained import TRAINED

pytestmark = pytest.mark.matrix

DTYPE, OWN = "turbo4", "float16"
ARGS = {"runner": "pooling", "max_num_batched_tokens": 128}
ARGS |= {"enable_chunked_prefill": True, "enable_prefix_caching": True}
UNCACHED = {
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 4096,
}
# The bound of one less the cosine of two dtypes' vectors. A third of it was measured,
# and 0.8 or more without attention.
DISTANCE = 0.01
# The pooling task of each kind of model.
TASKS = {"embedding": "embed", "reward": "token_classify"}


def write_reward_model(folder: Path) -> str:
    """Writes the trained model with a seeded head that scores each token."""
    shutil.copytree(TRAINED, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen2ForRewardModel"]
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    generator, hidden = torch.Generator().manual_seed(0), config["hidden_size"]
    for place, size in ((0, hidden), (2, 1)):
        weight = torch.randn(size, hidden, generator=generator) / hidden**0.5
        weights[f"score.{place}.weight"] = weight.to(torch.bfloat16)
        weights[f"score.{place}.bias"] = torch.zeros(size, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def result(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    reward = write_reward_model(tmp_path_factory.mktemp("pooling") / "reward")
    models = {
        "embedding": ({"convert": "embed"}, str(TRAINED)),
        "reward": ({}, reward),
    }

    def engine(name: str, dtype: str, zeroed: bool = False, **more: Any) -> Engine:
        own, folder = models[name]
        args = ARGS | own | {"kv_cache_dtype": dtype} | more
        call = Call(trained.prompts(), pooled=TASKS[name])
        calls = {"cold": call, "warm": call}
        return Engine(args, calls, zeroed, folder, may_fail=bool(more))

    engines = {}
    for name in models:
        engines |= {f"{name}-{dtype}": engine(name, dtype) for dtype in (OWN, DTYPE)}
        engines[f"{name}-zeroed"] = engine(name, DTYPE, zeroed=True)
    engines["embedding-stored"] = engine(
        "embedding", DTYPE, attention_config={"turbo_prefill": "stored"}
    )
    engines["embedding-uncached"] = engine("embedding", DTYPE, **UNCACHED)
    engines["bidirectional"] = engine(
        "embedding", DTYPE, hf_overrides={"is_causal": False}, **UNCACHED
    )
    return jobs.start("pooling", "v1", engines).result()


def distances(result: dict[str, Any], *runs: tuple[str, str]) -> list[float]:
    """Returns each prompt's distance between its vectors of two (engine, call)."""
    requests = (requests_of(result[engine], call) for engine, call in runs)
    pairs = zip(*requests, strict=True)
    vectors = [[torch.tensor(each["data"]) for each in pair] for pair in pairs]
    return [1 - torch.cosine_similarity(*pair, dim=0).item() for pair in vectors]


@pytest.mark.parametrize("call", ["cold", "warm"])
@pytest.mark.parametrize("name", TASKS)
def test_gives_as_with_its_own_dtype(result: dict[str, Any], name: str, call: str):
    found = distances(result, (f"{name}-{OWN}", call), (f"{name}-{DTYPE}", call))
    assert min(found) > 0
    assert max(found) < DISTANCE


@pytest.mark.parametrize("name", TASKS)
def test_attention_decides_what_is_given(result: dict[str, Any], name: str):
    """Guards the test above: vectors without attention are far off."""
    runs = ((f"{name}-{each}", "cold") for each in (OWN, "zeroed"))
    assert min(distances(result, *runs)) > 10 * DISTANCE


def test_vectors_from_prefix_hits(result: dict[str, Any]):
    """Scores of all tokens have no hits, because they need all tokens."""
    for name, hits in (("embedding", True), ("reward", False)):
        warm = requests_of(result[f"{name}-{DTYPE}"], "warm")
        assert all(bool(each["num_cached_tokens"]) == hits for each in warm)


def test_one_prompt_has_one_vector_where_asked_for(result: dict[str, Any]):
    """It is the same up to rounding with "stored", and if nothing is cached.

    In the second case it is the vector of the model's own dtype.
    """

    def apart(*runs: str) -> float:
        return max(distances(result, *(f"embedding-{run}".split() for run in runs)))

    raw = apart(f"{DTYPE} cold", f"{DTYPE} warm")
    assert 10 * apart("stored cold", "stored warm") < raw
    assert 100 * apart("uncached cold", "uncached warm") < raw
    assert 100 * apart("uncached cold", f"{OWN} cold") < raw
    # Therefore "stored" is not the default.
    from_own = apart(f"{DTYPE} warm", f"{OWN} cold")
    assert apart("stored cold", f"{OWN} cold") > 2 * from_own


def test_bidirectional_models_are_refused(result: dict[str, Any]):
    error = result["bidirectional"]["error"]
    assert f"--kv-cache-dtype {DTYPE} does not support this: encoder-only at" in error
