# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The quality lab: its arithmetic, and a small run of it through the engine."""

import json
import math
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quality
from harness import ROOT, TIMEOUT_S
from scenarios import GAIN, TURBO_DTYPES
from turbo_quality.cases import (
    HELD_OUT,
    KINDS,
    MODEL,
    Cases,
    Vocabulary,
    build_cases,
    cut,
)
from turbo_quality.metrics import common_prefix, compare, kl_divergence, score_tasks
from turbo_quality.report import bars, ratio_error

MAX_PICTURE_BYTES = 100 << 10
# Bounds of the mean KL from `auto`, in nats. A dtype has to be better than the next
# coarser one, and turbo3 better than vLLM's preset of as many bytes, which diverges
# twice as much (README). Each bound lies between the two that --quick measured. They
# are absolute, because a fault that all dtypes have changes no ratio. CPUs that round
# otherwise measure 0.8 to 1.2 times as much.
KL_BOUND = {
    "decode": {"turbo4": 0.0131, "k4v3": 0.0272, "turbo3": 0.0455},
    "prefill": {"turbo4": 0.0021, "k4v3": 0.0033, "turbo3": 0.0075},
}
# Bounds of a dtype's KL over turbo4's. KL is in proportion to the squared error, which
# is four times as large with a bit less. The trellis takes some of that off. The factor
# is 4 where K and V have a bit less, and 2.5 where V alone has, which is half of the
# error. So few positions get a quarter more.
MAX_RATIO = {"k4v3": 1.25 * 2.5, "turbo3": 1.25 * 4}
# An unquantised cache differs from itself by the order of sums alone. fp16 rounds to
# 1/2048 and four bits to 1/16, and KL is in proportion to the square. A CPU's order of
# sums may treble it.
NOISE_SHARE = 0.01


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def distributions() -> np.ndarray:
    generator = np.random.default_rng(0)
    return log_softmax(3 * generator.standard_normal((2, 50, 259))).astype(np.float32)


def test_kl_of_two_coins():
    fair, biased = np.log([0.5, 0.5]), np.log([0.9, 0.1])
    assert kl_divergence(fair, biased) == pytest.approx(math.log(0.5 / 0.3))
    expected = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert kl_divergence(biased, fair) == pytest.approx(expected)


def test_kl_ignores_what_the_reference_rules_out():
    with np.errstate(divide="ignore"):
        certain, fair = np.log([1.0, 0.0]), np.log([0.5, 0.5])
    assert kl_divergence(certain, fair) == pytest.approx(math.log(2))
    assert kl_divergence(fair, certain) == math.inf


def test_comparison_with_itself(distributions: np.ndarray):
    targets = distributions.argmax(axis=-1)
    result = compare(distributions, distributions, targets)
    assert result["kl_mean"] == result["kl_p99"] == result["kl_stderr"] == 0
    assert result["top1"] == 1
    assert result["positions"] == targets.size
    likeliest = distributions.max(axis=-1).mean(dtype=np.float64)
    assert result["perplexity"] == pytest.approx(math.exp(-likeliest), rel=1e-6)


def test_comparison_with_shuffled_rows(distributions: np.ndarray):
    """The figures of an engine that mixed up its positions."""
    targets = distributions.argmax(axis=-1)
    result = compare(distributions, distributions[:, ::-1], targets)
    assert result["kl_mean"] > 1
    assert result["top1"] < 0.1


def test_tail_and_spread(distributions: np.ndarray):
    other = distributions.copy()
    other[0, 0] = np.roll(other[0, 0], 1)
    result = compare(distributions, other, distributions.argmax(axis=-1))
    worst = kl_divergence(distributions[0, 0], other[0, 0])
    assert result["kl_mean"] == pytest.approx(worst / 100)
    # One text has all of it. The texts' means are m/50 and 0, so that the standard
    # error is the mean itself.
    assert result["kl_stderr"] == pytest.approx(worst / 100)
    assert result["top1"] == 0.99


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0


