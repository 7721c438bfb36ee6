# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CUDA kernels that are built ahead, and loaded where nothing can be built."""

import argparse
import ctypes
import importlib.util
import json
import lzma
import multiprocessing
import os
import subprocess
import sys
import tarfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import regex as re
import torch

from vllm.config import set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl
from vllm.v1.attention.ops.turbo.cuda import build as cuda_build
from vllm.v1.attention.ops.turbo.cuda import built as cuda_built
from vllm.v1.attention.ops.turbo.cuda import family as cuda_family
from vllm.v1.attention.ops.turbo.cuda import prebuild
from vllm.v1.attention.ops.turbo.cuda.build import version_of_tvm_ffi
from vllm.v1.attention.ops.turbo.cuda.compiler import find_nvcc
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES
from vllm.v1.attention.ops.turbo.serving.startup import describe_cache

from ..backend_utils import make_vllm_config
from ..build_utils import TIMEOUT_S, set_platform
from ..utils import ON_GPU, requires_triton
from . import compile_kernels

NVCC = find_nvcc()
# A compiler whose libraries hold its arguments. It fails if they contain $BROKEN.
COMPILER = """#!/bin/sh
[ "$1" != --version ] || { echo "Cuda compilation tools, release 13.1, V1"; exit; }
for argument; do
  case $argument in
    -o=*) output=${argument#-o=} ;;
  esac
done
case "$* " in
  *"$BROKEN"*) echo "error: what is $BROKEN" >&2 && exit 2 ;;
esac
echo "ptxas info: 0 bytes spill stores, 0 bytes spill loads" >&2
echo "ptxas info: Used 96 registers" >&2
echo "$*" >"$output"
"""
# Keeps the host's compiler from inlining TVM-FFI's functions, which takes longer than
# everything else.
SHORT_HOST_CODE = """
#include <tvm/ffi/base_detail.h>
#undef TVM_FFI_INLINE
#define TVM_FFI_INLINE inline
"""
# Nvcc, but not for store and decode. Their libraries have an empty function of the
# expected name, which is loaded and never called.
QUICK_COMPILER = """#!/bin/sh
for argument; do
  case $argument in
    -o=*) output=${{argument#-o=}} ;;
    */store.cu | */decode.cu) kernel=$(basename "$argument" .cu) ;;
  esac
done
[ "$kernel" ] || exec {nvcc} "$@"
echo "extern \\"C\\" int __tvm_ffi_$kernel() {{ return 0; }}" |
  g++ -x c++ -shared -fPIC -o "$output" -
"""
# A few modules: a store, a merge and a decode.
FEW = "^(store turbo4_128|merge 128|decode turbo4_128_8)$"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvcc").write_text(COMPILER)
    (folder / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("BROKEN", "nothing that is asked for")


def run(*args: str | Path) -> int:
    return prebuild.main([str(arg) for arg in args])


def compile_run(monkeypatch: pytest.MonkeyPatch, *args: str | Path) -> int:
    """Run ``compile_kernels.py`` for a few modules."""
    argv = ["compile_kernels.py", "--modules", FEW, *map(str, args)]
    monkeypatch.setattr(sys, "argv", argv)
    return compile_kernels.main()


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / prebuild.MANIFEST).read_text())


@pytest.mark.parametrize(
    "text, capability",
    [("9.0", 90), ("90", 90), ("sm_90", 90), ("9.0a", 90), ("8.6", 86), ("12.0", 120)],
)
def test_spellings_of_an_architecture(text, capability):
    assert prebuild.parse_architecture(text) == capability


@pytest.mark.parametrize("text", ["7.5", "9", "9.1", "hopper", "", "9.0 "])
def test_other_architectures_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="none of 8.0, 8.6.* 12.0"):
        prebuild.parse_architecture(text)


