# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""ci/lower_kernels.py: launches in the interpreter, which a compiler then reads."""

import os
import sys
from pathlib import Path

import trees
from covering import covering

STANDINS = trees.ROOT / "cpu_standins"
# The interpreter takes a sum that begins as an integer and becomes a float.
KERNELS = """
from typing import NamedTuple

import triton
import triton.language as tl


class Sizes(NamedTuple):
    count: int


@triton.jit
def good(x_ptr, y_ptr, sizes, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    mask = places < sizes.count
    total = tl.load(x_ptr + places, mask=mask)
    if y_ptr is not None:
        total += tl.load(y_ptr + places, mask=mask)
    tl.store(x_ptr + places, total, mask=mask)


@triton.jit
def changing(x_ptr, count, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    total = 0
    for _ in range(count):
        total += tl.load(x_ptr + places)
    tl.store(x_ptr + places, total)
"""
TESTS = """
import odd_kernels as odd
import torch


def test_kernels():
    x, y = torch.ones(8), torch.ones(8)
    for count in (3, 5, 16):
        odd.good[(1,)](x, None, odd.Sizes(count), COUNT=8, num_warps=1)
    odd.good[(1,)](x, y, sizes=odd.Sizes(1), COUNT=8)
    odd.changing[(1,)](x, 2, 8)
    assert x[0] == 4
"""


def run(folder: Path, *args: str, **variables: str) -> trees.Done:
    path = os.pathsep.join((str(folder), str(STANDINS)))
    environment = {k: v for k, v in os.environ.items() if "PYTEST" not in k}
    environment |= {"PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu", **variables}
    return trees.run(sys.executable, *args, cwd=folder, env=environment)


def test_a_kernel_that_a_compiler_refuses(tmp_path):
    """Other kernels, which the same tests launch, are lowered."""
    launches = tmp_path / "launches"
    launches.mkdir()
    (tmp_path / "odd_kernels.py").write_text(KERNELS)
    (tmp_path / "test_odd.py").write_text(TESTS)
    words = "-m", "pytest", "-q", "-p", "vllm_turbo_cpu_standins.launches"
    variables = {"TURBO_LAUNCHES": str(launches), "TURBO_LAUNCHES_OF": "odd_"}
    variables |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run(tmp_path, *words, "test_odd.py", **variables)
    assert done.returncode == 0, done.stdout
    done = run(tmp_path, str(trees.ROOT / "ci/lower_kernels.py"), str(launches))
    assert done.returncode == 1
    assert "changing: " in done.stdout and "odd_kernels" in done.stdout
    assert "good: " not in done.stdout
    # 3 and 5 give the same code. 16 gives another, but is as well a size.
    assert (
        "3 of 4 launches" in done.stdout and "1 of changing, 2 of good" in done.stdout
    )


def test_no_launches(tmp_path):
    done = run(tmp_path, str(trees.ROOT / "ci/lower_kernels.py"), str(tmp_path))
    assert done.returncode == 1 and "no launches" in done.stderr


def test_values_that_occur_together():
    cases = ["ab", "a", "cd", "ac", "abc", "d"]
    assert covering(cases, list, together=1) == ["ab", "cd"]
    assert covering(cases, list, together=2) == ["ab", "cd", "ac", "abc"]
