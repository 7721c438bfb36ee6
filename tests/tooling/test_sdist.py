# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The pin file, and getting the sdist that it names."""

import hashlib
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import trees
from trees import ROOT
from turbo_series import sdist
from turbo_series.errors import SeriesError
from turbo_series.model import Series
from turbo_series.operate import apply
from turbo_series.target import open_target
from turbo_series.upstream import Pin, Upstream, load_upstream, to_toml


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upstream:
    """The pin of a small sdist, which pip finds in a folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    top = trees.make_sdist(tmp_path / "vllm-0.33.0")
    (top / ".gitignore").write_text("/vllm/_version.py\n")
    (top / "setup.py").chmod(0o755)
    (top / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['torch == 99']\n"
        "build-backend = 'setuptools.build_meta'\n"
        "[project]\nname = '!'\n"
    )
    folder = tmp_path / "dists"
    folder.mkdir()
    archive = folder / "vllm-0.33.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(top, arcname=top.name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return replace(load_upstream(ROOT), sdist=Pin(archive.name, digest))


def test_pin_file() -> None:
    upstream = load_upstream(ROOT)
    assert to_toml(upstream) == (ROOT / "UPSTREAM.toml").read_text()
    assert set(upstream.wheels) == {"x86_64", "aarch64"}
    for pin in (upstream.sdist, *upstream.wheels.values()):
        assert upstream.version in pin.file
        assert len(bytes.fromhex(pin.sha256)) == 32


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[project]", "[project"),
        ("[project]", "[other]"),
        ('version = "', 'release = "'),
        ('file = "', 'name = "'),
        ("[sdist]", "[[sdist]]"),
        ("[wheel.x86_64]", "[wheel]"),
    ],
)
def test_pin_file_errors(tmp_path: Path, old: str, new: str) -> None:
    text = (ROOT / "UPSTREAM.toml").read_text()
    assert old in text
    (tmp_path / "UPSTREAM.toml").write_text(text.replace(old, new))
    with pytest.raises(SeriesError, match=r"UPSTREAM\.toml: "):
        load_upstream(tmp_path)


def test_pin_file_missing(tmp_path: Path) -> None:
    with pytest.raises(SeriesError, match="cannot read .*UPSTREAM.toml"):
        load_upstream(tmp_path)


def test_download_is_cached(pinned: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached file is checked, and fetched again if it is not the pinned one."""
    path = sdist.download(pinned)
    with monkeypatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", "/nowhere")
        assert sdist.download(pinned) == path
        path.write_bytes(b"gone bad")
        with pytest.raises(SeriesError, match="pip download: .*vllm==0.33.0"):
            sdist.download(pinned)
    assert sdist.download(pinned).stat().st_size > 100


def test_download_is_checked(pinned: Upstream) -> None:
    other = replace(pinned, sdist=Pin(pinned.sdist.file, "0" * 64))
    with pytest.raises(SeriesError, match="not the pinned file"):
        sdist.download(other)
    assert list(sdist.cache_folder().iterdir()) == []


def test_download_from_an_index(
    pinned: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found among other files. It is not built: its pyproject.toml would fail."""
    page = tmp_path / "simple/vllm/index.html"
    page.parent.mkdir(parents=True)
    names = ["vllm-0.33.0-py3-none-any.whl", "vllm-0.34.0.tar.gz", pinned.sdist.file]
    links = (f'<a href="../../dists/{name}">{name}</a>' for name in names)
    page.write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    assert sdist.sha256_of(sdist.download(pinned)) == pinned.sdist.sha256


def test_unpack(pinned: Upstream, series: Series, tmp_path: Path) -> None:
    archive = sdist.download(pinned)
    plain = tmp_path / "new/plain"
    sdist.unpack(archive, plain, git=False)
    target = open_target(str(plain))
    assert target.kind == "sdist"
    apply(series, target)
    with pytest.raises(SeriesError, match="exists and is not empty"):
        sdist.unpack(archive, plain, git=False)
    assert [path.name for path in plain.parent.iterdir()] == ["plain"]


def test_unpack_to_a_commit(pinned: Upstream, tmp_path: Path) -> None:
    """The commit has every file, and is the same each time."""
    archive = sdist.download(pinned)
    heads = set()
    for name in ("a", "b"):
        sdist.unpack(archive, tmp_path / name, git=True)
        heads.add(trees.git(tmp_path / name, "rev-parse", "HEAD"))
        assert open_target(str(tmp_path / name)).kind == "checkout"
    assert len(heads) == 1
    assert trees.git(tmp_path / "a", "status", "--porcelain", "--ignored") == ""
    files = trees.git(tmp_path / "a", "ls-files", "-s")
    assert "vllm/_version.py" in files
    assert files.count("100755") == 1


def test_what_is_unpacked_is_ours(
    pinned: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of another user become ours, also where tarfile has no filters."""
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    packed, archive = tmp_path / "packed", tmp_path / "other.tar.gz"
    sdist.obtain(pinned, packed, git=False, say=lambda _: None)

    def of_another(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 12345
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w:gz") as tar:
        tar.add(packed, arcname="vllm-0.33.0", filter=of_another)
    sdist.unpack(archive, tmp_path / "out", git=True)
    owners = {path.stat().st_uid for path in (tmp_path / "out").rglob("*")}
    assert owners == {os.getuid()}


def test_archive_of_more_than_one_folder(tmp_path: Path) -> None:
    archive = tmp_path / "odd.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("a/x", "b/x"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(SeriesError, match="does not hold one folder"):
        sdist.unpack(archive, tmp_path / "out", git=False)
