# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds the CUDA kernels ahead of time, for GPUs that need not be there.

    python -m vllm.v1.attention.ops.turbo.cuda.build --arch 8.0 9.0 --output DIR

It needs nvcc, a C++ compiler and TVM-FFI's headers. Without ``--output`` the libraries
go beside the kernels' sources, where engines look for them: see built.py. Their names
have a hash of everything that they are built from. A library that the folder already
has is not built again.
"""

import argparse
import hashlib
import io
import json
import lzma
import os
import platform
import sys
import tarfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import regex as re

from vllm.v1.attention.ops.turbo.cuda.build import (
    SUPPORTED_HEAD_SIZES,
    CudaModule,
    module_name,
    version_of_tvm_ffi,
)
from vllm.v1.attention.ops.turbo.cuda.built import (
    PREBUILT_DIR,
    digest_path,
    file_digest,
    find_in,
    publish,
    replace_text,
)
from vllm.v1.attention.ops.turbo.cuda.compiler import (
    LIBRARY_FLAGS,
    CompileError,
    compile_module,
    find_nvcc,
    nvcc_release,
)
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES
from vllm.v1.attention.ops.turbo.cuda.modules import all_modules
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS
from vllm.v1.attention.ops.turbo.latent.format import LATENT_SIZES

MANIFEST = "manifest.json"
# Head sizes of K and V, or of a latent and its rotary key together.
HEAD_SIZES = sorted({*SUPPORTED_HEAD_SIZES, *LATENT_SIZES})
# The version of the manifest's format.
_MANIFEST_FORMAT = 1
# The package with the kernels, their generators and their callers.
_PACKAGE_DIR = Path(__file__).parents[1]
_SOURCES = (".py", ".cu", ".cuh")
# Bytes of a stream before compression: the size of xz's dictionary.
_STREAM_BYTES = 64 << 20
# The most characters of the compiler's output in a message.
_LAST_CHARS = 2000


class Job(NamedTuple):
    """A module to be built.

    Attributes:
        label: The module's name for users.
        library: The file name of the library, without a suffix.
        module: The module's sources.
        capability: The architecture's compute capability.

    """

    label: str
    library: str
    module: CudaModule
    capability: int


def parse_architecture(text: str) -> int:
    """The compute capability of a name: 9.0, 90, sm_90 and 9.0a all mean 90.

    ``CudaModule.is_specific`` decides whether a module is built for 9.0a.

    Raises:
        argparse.ArgumentTypeError: If the architecture has no kernels.

    """
    match = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)[af]?", text)
    capability = int(match[1] + match[2]) if match else 0
    if capability in ARCHITECTURES:
        return capability
    known = ", ".join(f"{number / 10:.1f}" for number in ARCHITECTURES)
    raise argparse.ArgumentTypeError(f"{text!r} is none of {known}")


def served_modules(
    capability: int, cache_dtypes: Sequence[str], head_sizes: Sequence[int]
) -> dict[str, CudaModule]:
    """The modules that serving may ask for on GPUs of an architecture, by name."""
    from vllm.v1.attention.ops.turbo.cuda.latent_modules import all_latent_modules

    sizes = [size for size in head_sizes if size in SUPPORTED_HEAD_SIZES]
    found = all_modules(capability, cache_dtypes, sizes)
    sizes = [size for size in head_sizes if size in LATENT_SIZES]
    return found | all_latent_modules(capability, cache_dtypes, sizes)


def jobs_for(
    capabilities: Iterable[int],
    cache_dtypes: Sequence[str] = TURBO_PRESETS,
    head_sizes: Sequence[int] = HEAD_SIZES,
    pattern: str = "",
) -> list[Job]:
    """The modules to be built, as jobs.

    Args:
        capabilities: Compute capabilities of the architectures.
        cache_dtypes: The turbo dtypes.
        head_sizes: The head sizes.
        pattern: A regular expression that is searched in the names of modules.

    """
    return [
        Job(
            f"{name} for {capability / 10:.1f}",
            module_name(module, str(capability)),
            module,
            capability,
        )
        for capability in capabilities
        for name, module in served_modules(capability, cache_dtypes, head_sizes).items()
        if re.search(pattern, name)
    ]


def build_library(job: Job, folder: Path, nvcc: str, flags: Sequence[str] = ()) -> str:
    """Build a module's library in a folder, atomically.

    Returns:
        The compiler's output.

    Raises:
        CompileError: If it does not compile.

    """
    unfinished = folder / f"{job.library}.{os.getpid()}"
    try:
        words = compile_module(
            job.module, job.capability, nvcc, unfinished, (*LIBRARY_FLAGS, *flags)
        )
        library = folder / f"{job.library}.so"
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)
    publish(library)
    return words


def package_digest() -> str:
    """A hash of this package's sources, to compare with a manifest's."""
    digest = hashlib.sha256()
    paths = {
        path.relative_to(_PACKAGE_DIR).as_posix(): path
        for path in _PACKAGE_DIR.rglob("*")
        if path.suffix in _SOURCES
    }
    for name, path in sorted(paths.items()):
        digest.update(f"{file_digest(path)}  {name}\n".encode())
    return digest.hexdigest()


def write_manifest(folder: Path, libraries: Iterable[str], nvcc: str) -> dict[str, Any]:
    """Write the manifest of a folder.

    It lists these libraries, and those of an older manifest of the same sources.

    Returns:
        The manifest.

    """
    made = {
        "format": _MANIFEST_FORMAT,
        "package": package_digest(),
        "tvm_ffi": version_of_tvm_ffi(),
        "cuda": nvcc_release(nvcc),
        "machine": platform.machine(),
    }
    path = folder / MANIFEST
    names = set(libraries)
    try:
        old = json.loads(path.read_text())
        if made.items() <= old.items():
            names |= old["libraries"].keys()
    except (OSError, ValueError):
        pass
    found = {name: find_in(folder, name) for name in sorted(names)}
    made["libraries"] = {
        name: file_digest(path) for name, path in found.items() if path is not None
    }
    replace_text(path, json.dumps(made, indent=1) + "\n")
    return made


def _compress(part: memoryview) -> bytes:
    """Compress a part to a stream of xz."""
    return lzma.compress(part, preset=9 | lzma.PRESET_EXTREME)


def pack(folder: Path, manifest: dict[str, Any], archive: Path) -> int:
    """Pack a manifest and its libraries into an archive, reproducibly.

    The archive is a sequence of xz streams, which are compressed in parallel and read
    as one.

    Returns:
        The size of the archive in bytes.

    """
    names = [MANIFEST]
    for name in manifest["libraries"]:
        names += [f"{name}.so", digest_path(Path(f"{name}.so")).name]
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            data = (folder / name).read_bytes()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    view = whole.getbuffer()
    parts = [view[i : i + _STREAM_BYTES] for i in range(0, len(view), _STREAM_BYTES)]
    unfinished = archive.with_name(f"{archive.name}.{os.getpid()}")
    with ThreadPoolExecutor(os.cpu_count()) as pool, unfinished.open("wb") as file:
        file.writelines(pool.map(_compress, parts))
    unfinished.replace(archive)
    return archive.stat().st_size


def prebuild(jobs: Sequence[Job], folder: Path, nvcc: str, threads: int) -> list[str]:
    """Build the libraries that the folder lacks, and print each.

    Returns:
        A message for each failure.

    """
    missing = [job for job in jobs if find_in(folder, job.library) is None]
    print(f"{len(jobs)} modules, {len(missing)} to be built", flush=True)
    failures = []
    with ThreadPoolExecutor(threads) as pool:
        futures = {
            job: pool.submit(build_library, job, folder, nvcc) for job in missing
        }
        for number, (job, future) in enumerate(futures.items(), 1):
            try:
                future.result()
                print(f"[{number}/{len(missing)}] {job.label}", flush=True)
            except CompileError as error:
                words = str(error).strip()[-_LAST_CHARS:]
                failures.append(f"{job.label} was not compiled:\n{words}")
    return failures


def _parser() -> argparse.ArgumentParser:
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m vllm.v1.attention.ops.turbo.cuda.build", description=description
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        type=parse_architecture,
        required=True,
        help="compute capabilities of the GPUs, such as 9.0",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=PREBUILT_DIR,
        help="folder for the libraries (default: where engines look for them)",
    )
    parser.add_argument("--archive", type=Path, help="also write a .tar.xz of them")
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        choices=TURBO_PRESETS,
        default=TURBO_PRESETS,
        help="build only for these dtypes",
    )
    parser.add_argument(
        "--head-size",
        nargs="+",
        type=int,
        choices=HEAD_SIZES,
        default=HEAD_SIZES,
        help="build only for these head sizes",
    )
    parser.add_argument(
        "--modules", default="", help="build only modules whose names match this regex"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Build, write the manifest, and pack; return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    nvcc = find_nvcc()
    if nvcc is None:
        parser.error("there is no nvcc: install the CUDA toolkit, or set CUDA_HOME")
    if not version_of_tvm_ffi():
        parser.error("there is no TVM-FFI: install apache-tvm-ffi")
    jobs = jobs_for(args.arch, args.kv_cache_dtype, args.head_size, args.modules)
    if not jobs:
        parser.error("no module is of that kind")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        failures = prebuild(jobs, args.output, nvcc, args.jobs)
        manifest = write_manifest(args.output, (job.library for job in jobs), nvcc)
        count = len(manifest["libraries"])
        print(f"{args.output}: {count} libraries")
        if args.archive and not failures:
            size = pack(args.output, manifest, args.archive)
            print(f"{args.archive}: {size} bytes, {size // count} a library")
    except OSError as error:
        parser.error(f"cannot write {error.filename}: {error.strerror}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
