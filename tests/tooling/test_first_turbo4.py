# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The first turbo4 has bytes and functions of the series."""

import ast
import json
from pathlib import Path

import pytest
from trees import ROOT

FILES = ROOT / "proposals/serve-a-turbo4-kv-cache-by-triton/files"
OPS = "vllm/v1/attention/ops/turbo"
TESTS = "tests/kernels/turbo"
# Functions that are those of the overlay, by the proposal's file and the overlay's.
SHARED = {
    ("format.py", "format.py"): "fp32 _value_levels",
    ("rotation.py", "formats/rotation.py"): "rotation_matrix inverse_sqrt",
    ("triton/codec.py", "triton/pages.py"): "tile_pointers",
    ("triton/codec.py", "triton/codec.py"): "scale_value",
    ("triton/operands.py", "triton/codec.py"): "as_loaded",
    ("triton/operands.py", "triton/operands.py"): "_key_ptx _value_ptx _position",
    ("triton/encode.py", "triton/encode.py"): "constants _fold_sum",
    ("triton/encode.py", "triton/unbiased.py"): (
        "magnitude_of _level_of nearest_index unbiasing_factor _product"
    ),
    ("triton/scales.py", "triton/scales.py"): (
        "exponent_of power_of_two unfold nearest_level round_to_integer "
        "rounded_square _squared_error _of_words scale_floor scale_candidates at "
        "no_errors with_error normaliser_of choose_scales _by_group"
    ),
}


def functions(path: Path) -> dict[str, str]:
    """The functions of a module, without their comments and their layout."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {x.name: ast.dump(x) for x in body if isinstance(x, ast.FunctionDef)}


@pytest.mark.parametrize("own, theirs", SHARED)
def test_functions_are_those_of_the_series(own: str, theirs: str) -> None:
    """A change of one side is made on the other, or is noted here."""
    first = functions(FILES / OPS / own)
    series = functions(ROOT / "vllm_overlay" / OPS / theirs)
    for name in SHARED[own, theirs].split():
        assert first[name] == series[name], name


def test_golden_bytes_are_those_of_the_series() -> None:
    """All that it stores is stored so by the series."""
    first = json.loads((FILES / TESTS / "golden.json").read_text())
    overlay = ROOT / "vllm_overlay" / TESTS
    golden = json.loads((overlay / "formats/golden.json").read_text())
    assert first
    for layout, bytes_of in first.items():
        assert bytes_of == {name: golden[layout][name] for name in bytes_of}
