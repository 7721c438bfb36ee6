# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checkpoints of users: with quantised weights, with scales for a cache, or with both.

Each kind is asked for facts in texts, with a turbo dtype and with the model's own.
"""

import json
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import trained
from harness import Call, Engine, Jobs, mean_divergence, requests_of, values_to_come
from safetensors.torch import load_file
from scenarios import PROMPTS
from trained import MAX_TOKENS, TRAINED
from turbo_seeded.checkpoints import KINDS, write_checkpoint

DTYPE = "turbo4"
# With auto a checkpoint's scheme would decide.
OWN = "float16"
# Weights that a stand-in unpacks, and scales that a tool writes to another place.
ALWAYS = ("awq", "modelopt-fp8")
WITH_SCALES_ALONE = ("cache", "cache-per-head")
ASKED = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.matrix)
    for name, kind in KINDS.items()
    if kind.on_cpu
]


@pytest.fixture(scope="module")
def asked(
    request: pytest.FixtureRequest,
    jobs: Jobs,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """The answers of the kinds that are tested."""
    root = tmp_path_factory.mktemp("kinds")
    engines = {}
    for kind in values_to_come(request, "kind"):
        folder = write_checkpoint(TRAINED, root / kind, KINDS[kind])
        for dtype in (OWN, DTYPE):
            calls = {"batched": Call(trained.prompts(), MAX_TOKENS)}
            engines[f"{kind}-{dtype}"] = Engine(
                {"kv_cache_dtype": dtype}, calls, model=folder
            )
    return jobs.start("kinds", "v1", engines).result()


@pytest.mark.parametrize("kind", ASKED)
def test_kind_answers_as_with_its_own_dtype(asked: dict[str, Any], kind: str):
    own, packed = (requests_of(asked[f"{kind}-{dtype}"]) for dtype in (OWN, DTYPE))
    assert all(trained.right(own)) and all(trained.right(packed))
    assert 0 < mean_divergence(own, packed) < KINDS[kind].kl_bound


@pytest.fixture(scope="module")
def outcome(
    model: Path, jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("checkpoints")

    def engine(folder: str | None) -> Engine:
        # Means of K are a file's, or measured anew, and may then round otherwise.
        means = {"turbo_means": "off"}
        args = {"kv_cache_dtype": DTYPE, "attention_config": means}
        return Engine(args, {"batched": Call(PROMPTS, 8)}, model=folder)

    engines = {"none": engine(None)} | {
        name: engine(write_checkpoint(model, root / name, KINDS[name]))
        for name in WITH_SCALES_ALONE
    }
    return jobs.start("checkpoints", "v1", engines).result()


@pytest.mark.parametrize("name", WITH_SCALES_ALONE)
def test_scales_are_not_read(outcome: dict[str, Any], name: str):
    assert outcome[name] == outcome["none"]


def figures(
    kind: str, kl: float = 0.01, int8: float = 0.001, **changes: Any
) -> dict[str, Any]:
    row = {"kind": kind, "kl_mean": kl, "lost": 0, "capacity": 3.76}
    return row | {"int8_per_token_head_kl_mean": int8} | changes


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (figures("awq", 0.039), ""),
        (figures("awq", 0.041), "more than 4.0 times as far off as plain"),
        # Twice 0.01 with plain weights and the 0.02 that rounding adds to int8's 0.001.
        (figures("modelopt-nvfp4", 0.059, int8=0.021), ""),
        (
            figures("modelopt-nvfp4", 0.061, int8=0.021),
            "more than 2.0 times as far off as plain and rounding",
        ),
        (
            figures("modelopt-fp8", 0.021, int8=0.0),
            "more than 2.0 times as far off as plain and rounding",
        ),
        (figures("awq", lost=1), "facts lost"),
        # The capacity if it were compared with an FP8 cache.
        (figures("awq", capacity=1.88), "another capacity"),
        ({"kind": "awq", "error": "no kernel"}, "awq did not run"),
    ],
)
def test_checkpoints_are_judged(row: dict[str, Any], wrong: str):
    assert checkpoints.judge(row, figures("plain")) == wrong


def test_nothing_is_judged_by_what_did_not_run():
    plain = {"kind": "plain", "error": "no GPU"}
    assert checkpoints.judge(figures("awq"), plain) == "plain did not run"
    assert checkpoints.judge(plain, plain) == "plain did not run"


def test_every_checkpoint_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both models are checked. Routers to experts are not quantised."""

    def check(
        kind: str, folder: Path, _output: Path, engine_args: str
    ) -> dict[str, Any]:
        assert engine_args == "{}" and kind in ("plain", "fp8")
        config = json.loads((folder / "config.json").read_text())
        quantised = config.get("quantization_config", {})
        plain = quantised.get("modules_to_not_convert", [])
        kl = 1.0 if quantised and not plain else 0.01
        found = figures("", kl, plain=plain)
        del found["kind"]
        return found

    monkeypatch.setattr(checkpoints, "check", check)
    output = tmp_path / "rows.jsonl"
    assert checkpoints.main(["--kinds", "fp8", "--output", str(output)]) == 1
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    found = [(row["model"], row["plain"], row["wrong"]) for row in rows]
    wrong = "more than 2.0 times as far off as plain and rounding"
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    assert found == [
        ("trained", [], ""),
        ("trained", [], wrong),
        ("experts", [], ""),
        ("experts", routers, ""),
    ]


def test_scales_that_a_cache_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The finer cache gets the same weights without the scales."""
    asked = []

    def run_check(
        folder: Path, dtypes: list[str], output: Path, _engine_args: str
    ) -> dict[str, dict[str, Any]]:
        config = json.loads((folder / "config.json").read_text())
        scheme = config["quantization_config"].get("kv_cache_scheme", {})
        asked.append((dtypes, scheme.get("strategy"), output.parent))
        weights = load_file(folder / "model.safetensors")
        assert any(name.endswith("k_scale") for name in weights) == bool(scheme)
        figures = {"needles": {"lost": 0, "found": 1}, "capacity": 3.76, "top1": 1.0}
        return {dtype: figures | {"kl_mean": 0.1, "backends": []} for dtype in dtypes}

    monkeypatch.setattr(checkpoints, "run_check", run_check)
    kind, output = "w8a8-cache-per-head", tmp_path / "check"
    folder = checkpoints.write("trained", kind, tmp_path)
    row = checkpoints.check(kind, folder, output, "{}")
    assert row["int8_per_token_head_kl_mean"] == 0.1
    assert asked == [
        (["turbo4", "fp8"], "attn_head", output),
        (["int8_per_token_head"], None, output),
    ]


@pytest.mark.matrix
def test_checkpoints_of_a_kind(tmp_path: Path):
    output = tmp_path / "rows.jsonl"
    options = ["--models", "trained", "--kinds", "awq", "--output", str(output)]
    assert checkpoints.main(options) == 0
    plain, packed = map(json.loads, output.read_text().splitlines())
    assert packed["kl_mean"] > plain["kl_mean"] > 0
    assert packed["backends"] == ["TURBO"] and packed["found"] > 0
