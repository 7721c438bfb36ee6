# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""ci/shards.py: parts of a suite, and the GPU that each worker has."""

import os
import sys
from pathlib import Path

import pytest
import trees

TESTS = """
import os

import pytest


@pytest.mark.parametrize("number", range(7))
def test_number(number):
    print("GPU", os.environ.get("CUDA_VISIBLE_DEVICES"))
"""


def run(folder: Path, *args: str, **variables: str) -> trees.Done:
    (folder / "test_numbers.py").write_text(TESTS)
    environment = {k: v for k, v in os.environ.items() if "PYTEST" not in k}
    environment |= {"PYTHONPATH": str(trees.ROOT / "ci"), **variables}
    command = (sys.executable, "-m", "pytest", "-p", "shards", "-q", *args, ".")
    return trees.run(*command, cwd=folder, env=environment)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_each_test_is_in_one_part(tmp_path, count):
    found = []
    for number in range(1, count + 1):
        done = run(tmp_path, "--collect-only", "--shard", f"{number}/{count}")
        # Pytest's status for no tests.
        assert done.returncode == (5 if number > 7 else 0), done.stdout
        found += [line for line in done.stdout.splitlines() if "::" in line]
    assert len(found) == len(set(found)) == 7


@pytest.mark.parametrize("text", ["0/2", "3/2", "a/2"])
def test_a_part_that_there_is_not(tmp_path, text):
    done = run(tmp_path, f"--shard={text}")
    assert done.returncode == 4
    assert f"--shard {text}" in done.stderr


def test_workers_share_gpus(tmp_path):
    done = run(tmp_path, "-n", "3", "-rP", CUDA_VISIBLE_DEVICES="4,6")
    assert done.returncode == 0, done.stdout
    used = {line for line in done.stdout.splitlines() if line.startswith("GPU")}
    assert used <= {"GPU 4", "GPU 6"} and "GPU 4,6" not in done.stdout


def test_one_process_has_all_gpus(tmp_path):
    done = run(tmp_path, "-rP", CUDA_VISIBLE_DEVICES="4,6")
    assert "GPU 4,6" in done.stdout