def test_libraries_are_found_by_the_names_of_modules(compiler, tmp_path, capsys):
    """Each architecture has libraries that were built for it, each with its SHA-256."""
    folder = tmp_path / "made" / "here"
    args = ("--output", folder, "--modules", FEW)
    assert run("--arch", "8.0", "9.0", *args) == 0
    jobs = prebuild.jobs_for((80, 90), pattern=FEW)
    assert len(jobs) == 6 and len({job.library for job in jobs}) == 6
    for job in jobs:
        library = cuda_built.find_in(folder, job.library)
        assert library is not None and f"_sm{job.capability}_" in job.library
        asked = library.read_text()
        assert f"code=sm_{job.capability} " in asked and "-shared" in asked
        assert all(flag in asked for flag in job.module.flags)
    manifest = manifest_of(folder)
    assert manifest["tvm_ffi"] == version_of_tvm_ffi() and manifest["cuda"] == "13.1"
    assert set(manifest["libraries"]) == {job.library for job in jobs}
    for name, digest in manifest["libraries"].items():
        assert cuda_built.file_digest(folder / f"{name}.so") == digest
    files = {f"{job.library}{end}" for job in jobs for end in (".so", ".sha256")}
    assert {path.name for path in folder.iterdir()} == {prebuild.MANIFEST, *files}
    assert "6 modules, 6 to be built" in capsys.readouterr().out


def test_libraries_are_not_built_again(compiler, tmp_path, capsys):
    args = ("--output", tmp_path / "made", "--modules", FEW)
    assert run("--arch", "8.0", *args) == 0
    library = next((tmp_path / "made").glob("*.so"))
    library.write_text("half of")
    assert run("--arch", "8.0", *args) == 0
    assert "3 modules, 1 to be built" in capsys.readouterr().out
    # Another architecture's libraries are added.
    assert run("--arch", "9.0", *args) == 0
    assert len(manifest_of(tmp_path / "made")["libraries"]) == 6


def test_libraries_of_other_sources_are_not_listed(compiler, tmp_path, monkeypatch):
    args = ("--output", tmp_path / "made", "--modules", FEW)
    assert run("--arch", "8.0", *args) == 0
    monkeypatch.setattr(prebuild, "package_digest", lambda: "of others")
    assert run("--arch", "9.0", *args) == 0
    names = manifest_of(tmp_path / "made")["libraries"]
    assert len(names) == 3 and all("_sm90_" in name for name in names)


def test_some_dtypes_and_head_sizes(compiler, tmp_path):
    kinds = ("--kv-cache-dtype", "k4v3", "--head-size", "64")
    assert run("--arch", "8.9", "--output", tmp_path / "made", *kinds) == 0
    jobs = prebuild.jobs_for([89], ["k4v3"], [64])
    found = manifest_of(tmp_path / "made")["libraries"]
    assert set(found) == {job.library for job in jobs}
    assert len(found) < len(prebuild.jobs_for([89]))


def test_a_module_that_does_not_compile(compiler, tmp_path, monkeypatch, capsys):
    """Other modules are built even if one does not compile."""
    monkeypatch.setenv("BROKEN", "merge.cu")
    archive = tmp_path / "archive.tar.xz"
    args = ("--output", tmp_path / "made", "--modules", FEW, "--archive", archive)
    assert run("--arch", "9.0", *args) == 1
    said = capsys.readouterr().err
    assert "merge 128 for 9.0 was not compiled:\nerror: what is merge.cu" in said
    assert len(manifest_of(tmp_path / "made")["libraries"]) == 2
    assert not archive.exists()


def test_an_archive_has_the_files_of_the_manifest(compiler, tmp_path):
    """The archive's bytes follow from its contents, not from the time."""
    archives = [tmp_path / f"{number}.tar.xz" for number in (1, 2)]
    args = ("--output", tmp_path / "made", "--modules", FEW)
    for archive in archives:
        assert run("--arch", "9.0", *args, "--archive", archive) == 0
        os.utime(tmp_path / "made" / prebuild.MANIFEST, (1, 1))
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    unpacked, made = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("unpacked", "made")
    )
    assert unpacked == made


