# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Models that draft, with a cache of their own in the same dtype.

What is drafted must not change an answer. That a drafter's own attention is right shows
in what is accepted: a model that drafts for itself is always right.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Call, Engine, Jobs, Runner, decided_tokens
from scenarios import BLOCK, NUM_DRAFTS, text

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from seeded_drafts import target_overrides, write_draft  # noqa: E402

NUM_GENERATED = 9
TIE = 1e-3
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
    assert result["drafted"] == result["accepted"] > NUM_GENERATED
    steps = result["calls"]["batched"]["steps"]
    assert any(
        1 + NUM_DRAFTS in lengths and max(lengths) > 1 + NUM_DRAFTS
        for lengths in ([new for new, _ in step] for step in steps)
    )
    assert_equal(jobs, runner, result)


@pytest.mark.parametrize(
    "method, runner", [("eagle", "v1"), ("eagle", "v2"), ("mtp", "v2")]
)
def test_drafters(jobs: Jobs, model: Path, tmp_path: Path, method: str, runner: Runner):
    """Of another number and size of heads, and mostly wrong."""
    write_draft(tmp_path, method, model)
    args = drafter(method, tmp_path)
    args["hf_overrides"] = target_overrides(method, model)
    result = answers(jobs, f"{method}-{runner}", runner, args)
    assert result["drafted"] > result["accepted"]
    assert_equal(jobs, runner, result)
