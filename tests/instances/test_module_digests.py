# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A change of CUDA's modules is a reviewed change of the committed digests."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))

from module_digests import COMMITTED, find_digests, name_changes  # noqa: E402


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    return json.loads(COMMITTED.read_text())


def test_no_module_has_changed(committed: dict[str, Any]):
    """If a change is meant, ci/module_digests.py --write takes it over."""
    assert name_changes(find_digests(), committed) == []


def test_changes_are_named(committed: dict[str, Any]):
    other = copy.deepcopy(committed)
    other["modules"]["90"]["decode"] = "84 0"
    del other["modules"]["80"]["merge"]
    other["sources"]["store"] = "0"
    changes = name_changes(other, committed)
    assert [line.split(":")[0] for line in changes] == [
        "store",
        "merge for sm_80",
        "decode for sm_90",
    ]
