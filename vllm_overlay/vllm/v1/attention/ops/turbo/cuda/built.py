# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CUDA kernels that have been built: found and loaded without a compiler.

A library counts if a file beside it has its SHA-256, which is written when the linker
has ended: nobody loads half of one that another process is writing, and no lock is
needed, so that it may lie on a root that is read-only.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from vllm.logger import init_logger

logger = init_logger(__name__)

# The folder of libraries that are shipped with this package.
PREBUILT_DIR = Path(__file__).parent / "prebuilt"


def digest_path(library: Path) -> Path:
    """Where the SHA-256 of a library lies."""
    return library.with_suffix(".sha256")


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def replace_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    whole = path.with_name(f"{path.name}.{os.getpid()}")
    whole.write_text(text)
    whole.replace(path)


def publish(library: Path) -> None:
    """Let a library that is whole be found.

    Raises:
        OSError: If that cannot be written.

    """
    digest, path = file_digest(library), digest_path(library)
    if not path.exists() or path.read_text() != digest:
        replace_text(path, digest)


def _folders(name: str) -> Iterator[Path]:
    """Where a library may lie: the package, and FlashInfer's cache.

    The cache's folders are of a release of FlashInfer and of the architectures that it
    builds for; a library's name says all that it is built from, so that any will do.
    """
    yield PREBUILT_DIR
    base = os.getenv("FLASHINFER_WORKSPACE_BASE") or os.path.expanduser("~")
    cache = Path(base) / ".cache" / "flashinfer"
    yield from sorted(cache.glob(f"*/*/cached_ops/{name}"))


def find_in(folder: Path, name: str) -> Path | None:
    """The library of a module's name in a folder, if there is one that is whole."""
    library = folder / f"{name}.so"
    try:
        wanted, found = digest_path(library).read_text().strip(), file_digest(library)
    except OSError:
        return None
    if found == wanted:
        return library
    logger.warning("%s is left alone: its SHA-256 is not what was built.", library)
    return None


def find_built(name: str) -> Path | None:
    """The library of a module's name, if there is one that is whole."""
    found = (find_in(folder, name) for folder in _folders(name))
    return next((library for library in found if library is not None), None)
