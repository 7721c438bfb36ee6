# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The series as it stands in the project folder."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .errors import SeriesError
from .git import scratch
from .patchfile import Patch, parse_patch, safe_path
from .upstream import Upstream, load_upstream

PATCHES = "patches"
OVERLAY = "vllm_overlay"
_CACHES = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"}


@dataclass(frozen=True)
class OverlayFile:
    """A file that the series adds."""

    path: str
    data: bytes
    executable: bool

    @property
    def git_mode(self) -> str:
        return "100755" if self.executable else "100644"


@dataclass(frozen=True)
class Series:
    """Patches in order, and the new files that go with them."""

    root: Path
    upstream: Upstream
    patches: tuple[Patch, ...]
    overlay: dict[str, OverlayFile]

    @cached_property
    def revision(self) -> str:
        """A hash of everything that `apply` would write."""
        digest = hashlib.sha256(self.upstream.version.encode())
        for patch in self.patches:
            digest.update(b"\0patch\0%d\0" % len(patch.data) + patch.data)
        for path, file in sorted(self.overlay.items()):
            head = f"\0file\0{path}\0{file.git_mode}\0{len(file.data)}\0"
            digest.update(head.encode() + file.data)
        return digest.hexdigest()

    def overlay_of(self, patch: Patch) -> list[str]:
        """The overlay paths that a patch's `Overlay:` trailers name.

        A glob leaves out a path that another patch names in full.
        """
        own = set(patch.trailer("Overlay"))
        globs = [glob_regex(glob) for glob in own]
        return [
            path
            for path in sorted(self.overlay)
            if path in own
            or path not in self._named
            and any(glob.fullmatch(path) for glob in globs)
        ]

    @cached_property
    def _named(self) -> set[str]:
        """The values of all `Overlay:` trailers, paths and globs alike."""
        return {value for patch in self.patches for value in patch.trailer("Overlay")}


def glob_regex(glob: str) -> re.Pattern[str]:
    """A glob in which `*` and `?` stop at a slash and `**` does not."""
    out = ""
    for part in re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", glob):
        special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        out += special.get(part, re.escape(part))
    return re.compile(out)


def read_order(root: Path) -> list[str]:
    """The patch names in `patches/series`."""
    path = root / PATCHES / "series"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SeriesError(f"cannot read {path}: {error.strerror}") from None
    names = (line.split("#")[0].strip() for line in lines)
    return [name for name in names if name]


def overlay_paths(root: Path) -> list[str]:
    """The files below `vllm_overlay/`, without the caches of Python tools."""
    return _paths_below(root / OVERLAY)


def _paths_below(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if _CACHES & set(relative.parts) or path.suffix == ".pyc":
            continue
        if path.is_symlink():
            raise SeriesError(f"{folder.name}/{relative} is a symbolic link")
        if path.is_file():
            found.append(safe_path(relative.as_posix()))
    return found


def load_overlay(root: Path) -> dict[str, OverlayFile]:
    """Read every overlay file."""
    return overlay_files(root / OVERLAY)


def overlay_files(folder: Path) -> dict[str, OverlayFile]:
    """Read the files below a folder, by their paths there."""
    files = {}
    for path in _paths_below(folder):
        full = folder / path
        executable = bool(full.stat().st_mode & 0o100)
        files[path] = OverlayFile(path, full.read_bytes(), executable)
    return files


def parse_patches(named: Iterable[tuple[str, bytes]]) -> tuple[Patch, ...]:
    """Parse several patches in one scratch folder."""
    with scratch(init=False) as git:
        return tuple(parse_patch(name, data, git) for name, data in named)


def load_series(root: Path) -> Series:
    """Read the series at `root`."""
    named = []
    for name in read_order(root):
        path = root / PATCHES / name
        try:
            named.append((name, path.read_bytes()))
        except OSError as error:
            raise SeriesError(f"cannot read {path}: {error.strerror}") from None
    return Series(
        root=root,
        upstream=load_upstream(root),
        patches=parse_patches(named),
        overlay=load_overlay(root),
    )
