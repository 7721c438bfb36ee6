# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A pytest plugin that runs one part of the tests, and gives each worker a GPU.

``--shard 1/3`` runs the first test, the fourth and so on. Neighbours are cases of one
test and take about as long, so the parts do as well.

Workers of pytest-xdist take the visible GPUs by turns.
"""

import os
import shutil
import subprocess

import pytest


def _share_gpus() -> None:
    """Leave this worker one GPU, before CUDA is initialised."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if gpus == [""]:
        if shutil.which("nvidia-smi") is None:
            return
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        gpus = [str(i) for i in range(listed.stdout.count("GPU "))]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker[2:]) % len(gpus)]


_share_gpus()


def parse_shard(text: str) -> tuple[int, int]:
    """Returns a part's number, from one on, and the number of parts."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal()):
        raise pytest.UsageError(f"--shard {text}: want NUMBER/COUNT, such as 1/3")
    if not 1 <= int(number) <= int(count):
        raise pytest.UsageError(f"--shard {text}: {number} is not within 1 to {count}")
    return int(number), int(count)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", help="such as 1/3: the first of three parts")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    text = config.getoption("--shard")
    if text is None:
        return
    number, count = parse_shard(text)
    parts = [items[i::count] for i in range(count)]
    kept = parts.pop(number - 1)
    config.hook.pytest_deselected(items=[item for part in parts for item in part])
    items[:] = kept
