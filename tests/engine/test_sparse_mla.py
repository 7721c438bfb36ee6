# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse multi-head latent attention in the engine, with a small DeepSeek V3.2.

Its indexer is a stand-in for CPUs. It lists the same tokens in each way to serve a
prompt. Attention is held to scores of all tokens, with a mask on all but the listed.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_family
from harness import (
    Call,
    Engine,
    Runner,
    largest_divergences,
    mean_divergence,
    requests_of,
    run_job,
)
from safetensors.torch import load_file, save_file
from scenarios import text
from test_mla import run_drafts, write_mtp
from ways import KL_TOLERANCE, NUM_GENERATED

BLOCK, LAYERS, TOPK = 64, 4, 24
QUERY_RANK, INDEX_HEADS, INDEX_DIM = 64, 4, 128
MEMORY = 32 << 20
# Bytes of a token: the latents of all layers, and the keys of an indexer.
TOKEN_BYTES = LAYERS * 340 + 132
# Prompts of one token, as long as a list, around a block, and of several chunks.
PROMPTS = [text(n, 500 + n) for n in (1, TOPK, BLOCK - 1, BLOCK + 1, 300)]
PREFIX = text(2 * BLOCK, 700)
NEW = (3, 150)
FOLLOWERS = [PREFIX + text(n, 710 + n) for n in NEW]
# Tokens of a step: fewer than those of all prompts.
STEP = 200


def write_v32(folder: Path, drafts: bool = False) -> Path:
    """Writes a DeepSeek V3.2 with weights of which indexers decide the tokens.

    Only the first layer has an indexer, which sees embeddings: a rounding in a later
    one would list other tokens. A layer that drafts, mostly wrong, has one of its own.
    """
    if drafts:
        write_mtp(folder)
    else:
        write_family(folder, "deepseek_v2", seed=1)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "q_lora_rank": QUERY_RANK,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": LAYERS + 1,
        "index_topk": TOPK,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk_pattern": "F" + "S" * (LAYERS - 1),
    }
    path.write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for layer in range(LAYERS + drafts):
        name = f"model.layers.{layer}.self_attn."
        queries = weights.pop(f"{name}q_proj.weight").float()
        # Its rank is lower, so that queries are as large as they were.
        weights[f"{name}q_a_proj.weight"] = normal(QUERY_RANK, hidden) / hidden**0.5
        weights[f"{name}q_a_layernorm.weight"] = torch.ones(QUERY_RANK)
        own = queries[:, :QUERY_RANK] * (hidden / QUERY_RANK) ** 0.5
        weights[f"{name}q_b_proj.weight"] = own.contiguous()
        if 0 < layer < LAYERS:
            continue
        size = INDEX_HEADS * INDEX_DIM
        weights[f"{name}indexer.wq_b.weight"] = normal(size, QUERY_RANK)
        weights[f"{name}indexer.wk.weight"] = normal(INDEX_DIM, hidden)
        weights[f"{name}indexer.weights_proj.weight"] = normal(INDEX_HEADS, hidden)
        weights[f"{name}indexer.k_norm.weight"] = torch.ones(INDEX_DIM)
        weights[f"{name}indexer.k_norm.bias"] = torch.zeros(INDEX_DIM)
    stored = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine(dtype: str = "turbo4", prefill: str = "stored", **more: Any) -> Engine:
    """An engine that gets all prompts alone, in a batch, and behind hits."""
    args: dict[str, Any] = {
        "kv_cache_dtype": dtype,
        "dtype": "float32",
        "block_size": BLOCK,
        "kv_cache_memory_bytes": MEMORY,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": STEP,
        "attention_config": {"turbo_prefill": prefill},
    }

    def call(prompts: list[list[int]], **options: Any) -> Call:
        return Call(prompts, NUM_GENERATED, **options)

    calls = {
        "alone": call([*PROMPTS, *FOLLOWERS], one_by_one=True, forgets=True),
        "batched": call([*PROMPTS, *FOLLOWERS], forgets=True),
        "fill": call([PREFIX], forgets=True),
        "hits": call(FOLLOWERS),
    }
    return Engine(args | more, calls)


def masked_engine() -> Engine:
    masked = engine()
    masked.masked_attention = True
    masked.calls = {"alone": masked.calls["alone"]}
    return masked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_v32(tmp_path_factory.mktemp("v32"))


