# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Models that draft, with a cache of their own in the same dtype.

What is drafted must not change an answer. That a drafter's own attention is right shows
in what is accepted: a model that drafts for itself is always right.
"""

import heapq
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Call, Engine, Jobs, Runner, decided_tokens, tie
from scenarios import BLOCK, NUM_DRAFTS, SLOT_BYTES, text

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from seeded_drafts import target_overrides, write_draft  # noqa: E402

NUM_GENERATED = 9
# Of what may move when drafts are verified several at a time: codes flip.
TIE = tie(1e-3)
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


def answers(
    jobs: Jobs, name: str, runner: Runner, args: dict[str, Any]
) -> dict[str, Any]:
    """What an engine gives for the prompts."""
    calls = {"batched": Call(PROMPTS, NUM_GENERATED)}
    # Counts of drafts are a process's: one engine in each.
    job = jobs.start(name, runner, {"engine": Engine(ARGS | args, calls)})
    return job.result()["engine"]


def num_tied(result: dict[str, Any]) -> int:
    """Counts the tokens that rounding may have decided."""
    return sum(
        best - second <= TIE
        for request in result["calls"]["batched"]["requests"]
        for best, second in (heapq.nlargest(2, row) for row in request["logprobs"])
    )


def assert_equal(jobs: Jobs, runner: Runner, result: dict[str, Any]) -> None:
    """Asserts that drafts changed no token that rounding does not decide."""
    plain = answers(jobs, f"undrafted-{runner}", runner, {})
    assert plain["runner"] == result["runner"] == runner
    expected = plain["calls"]["batched"]["requests"]
    requests = result["calls"]["batched"]["requests"]
    num_decided = 0
    for own, other in zip(expected, requests, strict=True):
        decided = decided_tokens(own, TIE)
        assert other["tokens"][: len(decided)] == decided
        num_decided += len(decided)
    assert 2 * num_decided > NUM_GENERATED * len(PROMPTS)


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
    args = drafter("draft_model", model)
    result = answers(jobs, f"own-drafts-{runner}", runner, args)
    rejected = result["drafted"] - result["accepted"]
    # A near tie that another sum decides ends a request's drafts of that step.
    assert rejected <= NUM_DRAFTS * num_tied(result)
    assert result["accepted"] > NUM_GENERATED
    steps = result["calls"]["batched"]["steps"]
    assert any(
        1 + NUM_DRAFTS in lengths and max(lengths) > 1 + NUM_DRAFTS
        for lengths in ([new for new, _ in step] for step in steps)
    )
    assert_equal(jobs, runner, result)


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
    """Of another number and size of heads, and mostly wrong; with the target's cache
    dtype, or the model's own beside it.
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


def test_drafts_of_the_gpus_ngrams(jobs: Jobs):
    """By vLLM's kernels, which model runner V2 alone has without a GPU."""
    args = {
        "speculative_config": {
            "method": "ngram_gpu",
            "num_speculative_tokens": NUM_DRAFTS,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    }
    result = answers(jobs, "ngram_gpu-v2", "v2", args)
    assert result["drafted"] > 0
    assert_equal(jobs, "v2", result)
