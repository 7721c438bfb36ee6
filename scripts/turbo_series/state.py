# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The manifest: the changes that were, or are about to be, made to a target.

It is written before the first file changes and rewritten after the last, so it is
also the journal: `state` says which of the two a killed run left behind.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from . import record
from .disk import Disk, temporary_of
from .errors import SeriesError
from .patchfile import safe_path
from .target import STATE_FOLDER, Kind, Target

FORMAT = 1
MANIFEST = "manifest.json"
BACKUP = "backup"
IGNORE = ".gitignore"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A file that the series adds or modifies; `before` is None if added.

    The original bytes of a modified file are kept as `backup/<before>`.
    """

    path: str
    kind: Literal["added", "modified"]
    before: str | None
    after: str


@dataclass(frozen=True)
class Manifest:
    """See the module's docstring. `folders` are those that the series created."""

    state: Literal["applying", "applied", "reverting"]
    kind: Kind
    version: str
    revision: str
    record: str | None
    folders: tuple[str, ...]
    files: tuple[Entry, ...]

    def to_bytes(self) -> bytes:
        return (
            json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"
        ).encode()

    def with_state(
        self, state: Literal["applying", "applied", "reverting"]
    ) -> "Manifest":
        return replace(self, state=state)


class FileState(Enum):
    """How a file of the manifest stands in the tree."""

    APPLIED = "as applied"
    BASE = "as in the base"
    MISSING = "missing"
    CHANGED = "changed"


def read_manifest(target: Target) -> Manifest | None:
    """The manifest of a target, or None if it has none."""
    path = target.state / MANIFEST
    try:
        fields: dict[str, Any] = json.loads(path.read_bytes())
        if fields.pop("format") != FORMAT:
            raise SeriesError(f"{path} was written by another version of this tool")
        files = tuple(Entry(**entry) for entry in fields.pop("files"))
        manifest = Manifest(
            **{**fields, "folders": tuple(fields["folders"])}, files=files
        )
        for entry in files:
            safe_path(entry.path)
        for folder in manifest.folders:
            safe_path(folder)
        return manifest
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SeriesError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SeriesError(f"{path} is damaged ({error})") from None


def survey(target: Target, manifest: Manifest) -> dict[str, FileState]:
    """The state of each file of the manifest, by content."""
    return {entry.path: _state_of(target, manifest, entry) for entry in manifest.files}


def _state_of(target: Target, manifest: Manifest, entry: Entry) -> FileState:
    data = target.read(entry.path)
    digest = None if data is None else sha256(data)
    if digest == entry.after:
        return FileState.APPLIED
    if digest == entry.before:
        return FileState.BASE
    if entry.path == manifest.record and (data is None or _foreign(data, manifest)):
        return FileState.BASE
    return FileState.MISSING if digest is None else FileState.CHANGED


def _foreign(data: bytes, manifest: Manifest) -> bool:
    """Whether a RECORD is a later install's, which does not list the series."""
    try:
        listed = record.listed_paths(data)
    except (UnicodeDecodeError, record.csv.Error):
        return False
    ours = {entry.path for entry in manifest.files if entry.kind == "added"}
    return not listed & (ours | {f"{STATE_FOLDER}/{MANIFEST}"})


def base_is_gone(target: Target, manifest: Manifest) -> bool:
    """Whether the install that the series was applied to was uninstalled."""
    return manifest.record is not None and not (target.root / manifest.record).exists()


def backup_name(digest: str) -> str:
    """The path of a backup, relative to the target."""
    return f"{STATE_FOLDER}/{BACKUP}/{digest}"


def read_backup(target: Target, entry: Entry) -> bytes:
    """The original bytes of a modified file, checked."""
    assert entry.before is not None
    data = target.read(backup_name(entry.before))
    if data is None or sha256(data) != entry.before:
        problem = "missing" if data is None else "damaged"
        raise SeriesError(
            f"{entry.path}: the copy of the original is {problem} "
            f"({target.root / backup_name(entry.before)}); reinstall vllm"
        )
    return data


def remove_state(target: Target, disk: Disk) -> None:
    """Delete the state folder, the manifest last."""
    backup = target.state / BACKUP
    for folder in (backup, target.state):
        names = sorted(folder.iterdir()) if folder.is_dir() else []
        for path in names:
            if path.is_file() and path.name != MANIFEST:
                disk.remove(path)
        disk.remove_folder(folder)
    disk.remove(temporary_of(target.state / MANIFEST))
    disk.remove(target.state / MANIFEST)
    disk.remove_folder(target.state)


def refuse_orphan_backups(target: Target) -> None:
    """Raise if there are originals but nothing says what they belong to."""
    backup = target.state / BACKUP
    if backup.is_dir() and any(backup.iterdir()):
        raise SeriesError(
            f"{target.state} holds originals of changed files but no {MANIFEST}; "
            "reinstall vllm and delete that folder"
        )


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep a second run out of the same tree.

    The lock is on the folder itself, so nothing is left behind for pip to miss.
    """
    handle = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SeriesError(f"another run is at work in {root}") from None
        except OSError:
            # Not every file system can lock a folder; a lock is only a courtesy.
            pass
        yield
    finally:
        os.close(handle)