@pytest.fixture(scope="module")
def outcome(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    runs = tmp_path_factory.mktemp("run")
    engines = {"few": engine(), "masked": masked_engine()}
    return run_job(runs, folder, "v2", engines), (runs / "log").read_text()


def assert_equal(found: dict[str, Any], alone: list[dict[str, Any]]) -> None:
    """Assert that all ways give the distributions of prompts alone, up to rounding."""
    steps = found["calls"]["batched"]["steps"]
    assert any(new > TOPK and computed for step in steps for new, computed in step)
    assert found["calls"]["hits"]["steps"][0] == [[new, len(PREFIX)] for new in NEW]
    for call, expected in (
        ("alone", alone),
        ("batched", alone),
        ("hits", alone[len(PROMPTS) :]),
    ):
        divergences = largest_divergences(expected, requests_of(found, call))
        assert max(divergences) < KL_TOLERANCE, (call, divergences)


def test_all_ways_are_masked_attention(outcome: Any):
    found, _ = outcome
    assert_equal(found["few"], requests_of(found["masked"], "alone"))


def test_capacity(outcome: Any):
    """Latents take 340 bytes a token, and indexers keep their 132."""
    found, log = outcome
    few = found["few"]
    assert few["num_tokens"] == MEMORY // (TOKEN_BYTES * BLOCK) * BLOCK
    sizes = sorted(size for size, _ in few["pages"].values())
    assert sizes == [132 * BLOCK] + [340 * BLOCK] * LAYERS
    assert "340 bytes a token and layer (sparse MLA layers: 4, query heads: 4" in log


def test_means_of_latents_are_taken_off(outcome: Any):
    """A pass of text needs no lists of tokens."""
    _, log = outcome
    assert f"the means of latents are taken off in {LAYERS} of {LAYERS} layers" in log
    assert f"latents' mean: {LAYERS} of {LAYERS} layers" in log


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["turbo4", "turbo3"])
def test_model_runner_v1(folder: Path, tmp_path: Path, dtype: str):
    found = run_job(tmp_path, folder, "v1", {"few": engine(dtype)})["few"]
    assert_equal(found, requests_of(found, "alone"))


@pytest.mark.matrix
def test_raw(folder: Path, tmp_path: Path, outcome: Any):
    """Prefills as short as a list attend densely to each other as computed."""
    raw = engine(prefill="raw")
    raw.calls = {"alone": raw.calls["alone"]}
    result = run_job(tmp_path, folder, "v2", {"raw": raw})["raw"]
    found, _ = outcome
    pairs = zip(requests_of(found["few"], "alone"), requests_of(result, "alone"))
    noise = [mean_divergence([one], [other]) for one, other in pairs]
    # The one of one token and the one as long as a list are prefilled densely.
    assert max(noise[2:]) < KL_TOLERANCE < max(noise[:2]) < 0.5


@pytest.mark.matrix
def test_glm_5_is_the_same(folder: Path, tmp_path: Path, outcome: Any):
    """GLM-5 has DeepSeek V3.2's layers under a name of its own."""
    model = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    names = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}
    (model / "config.json").write_text(json.dumps(config | names))
    glm = engine()
    glm.calls = {"alone": glm.calls["alone"]}
    result = run_job(tmp_path / "run", model, "v2", {"few": glm})["few"]
    assert [size for size, _ in result["pages"].values()].count(340 * BLOCK) == LAYERS
    found, _ = outcome
    both = (requests_of(each, "alone") for each in (found["few"], result))
    assert max(largest_divergences(*both)) < KL_TOLERANCE


@pytest.mark.matrix
def test_blocks_come_back_from_the_host(folder: Path, tmp_path: Path):
    """A connector moves the pages of latents, and those of the indexer."""
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": MEMORY},
    }
    offloading = engine(kv_transfer_config=transfer)
    offloading.calls = {
        "first": Call(FOLLOWERS, NUM_GENERATED, one_by_one=True),
        "kept": Call(FOLLOWERS, NUM_GENERATED, one_by_one=True),
        "again": Call(FOLLOWERS, NUM_GENERATED, one_by_one=True, forgets=True),
    }
    found = run_job(tmp_path, folder, "v2", {"few": offloading})["few"]
    kept, again = (requests_of(found, call) for call in ("kept", "again"))
    whole = [len(PREFIX + [0] * new) // BLOCK * BLOCK for new in NEW]
    for requests in (kept, again):
        assert [each["num_cached_tokens"] for each in requests] == whole
    assert max(largest_divergences(kept, again)) < KL_TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_own_drafts(tmp_path: Path, runner: Runner):
    """MTP's layer has latents and an indexer of its own, and changes nothing."""
    model = write_v32(tmp_path / "model", drafts=True)
    args = engine(disable_log_stats=False).args
    result = run_drafts(tmp_path / "run", model, runner, args, PROMPTS)
    sizes = sorted(size for size, _ in result["pages"].values())
    assert sizes == [132 * BLOCK] * 2 + [340 * BLOCK] * (LAYERS + 1)
