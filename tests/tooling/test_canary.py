# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The search for a newer release, in a folder that stands for the package index."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trees
from turbo_series import cli, sdist
from turbo_series.upstream import Pin, Upstream, to_toml

Canary = Callable[..., trees.Done]
# pip asks it for a release's name.
BACKEND = (
    "pyproject.toml",
    "[project]\nname = 'vllm'\n",
    "[build-system]\nrequires = []\nbuild-backend = 'setuptools.build_meta'\n",
)
DELETED = ("vllm/platforms/cuda.py", "", "")
USES = trees.SPDX + "from vllm.platforms.cuda import backend\nBACKEND = backend()\n"


@pytest.fixture
def canary(project: Path, tmp_path: Path) -> Canary:
    """Runs the script in a project for 0.33.0, with the releases of a folder."""
    releases = tmp_path / "releases"
    archive = trees.make_release(releases, "0.33.0")
    pin = Pin(archive.name, sdist.sha256_of(archive))
    upstream = Upstream("vllm", "0.33.0", pin, {"x86_64": Pin("w", "0" * 64)})
    (project / "UPSTREAM.toml").write_text(to_toml(upstream))
    (project / "vllm_overlay/vllm/turbo/format.py").write_text(USES)
    assert cli.main(project, ["index"]) == 0
    cache = tmp_path / "cache/vllm-turbo"
    cache.mkdir(parents=True)
    shutil.copy(archive, cache)
    for folder in ("ci", "scripts"):
        shutil.copytree(trees.ROOT / folder, project / folder)

    def run(*versions: str, index: Path = releases) -> trees.Done:
        for version in versions:
            trees.make_release(releases, version, BACKEND, DELETED)
        own = {
            "PYTHON": sys.executable,
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": str(cache.parent),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(index),
        }
        before = trees.snapshot(project)
        done = trees.run(project / "ci/canary.sh", env={**os.environ, **own})
        assert trees.snapshot(project) == before
        return done

    return run


@pytest.mark.parametrize("older", [[], ["0.9.2", "0.32.1"]])
def test_no_newer_release(canary: Canary, older: list[str]) -> None:
    done = canary(*older)
    assert (done.returncode, done.stdout) == (0, "no newer release\n"), done.stderr


def test_newer_release(canary: Canary) -> None:
    """The newest one is stepped to, and the list has its own exit status."""
    done = canary("0.33.1", "0.100.0", "0.34.0")
    assert done.returncode == 3, done.stderr
    lost = "vllm/turbo/format.py:3 imports vllm.platforms.cuda.backend, which is gone"
    assert "To look at, for vllm 0.100.0:\n" in done.stdout
    assert "  backend.patch: deleted upstream: vllm/platforms/cuda.py\n" in done.stdout
    assert f"  vllm_overlay/{lost}\n" in done.stdout


def test_broken_index(canary: Canary, tmp_path: Path) -> None:
    """Neither an index without the project nor a bad sdist reads as no release."""
    done = canary(index=tmp_path / "nowhere")
    assert done.returncode == 1
    assert "error: pip index: " in done.stderr
    (tmp_path / "releases/vllm-0.34.0.tar.gz").write_bytes(b"no archive")
    done = canary()
    assert done.returncode == 1
    assert "error: pip download: " in done.stderr
