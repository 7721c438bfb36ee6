# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Models that draft, with a cache of their own in the same dtype.

Drafts must not change an answer. Accepted drafts show that a drafter's own attention is
right: a model that drafts for itself is always right. A hybrid goes back to an earlier
state in the cache when drafts are rejected.
"""

import heapq
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from drafting_models import (
    write_assistant,
    write_drafting_hybrid,
    write_drafting_target,
)
from harness import Call, Engine, Jobs, Runner, decided_tokens, requests_of, tie
from safetensors.torch import load_file
from scenarios import BLOCK, NGRAMS, NUM_DRAFTS, SLOT_BYTES, text
from turbo_seeded.drafts import target_overrides, write_draft
from ways import KL_TOLERANCE

NUM_GENERATED = 9
# Log-probabilities may move so far when several drafts are verified at a time: codes
# flip.
TIE = tie(KL_TOLERANCE)
# The longer ones are prefilled beside others' drafts, which are then verified.
PROMPTS = [text(length, length) for length in (3, BLOCK - 1, 2 * BLOCK + 5, BLOCK)]
ARGS: dict[str, Any] = {
    "kv_cache_dtype": "turbo4",
    "dtype": "float32",
    "attention_config": {"turbo_prefill": "stored"},
    "enable_chunked_prefill": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": BLOCK + 12,
    "disable_log_stats": False,
}


# A hybrid's blocks, each as large as a state. Hits end within blocks of the second and
# the third prompt.
STATE_BLOCK, UNIT = 80, 16
HYBRID_PROMPTS = [
    text(length, length)
    for length in (3, STATE_BLOCK - 1, 2 * STATE_BLOCK + 20, STATE_BLOCK)
]
HYBRID_ARGS: dict[str, Any] = {
    "block_size": STATE_BLOCK,
    "max_num_batched_tokens": STATE_BLOCK + 12,
}
CACHED = {
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "prefix_match_unit": UNIT,
}


def answers(
    jobs: Jobs,
    name: str,
    runner: Runner,
    args: dict[str, Any],
    prompts: list[list[int]] = PROMPTS,
    model: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Returns an engine's results for the prompts, with a cache for them twice."""
    calls = {"batched": Call(prompts, NUM_GENERATED)}
    if "enable_prefix_caching" in args:
        calls["warm"] = Call(prompts, NUM_GENERATED)
    # Counts of drafts are a process's: one engine in each.
    folder = str(model) if model else None
    engine = Engine(ARGS | args, calls, model=folder, **options)
    return jobs.start(name, runner, {"engine": engine}).result()["engine"]


def num_tied(result: dict[str, Any]) -> int:
    """Counts the tokens that rounding may have decided."""
    return sum(
        best - second <= TIE
        for request in requests_of(result)
        for best, second in (heapq.nlargest(2, row) for row in request["logprobs"])
    )


def assert_equal(jobs: Jobs, runner: Runner, result: dict[str, Any]) -> None:
    """Asserts that drafts changed no token that rounding does not decide."""
    assert_tokens(answers(jobs, f"undrafted-{runner}", runner, {}), result, runner)


def assert_tokens(
    plain: dict[str, Any], result: dict[str, Any], runner: Runner
) -> None:
    assert plain["runner"] == result["runner"] == runner
    expected = requests_of(plain)
    decided = [decided_tokens(request, TIE) for request in expected]
    for call in result["calls"].values():
        for tokens, request in zip(decided, call["requests"], strict=True):
            assert request["tokens"][: len(tokens)] == tokens
    assert 2 * sum(map(len, decided)) > NUM_GENERATED * len(expected)


