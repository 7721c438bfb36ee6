# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How `equality.py` compares two runs, and what it lets pass."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from equality import KL_BOUND, TIE, compare, decided, judge  # noqa: E402
from tasks import IM_END  # noqa: E402

REQUESTS, POSITIONS, VOCABULARY = 3, 5, 7


@pytest.fixture
def quiet() -> dict[str, np.ndarray]:
    """A run whose likeliest tokens are never tied, but in request 1 at position 2."""
    generator = np.random.default_rng(0)
    logits = generator.random((REQUESTS, POSITIONS, VOCABULARY))
    tokens = generator.integers(VOCABULARY, size=(REQUESTS, POSITIONS))
    np.put_along_axis(logits, tokens[..., None], 5.0, axis=-1)
    logits[1, 2, (tokens[1, 2] + 1) % VOCABULARY] = 5.0 - TIE / 2
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return {"tokens": tokens, "logprobs": logprobs.astype(np.float32)}


def changed(run: dict[str, np.ndarray], request: int, position: int) -> dict:
    """The run with one token another, and all that follows."""
    tokens = run["tokens"].copy()
    tokens[request, position:] = (tokens[request, position:] + 1) % VOCABULARY
    return run | {"tokens": tokens}


def test_what_is_decided(quiet):
    assert decided(quiet["logprobs"]).tolist() == [POSITIONS, 2, POSITIONS]


def test_a_run_equals_itself(quiet):
    row = compare(quiet, quiet)
    assert row["unequal_requests"] == 0 and row["kl_max"] == 0
    assert (row["positions"], row["excused_positions"]) == (15, 3)


@pytest.mark.parametrize(
    "request_, position, unequal", [(0, 4, 1), (1, 1, 1), (1, 2, 0), (1, 4, 0)]
)
def test_other_tokens(quiet, request_, position, unequal):
    """From a tie on, a request may go on as it likes."""
    row = compare(quiet, changed(quiet, request_, position))
    assert row["unequal_requests"] == unequal


def test_what_follows_an_answer_is_not_compared(quiet):
    quiet["tokens"][0, 2] = IM_END
    row = compare(quiet, changed(quiet, 0, 3))
    assert (row["positions"], row["excused_positions"]) == (13, 3)
    assert row["unequal_requests"] == 0
    assert compare(quiet, changed(quiet, 0, 2))["unequal_requests"] == 1


def test_kl_counts_equal_contexts_alone(quiet):
    other = changed(quiet, 0, 1)
    other["logprobs"] = quiet["logprobs"].copy()
    other["logprobs"][0, 2] = np.roll(other["logprobs"][0, 2], 1)
    assert compare(quiet, other)["kl_max"] == 0
    other["logprobs"][0, 1] = np.roll(other["logprobs"][0, 1], 1)
    assert compare(quiet, other)["kl_max"] > 1


def judged(mode: str, prefill: str = "stored", **fields: Any) -> str | None:
    row = {"kv_cache_dtype": "turbo4", "unequal_requests": 0, "kl_mean": 0.0}
    result = {"cached_tokens": np.array([16, 32]), "preemptions": np.array(3)}
    counts = {name: fields.pop(name) for name in list(fields) if name in result}
    return judge(mode, row | fields, prefill, result | counts)


def test_a_mode_passes_or_says_why():
    assert judged("batched") is None
    assert "2 requests" in judged("batched", unequal_requests=2)
    assert "2 requests" in judged("batched", "raw", unequal_requests=2)
    assert "2 requests" in judged("chunked", unequal_requests=2)
    above = 1.01 * KL_BOUND["turbo4"]
    assert judged("chunked", "raw", unequal_requests=2) is None
    assert "above" in judged("chunked", "raw", kl_mean=above)
    assert "above" in judged("chunked", "raw", kl_mean=float("nan"))


def test_a_mode_has_to_do_what_it_is_for():
    assert "prefix cache" in judged("prefix", cached_tokens=np.array([16, 0]))
    assert "preempted" in judged("preempted", preemptions=np.array(0))


@pytest.mark.parametrize("mode", ["swapped", "zeroed"])
def test_a_defect_has_to_show(mode):
    assert judged(mode, unequal_requests=1) is None
    assert "not noticed" in judged(mode)
