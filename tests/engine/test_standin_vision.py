# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stand-ins for torchvision's ops, where its library does not load."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import run_python
from vllm_turbo_cpu_standins.vision import SCHEMAS, define_missing

# A process that imports nothing of ours runs this.
USE = """
import torch, torchvision
from torchvision.transforms.v2 import functional
print(*functional.resize(torch.rand(3, 20, 20), [10, 10]).shape)
boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
print("nms" if torchvision.extension._has_ops() else "no nms")
try:
    torchvision.ops.nms(boxes, torch.ones(1), 0.5)
except RuntimeError as error:
    print(error)
"""


@pytest.fixture
def make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Path | None], str]:
    """Makes a package with a library or without, and returns its name."""

    def make_package(name: str, library: Path | None) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        if library is not None:
            shutil.copy(library, tmp_path / name / "_C.so")
        return name

    monkeypatch.syspath_prepend(tmp_path)
    return make_package


def test_import():
    """Every process has the ops, and torchvision refuses to call them."""
    done = run_python("-c", USE)
    assert done.returncode == 0, done.stderr
    size, has_ops, *error = done.stdout.splitlines()
    assert size == "3 10 10"
    if has_ops == "no nms":
        assert "Couldn't load custom C++ ops" in error[0]


def test_ops_of_a_library_that_does_not_load(make):
    package = make("vision_of_another_machine", Path(__file__))
    assert define_missing(package) == list(SCHEMAS)
    for name in SCHEMAS:
        torch.library.register_fake(f"{package}::{name}")(lambda *args: None)
    # A second call finds nothing missing.
    assert define_missing(package) == []


def test_ops_without_a_library(make):
    assert define_missing(make("vision_in_python", None)) == list(SCHEMAS)


def test_a_library_that_loads_has_its_own(make):
    library = Path(torch.__file__).parent / "lib" / "libshm.so"
    package = make("vision_of_this_machine", library)
    assert define_missing(package) == []
    assert not hasattr(getattr(torch.ops, package), "nms")


def test_no_package():
    assert define_missing("vision_that_is_not_here") == []
    assert not hasattr(torch.ops.vision_that_is_not_here, "nms")
