# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Get the pinned sdist and unpack it."""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from .errors import SeriesError
from .git import Git
from .upstream import Pin, Upstream

# Even for a download, pip asks an sdist's build backend for name and version. vLLM's
# backend needs PyTorch for that. This one is found first, and only states them.
_BACKEND = """
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = Path(folder) / "{project}-{version}.dist-info"
    info.mkdir()
    text = "Metadata-Version: 2.1\\nName: {project}\\nVersion: {version}\\n"
    (info / "METADATA").write_text(text)
    return info.name
"""
WHO = {
    "GIT_AUTHOR_NAME": "vLLM",
    "GIT_AUTHOR_EMAIL": "vllm@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "vLLM",
    "GIT_COMMITTER_EMAIL": "vllm@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}


def cache_folder() -> Path:
    """Where downloads are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "vllm-turbo"


def run_pip(*args: str, env: dict[str, str] | None = None) -> str:
    """Run this Python's pip, which knows the user's index; return what it printed."""
    command = [sys.executable, "-m", "pip", "--quiet", "--no-input", *args]
    done = subprocess.run(
        command, env={**os.environ, **(env or {})}, capture_output=True, text=True
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error: " in line.lower()]
        reason = lines[-1] if lines else done.stderr.strip() or "no reason given"
        raise SeriesError(f"pip {args[0]}: {reason}")
    return done.stdout


def fetch(project: str, version: str, folder: Path) -> Path:
    """Download the sdist of a release into an empty folder, as pip finds it."""
    with tempfile.TemporaryDirectory() as stub:
        package = Path(stub) / "setuptools"
        package.mkdir()
        (package / "__init__.py").touch()
        backend = _BACKEND.format(project=project, version=version)
        (package / "build_meta.py").write_text(backend)
        run_pip(
            "download", "--no-deps", "--no-build-isolation", f"--no-binary={project}",
            f"--dest={folder}", f"{project}=={version}", env={"PYTHONPATH": stub},
        )  # fmt: skip
    (path,) = folder.iterdir()
    return path


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(upstream: Upstream) -> Path:
    """The sdist in the cache, fetched if it is not there."""
    pin = upstream.sdist
    folder = cache_folder()
    path = folder / pin.file
    if path.is_file() and sha256_of(path) == pin.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        got = fetch(upstream.project, upstream.version, Path(scratch))
        if Pin(got.name, sha256_of(got)) != pin:
            raise SeriesError(f"{pin.file}: what came is not the pinned file")
        os.replace(got, path)
    return path


def unpack(archive: Path, folder: Path, git: bool) -> None:
    """Unpack an sdist so that `folder` is its top; with `git`, commit it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SeriesError(f"{folder} exists and is not empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpack-") as name:
        with tarfile.open(archive) as tar:
            # Early patch releases of Python 3.11 have no filters, and then ask for
            # none; the archive's hash is pinned either way. Without a filter, root's
            # files would have the packer as owner, and git does not trust such files.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            for member in tar:
                member.uid, member.gid = os.getuid(), os.getgid()
                member.uname = member.gname = ""
            tar.extractall(name)
        tops = list(Path(name).iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise SeriesError(f"{archive.name} does not hold one folder")
        if git:
            _commit(tops[0])
        os.replace(tops[0], folder)


def _commit(folder: Path) -> None:
    """Commit every file, those that .gitignore names included."""
    git = Git(folder, isolated=True)
    git.out("-c", "init.defaultBranch=main", "init", "--quiet", "--template=")
    git.out("add", "--all", "--force")
    # Tidying goes on in the background, where a folder may be moved or deleted.
    quiet = ("-c", "maintenance.auto=false", "commit", "--quiet", "--no-gpg-sign")
    git.out(*quiet, "-m", "base", env=WHO)


def obtain(
    upstream: Upstream, folder: Path, git: bool, say: Callable[[str], None] = print
) -> None:
    """Unpack the pinned sdist to `folder`."""
    unpack(download(upstream), folder, git)
    say(f"{upstream.sdist.file} unpacked to {folder}")
