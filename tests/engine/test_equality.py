# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`equality.py`: the comparison of two runs, and the conditions on a mode.

The settings of modes are in test_equality_run.py.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import equality
import numpy as np
import pytest
from equality import (
    KL_BOUND,
    TIE,
    compare,
    decided,
    judge,
    quiet_name,
    repeated,
    unfulfilled,
)
from harness import ROOT, TIMEOUT_S
from tasks import IM_END
from turbo_equality.modes import BLOCK, MODES

REQUESTS, POSITIONS, VOCABULARY = 3, 5, 7


@pytest.fixture
def quiet() -> dict[str, np.ndarray]:
    """A run whose likeliest tokens are tied in request 1 at position 2 alone."""
    generator = np.random.default_rng(0)
    logits = generator.random((REQUESTS, POSITIONS, VOCABULARY))
    tokens = generator.integers(VOCABULARY, size=(REQUESTS, POSITIONS))
    np.put_along_axis(logits, tokens[..., None], 5.0, axis=-1)
    logits[1, 2, (tokens[1, 2] + 1) % VOCABULARY] = 5.0 - TIE / 2
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return {"tokens": tokens, "logprobs": logprobs.astype(np.float32)}


def changed(run: dict[str, np.ndarray], request: int, position: int) -> dict:
    """The run with other tokens in a request from a position on."""
    tokens = run["tokens"].copy()
    tokens[request, position:] = (tokens[request, position:] + 1) % VOCABULARY
    return run | {"tokens": tokens}


def test_what_is_decided(quiet):
    assert decided(quiet["logprobs"]).tolist() == [POSITIONS, 2, POSITIONS]


@pytest.mark.parametrize("gap, is_decided", [(0.04, False), (0.06, True)])
def test_a_tie_is_as_wide_as_what_rounding_moves(gap, is_decided):
    """Logits of about 16 are 1/16 apart in bf16, and a rounding moves them by half."""
    logprobs = np.log([[[0.4, 0.4 * np.exp(-gap), 0.1]]])
    assert decided(logprobs).tolist() == [int(is_decided)]


def test_a_run_equals_itself(quiet):
    row = compare(quiet, quiet)
    assert row["unequal_requests"] == 0 and row["kl_max"] == 0
    assert (row["positions"], row["excused_positions"]) == (15, 3)


@pytest.mark.parametrize(
    "request_, position, unequal", [(0, 4, 1), (1, 1, 1), (1, 2, 0), (1, 4, 0)]
)
def test_other_tokens(quiet, request_, position, unequal):
    """From a tie on, a request's tokens are not compared."""
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


BUILT = {
    "store turbo4_128": 1,
    "decode turbo4_128_4": 1,
    "decode turbo4_128_8": 1,
    "extend_mma turbo4_128_r32": 1,
    "extend_mma turbo4_128_r64": 1,
    "merge 128": 1,
}


def judged(mode: str, **fields: Any) -> str | None:
    """The fault of a mode whose run is right, except for the given fields."""
    row = {
        "kv_cache_dtype": "turbo4",
        "unequal_requests": 1 if MODES[mode].defect else 0,
        "kl_mean": 0.0,
        "positions": 1000,
        "excused_positions": 0,
    }
    alone = MODES[mode].batch == 1 or mode == "one_sequence"
    result = {
        "cached_tokens": np.array([16, 32]),
        "from_cpu": 48,
        "preemptions": 3,
        "most_at_once": 1 if alone else 2,
        "drafted": 100,
        "accepted": 98,
        "capacity": int(1000 * MODES[mode].capacity),
        "room": None,
        "built": BUILT,
        "ran": {"replays": 7 if MODES[mode].graphs else 0},
        "unlike_asked": {},
    }
    for name in set(fields) & set(result):
        result[name] = fields.pop(name)
    fault = unfulfilled(mode, {"capacity": 1000}, result, requests=2)
    return judge(mode, row | fields, fault)


def test_the_documentation_has_the_bound():
    page = ROOT / "vllm_overlay/docs/features/quantization/turbo.md"
    said = re.search(r"mean of at most ([\d.]+)\s+nats a token", page.read_text())
    assert said and float(said[1]) == pytest.approx(KL_BOUND, rel=0.05)


def test_a_mode_passes_or_says_why():
    assert judged("batched") is None
    for mode in ("batched", "chunked", "eagle"):
        assert "2 requests" in judged(mode, unequal_requests=2)
        assert judged(mode, kl_mean=0.99 * KL_BOUND) is None
        assert "above" in judged(mode, kl_mean=1.01 * KL_BOUND)
        assert "above" in judged(mode, kl_mean=float("nan"))