def test_an_archive_for_releases(compiler, tmp_path, monkeypatch, capsys):
    """The command that records resources also packs libraries, up to a bound."""
    table, archive = tmp_path / "table.json", tmp_path / "kernels.tar.xz"
    args = ("--output", table, "--archive", archive)
    assert compile_run(monkeypatch, *args) == 0
    found = json.loads(table.read_text())["modules"]
    assert set(found) == {"store turbo4_128", "merge 128", "decode turbo4_128_8"}
    for row in found.values():
        assert row == {str(capability): [96, 0] for capability in ARCHITECTURES}
    with tarfile.open(archive) as tar:
        file = tar.extractfile(prebuild.MANIFEST)
        assert file is not None
        listed = json.loads(file.read())["libraries"]
    jobs = prebuild.jobs_for(ARCHITECTURES, pattern=FEW)
    assert set(listed) == {job.library for job in jobs} and len(jobs) == 18
    monkeypatch.setattr(compile_kernels, "_MAX_PACKED_BYTES", 10)
    assert compile_run(monkeypatch, *args) == 1
    assert "bytes packed, not 10 at most" in capsys.readouterr().out


def test_libraries_of_a_former_run_are_kept(compiler, tmp_path, monkeypatch, capsys):
    """A repeated run gives the same table and rebuilds libraries that are not whole."""
    folder, table = tmp_path / "kept", tmp_path / "table.json"
    args = ("--arch", "9.0", "--folder", folder, "--output", table)
    assert compile_run(monkeypatch, *args) == 0
    first = table.read_text()
    libraries = sorted(folder.glob("*.so"))
    made = {path: path.stat().st_mtime_ns for path in libraries}
    assert len(made) == 3
    broken, unlisted, kept = made
    broken.write_text("half of")
    unlisted.with_suffix(".ptxas").unlink()
    assert compile_run(monkeypatch, *args) == 0
    assert table.read_text() == first
    again = {path for path, then in made.items() if path.stat().st_mtime_ns != then}
    assert again == {broken, unlisted} and kept not in again
    # Spills beyond the record are an error in a repeated run also.
    recorded = tmp_path / "recorded.json"
    recorded.write_text(first)
    monkeypatch.setattr(compile_kernels, "RECORDED", recorded)
    kept.with_suffix(".ptxas").write_text(
        "Used 9 registers\n4 bytes spill stores, 4 bytes spill loads"
    )
    assert compile_run(monkeypatch, *args) == 1
    assert "8 bytes of spills, not 0" in capsys.readouterr().out


def test_an_archive_of_several_streams(compiler, tmp_path, monkeypatch):
    """Streams are compressed in parallel, and read as one."""
    args = ("--output", tmp_path / "made", "--modules", FEW)
    one, several = tmp_path / "one.tar.xz", tmp_path / "several.tar.xz"
    assert run("--arch", "9.0", *args, "--archive", one) == 0
    monkeypatch.setattr(prebuild, "_STREAM_BYTES", 1000)
    assert run("--arch", "9.0", *args, "--archive", several) == 0
    magic = b"\xfd7zXZ\x00"
    assert one.read_bytes().count(magic) == 1 < several.read_bytes().count(magic)
    assert lzma.decompress(one.read_bytes()) == lzma.decompress(several.read_bytes())
    with tarfile.open(several) as tar:
        assert len(tar.getnames()) == 7


def test_an_archive_of_several_runs(compiler, tmp_path, monkeypatch):
    """Several runs fill an archive: all architectures take too long for one command."""
    folder, archive = tmp_path / "kept", tmp_path / "kernels.tar.xz"
    for arch, more in (("8.0", ()), ("9.0", ("--archive", str(archive)))):
        args = ("--arch", arch, "--folder", folder, *more)
        assert compile_run(monkeypatch, *args) == 0
    with tarfile.open(archive) as tar:
        packed = {name for name in tar.getnames() if name.endswith(".so")}
    jobs = prebuild.jobs_for((80, 90), pattern=FEW)
    assert packed == {f"{job.library}.so" for job in jobs} and len(jobs) == 6


def refused(capsys: pytest.CaptureFixture, *args: str | Path) -> str:
    with pytest.raises(SystemExit) as error:
        run(*args)
    assert error.value.code == 2
    return capsys.readouterr().err


