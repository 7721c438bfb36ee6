# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Building the CUDA kernels, and finding what has been built."""

import errno
import logging
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import regex as re
import torch

from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.ops.turbo.cuda import build as cuda_build
from vllm.v1.attention.ops.turbo.cuda.build import CudaModule, build, build_and_load

from ..build_utils import (
    DEVICE,
    TIMEOUT_S,
    FlashInfer,
    all_failures,
    set_flashinfer,
)

MODULE = CudaModule("decode", "turbo4_128", "#define A 1\n", ("-DB",))


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FlashInfer:
    return set_flashinfer(monkeypatch, tmp_path)


def build_text() -> str:
    """Build the module; return the text that stands for its library."""
    return build(MODULE, DEVICE).read_text()


def test_builds_once_and_says_so(flashinfer, log):
    assert build_text() == MODULE.header
    (name,) = flashinfer.builds
    assert name.startswith("turbo_decode_turbo4_128_sm90_")
    target = "-gencode=arch=compute_90,code=sm_90"
    # FlashInfer's own -O3 comes before: nvcc takes the last -O, for host code alone.
    assert flashinfer.flags == [target, "-O1", "-DB"]
    (text,) = log.infos
    assert "Building" in text and "decode" in text and "turbo4_128" in text
    # As in another process: FlashInfer compiles nothing if the header is unchanged.
    header = flashinfer.folder / "generated" / name / cuda_build.HEADER_NAME
    os.utime(header, (1, 1))
    assert build_text() == MODULE.header
    assert flashinfer.builds == [name, name] and len(log) == 1
    assert header.stat().st_mtime == 1, "a new header would be compiled again"
    assert list(header.parent.iterdir()) == [header]


