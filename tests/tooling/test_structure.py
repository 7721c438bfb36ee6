# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The imports that turbo modules may have of each other."""

import sys
from pathlib import Path

import pytest
import trees

SCRIPT = trees.ROOT / "ci" / "structure.py"
TURBO = "vllm.v1.attention.ops.turbo"
TREE = {
    "ops/turbo/__init__": "",
    "ops/turbo/format": "import struct",
    "ops/turbo/interface": f"from {TURBO}.format import TurboFormat",
    "ops/turbo/planning/decode": f"from {TURBO}.interface import DecodeBatch",
    "ops/turbo/triton/store": f"from {TURBO} import format as fmt",
    "ops/turbo/cuda/store": f"import {TURBO}.interface",
    "ops/turbo/reference/cache": f"from {TURBO}.format import TurboFormat",
    "ops/turbo/layer/runner": f"from {TURBO}.planning import decode",
    "backends/turbo_attn": f"import {TURBO}.reference, {TURBO}.layer.runner",
}


def check(folder: Path, **changes: str) -> trees.Done:
    """Run the check on the tree, with some modules changed or added."""
    tree = TREE | {name.replace("__", "/"): text for name, text in changes.items()}
    for name, text in tree.items():
        path = folder / "vllm/v1/attention" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return trees.run(sys.executable, SCRIPT, folder)


def test_tree_of_the_project():
    result = trees.run(sys.executable, SCRIPT)
    assert result.returncode == 0, result.stdout


def test_sound_tree(tmp_path: Path):
    result = check(tmp_path)
    assert result.returncode == 0, result.stdout


# The imports below that make a circle.
CIRCLES = [
    ("planning__decode", "layer.runner import run"),
    ("format", "interface import LOG2_E"),
]


@pytest.mark.parametrize(
    "module, line, words",
    [
        ("triton__store", "cuda.store import store", "triton/ may not"),
        ("cuda__store", "triton import store", "cuda/ may not"),
        ("cuda__store", "reference.cache import load", "cuda/ may not"),
        ("planning__decode", "triton.store import store", "planning/ may not"),
        ("planning__decode", "layer.runner import run", "planning/ may not"),
        ("reference__cache", "layer.runner import run", "reference/ may not"),
        ("layer__runner", "reference.cache import load", "for CPUs and tests"),
        ("format", "interface import LOG2_E", "import each other"),
    ],
)
def test_wrong_way(tmp_path: Path, module: str, line: str, words: str):
    """An import in a function counts; one for annotations counts if it is a circle."""
    name = f"ops__turbo__{module}"
    statement = f"from {TURBO}.{line}"
    result = check(tmp_path, **{name: f"def late():\n    {statement}"})
    assert result.returncode == 1 and words in result.stdout, result.stdout
    result = check(tmp_path, **{name: f"if TYPE_CHECKING:\n    {statement}"})
    is_circle = "import each other" in result.stdout
    assert is_circle == ((module, line) in CIRCLES)
    assert result.returncode == is_circle, result.stdout


def test_nothing_to_check(tmp_path: Path):
    assert trees.run(sys.executable, SCRIPT, tmp_path).returncode == 1
