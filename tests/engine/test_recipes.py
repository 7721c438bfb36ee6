# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tables of served models of vLLM's recipes, held to the code.

One model of each class is built here, in one process. ``scripts/recipes.py --check``
builds all models, and tries the flags and dtypes that refusals name.
"""

import copy
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recipes
import torch
from harness import ROOT, SCRIPTS, run_python
from turbo_recipes import table, verdict
from turbo_recipes.shapes import expand, load_shapes
from turbo_series.upstream import load_upstream

from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend
from vllm.v1.attention.ops.turbo import reasons, refusals
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

PAGE = dict(block_size=16, num_kv_heads=2, head_size=64)
PACKED = TurboAttentionBackend.customize_spec(
    FullAttentionSpec(
        **PAGE, dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode("turbo4")
    )
)
CACHES: dict[str, KVCacheSpec] = {
    "packed": PACKED,
    "other head size": dataclasses.replace(PACKED, head_size=128),
    "bf16": FullAttentionSpec(**PAGE, dtype=torch.bfloat16),
    "window": SlidingWindowSpec(**PAGE, dtype=torch.bfloat16, sliding_window=8),
    "packed window": SlidingWindowSpec(
        **PAGE,
        dtype=torch.uint8,
        kv_quant_mode=PACKED.kv_quant_mode,
        state_content_bytes=PACKED.state_content_bytes,
        sliding_window=8,
    ),
    "state": MambaSpec(shapes=((2, 2),), dtypes=(torch.float32,), block_size=16),
}


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return json.loads(recipes.JSON.read_text())


def test_verdicts_are_of_the_code():
    done = run_python(SCRIPTS / "recipes.py", "--check", "--kinds")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("skips_windows", [False, True])
def test_layers_of_other_bytes_are_found(cache: str, skips_windows: bool):
    specs = {"first": PACKED, "second": CACHES[cache]}
    found = verdict.find_foreign_layer(specs, skips_windows)
    served = {"packed", "packed window", "state"} | (
        {"window"} if skips_windows else set()
    )
    kind = type(CACHES[cache]).__name__
    assert found == (None if cache in served else f"second ({kind})")


ERRORS: dict[str, tuple[Exception, str, str | None]] = {
    "layer": (
        ValueError(refusals.refusal("turbo4", [reasons.ALIBI, reasons.SPARSE])),
        "refused",
        "ALiBi; sparse attention",
    ),
    "flag": (
        ValueError(refusals.refusal("turbo4", [reasons.BATCH_INVARIANCE])),
        "refused",
        "batch invariance (unset VLLM_BATCH_INVARIANT)",
    ),
    "backend of a model": (
        ValueError(
            "model.layers.0.attn: attention backend OWN does not support "
            "--kv-cache-dtype turbo4. Use auto, or another dtype that it supports."
        ),
        "refused",
        "attention backend OWN does not support --kv-cache-dtype turbo4",
    ),
    "model": (NotImplementedError("a BF16 KV cache. No other"), "refused", None),
    "crash": (AttributeError("turbo4"), "defect", None),
    "other": (ValueError("the vocabulary is empty"), "defect", None),
    "package": (ModuleNotFoundError("No module", name="flashinfer"), "unknown", None),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors_are_judged(error: str):
    raised, outcome, reason = ERRORS[error]
    found = verdict.judge(verdict.Build("layers", raised))
    assert found["outcome"] == outcome
    if reason is not None:
        assert found["reason"] == reason


def test_a_model_without_layers_is_not_served():
    assert verdict.judge(verdict.Build())["outcome"] == "defect"


def test_no_model_is_a_defect(content):
    found = {name: entry["outcome"] for name, entry in content["shapes"].items()}
    assert set(found.values()) == {"served", "refused"}, found


def test_each_kind_is_checked():
    shapes = load_shapes()
    chosen = recipes.one_of_each_kind(shapes)
    assert {each.architecture for each in chosen} == {
        each.architecture for each in shapes
    }


def test_differences_are_found(content):
    shape = next(
        each
        for each in load_shapes()
        if content["shapes"][each.name]["outcome"] == "refused"
    )
    found = {
        key: value
        for key, value in content["shapes"][shape.name].items()
        if key in ("outcome", "stage", "reason")
    }
    assert not recipes.compare([shape], {shape.name: found}, content)
    served = {"outcome": "served"}
    assert recipes.compare([shape], {shape.name: served}, content)
    whole = found | {"instead": "auto"}
    assert recipes.compare([shape], {shape.name: whole}, content)


def test_json_is_of_the_shapes(content):
    shapes = {shape.name: shape for shape in load_shapes()}
    assert set(shapes) == set(content["shapes"])
    for name, shape in shapes.items():
        entry = content["shapes"][name]
        said = [entry[key] for key in ("family", "architecture", "source")]
        assert said == [shape.family, shape.architecture, shape.source]
    assert content["recipes"] == {
        recipe: shape.name for shape in shapes.values() for recipe in shape.recipes
    }


def test_page_is_of_the_json(content):
    page = table.page(content, load_upstream(ROOT).version)
    assert recipes.PAGE.read_text() == page


def test_page_is_written_from_the_json(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recipes, "PAGE", tmp_path / "recipes.md")
    monkeypatch.setattr(sys, "argv", ["recipes.py", "--page"])
    monkeypatch.setattr(recipes, "examine", None)
    assert recipes.main() == 0
    assert recipes.PAGE.read_text() == table.page(content, load_upstream(ROOT).version)


def test_sentences_of_none_are_left_out(content: dict[str, Any]):
    def page(number: str, entry: dict[str, Any]) -> str:
        changed = copy.deepcopy(content)
        changed["shapes"]["llama"] = entry
        assert table.count(changed)[number]
        return " ".join(table.page(changed, "1").split())

    refused = next(
        entry for entry in content["shapes"].values() if entry["outcome"] == "refused"
    )
    served = {"outcome": "served", "flags": ["--some-flag"]}
    crashed = {"outcome": "defect", "flags": ["--some-flag"], "message": "a crash"}
    cases = {
        "flagged": ("accepted with flags", refused | {"flags": served}),
        "misled": ("crash with a flag", refused | {"flags": crashed}),
        "defects": ("do something else", refused | crashed | {"flags": {}}),
    }
    text = " ".join(table.page(content, "1").split())
    numbers = table.count(content)
    for number, (words, entry) in cases.items():
        assert not numbers[number] and words not in text
        assert words in page(number, entry)


def test_cells_are_short(content: dict[str, Any]):
    for line in table.page(content, "1").splitlines():
        cells = line.split("|") if line.startswith("|") else []
        assert all(len(cell) <= 160 + 2 for cell in cells), line


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "docs/choosing.md",
        "vllm_overlay/docs/features/quantization/turbo.md",
    ],
)
def test_other_documents_count_as_the_page(name: str, content: dict[str, Any]):
    numbers = table.count(content)
    words = " ".join((ROOT / name).read_text().split())
    for found in re.findall(r"(\d+) of (?:the )?(\d+) recipes", words):
        assert found == (str(numbers["served"]), str(numbers["total"]))


def test_what_ran_is_in_the_repository():
    assert table.RUNS
    for architecture, paths in table.RUNS.items():
        assert paths and all((ROOT / path).exists() for path in paths), architecture


def make_sdist(folder: Path) -> None:
    for recipe in json.loads(recipes.JSON.read_text())["recipes"]:
        path = folder / f"recipes/models/{recipe}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


CHANGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "none": (lambda models: None, []),
    "another": (
        lambda models: (models / "openai/gpt-oss-7b.yaml").touch(),
        ["openai/gpt-oss-7b: of no shape"],
    ),
    "one less": (
        lambda models: (models / "openai/gpt-oss-20b.yaml").unlink(),
        ["openai/gpt-oss-20b: no recipe of this vLLM"],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_recipes_of_an_sdist(change: str, tmp_path: Path):
    make_sdist(tmp_path)
    apply, expected = CHANGES[change]
    apply(tmp_path / "recipes/models")
    assert recipes.check_sdist(tmp_path, load_shapes()) == expected


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("a x 2", ["a", "a"]),
        ("(a b) x 2 + 1 x 1", ["a", "b", "a", "b", 1]),
        ("(8 null) x 1 + 0.5 x 1", [8, None, 0.5]),
        ("all but every 3 of 6", [0, 1, 3, 4]),
        ("2D", "2D"),
    ],
)
def test_short_forms_of_lists(text: str, items: Any):
    assert expand({"x": {"y": text}}) == {"x": {"y": items}}
