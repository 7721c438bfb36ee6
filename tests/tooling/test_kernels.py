# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Archives of kernels that were built elsewhere: which are taken, and where they go."""

import io
import json
import platform
import re
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trees
from turbo_series import cli
from turbo_series.errors import SeriesError
from turbo_series.kernels import FOLDER, MANIFEST, PACKAGE, load_kernels, package_digest
from turbo_series.model import OverlayFile, Series
from turbo_series.operate import apply, revert
from turbo_series.state import sha256
from turbo_series.target import Target
from turbo_series.verify import verify

NAMES = ("turbo_merge_128_sm90_0123abcd", "turbo_store_turbo4_128_sm90_89ef")
VERSION = "0.1.11"


def _manifest(series: Series) -> dict[str, Any]:
    return {
        "format": 1,
        "package": package_digest(series.overlay),
        "tvm_ffi": VERSION,
        "cuda": "13.0",
        "machine": platform.machine(),
        "libraries": {name: sha256(name.encode()) for name in NAMES},
    }


def _files(manifest: dict[str, Any]) -> dict[str, bytes]:
    files = {MANIFEST: json.dumps(manifest).encode()}
    for name in NAMES:
        files[f"{name}.so"] = name.encode()
        files[f"{name}.sha256"] = sha256(name.encode()).encode()
    return files


