# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The modules beside this one, whatever pytest's import mode.
sys.path.insert(0, str(Path(__file__).parent))

from harness import WRITE_MODEL, Jobs  # noqa: E402

# Whoever begins one of these last goes on alone.
LONGEST = ("test_quality.py", "test_engine.py", "test_equality.py", "test_serve.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets the files that take minutes begin first."""
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model's folder."""
    folder = tmp_path_factory.mktemp("model") / "seeded-qwen3"
    subprocess.run([sys.executable, WRITE_MODEL, folder], check=True)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The seeded model as a Llama, of which each layer may have a window."""
    folder = tmp_path_factory.mktemp("llama") / "seeded-llama"
    subprocess.run([sys.executable, WRITE_MODEL, folder, "--llama"], check=True)
    return str(folder)


@pytest.fixture(scope="session")
def jobs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    runs = Jobs(tmp_path_factory.mktemp("jobs"), model)
    yield runs
    runs.stop()