def test_refusals_name_the_way_out(compiler, tmp_path, monkeypatch, capsys):
    args = ("--arch", "9.0", "--output", tmp_path / "made")
    said = refused(capsys, *args, "--modules", "store of nothing")
    assert "no module is of that kind" in said
    assert "none of 8.0" in refused(capsys, "--arch", "7.5")
    (tmp_path / "made").write_text("a file where a folder should be")
    said = refused(capsys, *args, "--modules", FEW)
    assert f"cannot write {tmp_path}/made: File exists" in said
    monkeypatch.setattr(prebuild, "version_of_tvm_ffi", lambda: "")
    assert "install apache-tvm-ffi" in refused(capsys, *args)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert "install the CUDA toolkit, or set CUDA_HOME" in refused(capsys, *args)


def refuse_tools(event: str, args: tuple) -> None:
    """An audit hook that refuses processes, written files, FlashInfer and filelock."""
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
        raise AssertionError(f"{event}: {args}")
    if event == "import" and args[0].split(".")[0] in ("flashinfer", "filelock"):
        raise AssertionError(f"import of {args[0]}")
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        raise AssertionError(f"{args[0]} is opened to be written")


def serve(folder: Path, prebuilt: Path, runtime: Path, answer: Connection) -> None:
    """Choose a layer's kernels, and answer with the line that the log gets."""
    # Made before vLLM sees a GPU, for which it would look for FlashAttention.
    config = make_vllm_config(folder, "turbo4")
    with set_current_vllm_config(config):
        impl = TurboAttentionImpl(8, 512, 0.1, 1, kv_cache_dtype="turbo4")
    # PyTorch loads the runtime if it is built for CUDA.
    ctypes.CDLL(str(runtime))
    os.environ |= {"PATH": "", "CUDA_HOME": "/nowhere", "HOME": "/nowhere"}
    with pytest.MonkeyPatch.context() as patch:
        set_platform(patch, "cuda", DeviceCapability(9, 0))
        patch.setattr(cuda_built, "PREBUILT_DIR", prebuilt)
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(cuda_family, "shared_memory", lambda _: ARCHITECTURES[90])
        # An image has its byte code, and the tests' environment need not write any.
        sys.dont_write_bytecode = True
        sys.addaudithook(refuse_tools)
        impl.process_weights_after_loading(torch.bfloat16)
        patch.setattr(type(impl.runner), "workspace_bytes", 0)
        answer.send(describe_cache([impl]))


@requires_triton
@pytest.mark.skipif(ON_GPU, reason="the CPU platform stands in for a GPU's")
@pytest.mark.skipif(
    NVCC is None or importlib.util.find_spec("tvm_ffi") is None,
    reason="needs nvcc and apache-tvm-ffi",
)
def test_an_image_without_tools_runs_its_kernels(tmp_path):
    """A layer loads all its modules from a folder that is made like an image's.

    The image has no compiler and no FlashInfer, and nothing can be written. Nvcc builds
    one of the modules.
    """
    prebuilt, programs = tmp_path / "prebuilt", tmp_path / "bin"
    programs.mkdir()
    (programs / "nvcc").write_text(QUICK_COMPILER.format(nvcc=NVCC))
    (programs / "nvcc").chmod(0o755)
    command = [sys.executable, "-m", cuda_build.__name__, "--arch", "9.0a"]
    command += ["--output", str(prebuilt), "--modules"]
    command += ["^(store turbo4_512|merge 512|decode turbo4_512_8)$"]
    (tmp_path / "short.h").write_text(SHORT_HOST_CODE)
    environment = os.environ | {
        "NVCC_PREPEND_FLAGS": f"-include={tmp_path}/short.h",
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(manifest_of(prebuilt)["libraries"]) == 3
    assert NVCC is not None
    words = subprocess.check_output(
        [NVCC, "-dryrun", "-x=cu", os.devnull], stderr=subprocess.STDOUT
    )
    toolkit = re.search(rb"^#\$ TOP=(.*)$", words, re.MULTILINE)
    assert toolkit is not None, words
    runtime = Path(toolkit[1].decode()) / "lib64" / "libcudart.so"
    # An audit hook cannot be removed, so it gets a process of its own.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(tmp_path, prebuilt, runtime, sender))
    process.start()
    sender.close()
    assert receiver.poll(TIMEOUT_S)
    line = receiver.recv()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    assert "head size: 512; CUDA kernels, because they could be" in line
