# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The shell scripts, and the targets that they refuse."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import trees
from turbo_series.model import Series
from turbo_series.operate import apply
from turbo_series.target import open_target


@pytest.fixture
def scripts(project: Path) -> Path:
    """The scripts, in a project of their own."""
    return Path(shutil.copytree(trees.ROOT / "scripts", project / "scripts"))


def _run(script: Path, *args: object, **env: str) -> trees.Done:
    env = {**os.environ, "PYTHON": sys.executable, **env}
    return trees.run(script, *args, env=env)


@pytest.mark.parametrize("script", ["apply.sh", "revert.sh", "verify.sh"])
def test_bad_targets_get_one_line(script: str, scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    trees.write_tree(tmp_path / "pkg", {"vllm/__init__.py": ""})
    for name, reason in (
        ("nowhere", "no such folder"),
        ("file", "not a folder"),
        ("empty", "holds no vllm/"),
        ("pkg/vllm", "name the folder above"),
    ):
        done = _run(scripts / script, tmp_path / name)
        assert done.returncode == 1
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert reason in done.stderr


def test_shell_scripts(scripts: Path, tmp_path: Path) -> None:
    target = trees.make_installed(tmp_path / "site")
    before = trees.snapshot(target)
    for script, args, status, said in (
        ("apply.sh", ["--check"], 0, "would apply"),
        ("verify.sh", [], 1, "the series is not applied"),
        ("apply.sh", [], 0, "applied: revision"),
        ("apply.sh", [], 0, "already applied"),
        ("verify.sh", [], 0, "verified"),
        ("revert.sh", [], 0, "reverted"),
        ("revert.sh", [], 1, "was not applied here"),
    ):
        done = _run(scripts / script, *args, target)
        assert done.returncode == status, done.stderr
        assert said in done.stdout + done.stderr
    assert trees.snapshot(target) == before


def test_scripts_from_elsewhere(scripts: Path, tmp_path: Path) -> None:
    """A script may be run by a relative path, with CDPATH set, and options alone."""
    os.symlink(scripts, tmp_path / "link")
    env = {**os.environ, "CDPATH": str(tmp_path)}
    done = trees.run("link/verify.sh", "--help", cwd=tmp_path, env=env, check=True)
    assert "TARGET" in done.stdout


def test_older_python_names_a_tree(scripts: Path, tmp_path: Path) -> None:
    """PYTHON says whose vLLM is meant; it need not be able to run the scripts."""
    target = trees.make_installed(tmp_path / "site")
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f"*find_spec*) echo origin={target}/vllm/__init__.py ;;\n"
        "*) exit 1 ;;\n"
        "esac\n"
    )
    python.chmod(0o755)
    for script in ("apply.sh", "verify.sh", "revert.sh"):
        done = _run(scripts / script, PYTHON=str(python))
        assert done.returncode == 0, done.stderr
        assert str(target) in done.stdout


def test_git_missing_is_one_line(scripts: Path, tmp_path: Path) -> None:
    target = trees.make_installed(tmp_path / "site")
    for command in ("apply", "revert"):
        assert _run(scripts / "series.py", command, target).returncode == 0
    command = (sys.executable, scripts / "series.py", "apply", target)
    done = trees.run(*command, env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == "error: git is not installed or not on PATH\n"


def _as_nobody(run: Callable[[], None]) -> str:
    """Run in a child without root's power to write anywhere; return its error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "no error"
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            run()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


@pytest.mark.parametrize("kind", list(trees.MAKERS))
def test_read_only_target(kind: str, series: Series) -> None:
    """The tree is not below tmp_path, which other users cannot enter."""
    with tempfile.TemporaryDirectory() as name:
        root = trees.MAKERS[kind](Path(name) / "tree")
        Path(name).chmod(0o755)
        target = open_target(str(root))
        folders = [root, *(p for p in root.rglob("*") if p.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
        before = trees.snapshot(root)
        said = _as_nobody(lambda: apply(series, target))
        assert said.startswith("SeriesError")
        assert "is not writable; nothing was changed" in said
        assert trees.snapshot(root) == before
        for folder in folders:
            folder.chmod(0o755)
