# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Get the pinned sdist and unpack it."""

import hashlib
import html
import os
import re
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin

from .errors import SeriesError
from .git import Git
from .upstream import Pin, Upstream

TIMEOUT_S = 120
_LINK = re.compile(r'<a\s[^>]*href="([^"]+)"[^>]*>\s*([^<\s]+)\s*</a>', re.IGNORECASE)
_WHO = {
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


def index_page(project: str) -> str:
    """The address of a project's page on the package index that pip knows."""
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        raise SeriesError("this Python has no pip, which knows the index") from None
    return f"{PyPI.simple_url}/{project}/"


def find_link(page: str, url: str, file: str) -> str:
    """The address of `file` on an index page that came from `url`."""
    for link, name in _LINK.findall(page):
        if name == file:
            return urljoin(url, html.unescape(link)).partition("#")[0]
    raise SeriesError(f"{file} is not on {url}")


def _is_pinned(path: Path, pin: Pin) -> bool:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == pin.sha256


def download(upstream: Upstream, page_url: str | None = None) -> Path:
    """The sdist in the cache, fetched if it is not there."""
    pin = upstream.sdist
    folder = cache_folder()
    path = folder / pin.file
    if path.is_file() and _is_pinned(path, pin):
        return path
    page_url = page_url or index_page(upstream.project)
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{pin.file}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(page_url, timeout=TIMEOUT_S) as reply:
            link = find_link(reply.read().decode(), page_url, pin.file)
        with (
            urllib.request.urlopen(link, timeout=TIMEOUT_S) as reply,
            part.open("wb") as out,
        ):
            shutil.copyfileobj(reply, out)
        if not _is_pinned(part, pin):
            raise SeriesError(f"{pin.file}: what came is not the pinned file")
        os.replace(part, path)
    except urllib.error.URLError as error:
        raise SeriesError(f"cannot fetch {pin.file}: {error.reason}") from None
    finally:
        part.unlink(missing_ok=True)
    return path


def unpack(archive: Path, folder: Path, git: bool) -> None:
    """Unpack an sdist so that `folder` is its top; with `git`, commit it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SeriesError(f"{folder} exists and is not empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpack-") as name:
        with tarfile.open(archive) as tar:
            # Early patch releases of Python 3.10 and 3.11 have no filters; the
            # archive's hash is pinned either way.
            if hasattr(tarfile, "data_filter"):
                tar.extractall(name, filter="data")
            else:
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
    git.out("commit", "--quiet", "--no-gpg-sign", "-m", "base", env=_WHO)


def obtain(
    upstream: Upstream, folder: Path, git: bool, say: Callable[[str], None] = print
) -> None:
    """Unpack the pinned sdist to `folder`."""
    unpack(download(upstream), folder, git)
    say(f"{upstream.sdist.file} unpacked to {folder}")
