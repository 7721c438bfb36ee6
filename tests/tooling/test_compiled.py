# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""ci/compiled.py: tests that compile kernels which have not changed are left out."""

import re
import sys
from pathlib import Path

import compiled
import pytest
import trees

OVERLAY = trees.ROOT / "vllm_overlay/tests/kernels/turbo"
TESTS = """
import pytest


@pytest.mark.parametrize(
    "name, capability", [("decode a", 80), ("merge b", 80), ("store c", 90)]
)
def test_compiles_and_spills_no_more_than_is_recorded(name, capability):
    pass


def test_gather_compiles_without_spills():
    pass


def test_other():
    pass
"""
RUNNER = """
import os, sys, compiled, pytest
compiled.find_unchanged = lambda: sys.argv[1].split()
compiled.shutil.which = lambda name: name
sys.exit(pytest.main(["-p", "compiled", "-v", *sys.argv[2:]]))
"""


def run(folder: Path, unchanged: str, *args: str) -> tuple[list[str], str]:
    (folder / "test_cases.py").write_text(TESTS)
    words = (sys.executable, "-c", RUNNER, unchanged, *args, ".")
    done = trees.run(*words, cwd=folder, env={"PYTHONPATH": str(trees.ROOT / "ci")})
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"::test_(\w+(?:\[.*\])?) PASSED", done.stdout), done.stdout


def test_changed_kernels_are_compiled(tmp_path: Path) -> None:
    """And one that has not changed, because nvcc or its flags may have."""
    found, said = run(tmp_path, "decode merge latent_gather")
    compiles = "compiles_and_spills_no_more_than_is_recorded"
    assert found == [f"{compiles}[merge b-80]", f"{compiles}[store c-90]", "other"]
    assert f"{compiled.LEFT_OUT}: decode latent_gather" in said


def test_all_are_compiled_without_a_record(tmp_path: Path) -> None:
    found, said = run(tmp_path, "")
    assert len(found) == 5 and "left out" not in said


def test_several_processes_leave_out_the_same(tmp_path: Path) -> None:
    _, said = run(tmp_path, "decode", "-n", "2")
    assert "4 passed" in said and f"{compiled.LEFT_OUT}: decode" in said


@pytest.mark.parametrize("name", compiled.TESTS)
def test_the_tests_are_there(name: str) -> None:
    """A test that has another name would be run each time."""
    texts = [path.read_text() for path in OVERLAY.rglob("test_*.py")]
    assert sum(f"\ndef {name}(" in text for text in texts) == 1
