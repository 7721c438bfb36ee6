# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The shape of the code is counted, and a broken bound is told with its places."""

import sys
from pathlib import Path

import house
import pytest

KERNEL = """
@triton.jit
def _kernel(a, b, c):
    a

    return b
"""
WIDE = "class A:\n    def wide(self, a, b, c, d, e, f, g, h, *, i):\n        pass\n"
FILES = {
    "triton/store.py": KERNEL,
    "runtime.py": WIDE,
    "narrow.py": "def narrow(a, b, c, d, e, f, g, h, i):\n    pass\n",
    "long.py": "\n" * 401,
    "format.py": "\n" * 500,
    "cuda/csrc/a/a.cuh": "\n" * 402,
}


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, house.Count]:
    overlay = tmp_path / "vllm_overlay"
    turbo = overlay / house.TURBO.relative_to(house.OVERLAY)
    for name, text in FILES.items():
        path = turbo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "OVERLAY", overlay)
    monkeypatch.setattr(house, "TURBO", turbo)
    return {count.name: count for count in house.find_counts()}


def test_counts(counts: dict[str, house.Count]) -> None:
    values = {name: count.value for name, count in counts.items()}
    lines = sum(text.count("\n") for text in FILES.values())
    assert values["lines of the product, Python"] == lines - 402
    assert values["lines of the product, CUDA"] == 402
    assert values["files at turbo/"] == 4
    assert values["lines of the longest Triton kernel"] == 4
    assert values["parameters of the widest Triton kernel"] == 3


def test_places_are_told(counts: dict[str, house.Count]) -> None:
    (wide,) = counts["functions with 10 or more parameters, no kernels"].places
    assert wide.endswith("runtime.py:2 wide")
    places = counts["files of the product over 400 lines"].places
    assert [Path(place).name for place in places] == ["a.cuh", "long.py"]


def test_a_broken_bound_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["house.py", "--check"])
    assert house.main() == 0
    monkeypatch.setitem(house.BOUNDS, "root", 3)
    assert house.main() == 1
    told = capsys.readouterr().out
    assert told.startswith("files at turbo/: ") and "at most 3 are allowed" in told
    assert "  format.py" in told
