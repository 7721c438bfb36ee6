# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Models that draft, with a cache of their own in the same dtype.

What is drafted must not change an answer. That a drafter's own attention is right shows
in what is accepted: a model that drafts for itself is always right.

A hybrid's states of drafts that are rejected are gone back from, in the cache.
"""

import heapq
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_family
from harness import Call, Engine, Jobs, Runner, decided_tokens, tie
from safetensors.torch import load_file, save_file
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


# A hybrid's, whose states are blocks: hits end within the second and the third prompt's
# blocks, too.
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
) -> dict[str, Any]:
    """What an engine gives for the prompts, and what it gives then."""
    calls = {"batched": Call(prompts, NUM_GENERATED)}
    if "enable_prefix_caching" in args:
        calls["warm"] = Call(prompts, NUM_GENERATED)
    # Counts of drafts are a process's: one engine in each.
    engine = Engine(ARGS | args, calls, model=str(model) if model else None)
    return jobs.start(name, runner, {"engine": engine}).result()["engine"]


def num_tied(result: dict[str, Any]) -> int:
    """Counts the tokens that rounding may have decided."""
    return sum(
        best - second <= TIE
        for request in result["calls"]["batched"]["requests"]
        for best, second in (heapq.nlargest(2, row) for row in request["logprobs"])
    )


def assert_equal(jobs: Jobs, runner: Runner, result: dict[str, Any]) -> None:
    """Asserts that drafts changed no token that rounding does not decide."""
    assert_tokens(answers(jobs, f"undrafted-{runner}", runner, {}), result, runner)


def assert_tokens(
    plain: dict[str, Any], result: dict[str, Any], runner: Runner
) -> None:
    assert plain["runner"] == result["runner"] == runner
    expected = plain["calls"]["batched"]["requests"]
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


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid whose checkpoint has a layer that predicts a further token.

    It has two tokens, so that half of what it predicts is right by chance.
    """
    folder = write_family(tmp_path_factory.mktemp("hybrid"), "qwen3_next")
    weights = load_file(folder / "model.safetensors")
    head, first = weights["lm_head.weight"], ord("a")
    # Of a row and its negative one wins against the others, which are zero.
    row = head[first].clone()
    head.zero_()
    head[first], head[first + 1] = row, -row
    generator = torch.Generator().manual_seed(1)
    hidden = head.shape[1]
    drafter = {"fc": torch.empty(hidden, 2 * hidden)}
    norms = ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")
    drafter |= {name: torch.zeros(hidden) for name in norms}
    drafter = {f"mtp.{name}.weight": tensor for name, tensor in drafter.items()}
    last = "model.layers.3."
    drafter |= {
        name.replace(last, "mtp.layers.0."): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(last)
    }
    for tensor in drafter.values():
        if tensor.dim() > 1:
            tensor.normal_(0, 0.3, generator=generator)
    weights |= {name: tensor.bfloat16() for name, tensor in drafter.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.matrix
@pytest.mark.parametrize(
    "runner, is_cached", [("v1", False), ("v2", False), ("v2", True)]
)
def test_own_layer_of_a_hybrid(
    jobs: Jobs, hybrid: Path, runner: Runner, is_cached: bool
):
    """States after each draft are kept until it is known which of them counts."""
    rest = (HYBRID_PROMPTS, hybrid)
    plain = answers(jobs, f"undrafted-hybrid-{runner}", runner, HYBRID_ARGS, *rest)
    args = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    args = HYBRID_ARGS | {"speculative_config": args} | (CACHED if is_cached else {})
    name = f"hybrid-mtp-{runner}-{is_cached}"
    result = answers(jobs, name, runner, args, *rest)
    # Some, and not all, of a step's.
    assert result["drafted"] > result["accepted"] > NUM_GENERATED
    assert_tokens(plain, result, runner)
    assert len(result["pages"]) == len(plain["pages"]) + 1
    assert len({size for size, _ in result["pages"].values()}) == 1
    if is_cached:
        warm = result["calls"]["warm"]["requests"]
        cached = [request["num_cached_tokens"] for request in warm]
        assert sum(num % STATE_BLOCK > 0 for num in cached) >= 2
