# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CUDA kernels that were built elsewhere, for a tree that the series is applied to.

`python -m vllm.v1.attention.ops.turbo.cuda.build --archive` writes such an archive.
"""

import hashlib
import json
import lzma
import platform
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import SeriesError
from .model import OverlayFile, Series
from .state import sha256
from .target import Target

PACKAGE = "vllm/v1/attention/ops/turbo/"
# Where the package looks for libraries.
FOLDER = f"{PACKAGE}cuda/prebuilt/"
MANIFEST = "manifest.json"
_FORMAT = 1
_SOURCES = (".py", ".cu", ".cuh")
_BUILD = "python -m vllm.v1.attention.ops.turbo.cuda.build"
_LIBRARY = re.compile(r"turbo_[a-z0-9_]+_sm\d+[a-z]?_[0-9a-f]+")


def package_digest(overlay: Mapping[str, OverlayFile]) -> str:
    """A hash of the kernels' package, as the package itself computes it."""
    digest = hashlib.sha256()
    for path, file in sorted(overlay.items()):
        if path.startswith(PACKAGE) and path.endswith(_SOURCES):
            name = path.removeprefix(PACKAGE)
            digest.update(f"{sha256(file.data)}  {name}\n".encode())
    return digest.hexdigest()


def _unpack(path: Path) -> dict[str, bytes]:
    """The files of an archive, none of which is in a folder."""
    try:
        with tarfile.open(path, "r:*") as tar:
            members = [(member, tar.extractfile(member)) for member in tar]
            return {member.name: file.read() for member, file in members if file}
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        reason = str(error).partition(":")[0]
        raise SeriesError(
            f"{path} is no archive of kernels ({reason}); {_BUILD} --archive writes one"
        ) from None


def _installed_tvm_ffi(target: Target) -> str | None:
    """The version of TVM-FFI beside an installed vLLM, if that can be seen."""
    found = [path.name for path in target.root.glob("apache_tvm_ffi-*.dist-info")]
    if target.kind != "installed" or len(found) != 1:
        return None
    return found[0].removesuffix(".dist-info").split("-")[1]


def _refuse_others(
    path: Path, manifest: dict[str, Any], series: Series, target: Target
) -> None:
    """Raise if the archive's libraries would not be loaded here."""
    machine = manifest["machine"]
    if machine != platform.machine():
        raise SeriesError(f"{path} is for {machine}, this is {platform.machine()}")
    if manifest["package"] != package_digest(series.overlay):
        raise SeriesError(
            f"{path} was built from other sources than those of this series; use the "
            f"archive that came with it, or build one: {_BUILD}"
        )
    here, wanted = _installed_tvm_ffi(target), manifest["tvm_ffi"]
    if here not in (None, wanted):
        raise SeriesError(
            f"{path} was built with apache-tvm-ffi {wanted}, {target.root} has {here}; "
            f"install the former, or build with the latter: {_BUILD}"
        )


def load_kernels(path: Path, series: Series, target: Target) -> dict[str, OverlayFile]:
    """Read an archive; return its files by their paths in a tree.

    Raises:
        SeriesError: If it is no archive of kernels, not whole, or not for this tree.

    """
    files = _unpack(path)
    try:
        manifest = json.loads(files[MANIFEST])
        if manifest["format"] != _FORMAT:
            raise SeriesError(f"{path} was written by another version of this series")
        libraries = dict(manifest["libraries"])
        _refuse_others(path, manifest, series, target)
    except (ValueError, KeyError, TypeError) as error:
        raise SeriesError(
            f"{path} has no {MANIFEST} of kernels ({error!r}); {_BUILD} --archive "
            "writes one"
        ) from None
    names = {f"{name}{end}" for name in libraries for end in (".so", ".sha256")}
    if files.keys() != names | {MANIFEST}:
        odd = sorted(files.keys() ^ (names | {MANIFEST}))
        raise SeriesError(f"{path} is not what its {MANIFEST} lists: {odd[0]}")
    for name, digest in libraries.items():
        recorded = files[f"{name}.sha256"].decode(errors="replace").strip()
        if not _LIBRARY.fullmatch(name):
            raise SeriesError(f"{path}: {name} is no name of a library")
        if not sha256(files[f"{name}.so"]) == digest == recorded:
            raise SeriesError(f"{path}: {name}.so is not what was built")
    return {
        FOLDER + name: OverlayFile(FOLDER + name, data, executable=False)
        for name, data in files.items()
    }
