# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The verdicts of ci/families.py, which needs a GPU, on its engines' reports."""

import importlib.util
import math
from typing import Any

import pytest
from harness import ROOT

spec = importlib.util.spec_from_file_location(
    "gpu_families", ROOT / "ci" / "families.py"
)
assert spec is not None and spec.loader is not None
gpu_families = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_families)

PACKED = {
    "arm": "turbo4",
    "kl_mean": 0.3,
    "backends": ["TURBO"],
    "window_layers": 4,
    "capacity": 3.76,
}
ROW = {"cuda_kl_mean": 0.3, "triton_kl_mean": 0.25, "backends": ["TURBO"]}


def test_figures() -> None:
    arms = [{"arm": "auto"}, PACKED, {"arm": "fp8", "kl_mean": 0.1}]
    facts = {"backends": ["TURBO"], "window_layers": 4, "capacity": 3.76}
    cuda = {"cuda_kl_mean": 0.3, "fp8_kl_mean": 0.1} | facts
    assert gpu_families.figures(arms, "cuda") == cuda
    assert gpu_families.figures(arms, "triton") == {"triton_kl_mean": 0.3} | facts


def test_what_fp8_cannot_serve_is_no_fault() -> None:
    arms = [PACKED, {"arm": "fp8", "error": "no"}]
    found = gpu_families.figures(arms, "cuda")
    assert found["fp8_error"] == "no" and "error" not in found


def test_an_engine_that_failed_is_told() -> None:
    arms = [{"arm": "turbo4", "error": "no kernel"}, {"arm": "fp8", "kl_mean": 0.1}]
    assert gpu_families.figures(arms, "cuda") == {"error": "no kernel"}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, ""),
        ({"triton_kl_mean": 0.19}, "as far off"),
        ({"cuda_kl_mean": 0.4}, "as far off"),
        ({"cuda_kl_mean": 0.0, "triton_kl_mean": 0.0}, "as far off"),
        ({"cuda_kl_mean": math.nan}, "as far off"),
        ({"backends": ["FLASH_ATTN"]}, "another backend"),
        ({"error": "no"}, "did not run"),
    ],
)
def test_a_family_is_judged(changes: dict[str, Any], wrong: str) -> None:
    found = gpu_families.judge(ROW | changes)
    assert wrong in found and bool(wrong) == bool(found)