@pytest.mark.parametrize(
    "mode, most", [("batched", 100), ("tensor_parallel_heads", 500)]
)
def test_a_comparison_needs_what_it_compares(mode, most):
    assert judged(mode, excused_positions=most) is None
    assert "are compared" in judged(mode, excused_positions=most + 1)
    assert "are compared" in judged(mode, excused_positions=1000)
    assert "are compared" in judged(mode, positions=0)


def test_a_defect_is_not_noticed_by_what_is_not_compared():
    assert "are compared" in judged("zeroed", excused_positions=1000)


@pytest.mark.parametrize(
    "mode, fault, said",
    [
        ("prefix", {"cached_tokens": np.array([16, 0])}, "prefix cache"),
        ("offload", {"from_cpu": 0}, "from the CPU"),
        ("preempted", {"preemptions": 0}, "preempted"),
        ("many_sequences", {"most_at_once": 0}, "only 0 requests"),
        ("eagle", {"drafted": 0}, "no draft"),
        ("draft_model", {"accepted": 89}, "89% of"),
        ("tensor_parallel_heads", {"capacity": 1000}, "holds 1000 tokens, not 2000"),
        ("dcp", {"capacity": 1979}, "holds 1979 tokens, not 2000"),
        ("batched", {"capacity": 985}, "holds 985 tokens, not 1000"),
        ("batched", {"capacity": 1015}, "holds 1015 tokens, not 1000"),
        ("skipped_graphs", {"capacity": 985}, "holds 985 tokens, not 1000"),
        ("skipped", {"room": 1015}, "holds 1000 tokens, and has room for 1015"),
        ("quiet_skipped", {"capacity": 985, "room": 1000}, "has room for 1000"),
        ("tensor_parallel_heads", {"built": BUILT | {"merge 128": 2}}, "built once"),
        ("tensor_parallel_heads", {"built": {"store turbo4_128": 1}}, "built once"),
        ("tensor_parallel_heads", {"built": {}}, "built once"),
        ("quiet", {"most_at_once": 2}, "2 requests ran at once"),
        ("one_sequence", {"most_at_once": 2}, "2 requests ran at once"),
        ("batched", {"most_at_once": 1}, "1 requests ran at once"),
        ("graphs", {"ran": {"replays": 0}}, "no CUDA graph"),
        ("eagle_graphs", {"ran": {"replays": 0}}, "no CUDA graph"),
        ("quiet", {"ran": {"replays": 1}}, "1 CUDA graphs"),
        ("block_64", {"unlike_asked": {"block_size": 16}}, "'block_size': 16"),
        ("zeroed", {"unlike_asked": {"block_size": 16}}, "'block_size': 16"),
    ],
)
def test_a_mode_has_to_do_what_it_is_for(mode, fault, said):
    assert judged(mode) is None
    assert said in judged(mode, **fault)


def test_hopper_has_kernels_of_its_own_for_extends():
    """Two ranks of an H200 build extend_wgmma and extend_outputs, each once."""
    kept = {name: times for name, times in BUILT.items() if "extend" not in name}
    hopper = ("extend_wgmma turbo4_128_r64", "extend_outputs turbo4_128_r64")
    mode = "tensor_parallel_heads"
    assert judged(mode, built=kept | dict.fromkeys(hopper, 1)) is None
    assert "built once" in judged(mode, built=kept | dict.fromkeys(hopper, 2))
    assert "built once" in judged(mode, built=kept)


def test_what_is_nearly_all_suffices():
    assert judged("draft_model", accepted=90) is None
    assert judged("skipped", room=1009) is None
    assert judged("batched", capacity=991) is None


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_held_to_a_quiet_run_of_its_model(mode):
    quiet = MODES[quiet_name(MODES[mode].model)]
    assert quiet.model == MODES[mode].model
    assert quiet.batch == 1 and quiet.gpus < 2


@pytest.mark.parametrize(
    "options", [["--prefill", "stored"], ["--kv-cache-dtype", "fp8"]]
)
def test_windows_are_for_raw_and_for_turbo(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["equality.py", "--window", *options])
    with pytest.raises(SystemExit):
        equality.main()
    assert "--window" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["swapped", "zeroed"])
def test_a_defect_has_to_show(mode):
    assert judged(mode) is None
    assert "not noticed" in judged(mode, unequal_requests=0)


