# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Find the tree to work on and say what it is."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Literal

from .errors import SeriesError
from .git import Git

Kind = Literal["checkout", "sdist", "installed"]
STATE_FOLDER = ".turbo-series"
PACKAGE = "vllm/"
KIND_NAMES = {
    "checkout": "a git checkout",
    "sdist": "an unpacked sdist",
    "installed": "an installed tree",
}

# Run by the user's Python, in an empty folder: `-c` puts the current one first on
# sys.path, which is not what `vllm serve` sees. find_spec does not import vllm.
_FINDER = """
import importlib.util
spec = importlib.util.find_spec("vllm")
print("origin=" + (spec.origin or "" if spec else ""))
"""


@dataclass(frozen=True)
class Target:
    """A vLLM tree."""

    root: Path
    kind: Kind
    dist_info: str | None = None

    @property
    def state(self) -> Path:
        """Where the manifest and the originals of changed files are kept."""
        return self.root / STATE_FOLDER

    @property
    def record(self) -> str | None:
        """The path of an installed tree's RECORD, if it has one."""
        if self.dist_info is None:
            return None
        path = f"{self.dist_info}/RECORD"
        return path if (self.root / path).is_file() else None

    def covers(self, path: str) -> bool:
        """Whether this kind of tree holds files at `path` at all."""
        return self.kind != "installed" or path.startswith(PACKAGE)

    def read(self, path: str) -> bytes | None:
        """The bytes of a file of the tree, or None if there is none.

        A path through a symbolic link is refused: replacing the link would cut it,
        and following it would write outside the tree.
        """
        full = self.root / path
        if os.path.realpath(full) != os.path.join(os.path.realpath(self.root), path):
            raise SeriesError(
                f"{full} is reached through a symbolic link; "
                "name the tree that it points into instead"
            )
        try:
            return full.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SeriesError(f"cannot read {full}: {error.strerror}") from None

    def version(self) -> str:
        """The version of the tree, or "unknown"."""
        sources: list[Callable[[], str | None]] = [
            lambda: _metadata_version(self.root / (self.dist_info or "") / "METADATA"),
            lambda: _metadata_version(self.root / "PKG-INFO"),
            lambda: self._described() if self.kind == "checkout" else None,
            lambda: _assigned_version(self.root / "vllm" / "_version.py"),
        ]
        return next((found for source in sources if (found := source())), "unknown")

    def _described(self) -> str | None:
        done = Git(self.root).run("describe", "--tags", "--match", "v[0-9]*")
        return done.stdout.decode().strip().removeprefix("v") or None


def _metadata_version(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return HeaderParser().parsestr(text, headersonly=True)["Version"]


def _assigned_version(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^__version__\b[^'\"\n]*['\"]([^'\"]+)", text, re.MULTILINE)
    return match[1] if match else None


def user_python() -> str:
    """The Python whose vLLM is meant when no target is named."""
    if named := os.environ.get("PYTHON"):
        # It is run from another folder, so a path must not depend on this one.
        return os.path.abspath(named) if os.path.dirname(named) else named
    if folder := os.environ.get("VIRTUAL_ENV"):
        return str(Path(folder) / "bin" / "python")
    return shutil.which("python") or sys.executable


def locate() -> Path:
    """The tree of the vLLM that the user's Python would import."""
    python = user_python()
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                [python, "-c", _FINDER],
                cwd=empty,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise SeriesError(f"cannot run {python}: {error.strerror}") from None
    found = re.search(r"^origin=(.+)$", done.stdout, re.MULTILINE)
    if found is None:
        raise SeriesError(f"{python} has no vllm; name a TARGET, or set PYTHON")
    root = Path(found[1]).parent.parent
    if Path("vllm/__init__.py").is_file() and Path.cwd() != root:
        print(f"note: using {root}, not the vllm/ of the current folder")
    return root


def _only_dist_info(root: Path) -> str | None:
    names = sorted(path.name for path in root.glob("vllm-*.dist-info"))
    if len(names) > 1:
        raise SeriesError(
            f"{root} holds {len(names)} vllm installs: {', '.join(names)}"
        )
    return names[0] if names else None


def _is_checkout(root: Path) -> bool:
    if not (root / ".git").exists():
        return False
    # Without git, `.git` alone decides; a command that needs git says so itself.
    if shutil.which("git") is None:
        return True
    done = Git(root).run("rev-parse", "--show-toplevel")
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise SeriesError(f"{root}: {reason[0] if reason else 'not a git checkout'}")
    return Path(done.stdout.decode().rstrip("\n")).resolve() == root.resolve()


def open_target(name: str | None) -> Target:
    """Open the tree called `name`, or the installed vLLM if None."""
    root = Path(name) if name is not None else locate()
    if not root.is_dir():
        problem = "not a folder" if root.exists() else "no such folder"
        raise SeriesError(f"{root}: {problem}")
    root = root.resolve()
    dist_info = _only_dist_info(root)
    if dist_info is not None:
        kind: Kind = "installed"
    elif _is_checkout(root):
        kind = "checkout"
    elif (root / "pyproject.toml").is_file() or (root / "setup.py").is_file():
        kind = "sdist"
    elif (root / "vllm").is_dir() or (root / STATE_FOLDER).is_dir():
        # An uninstall leaves this behind if files of the series were not listed.
        kind = "installed"
    else:
        kind = "installed"
        if root.name == "vllm" and (root / "__init__.py").is_file():
            raise SeriesError(
                f"{root} is the package itself; name the folder above, {root.parent}"
            )
    if not (root / "vllm").is_dir() and not (root / STATE_FOLDER).is_dir():
        raise SeriesError(f"{root} holds no vllm/: not a checkout, sdist or install")
    return Target(root, kind, dist_info)
