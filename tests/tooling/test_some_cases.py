# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""ci/some_cases.py: cases that have every value of every parameter."""

import re
import sys
from pathlib import Path

import trees

TESTS = """
import pytest


class Kernel:
    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize("kernel", [Kernel("triton"), Kernel("cuda")])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_many(dtype, size, kernel):
    assert (size, dtype) != (256, "fp16")


class Layout(Kernel):
    def __str__(self):
        return f"{self.name} of {self.size}"


def layout(size):
    made = Layout("turbo4")
    made.size = size
    return made


@pytest.mark.parametrize("layout", [layout(x) for x in (64, 128, 64, 128, 64)])
def test_layouts(layout):
    pass


@pytest.mark.parametrize("size", range(4))
def test_few(size):
    pass


@pytest.mark.skipif(False, reason="")
def test_one():
    pass


def test_key_levels_are_the_fit():
    pass
"""


def run(folder: Path, *args: str) -> tuple[int, str]:
    (folder / "test_cases.py").write_text(TESTS)
    words = (sys.executable, "-m", "pytest", "-p", "some_cases", "-q", *args, ".")
    done = trees.run(*words, cwd=folder, env={"PYTHONPATH": str(trees.ROOT / "ci")})
    return done.returncode, done.stdout


def test_cases_have_every_value(tmp_path: Path) -> None:
    status, said = run(tmp_path, "--collect-only")
    assert status == 0, said
    many = re.findall(r"test_many\[(.*)\]", said)
    assert len(many) == 5
    values = {value for case in many for value in case.split("-")}
    assert values == {"fp16", "bf16", "64", "128", "256", "kernel0", "kernel1"}
    assert said.count("::test_layouts") == 2
    assert said.count("test_few") == 4 and said.count("test_one") == 1
    assert "12/23 tests collected (11 deselected)" in said


def test_processes_choose_the_same(tmp_path: Path) -> None:
    """Otherwise pytest-xdist ends with an error."""
    status, said = run(tmp_path, "-n", "2")
    assert status == 1 and "1 failed, 11 passed" in said, said
    assert "cases whose values others have, which run with --all" in said