def _pack(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def archive(series: Series, tmp_path: Path) -> Path:
    return _pack(tmp_path / "kernels.tar.xz", _files(_manifest(series)))


@pytest.fixture
def sdist(make: Callable[[str], Target]) -> Target:
    return make("sdist")


def test_kernels_come_and_go_with_the_series(
    tree: Target, series: Series, archive: Path
) -> None:
    before = trees.snapshot(tree.root)
    apply(series, tree, kernels=load_kernels(archive, series, tree))
    files = {FOLDER + name: data for name, data in _files(_manifest(series)).items()}
    wanted = trees.expected(tree.kind)
    assert trees.contents(tree.root, [*wanted, *files]) == {**wanted, **files}
    assert verify(series, tree) == []
    (tree.root / FOLDER / f"{NAMES[0]}.so").write_bytes(b"other")
    assert verify(series, tree) == [f"{FOLDER}{NAMES[0]}.so: differs"]
    revert(tree, force=True)
    assert trees.snapshot(tree.root) == before


def test_record_lists_kernels(
    make: Callable[[str], Target], series: Series, archive: Path
) -> None:
    """By its RECORD pip removes them with vLLM."""
    target = make("installed")
    assert target.record is not None
    apply(series, target, kernels=load_kernels(archive, series, target))
    text = (target.root / target.record).read_text()
    assert all(f"\n{FOLDER}{name}.so,sha256=" in text for name in NAMES)


def test_kernels_stay_until_there_are_others(
    tree: Target, series: Series, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tree.root / FOLDER / f"{NAMES[1]}.so"
    apply(series, tree)
    kernels = load_kernels(archive, series, tree)
    for given, is_applied in ((kernels, True), (kernels, False), (None, False)):
        capsys.readouterr()
        apply(series, tree, kernels=given)
        said = capsys.readouterr().out
        assert ("already applied" in said) != is_applied
        assert ("with other kernels is taken off" in said) == is_applied
        assert library.read_bytes() == NAMES[1].encode()
    fewer = {path: file for path, file in kernels.items() if NAMES[1] not in path}
    apply(series, tree, kernels=fewer)
    assert not library.exists() and verify(series, tree) == []
    # The kernels go with the series that they were built for.
    apply(replace(series, patches=series.patches[:-1]), tree)
    assert not (tree.root / FOLDER).exists()


def test_a_tree_with_libraries_of_its_own(
    tree: Target, series: Series, archive: Path
) -> None:
    """Libraries that were built in the tree, for instance, are not overwritten."""
    library = tree.root / FOLDER / f"{NAMES[0]}.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"built here")
    with trees.refusing(tree.root, f"{NAMES[0]}.so exists already"):
        apply(series, tree, kernels=load_kernels(archive, series, tree))


def test_kernels_of_other_sources_are_refused(
    sdist: Target, series: Series, archive: Path
) -> None:
    """Sources of kernels and of their callers count; other files do not."""
    for path, refused in ((f"{PACKAGE}cuda/csrc/a.cu", True), ("docs/a.cu", False)):
        file = OverlayFile(path, b"int x;\n", executable=False)
        other = replace(series, overlay={**series.overlay, path: file})
        if refused:
            with pytest.raises(SeriesError, match="other sources than .*build one"):
                load_kernels(archive, other, sdist)
        else:
            assert load_kernels(archive, other, sdist)


def test_kernels_for_another_tvm_ffi_are_refused(
    make: Callable[[str], Target], series: Series, archive: Path
) -> None:
    """They would not be found: the names that are looked for have its version."""
    target = make("installed")
    for version in (VERSION, "0.1.15.post2"):
        info = target.root / f"apache_tvm_ffi-{version}.dist-info"
        info.mkdir()
        if version == VERSION:
            assert load_kernels(archive, series, target)
        else:
            words = f"apache-tvm-ffi {VERSION}, .* has {version}; install the former"
            with pytest.raises(SeriesError, match=words):
                load_kernels(archive, series, target)
        info.rmdir()


def _broken(manifest: dict[str, Any], fault: str) -> dict[str, bytes]:
    files = _files(manifest)
    if fault == "library":
        files[f"{NAMES[0]}.so"] = b"other"
    elif fault == "sha256":
        files[f"{NAMES[0]}.sha256"] = b"0"
    elif fault == "lacking":
        del files[f"{NAMES[0]}.so"]
    elif fault == "more":
        files["../../sitecustomize.py"] = b""
    elif fault == "no manifest":
        del files[MANIFEST]
    else:
        key, value = fault.split("=")
        manifest = {**manifest, key: json.loads(value)}
        files[MANIFEST] = json.dumps(manifest).encode()
    return files


@pytest.mark.parametrize(
    "fault, message",
    [
        ("library", f"{NAMES[0]}.so is not what was built"),
        ("sha256", f"{NAMES[0]}.so is not what was built"),
        ("lacking", f"not what its {MANIFEST} lists: {NAMES[0]}.so"),
        ("more", f"not what its {MANIFEST} lists: ../../sitecustomize.py"),
        ("no manifest", f"no {MANIFEST} of kernels.* --archive writes one"),
        ("libraries=7", f"no {MANIFEST} of kernels.* --archive writes one"),
        ('libraries={"../evil": ""}', f"not what its {MANIFEST} lists"),
        ("format=2", "by another version of this series"),
        ('machine="z80"', f"is for z80, this is {platform.machine()}"),
    ],
)
def test_what_is_no_archive_of_kernels(
    sdist: Target, series: Series, tmp_path: Path, fault: str, message: str
) -> None:
    path = _pack(tmp_path / "broken.tar.xz", _broken(_manifest(series), fault))
    with pytest.raises(SeriesError, match=message):
        load_kernels(path, series, sdist)


def test_names_that_lead_elsewhere(
    sdist: Target, series: Series, tmp_path: Path
) -> None:
    manifest = _manifest(series)
    name = "../turbo_merge_128_sm90_0"
    manifest["libraries"] = {name: sha256(b"")}
    files = {MANIFEST: json.dumps(manifest).encode()}
    files |= {f"{name}.so": b"", f"{name}.sha256": sha256(b"").encode()}
    with pytest.raises(SeriesError, match=re.escape(f"{name} is no name")):
        load_kernels(_pack(tmp_path / "a.tar.xz", files), series, sdist)


@pytest.mark.parametrize("cut", [0, 100, 400])
def test_half_of_an_archive(
    sdist: Target, series: Series, archive: Path, cut: int
) -> None:
    archive.write_bytes(archive.read_bytes()[:cut])
    with pytest.raises(SeriesError, match="no archive of kernels.* --archive writes"):
        load_kernels(archive, series, sdist)


def test_commands(
    make: Callable[[str], Target],
    project: Path,
    series: Series,
    archive: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = make("checkout")
    args = ["apply", str(target.root), "--kernels", str(archive)]
    assert cli.main(project, [*args, "--commit"]) == 1
    assert "kernels are no part of a commit" in capsys.readouterr().err
    assert cli.main(project, ["apply", "--kernels", "none.tar.xz", args[1]]) == 1
    assert "none.tar.xz: No such file" in capsys.readouterr().err
    assert cli.main(project, [*args, "--check"]) == 0
    assert not (target.root / FOLDER).exists()
    assert cli.main(project, args) == 0
    assert (target.root / FOLDER / MANIFEST).is_file()
    # A tree that holds the series as commits has no state to revert by.
    other = make("sdist")
    apply(series, other)
    shutil.rmtree(other.state / "backup")
    (other.state / "manifest.json").unlink()
    args[1] = str(other.root)
    assert cli.main(project, args) == 1
    assert f"unpack the kernels into {FOLDER}" in capsys.readouterr().err