def test_an_answer_needs_its_end():
    tasks = [
        {"kind": "needle", "length": 512, "depth": depth, "answer": [7, 258]}
        for depth in (0.0, 0.0, 1.0)
    ]
    scores = score_tasks(tasks, [[7, 258], [7, 7], [7, 258]])
    assert scores["needle"]["score"] == pytest.approx(2 / 3)
    assert scores["needle"]["grid"] == [
        {"length": 512, "depth": 0.0, "score": 0.5},
        {"length": 512, "depth": 1.0, "score": 1.0},
    ]


class ArmsInTurn:
    """A lab whose arms end in a given order, some of them with an error."""

    def __init__(self, ended: dict[str, str | None]) -> None:
        self.ended = ended

    def run(self, arms: list[quality.Arm]) -> Iterator[tuple[quality.Arm, str | None]]:
        by_name = {arm.name: arm for arm in arms}
        return ((by_name[name], error) for name, error in self.ended.items())

    def measure(self, arm: quality.Arm, reference: quality.Arm) -> dict[str, str]:
        return {"decode": f"{arm.name} by {reference.name}"}


def arms_in_turn(**ended: str | None) -> Iterator[dict[str, str]]:
    """Yields after each arm, for all that have ended, the error or the measure."""
    arms = [quality.Arm.parse(name, 64) for name in ("auto", "fp8", "turbo4")]
    for rows in quality.run_lab(ArmsInTurn(ended), arms):
        yield {row["arm"]: row.get("error") or row["decode"] for row in rows}


def test_what_was_measured_is_known_before_the_rest():
    fp8 = {"fp8": "fp8 by auto"}
    first = {"auto": "auto by auto"} | fp8
    known = arms_in_turn(fp8=None, auto=None, turbo4="no room")
    assert list(known) == [first, first | {"turbo4": "no room"}]


def test_no_arm_is_measured_without_the_first():
    with pytest.raises(SystemExit, match="no reference: no room"):
        list(arms_in_turn(fp8=None, auto="no room", turbo4=None))


def test_texts_share_no_token():
    tokens = Vocabulary(MODEL).documents(["ab", "cd"])
    assert tokens == [*b"ab", 256, *b"cd", 256]
    texts = cut(list(range(100)), 3, 30)
    assert sorted(sum(texts, [])) == sorted(set(sum(texts, [])))
    with pytest.raises(ValueError, match="100 tokens"):
        cut(list(range(100)), 4, 30)


def test_a_model_with_other_tokens_is_refused(tmp_path: Path):
    """Its ids 256 to 258 are words, which prompts would contain."""
    content = json.loads((MODEL / "tokenizer.json").read_text())
    content["added_tokens"][0]["content"] = "<|im_start|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    run = run_quality(tmp_path / "output", "--model", tmp_path)
    assert run.returncode == 2
    assert f"token 256 of {tmp_path} is '<|im_start|>', and not '<|endo" in run.stdout
    assert "scripts/check_model.py takes any model" in run.stdout
    with pytest.raises(ValueError, match="no tokenizer.json"):
        Vocabulary(tmp_path / "output")


class LabOnDisk:
    """Cases of a model with a large vocabulary."""

    def __init__(self, folder: Path, texts: int) -> None:
        self.args = Namespace(model=folder)
        (folder / "config.json").write_text(json.dumps({"vocab_size": 49152}))
        stretches = [[0] * 8000] * texts
        self.cases = Cases(quality.FULL, stretches, [], [[0]] * 100)


def test_disk_is_told_before_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    quality.check_disk(LabOnDisk(tmp_path, 1), tmp_path, 2)
    size = 4 * 49152 * (7999 + 2048 + 100)
    said = f"{size / 1e9:.2f} GB an arm, {2 * size / 1e9:.2f} GB in all, in {tmp_path}"
    assert said in capsys.readouterr().out
    with pytest.raises(ValueError, match="are free: set TMPDIR, or give fewer --arms"):
        quality.check_disk(LabOnDisk(tmp_path, 30), tmp_path, 10**6)


