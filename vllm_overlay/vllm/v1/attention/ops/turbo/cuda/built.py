# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Finds CUDA kernels that have been built, without a compiler.

A library counts if a file beside it has its SHA-256, which is written after the linker
has ended. So no process loads a library that another is still writing. This needs no
lock, and libraries may be on a read-only file system.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from vllm.logger import init_logger

logger = init_logger(__name__)

# The folder of libraries that come with this package.
PREBUILT_DIR = Path(__file__).parent / "prebuilt"


def digest_path(library: Path) -> Path:
    """The path of the file with a library's SHA-256."""
    return library.with_suffix(".sha256")


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    whole = path.with_name(f"{path.name}.{os.getpid()}")
    whole.write_text(text)
    whole.replace(path)


def publish(library: Path) -> None:
    """Record the SHA-256 of a complete library, so that it is found.

    Raises:
        OSError: If the record cannot be written.

    """
    digest, path = file_digest(library), digest_path(library)
    if not path.exists() or path.read_text() != digest:
        replace_text(path, digest)


def _folders(name: str) -> Iterator[Path]:
    """The folders that may have a library: the package's, and FlashInfer's cache.

    The cache has a folder for each release of FlashInfer and its architectures. All
    are searched, because a library's name determines everything that it is built from.
    """
    yield PREBUILT_DIR
    base = os.getenv("FLASHINFER_WORKSPACE_BASE") or os.path.expanduser("~")
    cache = Path(base) / ".cache" / "flashinfer"
    yield from sorted(cache.glob(f"*/*/cached_ops/{name}"))


def find_in(folder: Path, name: str) -> Path | None:
    """The library of a module's name in a folder, if there is a complete one."""
    library = folder / f"{name}.so"
    try:
        wanted, found = digest_path(library).read_text().strip(), file_digest(library)
    except OSError:
        return None
    if found == wanted:
        return library
    logger.warning("%s is not used: its SHA-256 differs from the build's.", library)
    return None


def find_built(name: str) -> Path | None:
    """The library of a module's name, if there is a complete one."""
    found = (find_in(folder, name) for folder in _folders(name))
    return next((library for library in found if library is not None), None)
