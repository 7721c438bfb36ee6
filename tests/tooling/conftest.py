# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Shared fixtures of the tooling's tests."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmarks", "ci")]

import trees  # noqa: E402
from turbo_series.model import Series, load_series  # noqa: E402
from turbo_series.target import Target, open_target  # noqa: E402


@pytest.fixture(scope="session")
def project_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    return trees.make_project(folder / "project", folder / "work")


@pytest.fixture(scope="session")
def series(project_source: Path) -> Series:
    """The series; not to be changed."""
    return load_series(project_source)


@pytest.fixture
def project(project_source: Path, tmp_path: Path) -> Path:
    """A project folder of the test's own."""
    return Path(shutil.copytree(project_source, tmp_path / "project"))


@pytest.fixture(autouse=True)
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the inodes that are to be synced, in place of syncing them.

    Syncing is slow. It matters when a machine stops, not when a process is killed.
    """
    inodes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: inodes.append(os.fstat(fd).st_ino))
    return inodes


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Target]:
    """Make a base tree of some kind and open it."""

    def build(kind: str) -> Target:
        return open_target(str(trees.MAKERS[kind](tmp_path / kind)))

    return build


@pytest.fixture
def tree(make: Callable[[str], Target], request: pytest.FixtureRequest) -> Target:
    """A base tree of each kind, unless a test is parametrized indirectly."""
    return make(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tree" in metafunc.fixturenames:
        metafunc.parametrize("tree", list(trees.MAKERS), indirect=True)