@pytest.mark.parametrize("name", ["needle-qwen3", "needle-llama"])
def test_engines_have_room_for_all_cases(name: str):
    model = MODEL.with_name(name)
    cases = build_cases(HELD_OUT, replace(quality.QUICK, cases=0), 0, model)
    assert len(cases.rivals) == quality.QUICK.rivals
    assert cases.longest() >= max(map(len, cases.rivals))
    # The last token of a case is the first digit of the first code.
    assert all(Vocabulary(model).decode(x[-1:]).isdigit() for x in cases.rivals)


def test_tasks_of_each_kind_and_of_some():
    plan = replace(quality.QUICK, rivals=0)
    tasks = build_cases(HELD_OUT, plan, 0, MODEL).tasks
    needles = build_cases(HELD_OUT, plan.changed(kinds=("needle",)), 0, MODEL).tasks
    assert sorted({task["kind"] for task in tasks}) == sorted(KINDS)
    assert needles == [task for task in tasks if task["kind"] == "needle"]
    assert len(needles) == len(plan.depths)


def test_arms_are_named_on_the_command_line():
    assert quality.Arm.parse("turbo4:stored", 64).stored
    assert quality.Arm.parse("auto:48", 64).chunk == 48
    arm = quality.Arm.parse("turboquant_4bit_nc:all", 64)
    assert arm.compress_all_layers and arm.cache_dtype == "turboquant_4bit_nc"
    assert arm == replace(arm, stored=False, has_window=False, skips_windows=False)
    assert quality.Arm.parse("fp8:TRITON_MLA", 64).backend == "TRITON_MLA"
    assert arm.backend is None
    arm = quality.Arm.parse("turbo4:skip-windows", 64)
    assert arm.skips_windows and not arm.has_window
    with pytest.raises(ValueError, match="'most'"):
        quality.Arm.parse("turboquant_4bit_nc:most", 64)
    for option in ("window", "no-means"):
        with pytest.raises(ValueError, match=f"fp8 has no {option}"):
            quality.Arm.parse(f"fp8:{option}", 64)


def test_ratio_of_texts_that_vary_alike_is_exact():
    texts = [1.0, 2.0, 4.0]
    assert ratio_error(texts, [2 * kl for kl in texts]) == pytest.approx(0)
    assert ratio_error([1.0], [2.0]) is None
    # The residuals about the ratio 1 are -1 and 1, with a deviation of sqrt(2).
    assert ratio_error([1.0, 3.0], [2.0, 2.0]) == pytest.approx(0.5)


def test_bars_are_held_or_not():
    def row(arm: str, kl: float, size: int) -> dict[str, Any]:
        part = {"kl_mean": kl, "kl_texts": [kl]}
        tasks = {"needle": {"score": 1.0 if kl < 3 else 0.5}}
        sizes = {"bytes_per_token": size, "tasks": tasks}
        return {"arm": arm, "decode": part, "prefill": part} | sizes

    rows = [
        row("auto", 0, 512),
        row("turbo4", 1, 136),
        row("k4v3", 4, 120),
        row("turboquant_4bit_nc:all", 2.5, 134),
        {"arm": "turboquant_4bit_nc", "error": "ValueError: no"},
    ]
    held = {bar["bar"]: bar["held"] for bar in bars(rows)}
    assert held == {
        "KL of decode, turbo4 over turboquant_4bit_nc:all": True,
        "KL of prefill, turbo4 over turboquant_4bit_nc:all": True,
        "KL of decode, k4v3 over turboquant_4bit_nc:all": False,
        "KL of prefill, k4v3 over turboquant_4bit_nc:all": False,
        "bytes, k4v3 over turboquant_4bit_nc:all": True,
        "needles that turbo4 misses beyond auto": True,
        "needles that k4v3 misses beyond auto": False,
    }