def drafter(method: str, folder: Path) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": method,
            "model": str(folder),
            "num_speculative_tokens": NUM_DRAFTS,
        }
    }


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_own_drafts_are_accepted(jobs: Jobs, model: Path, runner: Runner):
    # A drafter has no means of K. With the target's its cache would be another one.
    own = {"attention_config": ARGS["attention_config"] | {"turbo_means": "off"}}
    args = own | drafter("draft_model", model)
    result = answers(jobs, f"own-drafts-{runner}", runner, args)
    rejected = result["drafted"] - result["accepted"]
    # A near tie that another order of sums decides ends a request's drafts of a step.
    assert rejected <= NUM_DRAFTS * num_tied(result)
    assert result["accepted"] > NUM_GENERATED
    steps = result["calls"]["batched"]["steps"]
    assert any(
        1 + NUM_DRAFTS in lengths and max(lengths) > 1 + NUM_DRAFTS
        for lengths in ([new for new, _ in step] for step in steps)
    )
    assert_tokens(answers(jobs, f"own-{runner}", runner, own), result, runner)


@pytest.mark.parametrize(
    "method, runner, dtype",
    [
        ("eagle", "v1", None),
        ("eagle", "v2", None),
        ("eagle", "v2", "auto"),
        ("mtp", "v2", None),
    ],
)
def test_drafters(
    jobs: Jobs,
    model: Path,
    tmp_path: Path,
    method: str,
    runner: Runner,
    dtype: str | None,
):
    """A drafter has another number and size of heads, and is mostly wrong.

    Its cache has the target's dtype, or the model's own beside it.
    """
    write_draft(tmp_path, method, model)
    args = drafter(method, tmp_path)
    args["hf_overrides"] = target_overrides(method, model)
    if dtype:
        args["speculative_config"]["kv_cache_dtype"] = dtype
    result = answers(jobs, f"{method}-{runner}-{dtype}", runner, args)
    assert result["drafted"] > result["accepted"]
    assert_equal(jobs, runner, result)
    own = json.loads((model / "config.json").read_text())
    config = json.loads((tmp_path / "config.json").read_text())
    size = config["num_key_value_heads"] * config["head_dim"]
    # K and V of fp32, or of turbo4. The drafter's layers come after the target's.
    slot = size * 8 if dtype else size * SLOT_BYTES["turbo4"] // 128
    drafters = list(result["pages"].values())[own["num_hidden_layers"] :]
    assert drafters and all(page == [BLOCK * slot, False] for page in drafters)


def test_a_drafter_of_latents(tmp_path: Path):
    """It is a further layer of its target, and dense."""
    target = Path(__file__).resolve().parents[2] / "models" / "needle-deepseek-v3"
    write_draft(tmp_path, "mtp", target)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config["num_hidden_layers"]
    assert config["first_k_dense_replace"] > layers
    assert target_overrides("mtp", target) == {"num_nextn_predict_layers": 1}

    def shapes(folder: Path, prefix: str) -> dict[str, torch.Size]:
        weights = load_file(folder / "model.safetensors").items()
        return {
            name.removeprefix(prefix): weight.shape
            for name, weight in weights
            if name.startswith(prefix)
        }

    own = shapes(tmp_path, f"model.layers.{layers}.")
    assert shapes(target, "model.layers.0.").items() <= own.items()
    assert len(own) == len(shapes(tmp_path, ""))


def test_drafts_of_the_gpus_ngrams(jobs: Jobs):
    """They are found by vLLM's kernels, which V2 alone can run without a GPU."""
    args = {"speculative_config": NGRAMS | {"method": "ngram_gpu"}}
    result = answers(jobs, "ngram_gpu-v2", "v2", args)
    assert result["drafted"] > 0
    assert_equal(jobs, "v2", result)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafting_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "runner, is_cached", [("v1", False), ("v2", False), ("v2", True)]
)
def test_own_layer_of_a_hybrid(
    jobs: Jobs, hybrid: Path, runner: Runner, is_cached: bool
):
    """The states after all drafts are kept until it is known which one counts."""
    rest = (HYBRID_PROMPTS, hybrid)
    plain = answers(jobs, f"undrafted-hybrid-{runner}", runner, HYBRID_ARGS, *rest)
    args = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    args = HYBRID_ARGS | {"speculative_config": args} | (CACHED if is_cached else {})
    name = f"hybrid-mtp-{runner}-{is_cached}"
    result = answers(jobs, name, runner, args, *rest)
    # Some drafts of a step are accepted, and not all.
    assert result["drafted"] > result["accepted"] > NUM_GENERATED
    assert_tokens(plain, result, runner)
    assert len(result["pages"]) == len(plain["pages"]) + 1
    assert len({size for size, _ in result["pages"].values()}) == 1
    if is_cached:
        warm = requests_of(result, "warm")
        cached = [request["num_cached_tokens"] for request in warm]
        assert sum(num % STATE_BLOCK > 0 for num in cached) >= 2


