# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The folders that tests import from, whatever pytest's import mode.
FOLDERS = ("tests/engine", "scripts", "benchmarks", "ci", "tests/quality")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]
pytest.register_assert_rewrite("ways")

from harness import WRITE_MODEL, Jobs  # noqa: E402

# Files that take minutes. A worker that began one of these last would end alone.
LONGEST = (
    "test_quality.py",
    "test_engine.py",
    "test_check_model.py",
    "test_disaggregated.py",
    "test_recent_window.py",
    "test_drafts.py",
    "test_quickstart.py",
    "test_serve.py",
    "test_families.py",
    "test_plan_command.py",
    "test_plan.py",
    "test_model_benchmark.py",
)
NUM_LEFT_OUT = pytest.StashKey[int]()
CACHE = pytest.StashKey[str]()
LEFT_OUT = "tests of the matrix left out"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also tests of the matrix")


def pytest_configure(config: pytest.Config) -> None:
    marker = "matrix: one of many like it, which is run with --all alone"
    config.addinivalue_line("markers", marker)
    # Engines keep means of K in vLLM's cache, and workers share one that is not the
    # user's.
    if not hasattr(config, "workerinput"):
        config.stash[CACHE] = os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp()


def pytest_unconfigure(config: pytest.Config) -> None:
    if CACHE in config.stash:
        shutil.rmtree(config.stash[CACHE])


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves the matrix out, and lets the files that take minutes begin first."""
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=left_out)
        config.stash[NUM_LEFT_OUT] = len(left_out)
        # Each of several workers collects all tests, and another process reports.
        getattr(config, "workeroutput", {})[LEFT_OUT] = len(left_out)
        items[:] = [item for item in items if item not in left_out]
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the number from a worker."""
    output = getattr(node, "workeroutput", {})
    if LEFT_OUT in output:
        node.config.stash[NUM_LEFT_OUT] = output[LEFT_OUT]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if num := config.stash.get(NUM_LEFT_OUT, 0):
        line = f"left out: {num} tests of the matrix, which run with --all"
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model's folder."""
    folder = tmp_path_factory.mktemp("model") / "seeded-qwen3"
    subprocess.run([sys.executable, WRITE_MODEL, folder], check=True)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The seeded model as a Llama, each layer of which may have a window."""
    folder = tmp_path_factory.mktemp("llama") / "seeded-llama"
    subprocess.run([sys.executable, WRITE_MODEL, folder, "--llama"], check=True)
    return str(folder)


@pytest.fixture(scope="session")
def ops() -> Any:
    """All stand-ins for native ops as vLLM calls them: by name, and with a schema."""
    import torch
    from vllm_turbo_cpu_standins import registry

    registry.register_missing("turbo_standins_all")
    return torch.ops.turbo_standins_all


@pytest.fixture(scope="session")
def jobs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    runs = Jobs(tmp_path_factory.mktemp("jobs"), model)
    yield runs
    runs.stop()
