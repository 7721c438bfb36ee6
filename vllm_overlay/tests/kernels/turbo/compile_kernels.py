# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compiles every instance of the CUDA kernels for every architecture: no GPU needed.

    python tests/kernels/turbo/compile_kernels.py --output cuda_resources.json

The output has, by instance and architecture, the registers a thread and the bytes of
spills of the module's kernels, the most of each. It fails where a module does not
compile, or spills more than is recorded in the file of that name beside this one. To
record what was found, copy the output there.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import regex as re

from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import extend as cuda_extend
from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.cuda.build import HEADER_NAME, SOURCE_DIR, CudaModule
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat

# Compute capability -> bytes of shared memory that a block can have.
ARCHITECTURES = {
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    120: 101376,
}
RECORDED = Path(__file__).with_name("cuda_resources.json")
# Those of FlashInfer's that have a say in the device code.
FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr")


class Resources(NamedTuple):
    """The most that a kernel of a module takes.

    Attributes:
        registers: A thread.
        spills: Bytes stored and loaded in the code of a thread.

    """

    registers: int
    spills: int


class CompileError(RuntimeError):
    pass


def instances(capability: int) -> dict[str, CudaModule]:
    """All modules that may be served on GPUs of an architecture, by name."""
    shared_bytes = ARCHITECTURES[capability]
    modules = {}
    for size in cuda_decode.SUPPORTED_HEAD_SIZES:
        modules[f"merge {size}"] = cuda_merge.module(size)
        ends = ["", " offset"]
        # Of longer heads scores have no soft cap: see refusals.py.
        if size <= 256:
            modules[f"merge {size} cap"] = cuda_merge.module(size, True)
            ends.append(" cap")
        for name, end in itertools.product(TURBO_PRESETS, ends):
            layout = TurboFormat.from_cache_dtype(name, size)
            offset, cap = end == " offset", end == " cap"
            for window, kept in ((False, ""), (True, " window")):
                # The store makes no scores.
                if not cap:
                    store = cuda_store.module(layout, offset, window)
                    modules[f"store {name} {size}{end}{kept}"] = store
            for queries in cuda_decode.queries_at_once(size):
                decode = cuda_decode.module(layout, queries, shared_bytes, offset, cap)
                modules[f"decode {name} {size} {queries}{end}"] = decode
            if cuda_extend.unsupported_reason(layout):
                continue
            for columns in cuda_extend.COLUMNS:
                extend = cuda_extend.module(layout, columns, shared_bytes, offset, cap)
                modules[f"extend {name} {size} {columns}{end}"] = extend
    return modules


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")


def nvcc_release(nvcc: str) -> str:
    """Such as 13.0."""
    text = subprocess.check_output([nvcc, "--version"], text=True)
    return re.search(r"release (\d+\.\d+)", text)[1]


def include_flags() -> list[str]:
    """For nvcc to find TVM-FFI's headers and the kernels' own."""
    from tvm_ffi import libinfo

    system = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    flags = [x for path in system for x in ("-isystem", str(path))]
    return [*flags, f"-I{SOURCE_DIR}"]


def compile_module(module: CudaModule, capability: int, nvcc: str) -> Resources:
    """Compile a module's device code for one architecture: see ``compile_to_ptx``."""
    return compile_to_ptx(module, capability, nvcc)[0]


def compile_to_ptx(
    module: CudaModule, capability: int, nvcc: str
) -> tuple[Resources, str]:
    """Compile a module's device code for one architecture.

    Returns:
        What its kernels take, and the PTX that they were made of.

    Raises:
        CompileError: With the compiler's words.

    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / HEADER_NAME).write_text(module.header)
        command = [
            nvcc,
            *FLAGS,
            *include_flags(),
            f"-I{folder}",
            f"-gencode=arch=compute_{capability},code=sm_{capability}",
            *module.flags,
            "-cubin",
            "-Xptxas=-v",
            "--keep",
            f"--keep-dir={folder}",
            f"-o={folder}/kernel.cubin",
            str(module.source),
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise CompileError(result.stdout + result.stderr)
        ptx = (Path(folder) / module.source.with_suffix(".ptx").name).read_text()
    return parse_resources(result.stdout + result.stderr), ptx


def parse_resources(text: str) -> Resources:
    """Read what ``ptxas -v`` says."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if not registers or len(spills) < len(registers):
        raise CompileError(f"what ptxas says is not understood:\n{text}")
    return Resources(max(registers), max(int(a) + int(b) for a, b in spills))


def excess(name: str, capability: int, found: Resources, recorded: dict) -> str | None:
    """Say by how much a module spills more than is recorded."""
    spills = recorded["modules"].get(name, {}).get(str(capability), [0, 0])[1]
    if found.spills <= spills:
        return None
    return f"{name} for sm_{capability}: {found.spills} bytes of spills, not {spills}"


def write_table(path: Path, release: str, table: dict[str, dict[str, Any]]) -> None:
    """Write JSON with a line a module."""
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table.items()]
    columns = "by compute capability: registers a thread, bytes of spills"
    text = (
        f'{{\n "nvcc": "{release}",\n "columns": "{columns}",\n "modules": {{\n'
        + ",\n".join(lines)
        + "\n }\n}\n"
    )
    path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="table to write")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--modules", default="", help="regular expression of names")
    args = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        parser.error("there is no nvcc: install the CUDA toolkit, or set CUDA_HOME")
    release = nvcc_release(nvcc)
    recorded = json.loads(RECORDED.read_text())
    failures = []
    table: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {
            (name, capability): pool.submit(compile_module, module, capability, nvcc)
            for capability in ARCHITECTURES
            for name, module in instances(capability).items()
            if re.search(args.modules, name)
        }
        for (name, capability), future in sorted(futures.items()):
            try:
                found = future.result()
            except CompileError as error:
                failures.append(f"{name} for sm_{capability}: {error}")
                continue
            table.setdefault(name, {})[str(capability)] = list(found)
            failures.append(excess(name, capability, found, recorded) or "")
    failures = [failure for failure in failures if failure]
    if args.output:
        write_table(args.output, release, table)
    spilling = sum(row[1] > 0 for rows in table.values() for row in rows.values())
    print(f"nvcc {release}: {len(futures)} compiled, {spilling} spill")
    if release != recorded["nvcc"]:
        print(f"The recorded spills are those of nvcc {recorded['nvcc']}.")
    print("\n".join(failures), end="\n" if failures else "")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