# Most tokens of their answers are likelier than others by more than rounding decides.
SHARED_PROMPTS = [text(length, 100 + length) for length in map(len, PROMPTS)]


class Shared(NamedTuple):
    """A target, and a drafter that reads its caches."""

    target: Path
    drafter: Path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    folder = tmp_path_factory.mktemp("shared")
    found = Shared(folder / "target", folder / "drafter")
    write_drafting_target(found.target)
    write_assistant(found.drafter, found.target)
    return found


def shared_answers(
    jobs: Jobs,
    shared: Shared,
    name: str,
    runner: Runner,
    args: dict[str, Any],
    **options: Any,
) -> dict[str, Any]:
    args = drafter("mtp", shared.drafter) | args
    name = f"shared-{name}-{runner}"
    return answers(jobs, name, runner, args, SHARED_PROMPTS, shared.target, **options)


SHARED_CASES = {
    "stored": {},
    # Prompts of layers that only read are planned beside those of layers that store.
    "raw": {"attention_config": {"turbo_prefill": "raw"}},
    "cached": {"enable_prefix_caching": True},
}


@pytest.mark.matrix
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("case", SHARED_CASES)
def test_a_drafter_that_reads_the_targets_caches(
    jobs: Jobs, shared: Shared, runner: Runner, case: str
):
    """Gemma 4's drafter has layers with queries alone."""
    args = SHARED_CASES[case]
    plain = f"undrafted-shared-{runner}-{case == 'raw'}"
    settings = {} if case == "cached" else args
    plain = answers(jobs, plain, runner, settings, SHARED_PROMPTS, shared.target)
    result = shared_answers(jobs, shared, case, runner, args)
    assert result["drafted"] > result["accepted"] > 2 / 3 * result["drafted"]
    assert_tokens(plain, result, runner)
    # It takes no blocks of its own.
    assert result["num_blocks"] == plain["num_blocks"]
    assert len(result["pages"]) == len(plain["pages"]) + 2
    page = BLOCK * SLOT_BYTES["turbo4"]
    assert set(map(tuple, result["pages"].values())) == {(page, False)}
    log = (jobs.folder / f"shared-{case}-{runner}" / "log").read_text()
    (line,) = (line for line in log.splitlines() if "bytes a token and layer" in line)
    assert line.endswith("; 4 more read caches of these.")
    if case == "cached":
        warm = requests_of(result, "warm")
        assert sum(request["num_cached_tokens"] for request in warm) > BLOCK


@pytest.mark.matrix
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_drafter_that_reads_other_caches(jobs: Jobs, shared: Shared, runner: Runner):
    """Guards the test above, which would notice it."""
    options = {"misled_drafter": True}
    result = shared_answers(jobs, shared, "misled", runner, {}, **options)
    assert result["accepted"] < result["drafted"] / 10


@pytest.mark.matrix
def test_a_drafter_of_another_dtype_than_the_caches_it_reads(
    jobs: Jobs, shared: Shared
):
    """Runner V2 takes no dtype for this drafter."""
    args = drafter("mtp", shared.drafter)
    args["speculative_config"]["kv_cache_dtype"] = "auto"
    engine = Engine(ARGS | args, model=str(shared.target), may_fail=True)
    result = jobs.start("shared-auto-v1", "v1", {"engine": engine}).result()
    assert "no kv_cache_dtype in --speculative-config" in result["engine"]["error"]
