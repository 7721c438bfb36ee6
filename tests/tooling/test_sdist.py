# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The pin file, and getting the sdist that it names."""

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import trees
from turbo_series import sdist
from turbo_series.errors import SeriesError
from turbo_series.model import Series
from turbo_series.operate import apply
from turbo_series.target import open_target
from turbo_series.upstream import Pin, Upstream, load_upstream, parse_tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Upstream, str]:
    """The pin of a small sdist, and the page that links to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    top = trees.make_sdist(tmp_path / "vllm-0.33.0")
    (top / ".gitignore").write_text("/vllm/_version.py\n")
    (top / "setup.py").chmod(0o755)
    folder = tmp_path / "index"
    folder.mkdir()
    archive = folder / "vllm-0.33.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(top, arcname=top.name)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    page = folder / "page.html"
    page.write_text(
        '<a href="vllm-0.33.0.tar.gz.metadata">vllm-0.33.0.tar.gz.metadata</a>\n'
        f'<a data-x="1" href="vllm-0.33.0.tar.gz#sha256={digest}">'
        "vllm-0.33.0.tar.gz</a><br/>\n"
    )
    upstream = replace(load_upstream(ROOT), sdist=Pin(archive.name, digest))
    return upstream, page.as_uri()


def test_pin_file() -> None:
    """The small parser agrees with TOML's."""
    text = (ROOT / "UPSTREAM.toml").read_text()
    tomllib = pytest.importorskip("tomllib")
    nested = tomllib.loads(text)
    nested |= {f"wheel.{key}": value for key, value in nested.pop("wheel").items()}
    assert parse_tables(text) == nested
    upstream = load_upstream(ROOT)
    for pin in (upstream.sdist, *upstream.wheels.values()):
        assert upstream.version in pin.file
        assert len(bytes.fromhex(pin.sha256)) == 32


@pytest.mark.parametrize("text", ["a = 1", 'a = "b"', "[t]\na = 'b'", "[t"])
def test_pin_file_errors(text: str) -> None:
    with pytest.raises(SeriesError, match="UPSTREAM.toml line"):
        parse_tables(text)


def test_download_is_cached(pinned: tuple[Upstream, str]) -> None:
    upstream, url = pinned
    path = sdist.download(upstream, url)
    assert sdist.download(upstream, "file:///nowhere") == path
    path.write_bytes(b"gone bad")
    with pytest.raises(SeriesError, match="cannot fetch"):
        sdist.download(upstream, "file:///nowhere")
    assert sdist.download(upstream, url).stat().st_size > 100


def test_download_is_checked(pinned: tuple[Upstream, str]) -> None:
    upstream, url = pinned
    other = replace(upstream, sdist=Pin(upstream.sdist.file, "0" * 64))
    with pytest.raises(SeriesError, match="not the pinned file"):
        sdist.download(other, url)
    assert list(sdist.cache_folder().iterdir()) == []
    gone = replace(upstream, sdist=Pin("vllm-9.tar.gz", "0" * 64))
    with pytest.raises(SeriesError, match="vllm-9.tar.gz is not on"):
        sdist.download(gone, url)


def test_links() -> None:
    page = '<a href="../f/a.tar.gz?x=1&amp;y=2#sha256=0">a.tar.gz</a>'
    url = "https://example.com/simple/a/"
    assert sdist.find_link(page, url, "a.tar.gz") == (
        "https://example.com/simple/f/a.tar.gz?x=1&y=2"
    )


def test_unpack(pinned: tuple[Upstream, str], series: Series, tmp_path: Path) -> None:
    upstream, url = pinned
    archive = sdist.download(upstream, url)
    plain = tmp_path / "new/plain"
    sdist.unpack(archive, plain, git=False)
    target = open_target(str(plain))
    assert target.kind == "sdist"
    apply(series, target)
    with pytest.raises(SeriesError, match="exists and is not empty"):
        sdist.unpack(archive, plain, git=False)
    assert [path.name for path in plain.parent.iterdir()] == ["plain"]


def test_unpack_to_a_commit(pinned: tuple[Upstream, str], tmp_path: Path) -> None:
    """Every file is in it, and it is the same commit each time."""
    upstream, url = pinned
    archive = sdist.download(upstream, url)
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


def test_archive_of_more_than_one_folder(tmp_path: Path) -> None:
    archive = tmp_path / "odd.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("a/x", "b/x"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(SeriesError, match="does not hold one folder"):
        sdist.unpack(archive, tmp_path / "out", git=False)
