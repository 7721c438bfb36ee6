# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Find the pins of another release, for UPSTREAM.toml."""

import json
import os
import re
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .errors import SeriesError
from .sdist import cache_folder, fetch, run_pip, sha256_of
from .upstream import Pin, Upstream

# pip takes a manylinux tag literally, so tags of older glibcs have to be named as well.
_GLIBC_MINORS = range(17, 44)


def find_pins(old: Upstream, version: str) -> Upstream:
    """The pins of a release with the wheels that `old` has; its sdist gets cached."""
    return Upstream(
        project=old.project,
        version=version,
        sdist=_sdist(old.project, version),
        wheels={arch: _wheel(old.project, version, arch) for arch in old.wheels},
    )


def find_newer(pinned: Upstream) -> str | None:
    """The newest release that has an sdist, if it is newer than the pinned one."""
    project = pinned.project
    # At the level that run_pip asks for, this command says nothing.
    said = run_pip("index", "versions", "--verbose", f"--no-binary={project}", project)
    found = re.search(rf"^{re.escape(project)} \((.+)\)$", said, re.MULTILINE)
    if found is None:
        raise SeriesError(f"pip index: no version of {project} in its answer")
    newest, own = found[1], pinned.version
    older = _numbers(newest) <= _numbers(own)
    return None if older else newest


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _sdist(project: str, version: str) -> Pin:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = fetch(project, version, Path(scratch))
        pin = Pin(path.name, sha256_of(path))
        os.replace(path, folder / path.name)
    return pin


def _wheel(project: str, version: str, arch: str) -> Pin:
    """The wheel for Linux that pip would install; it is not downloaded."""
    platforms = [f"--platform=manylinux_2_{minor}_{arch}" for minor in _GLIBC_MINORS]
    with tempfile.TemporaryDirectory() as scratch:
        report = run_pip(
            "install", "--dry-run", "--report=-", "--no-deps", "--ignore-installed",
            "--only-binary=:all:", f"--target={scratch}", *platforms,
            f"{project}=={version}",
        )  # fmt: skip
    (item,) = json.loads(report)["install"]
    source = item["download_info"]
    digest = source.get("archive_info", {}).get("hashes", {}).get("sha256")
    if digest is None:
        raise SeriesError(f"pip knows no SHA-256 of {source['url']}")
    return Pin(unquote(urlsplit(source["url"]).path).rpartition("/")[2], digest)