def run_quality(output: Path, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks/quality.py", "--quick", "--jobs", "2"]
    return subprocess.run(
        list(map(str, [*command, "--output", output, *options])),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def rows_in(folder: Path) -> dict[str, dict[str, Any]]:
    report = json.loads((folder / "quality.json").read_text())
    return {row["arm"]: row for row in report["arms"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run's output, with `fp8` because a CPU refuses it.

    Engines generate answers to needles alone: other tasks would take a third of the
    whole time.
    """
    folder = tmp_path_factory.mktemp("quality")
    options = ["--only-needles", "--continuation-steps", 1]
    run = run_quality(folder, *options, "--arms", *quality.CPU_ARMS, "fp8")
    # One arm has no figures.
    assert run.returncode == 1, run.stdout
    assert (folder / "quality.md").read_text() in run.stdout
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, dict[str, Any]]:
    return rows_in(folder)


def test_bytes_a_token(rows: dict[str, dict[str, Any]]):
    reference = rows["auto"]["bytes_per_token"]
    for dtype in TURBO_DTYPES:
        assert reference / rows[dtype]["bytes_per_token"] == pytest.approx(GAIN[dtype])
        assert rows[dtype]["backends"] == ["TURBO"]


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_divergence(rows: dict[str, dict[str, Any]], part: str):
    """Fewer bits cost more, within their bounds, and no quantisation is free."""
    divergences = [rows[dtype][part]["kl_mean"] for dtype in TURBO_DTYPES]
    assert rows["auto:48"][part]["kl_mean"] < NOISE_SHARE * divergences[0]
    assert divergences == sorted(divergences)
    for dtype, divergence in zip(TURBO_DTYPES, divergences):
        assert divergence < KL_BOUND[part][dtype]
    for dtype, limit in MAX_RATIO.items():
        assert rows[dtype][part]["kl_mean"] < limit * divergences[0]


def test_answers_that_weigh_many_codes_at_once(rows: dict[str, dict[str, Any]]):
    """They diverge more than text does, and not because two runs differ."""
    rivals = {arm: rows[arm]["rivals"] for arm in ("auto", "auto:48", *TURBO_DTYPES)}
    assert all(found["positions"] == 4 for found in rivals.values())
    for dtype in TURBO_DTYPES:
        assert rivals[dtype]["kl_mean"] > rows[dtype]["decode"]["kl_mean"]
        assert rivals["auto:48"]["kl_mean"] < NOISE_SHARE * rivals[dtype]["kl_mean"]
    assert rivals["auto"]["top1"] == 1


def test_needles_are_found(rows: dict[str, dict[str, Any]]):
    for arm in ("auto", "auto:48", "turbo4", "k4v3"):
        needles = rows[arm]["tasks"]["needle"]
        assert needles["score"] == 1 and needles["cases"] == 3


def test_a_refused_dtype_is_named(folder: Path, rows: dict[str, dict[str, Any]]):
    assert "fp8" in rows["fp8"]["error"]
    assert "`fp8`: not measured: " in (folder / "quality.md").read_text()


@pytest.mark.parametrize("name", ["kl_bytes.svg", "needles.svg"])
def test_pictures(folder: Path, name: str):
    picture = folder / name
    assert picture.stat().st_size < MAX_PICTURE_BYTES
    text = picture.read_text()
    assert all(dtype in text for dtype in TURBO_DTYPES)


@pytest.mark.matrix
def test_latents_of_mla(tmp_path: Path):
    """Latents are measured as K and V are, by the backends that serve them."""
    model = MODEL.with_name("needle-deepseek-v3")
    options = ["--no-pictures", "--texts", 2, "--rivals", 1, "--arms"]
    options += ["auto", "turbo4:TURBO_MLA", "turbo4:TRITON_MLA"]
    run = run_quality(tmp_path, "--model", model, *options)
    assert run.returncode == 1, run.stdout
    auto, turbo4, other = rows_in(tmp_path).values()
    assert (auto["backends"], turbo4["backends"]) == (["CPU_MLA"], ["TURBO_MLA"])
    ratio = auto["bytes_per_token"] / turbo4["bytes_per_token"]
    assert ratio == pytest.approx(640 / 204)
    assert auto["decode"]["kl_mean"] == 0 < turbo4["decode"]["kl_mean"]
    assert "TRITON_MLA" in other["error"]
