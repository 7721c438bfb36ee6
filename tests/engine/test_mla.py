# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Multi-head latent attention in the engine, with a dense DeepSeek V2.

One engine answers in all ways that MLA has paths for. With --all there are more: both
dtypes and model runners, raw prefills, drafts, and vLLM's own cache. Preemption and
small chunks are in test_families.py.
"""

import json
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from families import write_family
from harness import (
    Call,
    Engine,
    Runner,
    kl_divergences,
    largest_divergences,
    mean_divergence,
    requests_of,
    run_job,
)
from safetensors.torch import load_file, save_file
from scenarios import ALL_BYTES, NGRAMS, NUM_DRAFTS, text
from ways import KL_TOLERANCE, NUM_GENERATED

from vllm.v1.attention.ops.turbo.latent.runner import MAX_ABSORBED_LEN

BLOCK = 64
BYTES = {"turbo4": 340, "turbo3": 276}
MEMORY = 32 << 20
LAYERS = 4
# Prompts of one token, of lengths around a block, and so many tokens that latents are
# projected up.
PROMPTS = [
    text(n, 500 + n) for n in (1, BLOCK - 1, BLOCK + 1, MAX_ABSORBED_LEN + 2, 300)
]
PREFIX = text(2 * BLOCK, 700)
# New tokens behind a hit: they are absorbed, or attend to contexts that are gathered.
NEW = (3, 40, MAX_ABSORBED_LEN + 22)
FOLLOWERS = [PREFIX + text(n, 710 + n) for n in NEW]
# Tokens of a step: fewer than those of all prompts.
STEP = 400
# Mean nats between runs that see tokens raw and as they are stored.
KL_BOUND = {"turbo4": 0.1, "turbo3": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # With other weights a rounding moves a stored code of the prompt of one token, and
    # few tokens outweigh it. It does so with the mean of latents and without it.
    return write_family(tmp_path_factory.mktemp("mla"), "deepseek_v2", seed=1)


def engine(dtype: str, prefill: str = "stored", **more: Any) -> Engine:
    """An engine that gets all prompts alone, in a batch, and behind hits."""
    args: dict[str, Any] = {
        "kv_cache_dtype": dtype,
        "dtype": "float32",
        "block_size": BLOCK,
        "kv_cache_memory_bytes": MEMORY,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": STEP,
    }
    if dtype in BYTES:
        args["attention_config"] = {"turbo_prefill": prefill}

    def call(prompts: list[list[int]], **options: Any) -> Call:
        return Call(prompts, NUM_GENERATED, **options)

    calls = {"alone": call(PROMPTS, one_by_one=True)}
    for i, follower in enumerate(FOLLOWERS):
        calls[f"follower {i}"] = call([follower], forgets=True)
    calls["batched"] = call([*PROMPTS, *FOLLOWERS], forgets=True)
    calls["fill"] = call([PREFIX], forgets=True)
    calls["hits"] = call(FOLLOWERS)
    return Engine(args | more, calls)


class Outcome:
    """An engine's results, with the answers each prompt had alone."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        calls = ("alone", *(f"follower {i}" for i in range(len(FOLLOWERS))))
        alone = [each for call in calls for each in requests_of(result, call)]
        prompts = [*PROMPTS, *FOLLOWERS]
        self.alone = dict(zip(map(tuple, prompts), alone, strict=True))

    def divergences(self, call: str, prompts: list[list[int]]) -> list[list[float]]:
        """Each prompt's divergences from its run alone, by position, in nats."""
        pairs = zip(prompts, requests_of(self.result, call), strict=True)
        return [kl_divergences(self.alone[tuple(p)], found) for p, found in pairs]

    def check_ways(self) -> None:
        """Check that there were chunks, and hits of both kinds."""
        steps = self.result["calls"]["batched"]["steps"]
        chunks = [new for step in steps for new, computed in step if computed]
        assert any(1 < new <= MAX_ABSORBED_LEN for new in chunks)
        hits = self.result["calls"]["hits"]["steps"][0]
        assert hits == [[new, len(PREFIX)] for new in NEW]

    def assert_equal(self, flipped_code: float = KL_TOLERANCE) -> None:
        """Assert that all ways give the same distributions up to rounding.

        Args:
            flipped_code: The most nats that one position in twenty may differ by,
                because a latent's code was rounded the other way.

        """
        for call, prompts in (
            ("batched", [*PROMPTS, *FOLLOWERS]),
            ("hits", FOLLOWERS),
        ):
            by_prompt = self.divergences(call, prompts)
            found = sorted(chain.from_iterable(by_prompt))
            assert found[len(found) * 19 // 20 - 1] < KL_TOLERANCE
            assert found[-1] < flipped_code
            # Contexts are the same at most positions, or nothing is compared.
            assert 2 * len(found) > NUM_GENERATED * len(prompts)

    def assert_near(self, bound: float) -> None:
        """Assert that all ways give the same up to the quantisation's noise."""
        found = self.divergences("batched", [*PROMPTS, *FOLLOWERS])
        found += self.divergences("hits", FOLLOWERS)
        noise = [kl for each in found for kl in each]
        assert max(noise) > KL_TOLERANCE
        assert mean(noise) < bound


@pytest.fixture(scope="module")
def outcome(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    runs = tmp_path_factory.mktemp("run")
    result = run_job(runs, folder, "v2", {"few": engine("turbo4")})
    return Outcome(result["few"]), (runs / "log").read_text()


def test_all_ways_are_equal(outcome: Any):
    found, _ = outcome
    found.check_ways()
    found.assert_equal()


def test_capacity(outcome: Any):
    """A token takes 340 bytes a layer, and the line at the start says so."""
    found, log = outcome
    result = found.result
    assert result["num_tokens"] == MEMORY // (LAYERS * BYTES["turbo4"] * BLOCK) * BLOCK
    assert {size for size, _ in result["pages"].values()} == {340 * BLOCK}
    (line,) = (line for line in log.splitlines() if "bytes a token and layer" in line)
    assert "340 bytes a token and layer (MLA layers: 4, query heads: 4, lat" in line
    assert "3.39 times fewer than in bf16" in line


@pytest.mark.matrix
@pytest.mark.parametrize("dtype, flipped_code", [("turbo4", 1e-3), ("turbo3", 3e-3)])
def test_stored(folder: Path, tmp_path: Path, dtype: str, flipped_code: float):
    found = run_job(tmp_path, folder, "v1", {"few": engine(dtype)})["few"]
    assert found["runner"] == "v1"
    assert found["num_tokens"] == MEMORY // (LAYERS * BYTES[dtype] * BLOCK) * BLOCK
    Outcome(found).check_ways()
    Outcome(found).assert_equal(flipped_code)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_raw(folder: Path, tmp_path: Path, dtype: str, runner: Runner):
    found = run_job(tmp_path, folder, runner, {"few": engine(dtype, "raw")})["few"]
    Outcome(found).check_ways()
    Outcome(found).assert_near(KL_BOUND[dtype])


@pytest.mark.matrix
def test_attention_decides_every_answer(outcome: Any, folder: Path, tmp_path: Path):
    """Guards the tests above: were attention ignored, they would all pass."""
    zeroed = engine("turbo4")
    zeroed.zero_attention = True
    zeroed.calls = {"alone": zeroed.calls["alone"]}
    result = run_job(tmp_path, folder, "v2", {"zeroed": zeroed})["zeroed"]
    found, _ = outcome
    alone = [found.alone[tuple(prompt)] for prompt in PROMPTS]
    divergences = largest_divergences(alone, requests_of(result, "alone"))
    assert min(divergences) > 100 * KL_TOLERANCE


@pytest.mark.matrix
def test_drafts(folder: Path, tmp_path: Path):
    """A step that verifies drafts gives what steps of one token give."""
    prompts = [ALL_BYTES, *PROMPTS[2:4]]
    calls = {"batched": Call(prompts, NUM_GENERATED)}
    alone = {"alone": Call(prompts, NUM_GENERATED, one_by_one=True)}
    common = engine("turbo4").args
    engines = {
        "plain": Engine(common, alone),
        # Last, because Numba undoes the setup of vLLM's CPU platform: see scenarios.py.
        "drafts": Engine(common | {"speculative_config": NGRAMS}, calls),
    }
    found = run_job(tmp_path, folder, "v1", engines)
    steps = found["drafts"]["calls"]["batched"]["steps"]
    verified = {new for step in steps for new, computed in step if computed}
    assert 1 + NUM_DRAFTS in verified
    runs = requests_of(found["plain"], "alone"), requests_of(found["drafts"])
    assert max(largest_divergences(*runs)) < KL_TOLERANCE


def write_mtp(folder: Path) -> Path:
    """Writes the model as a DeepSeek V3 with a layer that drafts, mostly wrong."""
    write_family(folder, "deepseek_v2")
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        # All layers are dense, the one that drafts as well.
        "first_k_dense_replace": LAYERS + 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 1,
    }
    path.write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    last, own = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    more = {
        name.replace(last, own): tensor.flip(0).contiguous()
        for name, tensor in weights.items()
        if name.startswith(last)
    }
    hidden = config["hidden_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        more[f"{own}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    halves = torch.eye(hidden, dtype=torch.bfloat16)
    more[f"{own}eh_proj.weight"] = torch.cat([halves, halves], 1)
    more[f"{own}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    more[f"{own}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | more, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run_drafts(
    folder: Path,
    model: Path,
    runner: Runner,
    args: dict[str, Any],
    prompts: list[list[int]],
) -> dict[str, Any]:
    """Returns the result of an engine with MTP's drafts, which change nothing.

    The engine without drafts gets all prompts at once as well. Alone, a prompt of one
    token is rounded in another way, which may move a stored code: see `folder`.
    """
    drafting = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    calls = {"batched": Call(prompts, 3 * NUM_GENERATED)}
    engines = {
        "plain": Engine(args, calls),
        "drafts": Engine(args | {"speculative_config": drafting}, calls),
    }
    found = run_job(folder, model, runner, engines)
    result = found["drafts"]
    assert result["drafted"] > result["accepted"]
    runs = requests_of(found["plain"]), requests_of(result)
    assert max(largest_divergences(*runs)) < KL_TOLERANCE
    return result


@pytest.mark.matrix
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_own_drafts(tmp_path: Path, runner: Runner):
    """MTP's layer has latents of its own, and its drafts change nothing."""
    model = write_mtp(tmp_path / "model")
    args = engine("turbo4", disable_log_stats=False).args
    result = run_drafts(tmp_path / "run", model, runner, args, PROMPTS)
    assert [size for size, _ in result["pages"].values()] == [340 * BLOCK] * (
        LAYERS + 1
    )


@pytest.mark.matrix
def test_blocks_come_back(folder: Path, tmp_path: Path):
    """A connector brings them back from files."""
    extra = {"shared_storage_path": str(tmp_path / "stored")}
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    # The connector keeps whole prompts, which have to come in one step.
    whole_prompts = {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}
    without = {"enable_prefix_caching": False, "kv_transfer_config": transfer}
    loading = engine("turbo4", **whole_prompts, **without)
    long = PROMPTS[2:]
    loading.calls = {name: Call(long, NUM_GENERATED) for name in ("stored", "loaded")}
    found = run_job(tmp_path / "run", folder, "v2", {"few": loading})["few"]
    whole = [(len(prompt) - 2) // BLOCK * BLOCK for prompt in long]
    first = [cached for _, cached in found["calls"]["loaded"]["steps"][0]]
    assert first == whole and any(first)
    runs = (requests_of(found, call) for call in loading.calls)
    assert max(largest_divergences(*runs)) < KL_TOLERANCE


@pytest.mark.matrix
def test_divergence_from_an_unquantised_cache(folder: Path, tmp_path: Path):
    """Four bits are nearer than three, and both far nearer than no attention."""
    calls = {"alone": Call(PROMPTS, NUM_GENERATED, one_by_one=True)}
    engines = {dtype: engine(dtype) for dtype in ("auto", *BYTES)}
    # vLLM's own pages have 16 tokens there, and neither chunks nor hits.
    engines["auto"].args |= {"block_size": 16, "enable_prefix_caching": False}
    engines["zeroed"] = Engine(engines["auto"].args, zero_attention=True)
    for each in engines.values():
        each.calls = calls
    found = run_job(tmp_path, folder, "v1", engines)
    own = requests_of(found["auto"], "alone")
    kl = {
        name: mean_divergence(own, requests_of(found[name], "alone"))
        for name in (*BYTES, "zeroed")
    }
    assert 0 < 1.5 * kl["turbo4"] < kl["turbo3"] < kl["zeroed"] / 4, kl
