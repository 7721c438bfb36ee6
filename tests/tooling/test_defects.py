# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The defects that ci/ plants in the CUDA kernels still are changes to the sources."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))

from cuda_defects import DEFECTS, SANITIZER_DEFECTS, TESTS, Defect  # noqa: E402

SOURCES = ROOT / "vllm_overlay/vllm/v1/attention/ops/turbo/cuda/csrc"
# Of the sanitizer's, some are in the inputs.
PLANTED = {
    name: defect
    for name, defect in (DEFECTS | SANITIZER_DEFECTS).items()
    if defect is not None
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_a_defect_replaces_is_there(name: str) -> None:
    """As often as it says, or planting it fails, on a GPU."""
    defect: Defect = PLANTED[name]
    text = (SOURCES / defect.source).read_text()
    assert text.count(defect.old) == defect.times
    assert defect.new != defect.old


@pytest.mark.parametrize("name", DEFECTS)
def test_its_test_is_there(name: str) -> None:
    path, _, function = DEFECTS[name].test.partition("::")
    assert f"def {function}(" in (TESTS / path).read_text()
