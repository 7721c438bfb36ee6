# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Find the vLLM that is meant when no TARGET is named."""

import venv
from pathlib import Path

import pytest
import trees
from turbo_series import cli
from turbo_series.errors import SeriesError
from turbo_series.target import locate, open_target


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    return folder


@pytest.fixture
def site(environment: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site-packages of the active environment, holding nothing."""
    monkeypatch.delenv("PYTHON", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("VIRTUAL_ENV", str(environment))
    (folder,) = environment.glob("lib/python*/site-packages")
    for path in folder.glob("*.pth"):
        path.unlink()
    return folder


@pytest.fixture
def installed(site: Path, tmp_path: Path) -> Path:
    """A vLLM reached through a .pth file; importing it would raise."""
    folder = trees.make_installed(tmp_path / "packages")
    (folder / "vllm/__init__.py").write_text("raise SystemExit('imported')\n")
    (site / "here.pth").write_text(f"{folder}\n")
    return folder


def test_active_environment(installed: Path) -> None:
    assert locate() == installed


def test_python_is_honoured(
    installed: Path, monkeypatch: pytest.MonkeyPatch, environment: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    venv.create(other, symlinks=True)
    monkeypatch.setenv("VIRTUAL_ENV", str(other))
    with pytest.raises(SeriesError, match="has no vllm; name a TARGET"):
        locate()
    monkeypatch.setenv("PYTHON", str(environment / "bin/python"))
    assert locate() == installed


def test_python_may_be_a_relative_path(
    installed: Path, monkeypatch: pytest.MonkeyPatch, environment: Path
) -> None:
    monkeypatch.chdir(environment)
    monkeypatch.setenv("PYTHON", "bin/python")
    assert locate() == installed


def test_current_folder_does_not_shadow(
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkout = trees.make_checkout(tmp_path / "checkout")
    monkeypatch.chdir(checkout)
    assert locate() == installed
    assert "not the vllm/ of the current folder" in capsys.readouterr().out


def test_current_folder_alone_is_not_found(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trees.make_checkout(tmp_path / "checkout"))
    with pytest.raises(SeriesError, match="has no vllm"):
        locate()


def test_editable_install(site: Path, tmp_path: Path) -> None:
    checkout = trees.make_checkout(tmp_path / "checkout")
    (site / "editable.pth").write_text(f"{checkout}\n")
    assert open_target(None).kind == "checkout"
    assert open_target(None).root == checkout


def test_no_such_python(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", "/nowhere/python")
    with pytest.raises(SeriesError, match="cannot run /nowhere/python"):
        locate()


def test_commands_without_target(
    installed: Path, project_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trees.snapshot(installed)
    assert cli.main(project_source, ["apply"]) == 0
    assert cli.main(project_source, ["verify"]) == 0
    assert cli.main(project_source, ["revert"]) == 0
    assert trees.snapshot(installed) == before
    assert str(installed) in capsys.readouterr().out


def test_kinds(tmp_path: Path) -> None:
    for kind, maker in trees.MAKERS.items():
        assert open_target(str(maker(tmp_path / kind))).kind == kind
    worktree = tmp_path / "worktree"
    trees.git(tmp_path / "checkout", "worktree", "add", "-q", str(worktree))
    assert (worktree / ".git").is_file()
    assert open_target(str(worktree)).kind == "checkout"
