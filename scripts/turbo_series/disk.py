# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every change to a target's files, one durable step at a time."""

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

TEMPORARY = ".{}.turbo-tmp"


def temporary_of(path: Path) -> Path:
    """The name under which a file is written before it takes its place."""
    return path.with_name(TEMPORARY.format(path.name))


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems cannot sync a folder; nothing more can be done.
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


class Disk:
    """Changes files; calls `on_step` before each change, so tests can stop there."""

    def __init__(self, on_step: Callable[[str], None] | None = None) -> None:
        self.on_step = on_step or (lambda step: None)

    def make_folder(self, path: Path) -> None:
        """Create one folder unless it exists."""
        self.on_step(f"make {path}")
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)

    def write(self, path: Path, data: bytes, executable: bool = False) -> None:
        """Put `data` at `path` by writing a file beside it and renaming that.

        The old file is never opened for writing: package managers hard-link
        installed files to a cache that other environments share. An existing file's
        mode and owner carry over.
        """
        temporary = temporary_of(path)
        self.on_step(f"create {temporary}")
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        handle = os.open(temporary, flags, 0o777 if executable else 0o666)
        with os.fdopen(handle, "wb") as file:
            half = len(data) // 2
            file.write(data[:half])
            file.flush()
            self.on_step(f"write {temporary}")
            file.write(data[half:])
            with contextlib.suppress(FileNotFoundError):
                old = path.stat()
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
            file.flush()
            os.fsync(file.fileno())
        self.on_step(f"replace {path}")
        os.replace(temporary, path)
        sync_folder(path.parent)

    def remove(self, path: Path) -> None:
        """Delete a file if it exists."""
        if path.is_symlink() or path.exists():
            self.on_step(f"remove {path}")
            path.unlink(missing_ok=True)
            sync_folder(path.parent)

    def remove_folder(self, path: Path) -> bool:
        """Delete a folder if it exists and is empty; return whether it is gone."""
        if not path.is_dir():
            return True
        if any(path.iterdir()):
            return False
        self.on_step(f"rmdir {path}")
        path.rmdir()
        sync_folder(path.parent)
        return True

    def drop_bytecode(self, path: Path) -> None:
        """Delete the compiled forms of a module.

        Python trusts a cached module whose source has the recorded size and mtime
        in whole seconds, which an edited file can match.
        """
        if path.suffix != ".py":
            return
        cache = path.parent / "__pycache__"
        prefix = f"{path.stem}."
        if cache.is_dir():
            for entry in sorted(cache.iterdir()):
                if entry.name.startswith(prefix) and entry.suffix == ".pyc":
                    self.remove(entry)
            self.remove_folder(cache)
