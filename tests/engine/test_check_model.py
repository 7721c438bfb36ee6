# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The check of a user's model: a small run through the engine, and its report."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import check_model
import numpy as np
import pytest
from families import write_family
from harness import ROOT, TIMEOUT_S
from scenarios import GAIN
from test_quality import KL_BOUND
from trained import TRAINED
from turbo_check.args import build_parser, complete
from turbo_check.metrics import rank_layers
from turbo_check.report import markdown
from turbo_process.arm import read_result, run_arm
from turbo_process.runner import side_by_side
from turbo_quality.metrics import kl_divergence

MODEL = ROOT / "models" / "needle-qwen3"
CHILD = Path(__file__).with_name("check_full_child.py")
# Tokens of the model: bytes and three special ones. Distributions have all of them.
VOCABULARY = 259
STEPS = 12
# fp32 log-probabilities, in either way of adding them up.
ROUNDING = 1e-6
# Tokens of a step: prompts come in several chunks.
CHUNK = 200
# An arm that reads all tokens as codes, none of them in 8 bits.
PACKED = "turbo4:no-window"
OPTIONS = [
    str(MODEL), "--max-context", "640", "--texts", "2", "--decode-steps", str(STEPS),
    "--needles", "1", "--top", str(VOCABULARY), "--layers", "1",
    "--kv-cache-dtype", "auto", PACKED, "turbo4", "fp8",
]  # fmt: skip