def ran(name: str, tokens: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
    """The results of a mode that ran as it should."""
    alone = MODES[name].batch == 1
    return {
        "tokens": tokens,
        "logprobs": logprobs,
        "right": np.ones(len(tokens), bool),
        "cached_tokens": np.full(len(tokens), 16),
        "from_cpu": 0,
        "preemptions": 0,
        "most_at_once": 1 if alone else len(tokens),
        "drafted": 0,
        "accepted": 0,
        "capacity": 1000,
        "room": None,
        "built": {},
        "ran": {"replays": 0},
        "unlike_asked": {},
    }


@pytest.mark.parametrize(
    "modes, broken, failing, status",
    [
        (["batched", "zeroed"], "zeroed", None, 0),
        (["batched", "zeroed"], None, None, 1),
        (["batched"], "batched", None, 1),
        (["batched"], None, "batched", 1),
        (["batched"], None, "quiet", 1),
    ],
)
def test_the_exit_status_says_whether_all_is_well(
    quiet, modes, broken, failing, status, monkeypatch, capsys
):
    """All but the engines is the script's own."""
    # Each token is certain.
    logprobs = np.full((REQUESTS, POSITIONS, VOCABULARY), -20.0)
    np.put_along_axis(logprobs, quiet["tokens"][..., None], 0.0, axis=-1)

    def run_mode(name: str, *_: Any) -> dict[str, Any]:
        if name == failing:
            raise RuntimeError("status 1")
        run = ran(name, quiet["tokens"], logprobs)
        return run if name != broken else changed(run, 0, 1)

    monkeypatch.setattr(equality, "run_mode", run_mode)
    command = ["equality.py", "--prefill", "stored", "--modes", *modes]
    monkeypatch.setattr(sys, "argv", command)
    assert equality.main() == status
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["mode"] for row in rows] == ["quiet", *modes]
    assert any(row["wrong"] for row in rows) == bool(status)


@pytest.mark.parametrize("unlike, status", [({}, 0), ({"block_size": 32}, 1)])
def test_texts_are_counted_and_not_judged(quiet, unlike, status, monkeypatch, capsys):
    """Other tokens, and another distribution where they part, are no fault.

    A mode is still judged by the condition that it is for.
    """
    asked: list[dict[str, Any]] = []

    def run_mode(name: str, _: Path, tasks: list, *__: Any) -> dict[str, Any]:
        asked[:] = tasks
        run = ran(name, quiet["tokens"], quiet["logprobs"])
        if name == "quiet":
            return run
        run["logprobs"] = np.roll(quiet["logprobs"], 1, -1)
        return changed(run, 1, 2) | {"unlike_asked": unlike}

    monkeypatch.setattr(equality, "run_mode", run_mode)
    command = ["equality.py", "--prefill", "stored", "--modes", "batched"]
    command += ["--texts", str(REQUESTS), "--lengths", "64"]
    monkeypatch.setattr(sys, "argv", command)
    assert equality.main() == status
    quiet_row, row = map(json.loads, capsys.readouterr().out.splitlines())
    assert quiet_row["wrong"] is None and quiet_row["identical_requests"] == REQUESTS
    assert len(asked) == REQUESTS and all(task["answer"] == [] for task in asked)
    assert all(32 <= len(task["prompt"]) <= 64 for task in asked)
    assert row["identical_requests"] == REQUESTS - 1
    assert row["parted_gaps"] == [pytest.approx(TIE / 2, rel=1e-3)]
    assert row["kl_mean"] > KL_BOUND
    assert "'block_size': 32" in row["wrong"] if status else row["wrong"] is None


@pytest.mark.matrix
def test_a_defect_is_noticed_in_an_engine(tmp_path):
    """One mode of the trained model, on a CPU."""
    output = tmp_path / "rows.jsonl"
    options = ["--prefill", "stored", "--modes", "zeroed", "--tokens", "8"]
    options += ["--jobs", "2", "--time-limit", str(TIMEOUT_S), "--output", str(output)]
    command = [sys.executable, str(ROOT / "benchmarks/equality.py"), *options]
    assert subprocess.run(command).returncode == 0
    quiet_row, zeroed = map(json.loads, output.read_text().splitlines())
    # One answer has more tokens than these.
    assert quiet_row["right_answers"] == quiet_row["requests"] - 1 > 0
    assert zeroed["unequal_requests"] == quiet_row["requests"]
    assert quiet_row["ran"]["block_size"] == BLOCK["cpu"]
    assert quiet_row["ran"]["turbo_prefill"] == "stored"
