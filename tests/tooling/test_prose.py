# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sentences to be rewritten are found in docstrings and comments."""

import sys
from pathlib import Path

import prose
import pytest

LONG = " ".join(["word"] * 31)
FILES = {
    "a.py": f'''"""What a module does."""
# SPDX-License-Identifier: Apache-2.0


def f(x, y):
    """Say nothing.

    Args:
        x: Of two numbers the larger.
        y: A number.

    Of the rest.
    """
    # Those of a comment
    # of two lines.
    return x  # What stands behind code does not count.


# {LONG}.
TEXT = "Of a string, as ever."
''',
    "b.cuh": f"// Of a header.\n//\n// {LONG}.\nint x;  // What\n  // Often so.\n",
    "c.sh": "#!/bin/sh\n# What it does.\n# shellcheck disable=SC2086\necho Of\n",
}
EXPECTED = {
    "a.py": [
        (1, "openings"), (6, "openings"), (6, "openings"), (14, "openings"),
        (19, "long sentences"),
    ],
    "b.cuh": [(1, "openings"), (3, "long sentences")],
    "c.sh": [(2, "openings")],
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_faults(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FILES[name])
    found = prose.find_faults(tmp_path / name, name)
    assert sorted((fault.line, fault.kind) for fault in found) == EXPECTED[name]


def test_a_broken_bound_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    files = [(tmp_path / name, name) for name in FILES]
    monkeypatch.setattr(prose, "find_files", lambda: files)
    monkeypatch.setattr(sys, "argv", ["prose.py", "--check"])
    monkeypatch.setattr(prose, "BOUNDS", {"openings": 6, "long sentences": 2})
    assert prose.main() == 0
    monkeypatch.setitem(prose.BOUNDS, "openings", 5)
    assert prose.main() == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "openings: 6, at most 5 are allowed; most are in"
    assert told[1] == "  a.py: 4"
