# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Installed trees: RECORD, pip, and Python's module caches."""

import base64
import csv
import hashlib
import os
import shutil
import sys
import venv
from pathlib import Path

import pytest
import trees
from turbo_series import record
from turbo_series.errors import SeriesError
from turbo_series.model import Series
from turbo_series.operate import apply, revert
from turbo_series.target import STATE_FOLDER, Target, open_target
from turbo_series.verify import verify

INFO = "vllm-0.33.0.dist-info"


def _pip(python: Path, *args: str) -> None:
    """Run this Python's pip on another environment."""
    command = (sys.executable, "-m", "pip", "--python", python, "-q", *args)
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    trees.run(*command, check=True, env=env)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The Python of an environment in which the small vLLM is installed by pip."""
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    _install(python, tmp_path)
    return python


def _install(python: Path, folder: Path) -> None:
    wheel = trees.make_wheel(folder / "wheels")
    _pip(python, "install", "--no-index", "--no-deps", "--force-reinstall", str(wheel))


@pytest.fixture
def site(python: Path) -> Target:
    (folder,) = python.parent.parent.glob("lib/python*/site-packages")
    return open_target(str(folder))


def _left(site: Target) -> list[str]:
    paths = [site.root / "vllm", site.state, *site.root.glob("vllm*")]
    return sorted({path.name for path in paths if path.exists()})


def test_record_lists_every_file(site: Target, series: Series) -> None:
    original = (site.root / INFO / "RECORD").read_bytes()
    apply(series, site)
    with (site.root / INFO / "RECORD").open(newline="") as file:
        rows = {row[0]: row[1:] for row in csv.reader(file)}
    files = [p for p in site.root.rglob("*") if p.is_file()]
    ours = [p for p in files if p.is_relative_to(site.root / "vllm")]
    ours += [p for p in files if p.is_relative_to(site.state)]
    for path in ours:
        digest, size = rows[path.relative_to(site.root).as_posix()]
        if path.name == "manifest.json" or path.suffix == ".pyc":
            assert digest == size == ""
            continue
        data = path.read_bytes()
        plain = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        assert digest == "sha256=" + plain.rstrip("=")
        assert size == str(len(data))
    assert len({*rows}) == len((site.root / INFO / "RECORD").read_text().splitlines())
    revert(site)
    assert (site.root / INFO / "RECORD").read_bytes() == original


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_record_keeps_other_lines(ending: str) -> None:
    """Quoting, line ends and unknown hashes of other files are not touched."""
    lines = ['"odd, name.py",sha256=abc,3', "a.py,md5=x,1", "b.py,,", "RECORD,,"]
    old = ending.join(lines).encode()
    new = record.updated(old, {"a.py": b"new"}, {"c, d.py": b""}, ["m.json"])
    empty = base64.urlsafe_b64encode(hashlib.sha256(b"").digest()).decode()[:-1]
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"new").digest()).decode()[:-1]
    wanted = [lines[0], f"a.py,sha256={digest},3", *lines[2:]]
    wanted += [f'"c, d.py",sha256={empty},0', "m.json,,", ""]
    assert new.decode() == ending.join(wanted)


def test_uninstall_leaves_nothing(
    site: Target, python: Path, series: Series, tmp_path: Path
) -> None:
    apply(series, site)
    trees.run(python, "-c", "import vllm.turbo.format", check=True)
    _pip(python, "uninstall", "-y", "vllm")
    assert _left(site) == []


def test_uninstall_after_revert_leaves_nothing(
    site: Target, python: Path, series: Series
) -> None:
    apply(series, site)
    revert(site)
    _pip(python, "uninstall", "-y", "vllm")
    assert _left(site) == []


def test_reinstall_takes_the_series_off(
    site: Target, python: Path, series: Series, tmp_path: Path
) -> None:
    before = trees.snapshot(site.root)
    apply(series, site)
    _install(python, tmp_path)
    assert trees.snapshot(site.root).keys() == before.keys()
    assert verify(series, site) == ["the series is not applied"]


def _forget_series(site: Target, original: bytes) -> None:
    """Put back the RECORD that does not list the series."""
    (site.root / INFO / "RECORD").write_bytes(original)


def test_uninstall_without_record_is_named(
    site: Target, python: Path, series: Series
) -> None:
    original = (site.root / INFO / "RECORD").read_bytes()
    apply(series, site)
    _forget_series(site, original)
    (problem, *others) = verify(series, site)
    assert "RECORD does not list the series" in problem
    assert others == [f"{INFO}/RECORD: not as applied (as in the base)"]
    _pip(python, "uninstall", "-y", "vllm")
    here = open_target(str(site.root))
    (problem, *others) = verify(series, here)
    assert problem.startswith("vllm was uninstalled, 3 added file(s) remain")
    assert "vllm/config/cache.py: missing" in others
    revert(here)
    assert _left(site) == []


def test_reinstall_without_record_is_named(
    site: Target, python: Path, series: Series, tmp_path: Path
) -> None:
    original = (site.root / INFO / "RECORD").read_bytes()
    before = trees.snapshot(site.root)
    apply(series, site)
    applied = trees.contents(site.root, trees.expected("installed"))
    _forget_series(site, original)
    _install(python, tmp_path)
    (problem, *others) = verify(series, site)
    assert problem.startswith("vllm was reinstalled over the series")
    assert "vllm/config/cache.py: not as applied (as in the base)" in others
    assert not any("vllm/turbo" in line for line in others)

    apply(series, site)
    assert verify(series, site) == []
    assert trees.contents(site.root, trees.expected("installed")) == applied
    _forget_series(site, original)
    _install(python, tmp_path)
    revert(site)
    assert trees.snapshot(site.root) == before


def test_reinstall_with_another_record(
    site: Target, python: Path, series: Series, tmp_path: Path
) -> None:
    """The RECORD of a later install is left as that install wrote it."""
    path = site.root / INFO / "RECORD"
    original = path.read_bytes()
    apply(series, site)
    _forget_series(site, original)
    _install(python, tmp_path)
    later = original + b"vllm-0.33.0.dist-info/LATER,,\r\n"
    path.write_bytes(later)
    assert verify(series, site)[0].startswith("vllm was reinstalled")
    apply(series, site)
    assert path.read_bytes().startswith(later[:40])
    assert b"LATER" in path.read_bytes()
    assert verify(series, site) == []
    revert(site)
    assert path.read_bytes() == later


def test_changed_record_is_not_lost(site: Target, series: Series) -> None:
    """A RECORD that lists the series and was edited since stops a revert."""
    apply(series, site)
    path = site.root / INFO / "RECORD"
    path.write_bytes(path.read_bytes() + b"mine,,\r\n")
    with pytest.raises(SeriesError, match=r"RECORD \(changed\)"):
        revert(site)


def test_other_version_over_leftovers(
    site: Target, series: Series, tmp_path: Path
) -> None:
    """Revert removes our files and leaves the newer vLLM alone."""
    apply(series, site)
    shutil.rmtree(site.root / INFO)
    trees.make_installed(site.root, "0.34.0")
    newer = site.root / "vllm/config/cache.py"
    newer.write_text("newer\n")
    here = open_target(str(site.root))
    assert "vllm was uninstalled" in verify(series, here)[0]
    revert(here)
    assert newer.read_text() == "newer\n"
    assert not (site.root / "vllm/turbo").exists()
    assert not here.state.exists()


def _value(python: Path) -> str:
    code = "from vllm.config import cache; print(cache.SIZE)"
    return trees.run(python, "-c", code, check=True).stdout.strip()


@pytest.mark.parametrize("mode", ["timestamp", "unchecked-hash"])
def test_stale_bytecode(
    site: Target, python: Path, series: Series, project: Path, mode: str
) -> None:
    """Bytecode is removed that Python would take for the new source's.

    The new source has the same size and time, or Python does not compare.
    """
    path = site.root / "vllm/config/cache.py"
    same_size = series.patches[1].files[1]
    assert same_size.path == "vllm/config/cache.py"

    def compiled() -> None:
        flags = ("--invalidation-mode", mode, "-q", path)
        trees.run(python, "-m", "compileall", "-f", *flags, check=True)

    def pin_time() -> None:
        os.utime(path, (1_700_000_000, 1_700_000_000))

    only = trees.project_with(project, ["backend.patch"])
    pin_time()
    compiled()
    assert _value(python) == "1"
    size = path.stat().st_size
    apply(only, site)
    pin_time()
    assert path.stat().st_size == size
    assert _value(python) == "2"
    compiled()
    revert(site)
    pin_time()
    assert _value(python) == "1"


def test_two_installs_are_refused(tmp_path: Path) -> None:
    root = trees.make_installed(tmp_path / "site")
    trees.make_installed(root, "0.32.0")
    with pytest.raises(SeriesError, match="2 vllm installs"):
        open_target(str(root))


def test_install_without_record(tmp_path: Path, series: Series) -> None:
    """Some distributors leave RECORD out."""
    root = trees.make_installed(tmp_path / "site")
    (root / INFO / "RECORD").unlink()
    before = trees.snapshot(root)
    target = open_target(str(root))
    apply(series, target)
    assert verify(series, target) == []
    assert not (root / INFO / "RECORD").exists()
    assert (root / STATE_FOLDER).is_dir()
    revert(target)
    assert trees.snapshot(root) == before