def test_processes_that_start_together_build_once(flashinfer, monkeypatch, tmp_path):
    """The ranks of a host start together."""
    log = tmp_path / "builds"
    build = FlashInfer.Spec.build
    context = multiprocessing.get_context("fork")
    together = context.Barrier(2, timeout=TIMEOUT_S)

    def slow_build(spec: FlashInfer.Spec) -> None:
        # Ninja finds the library up to date.
        if spec.jit_library_path.exists():
            return
        with log.open("a") as file:
            file.write(f"{spec.name}\n")
        # Long enough for the other process to come here, if no lock stops it.
        time.sleep(1)
        build(spec)

    def rank() -> None:
        together.wait()
        assert build_text() == MODULE.header

    monkeypatch.setattr(FlashInfer.Spec, "build", slow_build)
    ranks = [context.Process(target=rank) for _ in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert len(log.read_text().splitlines()) == 1


def test_header_of_a_broken_build_is_replaced(flashinfer):
    build_text()
    (header,) = (flashinfer.folder / "generated").glob(f"*/{cuda_build.HEADER_NAME}")
    header.write_text("#define A")
    assert build_text() == MODULE.header


def test_every_part_is_in_the_name(monkeypatch, tmp_path):
    """Installing a package does not keep times by which to tell old from new files."""
    shutil.copytree(cuda_build.SOURCE_DIR, tmp_path / "cuda")
    monkeypatch.setattr(cuda_build, "SOURCE_DIR", tmp_path / "cuda")
    names = {cuda_build.module_name(MODULE, "90")}
    assert names == {cuda_build.module_name(MODULE, "90")}
    names.add(cuda_build.module_name(MODULE, "86"))
    names.add(cuda_build.module_name(MODULE._replace(flags=()), "90"))
    names.add(cuda_build.module_name(MODULE._replace(header="#define A 2"), "90"))
    names.add(cuda_build.module_name(MODULE._replace(kernel="store"), "90"))
    for source in ("decode/decode.cu", "common/tile.cuh"):
        with (tmp_path / "cuda" / source).open("a") as file:
            file.write("//\n")
        names.add(cuda_build.module_name(MODULE, "90"))
    monkeypatch.setattr(cuda_build.metadata, "version", lambda name: f"other {name}")
    names.add(cuda_build.module_name(MODULE, "90"))
    assert len(names) == 8


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths of loaded libraries; a library is a text that its function returns."""
    paths: list[Path] = []

    def load_function(path: Path, name: str) -> str:
        paths.append(path)
        return path.read_text()

    monkeypatch.setattr(cuda_build, "_load_function", load_function)
    return paths


@pytest.fixture
def without_tools(flashinfer: FlashInfer, monkeypatch: pytest.MonkeyPatch):
    """A function that removes programs, FlashInfer and filelock."""

    def take() -> None:
        flashinfer.tools.clear()
        for name in ("flashinfer", "flashinfer.jit", "filelock"):
            monkeypatch.setitem(sys.modules, name, None)

    return take


@pytest.mark.parametrize("place", ["cache", "package"])
def test_a_built_library_needs_no_tools(
    flashinfer, loaded, without_tools, log, monkeypatch, tmp_path, place
):
    """A library that was built loads without tools, from a read-only file system."""
    library = build(MODULE, DEVICE)
    if place == "package":
        library = shutil.copytree(library.parent, tmp_path / "prebuilt") / library.name
        shutil.rmtree(flashinfer.folder)
    without_tools()
    log.clear()

    # Permissions would not stop root from writing.
    def refuse(path: Path, *args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for name in ("mkdir", "replace", "touch", "write_bytes", "write_text"):
        monkeypatch.setattr(Path, name, refuse)
    assert build_and_load(MODULE, DEVICE) == MODULE.header
    assert loaded == [library] and len(flashinfer.builds) == 1 and not log
    # A module with another header is not found.
    with pytest.raises(RuntimeError, match="FlashInfer cannot be imported"):
        build_and_load(MODULE._replace(header="#define A 2"), DEVICE)


@pytest.mark.parametrize("fault", ["not whole", "changed"])
def test_an_incomplete_library_is_not_loaded(
    flashinfer, loaded, without_tools, log, fault
):
    library = build(MODULE, DEVICE)
    if fault == "changed":
        library.write_text("#define")
    else:
        library.with_suffix(".sha256").unlink()
    found = build_and_load(MODULE, DEVICE)
    assert found == MODULE.header and len(flashinfer.builds) == 2
    assert len(log.warnings) == (fault == "changed")
    assert all(str(library) in text and "SHA-256" in text for text in log.warnings)
    library.with_suffix(".sha256").write_text("0")
    without_tools()
    with pytest.raises(RuntimeError, match="FlashInfer cannot be imported"):
        build_and_load(MODULE, DEVICE)


def test_a_library_that_does_not_load_is_built_again(
    flashinfer, without_tools, log, monkeypatch, tmp_path
):
    library = build(MODULE, DEVICE)
    prebuilt = shutil.copytree(library.parent, tmp_path / "prebuilt") / library.name

    def load_function(path: Path, name: str) -> str:
        if path == prebuilt:
            raise OSError("libcudart.so.13: cannot open")
        return path.read_text()

    monkeypatch.setattr(cuda_build, "_load_function", load_function)
    assert build_and_load(MODULE, DEVICE) == MODULE.header
    assert log[-1].level == logging.WARNING
    assert re.search(f"{prebuilt}.*built anew.*libcudart", log[-1].text)
    without_tools()
    with pytest.raises(RuntimeError, match="FlashInfer cannot be imported"):
        build_and_load(MODULE, DEVICE)


@all_failures
def test_failures_name_the_way_out(flashinfer, monkeypatch, fail, message):
    fail(flashinfer, monkeypatch)
    with pytest.raises(RuntimeError, match=f"(?s)cannot be built: .*{message}") as e:
        build_text()
    assert len(str(e.value)) < 5000, "the compiler's output is too long"


@pytest.mark.parametrize(
    "error",
    [
        OSError("libcudart.so.13: cannot open"),
        AttributeError("libcudart has no decode"),
    ],
    ids=["library", "function"],
)
def test_a_new_library_that_does_not_load(flashinfer, monkeypatch, error):
    def load_function(path: Path, name: str) -> None:
        assert name == "decode"
        raise error

    monkeypatch.setattr(cuda_build, "_load_function", load_function)
    with pytest.raises(RuntimeError, match="libcudart.*Remove .*turbo_decode") as e:
        build_and_load(MODULE, DEVICE)
    assert e.value.__cause__ is error


def test_a_module_is_built_for_the_device_that_runs_it(flashinfer, monkeypatch):
    """The device need not be the first, nor have the first one's capability."""
    capabilities = [DeviceCapability(9, 0), DeviceCapability(8, 6)]
    monkeypatch.setattr(
        current_platform, "get_device_capability", lambda index: capabilities[index]
    )
    for index, number in enumerate((90, 86)):
        build(MODULE, torch.device("cuda", index))
        assert flashinfer.flags[0] == f"-gencode=arch=compute_{number},code=sm_{number}"
    assert len(set(flashinfer.builds)) == 2