class FullChecks(check_model.Checks):
    child = CHILD


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """One engine at a time, and one fork server for all."""
    with side_by_side(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def checks(
    pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> FullChecks:
    output = tmp_path_factory.mktemp("output")
    args = build_parser("").parse_args([*OPTIONS, "--output", str(output)])
    complete(args)
    plan = {"greedy_steps": 4, "answer_tokens": 7, "depths": (0.5,)}
    args.plan = replace(args.plan, **plan)
    return FullChecks(args, tmp_path_factory.mktemp("arms"), pool)


@pytest.fixture(scope="module")
def arms(checks: FullChecks) -> dict[str, check_model.Arm]:
    names = checks.args.kv_cache_dtype
    return {arm.name: arm for arm in check_model.arms_of(names)}


@pytest.fixture(scope="module")
def report(checks: FullChecks, arms: dict[str, check_model.Arm]) -> dict[str, Any]:
    """The content of check.json."""
    report = check_model.check(checks, list(arms.values()))
    check_model.write_report(report, checks.args.output)
    return json.loads((checks.args.output / "check.json").read_text())


@pytest.fixture(scope="module")
def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["arm"]: row for row in report["arms"]}


def test_the_reference_does_not_diverge_from_itself(rows: dict[str, dict[str, Any]]):
    again = rows["auto, again"]
    assert again["kl_mean"] == again["kl_p99"] == again["perplexity_change"] == 0
    assert again["top1"] == again["capacity"] == 1
    assert again["greedy_prefix"] == again["greedy_steps"] == 4


def test_turbo4_diverges_by_what_four_bits_cost(rows: dict[str, dict[str, Any]]):
    row = rows[PACKED]
    # These are a third of the bound's positions, so that their mean is less certain.
    assert KL_BOUND["decode"]["turbo4"] / 20 < row["kl_mean"]
    assert row["kl_mean"] < 2 * KL_BOUND["decode"]["turbo4"]
    assert row["capacity"] == pytest.approx(GAIN["turbo4"], rel=1e-5)
    assert row["backends"] == ["TURBO"]
    assert row["top1"] > 0.8


def test_a_window_is_measured(rows: dict[str, dict[str, Any]]):
    row = rows["turbo4"]
    assert row["kl_mean"] < rows[PACKED]["kl_mean"] / 2
    assert row["capacity"] == rows[PACKED]["capacity"]
    assert row["window_layers"] == row["layers"]
    assert rows[PACKED]["window_layers"] == 0


def test_kl_is_that_of_full_distributions(
    checks: FullChecks,
    arms: dict[str, check_model.Arm],
    report: dict[str, Any],
    rows: dict[str, dict[str, Any]],
):
    """This holds if each token is told apart; the KL of fewer tokens is less."""
    assert report["is_exact"]
    full = [
        np.load(checks.folder(arms[name]) / "full.npy") for name in ("auto", PACKED)
    ]
    expected = kl_divergence(*full)
    assert rows[PACKED]["kl_mean"] == pytest.approx(expected.mean(), rel=1e-3)
    found = kl_divergence(
        *(
            checks.records(arms[name], [*range(4)])["logprobs"][..., :-1]
            for name in ("auto", PACKED)
        )
    )
    assert np.abs(found - expected).max() < 10 * ROUNDING
    agreement = full[0].argmax(-1) == full[1].argmax(-1)
    assert rows[PACKED]["top1"] == pytest.approx(agreement.mean(), rel=1e-5)
    # The texts' own tokens: each context has texts of its own.
    targets = np.array([t["tokens"][-STEPS:] for t in checks.cases.texts])
    score = np.take_along_axis(full[1], targets[..., None], -1).mean(dtype=np.float64)
    assert rows[PACKED]["perplexity"] == pytest.approx(np.exp(-score), rel=1e-5)


def test_prefill_is_that_of_full_distributions(
    pool: ThreadPoolExecutor, tmp_path: Path
):
    """The positions are those whose chunks read the cache."""
    options = [str(MODEL), "--max-context", "512", "--texts", "2", "--decode-steps"]
    options += ["1", "--top", str(VOCABULARY), "--output", str(tmp_path / "output")]
    # Else a prompt's chunks see all of it raw.
    attention = {"attention_config": {"turbo_prefill": "stored"}}
    options += ["--engine-args", json.dumps(attention)]
    args = build_parser("").parse_args(options)
    complete(args)
    plan = {"greedy_steps": 1, "answer_tokens": 1, "depths": (0.5,), "cases": 1}
    args.plan = replace(args.plan, chunk=CHUNK, **plan)
    (tmp_path / "arms").mkdir()
    checks = FullChecks(args, tmp_path / "arms", pool)
    arms = check_model.arms_of([PACKED])
    report = check_model.check(checks, arms)
    full = [np.load(checks.folder(x) / "full-prefill.npy")[:, CHUNK:] for x in arms]
    expected = kl_divergence(*full)
    first, row = (arm["prefill"] for arm in report["arms"])
    assert row["positions"] == expected.size == 2 * (512 - 2 - CHUNK)
    assert first["kl_mean"] == 0 < row["kl_mean"]
    assert row["kl_mean"] == pytest.approx(expected.mean(), rel=1e-2)
    assert row["kl_p99"] == pytest.approx(np.quantile(expected, 0.99), rel=1e-2)
    agreement = full[0].argmax(-1) == full[1].argmax(-1)
    assert row["top1"] == pytest.approx(agreement.mean(), rel=1e-5)
    targets = np.array([x["tokens"][CHUNK + 1 : -1] for x in checks.cases.texts])
    score = np.take_along_axis(full[1], targets[..., None], -1).mean(dtype=np.float64)
    assert row["perplexity"] == pytest.approx(np.exp(-score), rel=1e-5)
    text = markdown(report)
    assert f"from {CHUNK} on" in text and "| KL in prefill |" in text


def test_contexts_are_apart(report: dict[str, Any], rows: dict[str, dict[str, Any]]):
    assert report["contexts"] == [512, 640]
    parts = rows[PACKED]["decode"]
    assert [*parts] == ["512", "640"]
    assert sum(part["positions"] for part in parts.values()) == 2 * 2 * STEPS
    means = [part["kl_mean"] for part in parts.values()]
    assert rows[PACKED]["kl_mean"] == pytest.approx(np.mean(means), rel=1e-5)


def test_needles_are_found(rows: dict[str, dict[str, Any]]):
    for name in ("auto", "turbo4"):
        needles = rows[name]["needles"]
        assert (needles["found"], needles["cases"], needles["lost"]) == (2, 2, 0)


def test_a_refused_dtype_loses_no_other(
    checks: FullChecks, report: dict[str, Any], rows: dict[str, dict[str, Any]]
):
    assert "fp8" in rows["fp8"]["error"] and "kl_mean" not in rows["fp8"]
    assert check_model.failed(report)
    assert report["advice"].endswith("fp8: not measured")
    assert (checks.args.output / "logs" / "fp8.log").exists()
    assert f"log: {checks.args.output / 'logs'}" in rows["fp8"]["error"]


def test_what_has_ended_is_kept(
    checks: FullChecks,
    arms: dict[str, check_model.Arm],
    report: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The files are whole if the run is stopped."""

    def run(_arms: list[check_model.Arm]) -> Iterator[dict[str, Any]]:
        yield from report["arms"][:2]
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "run", run)
    with pytest.raises(KeyboardInterrupt):
        check_model.check(
            checks,
            list(arms.values()),
            lambda report: check_model.write_files(report, tmp_path),
        )
    kept = json.loads((tmp_path / "check.json").read_text())
    assert [row["arm"] for row in kept["arms"]] == ["auto", "auto, again"]
    assert "`auto, again`" in (tmp_path / "check.md").read_text()


def test_worst_layer_in_bf16(report: dict[str, Any], rows: dict[str, dict[str, Any]]):
    (row,) = report["layers"]["rows"]
    packed = rows[PACKED]
    assert row["skip_layers"] == [packed["keys"][0]["layer"]]
    reference = rows["auto"]["bytes_per_token"]
    rest = packed["layers"] - 1
    expected = (reference + rest * packed["bytes_per_token"]) / packed["layers"]
    assert row["bytes_per_token"] == pytest.approx(expected)
    # One of eight layers is less than the noise of so few positions: with 64 of them
    # the two were 5.06 and 4.98 millinats.
    assert 0 < row["kl_mean"] != packed["kl_mean"]


def test_files(checks: FullChecks, report: dict[str, Any]):
    text = (checks.args.output / "check.md").read_text()
    assert report["advice"] in text and "`turbo4`" in text and "`fp8`" in text
    assert "turbo4" in (checks.args.output / "kl.svg").read_text()
    assert set(report) == {
        "facts", "model", "plan", "contexts", "is_exact", "engine_args", "arms", "keys",
        "layers", "advice",
    }  # fmt: skip
    assert len(report["keys"]) == 8


@pytest.fixture(scope="module")
def biased(
    pool: ThreadPoolExecutor,
    checks: FullChecks,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[dict[str, Any]]]:
    """Layers of a model with a long bias of K, by cache dtype, the worst first."""
    folder = tmp_path_factory.mktemp("biased")
    found = {}
    for dtype in ("auto", "turbo4"):
        arm = check_model.Arm(dtype, dtype)
        job = {
            "model": str(TRAINED),
            "engine_args": check_model.engine_args(arm, checks.args),
            "compress_all_layers": False,
            "keys": checks.cases.keys[:256],
            "only_keys": True,
        }
        place = folder / dtype
        options = CHILD, job, place, checks.variables, TIMEOUT_S, True
        assert pool.submit(run_arm, *options).result() is None
        found[dtype] = rank_layers(read_result(place))
    return found


def test_a_long_bias_of_k_is_found(biased: dict[str, list[dict[str, Any]]]):
    """It is in the first and the last layer.

    Their slow pairs turn little within so few tokens.
    """
    worst, second, *others = biased["auto"]
    assert {worst["layer"], second["layer"]} == {"0", "4"}
    means = {row["layer"]: row["k_mean"] for row in (worst, second)}
    assert 290 < means["0"] < 310 and 440 < means["4"] < 465
    assert second["ratio"] > 4 * max(row["ratio"] for row in others)
    assert worst["k_left"] == worst["k_mean"]


def test_what_the_offset_leaves_is_told(biased: dict[str, list[dict[str, Any]]]):
    layers = {row["layer"]: row for row in biased["turbo4"]}
    for name in ("0", "4"):
        assert layers[name]["k_left"] < 0.1 * layers[name]["k_mean"]


@pytest.mark.matrix
def test_what_can_have_no_window_is_measured(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """A hybrid has no window by default, and the report says so."""
    model = write_family(tmp_path / "hybrid", "nemotron_h")
    options = ["--max-context", "512", "--texts", "1", "--needles", "1"]
    options += ["--kv-cache-dtype", "turbo4", "--output", str(tmp_path / "output")]
    args = build_parser("").parse_args([str(model), *options])
    complete(args)
    args.plan = replace(args.plan, greedy_steps=4, answer_tokens=7, depths=(0.5,))
    (tmp_path / "arms").mkdir()
    checks = check_model.Checks(args, tmp_path / "arms", pool)
    report = check_model.check(checks, check_model.arms_of(["turbo4"]))
    _, row = report["arms"]
    assert row["window_layers"] == 0 and row["capacity"] > 3
    assert "- `turbo4`: this engine cannot have a recent window;" in markdown(report)
    assert report["advice"].startswith("turbo4: ")
