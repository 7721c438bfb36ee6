# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compiles every instance of the CUDA kernels for every architecture, without a GPU.

    python tests/kernels/turbo/builds/compile_kernels.py --output cuda_resources.json

The output has a row an instance and architecture: the most registers a thread and the
most bytes of spills of the module's kernels. The command fails if a module does not
compile, or spills more than cuda_resources.json beside this file records. To record new
numbers, copy the output there.

    python tests/kernels/turbo/builds/compile_kernels.py --output cuda_resources.json \\
        --folder libraries --archive turbo-kernels.tar.xz

is for a release: its archive has the libraries of all architectures. A library that is
in the folder is not compiled again, so that the command can be stopped and repeated.
``--arch`` limits a run to some architectures, so that machines can share the work. A
last call without it, on a folder with the libraries of all machines, packs them.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import regex as re

from vllm.v1.attention.ops.turbo.cuda.build import CudaModule
from vllm.v1.attention.ops.turbo.cuda.built import find_in, replace_text
from vllm.v1.attention.ops.turbo.cuda.compiler import (
    CompileError,
    compile_module,
    find_nvcc,
    nvcc_release,
)
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES
from vllm.v1.attention.ops.turbo.cuda.prebuild import (
    Job,
    build_library,
    jobs_for,
    pack,
    parse_architecture,
    write_manifest,
)

RECORDED = Path(__file__).with_name("cuda_resources.json")
_VERBOSE = "-Xptxas=-v"
# Kernels whose modules take a core up to a minute to compile; others take ten seconds.
_SLOW = ("store", "latent_store", "latent_decode", "extend_outputs")
# Number of modules between two lines of progress.
_PROGRESS = 100
# The bound of an archive's bytes for each library in it.
_MAX_PACKED_BYTES = 24 << 10


class Resources(NamedTuple):
    """The most that any kernel of a module takes.

    Attributes:
        registers: Registers a thread.
        spills: Bytes of spill stores and loads in a thread's code.

    """

    registers: int
    spills: int


def compile_to_ptx(
    module: CudaModule, capability: int, nvcc: str
) -> tuple[Resources, str]:
    """Compile a module for one architecture.

    The compiler reads a source for the host as well, and refuses there what it takes
    for a GPU: a member's initial value that calls a device function.

    Returns:
        The resources of its kernels, and their PTX.

    Raises:
        CompileError: The compiler failed; the message has its output.

    """
    with tempfile.TemporaryDirectory() as folder:
        flags = ["-c", _VERBOSE, "--keep", f"--keep-dir={folder}"]
        output = Path(folder) / "kernel.o"
        words = compile_module(module, capability, nvcc, output, flags)
        ptx = (Path(folder) / module.source.with_suffix(".ptx").name).read_text()
    return parse_resources(words), ptx


def parse_resources(text: str) -> Resources:
    """Read the output of ``ptxas -v``."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if not registers or len(spills) < len(registers):
        raise CompileError(f"the output of ptxas is not understood:\n{text}")
    if "instructions are serialized" in text:
        raise CompileError(f"products of warpgroups do not overlap:\n{text}")
    return Resources(max(registers), max(int(a) + int(b) for a, b in spills))


def excess(name: str, capability: int, found: Resources, recorded: dict) -> str | None:
    """A message if a module spills more than is recorded, otherwise None."""
    spills = recorded["modules"].get(name, {}).get(str(capability), [0, 0])[1]
    if found.spills <= spills:
        return None
    return f"{name} for sm_{capability}: {found.spills} bytes of spills, not {spills}"


def write_table(path: Path, release: str, table: dict[str, dict[str, Any]]) -> None:
    """Write JSON with one line for each module."""
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table.items()]
    columns = "by compute capability: registers a thread, bytes of spills"
    text = (
        f'{{\n "nvcc": "{release}",\n "columns": "{columns}",\n "modules": {{\n'
        + ",\n".join(lines)
        + "\n }\n}\n"
    )
    path.write_text(text)


def compile_job(job: Job, nvcc: str, folder: Path | None) -> Resources:
    """Compile a module; with a folder, build the library that it lacks."""
    if folder is None:
        return compile_to_ptx(job.module, job.capability, nvcc)[0]
    said = folder / f"{job.library}.ptxas"
    if find_in(folder, job.library) is None or not said.exists():
        words = build_library(job, folder, nvcc, (_VERBOSE,))
        replace_text(said, words)
    return parse_resources(said.read_text())


def compile_all(
    jobs: Sequence[Job], nvcc: str, threads: int, folder: Path | None, recorded: dict
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Compile modules; return the table of their resources, and the failures."""
    table: dict[str, dict[str, Any]] = {}
    failures = []
    # Slow modules first, so that none begins when all others have ended.
    jobs = sorted(jobs, key=lambda job: job.module.kernel not in _SLOW)
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(compile_job, job, nvcc, folder) for job in jobs]
        for number, (job, future) in enumerate(zip(jobs, futures), 1):
            if number % _PROGRESS == 0:
                wait([future])
                print(f"{number} of {len(jobs)}", flush=True)
            name = f"{job.module.kernel} {job.module.instance}"
            try:
                found = future.result()
            except CompileError as error:
                failures.append(f"{job.label}: {error}")
                continue
            table.setdefault(name, {})[str(job.capability)] = list(found)
            if more := excess(name, job.capability, found, recorded):
                failures.append(more)
    return dict(sorted(table.items())), failures


def pack_all(
    folder: Path, jobs: Sequence[Job], nvcc: str, archive: Path | None
) -> list[str]:
    """List the libraries, and pack them if an archive is named; return failures."""
    manifest = write_manifest(folder, (job.library for job in jobs), nvcc)
    if archive is None:
        return []
    count = len(manifest["libraries"])
    size = pack(folder, manifest, archive) // max(count, 1)
    print(f"{archive}: {count} libraries of {size} bytes")
    if size <= _MAX_PACKED_BYTES:
        return []
    return [f"a library has {size} bytes packed, not {_MAX_PACKED_BYTES} at most"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="table to write")
    parser.add_argument("--archive", type=Path, help=".tar.xz of libraries to write")
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of libraries, which also keeps those of former runs",
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        type=parse_architecture,
        default=ARCHITECTURES,
        help="compute capabilities (default: all)",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--modules", default="", help="regular expression of names")
    args = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        parser.error("there is no nvcc: install the CUDA toolkit, or set CUDA_HOME")
    release = nvcc_release(nvcc)
    recorded = json.loads(RECORDED.read_text())
    jobs = jobs_for(args.arch, pattern=args.modules)
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or (Path(name) if args.archive else None)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        table, failures = compile_all(jobs, nvcc, args.jobs, folder, recorded)
        if folder is not None:
            failures += pack_all(folder, jobs, nvcc, args.archive)
    if args.output:
        write_table(args.output, release, table)
    spilling = sum(row[1] > 0 for rows in table.values() for row in rows.values())
    print(f"nvcc {release}: {len(jobs)} compiled, {spilling} spill")
    if release != recorded["nvcc"]:
        print(f"The recorded spills are those of nvcc {recorded['nvcc']}.")
    print("\n".join(failures), end="\n" if failures else "")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
