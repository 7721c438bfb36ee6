# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How `equality.py` compares two runs, and what it lets pass."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from equality import (  # noqa: E402
    KL_BOUND,
    TIE,
    compare,
    decided,
    judge,
    quiet_name,
    repeated,
    unfulfilled,
)
from equality_modes import MODES  # noqa: E402
from equality_run import child_environment, what_happened  # noqa: E402
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


def test_a_request_asked_again_is_held_to_the_first(quiet):
    twice = repeated(quiet, 2 * REQUESTS)
    assert compare(twice, twice)["positions"] == 30
    row = compare(twice, changed(twice, REQUESTS, 1))
    assert row["first_unequal"] == [{"request": REQUESTS, "position": 1}]


def judged(mode: str, prefill: str = "stored", **fields: Any) -> str | None:
    """What is said of a mode whose run did all that it should, but for the fields."""
    row = {"kv_cache_dtype": "turbo4", "unequal_requests": 0, "kl_mean": 0.0}
    result = {
        "cached_tokens": np.array([16, 32]),
        "from_cpu": 48,
        "preemptions": 3,
        "most_at_once": 2,
        "drafted": 100,
        "accepted": 98,
        "capacity": int(1000 * MODES[mode].capacity),
        "built": {"store turbo4_128": 1},
    }
    for name in set(fields) & set(result):
        result[name] = fields.pop(name)
    fault = unfulfilled(mode, {"capacity": 1000}, result, requests=2)
    return judge(mode, row | fields, prefill, fault)


def test_the_documentation_has_the_bounds():
    page = ROOT / "vllm_overlay/docs/features/quantization/turbo.md"
    said = re.search(
        r"at most ([\d.]+) nats a token with `turbo4`,\s+([\d.]+) with `k4v3` and "
        r"([\d.]+) with `turbo3`",
        page.read_text(),
    )
    assert said and [float(x) for x in said.groups()] == list(KL_BOUND.values())


def test_a_mode_passes_or_says_why():
    assert judged("batched") is None
    assert "2 requests" in judged("batched", unequal_requests=2)
    assert "2 requests" in judged("batched", "raw", unequal_requests=2)
    assert "2 requests" in judged("chunked", unequal_requests=2)
    above = 1.01 * KL_BOUND["turbo4"]
    assert judged("chunked", "raw", unequal_requests=2) is None
    assert "above" in judged("chunked", "raw", kl_mean=above)
    assert "above" in judged("chunked", "raw", kl_mean=float("nan"))


@pytest.mark.parametrize(
    "mode, fault, said",
    [
        ("prefix", {"cached_tokens": np.array([16, 0])}, "prefix cache"),
        ("offload", {"from_cpu": 0}, "from the CPU"),
        ("preempted", {"preemptions": 0}, "preempted"),
        ("many_sequences", {"most_at_once": 0}, "only 0 requests"),
        ("eagle", {"drafted": 0}, "no draft"),
        ("draft_model", {"accepted": 49}, "49% of"),
        ("tensor_parallel_heads", {"capacity": 1000}, "holds 1000 tokens, not 2000"),
        ("tensor_parallel_heads", {"built": {"store x": 2}}, "built once"),
        ("tensor_parallel_heads", {"built": {}}, "built once"),
    ],
)
def test_a_mode_has_to_do_what_it_is_for(mode, fault, said):
    assert judged(mode) is None
    assert said in judged(mode, **fault)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_held_to_a_quiet_run_of_its_model(mode):
    quiet = MODES[quiet_name(MODES[mode].model)]
    assert quiet.model == MODES[mode].model
    assert quiet.batch == 1 and quiet.gpus < 2


def test_ranks_need_no_multicast(tmp_path):
    """Not every host has it, and other all-reduces sum in another order."""
    for name, mode in MODES.items():
        variables = child_environment(tmp_path, mode, on_cpu=False)
        for variable in ("USE_FLASHINFER", "USE_SYMM_MEM"):
            off = variables.get(f"VLLM_ALLREDUCE_{variable}") == "0"
            assert off == (mode.gpus > 1), name


def test_a_log_is_shown_from_its_first_error(tmp_path):
    """Which rank's it is, whatever follows."""
    (tmp_path / "log").write_text(
        "\n".join(
            [
                *(f"before {i}" for i in range(50)),
                "(Worker_TP1 pid=7) ERROR 11-21 [executor.py:1] ValueError: the cause",
                *(f"after {i}" for i in range(200)),
                "RuntimeError: See root cause above.",
            ]
        )
    )
    shown = what_happened(tmp_path / "log").splitlines()
    assert shown[0] == "... 34 lines"
    assert shown[1] == "before 34"
    assert shown[17].endswith("ValueError: the cause")
    assert shown[-1] == "RuntimeError: See root cause above."
    assert len(shown) < 100


@pytest.mark.parametrize("mode", ["swapped", "zeroed"])
def test_a_defect_has_to_show(mode):
    assert judged(mode, unequal_requests=1) is None
    assert "not noticed" in judged(mode)
