# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The series as commits, there and back."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trees
from turbo_series import cli
from turbo_series.branch import differences, read_branch
from turbo_series.errors import SeriesError


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return trees.make_checkout(tmp_path / "checkout")


@pytest.fixture
def run(project: Path) -> Callable[..., int]:
    return lambda *args: cli.main(project, [str(arg) for arg in args])


def test_commit(checkout: Path, run: Callable[..., int]) -> None:
    """One commit a patch, with its author, date, message and overlay files."""
    base = trees.git(checkout, "rev-parse", "HEAD").strip()
    assert run("apply", "--commit", "--check", checkout) == 0
    assert trees.git(checkout, "rev-parse", "HEAD").strip() == base
    assert run("apply", "--commit", checkout) == 0
    assert trees.git(checkout, "status", "--porcelain") == ""
    wanted = trees.expected("checkout")
    assert trees.contents(checkout, wanted) == wanted
    log = trees.git(checkout, "log", "--reverse", "--format=%H", f"{base}..HEAD")
    assert len(log.split()) == len(trees.PATCHES)
    owned = (
        ["__init__.py", "format.py"],
        ["kernel.cu"],
        ["turbo.md"],
        ["test_format.py"],
    )
    for commit, (_, subject, edits, globs), names in zip(
        log.split(), trees.PATCHES, owned
    ):
        show = trees.git(checkout, "show", "-s", "--format=%an|%ae|%aI|%B", commit)
        author, email, date, message = show.split("|", 3)
        assert (author, email) == ("Zoë Example", "zoe@example.com")
        assert date == "2026-01-05T10:00:00+01:00"
        text = trees.message(subject, globs, "tests/turbo/test_format.py::test_bits")
        assert message.rstrip("\n") == text.rstrip("\n")
        changes = trees.git(
            checkout, "diff-tree", "-r", "--no-commit-id", "--name-status", commit
        )
        pairs = [line.split("\t") for line in changes.splitlines()]
        assert {p for s, p in pairs if s == "M"} == {path for path, *_ in edits}
        assert [p.rpartition("/")[2] for s, p in pairs if s == "A"] == names


def test_commit_twice(checkout: Path, run: Callable[..., int]) -> None:
    assert run("apply", "--commit", checkout) == 0
    head = trees.git(checkout, "rev-parse", "HEAD")
    assert run("apply", "--commit", checkout) == 0
    assert trees.git(checkout, "rev-parse", "HEAD") == head


@pytest.mark.parametrize("kind", ["sdist", "installed"])
def test_commit_needs_a_checkout(
    kind: str,
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = trees.MAKERS[kind](tmp_path / kind)
    before = trees.snapshot(root)
    assert run("apply", "--commit", root) == 1
    assert "commits need a git checkout" in capsys.readouterr().err
    assert trees.snapshot(root) == before


def test_commit_refusals(
    checkout: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Uncommitted work, an applied series, a foreign file, another base."""
    head = trees.git(checkout, "rev-parse", "HEAD")
    path = checkout / "vllm/config/cache.py"

    def refused(reason: str) -> None:
        assert run("apply", "--commit", checkout) == 1
        assert reason in capsys.readouterr().err
        assert trees.git(checkout, "rev-parse", "HEAD") == head

    path.write_text("mine\n")
    refused("has uncommitted changes: M vllm/config/cache.py")
    trees.git(checkout, "checkout", "-q", ".")
    assert run("apply", checkout) == 0
    refused("run revert.sh first")
    assert run("revert", checkout) == 0
    trees.write_tree(checkout, {"vllm/turbo/format.py": "mine\n"})
    refused("exists already and is not ours")
    (checkout / "vllm/turbo/format.py").unlink()
    path.write_text("other\n")
    trees.git(checkout, "commit", "-q", "-am", "other")
    head = trees.git(checkout, "rev-parse", "HEAD")
    refused("vllm/config/cache.py (other content in HEAD)")


def test_import_then_export(
    checkout: Path, run: Callable[..., int], project: Path
) -> None:
    """An export gives back the same bytes, also where the overlay was removed."""
    assert run("import", checkout, "--branch", "topic") == 0
    assert trees.git(checkout, "branch", "--show-current") == "topic\n"
    before = trees.snapshot(project)
    assert run("export", checkout, "--branch", "topic", "--check") == 0
    assert run("export", checkout, "--branch", "topic") == 0
    assert trees.snapshot(project) == before
    for path in (project / "patches").glob("*.patch"):
        shutil.copy(path, path.with_suffix(".kept"))
        path.write_bytes(path.read_bytes() + b"-- \n2.0\n")
    shutil.rmtree(project / "vllm_overlay")
    assert run("export", checkout, "--branch", "topic", "--check") == 1
    assert run("export", checkout, "--branch", "topic") == 0
    for path in (project / "patches").glob("*.kept"):
        path.unlink()
    assert trees.snapshot(project) == before


@pytest.mark.parametrize(
    "config",
    [
        "[diff]\nnoprefix = true\ncontext = 9\nalgorithm = histogram\n",
        "[format]\nsignature = me\nsubjectPrefix = X\nheaders = X: b\nsignOff = true\n",
        "[diff]\nmnemonicPrefix = true\n[core]\nabbrev = 5\nquotePath = false\n",
    ],
)
@pytest.mark.parametrize("where", ["user", "repository"])
def test_export_ignores_configuration(
    checkout: Path,
    run: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    where: str,
) -> None:
    assert run("import", checkout) == 0
    path = checkout / ".git/config"
    if where == "user":
        path = checkout.parent / "gitconfig"
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(path))
    with path.open("a") as file:
        file.write(config)
    assert run("export", checkout, "--check") == 0


def _amend(checkout: Path, *args: str) -> None:
    trees.git(checkout, "commit", "-q", "--amend", "--cleanup=verbatim", "-a", *args)


def test_export_of_an_edited_branch(
    checkout: Path, run: Callable[..., int], project: Path
) -> None:
    """Fixups go to their patch or the overlay; the names of patches stay."""
    assert run("import", checkout) == 0
    steps = checkout / ".buildkite/steps.yaml"
    steps.write_text(steps.read_text() + "  - more\n")
    (checkout / "docs/turbo.md").write_text("# Turbo, edited\n")
    (checkout / "tests/turbo/test_format.py").unlink()
    tool = checkout / "tests/turbo/tool.sh"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    trees.git(checkout, "add", "tests")
    _amend(checkout, "--no-edit")
    before = trees.snapshot(project)
    assert run("export", checkout) == 0
    after = trees.snapshot(project)
    changed = {p for p in before | after if before.get(p) != after.get(p)}
    assert changed == {
        "patches/ci-step.patch",
        "vllm_overlay/docs/turbo.md",
        "vllm_overlay/tests/turbo/test_format.py",
        "vllm_overlay/tests/turbo/tool.sh",
    }
    assert after["vllm_overlay/tests/turbo/tool.sh"][0] & 0o111
    again = trees.make_checkout(checkout.parent / "again")
    assert run("import", again) == 0
    assert run("export", again, "--check") == 0
    assert (again / "tests/turbo/tool.sh").stat().st_mode & 0o100


def test_export_of_new_reordered_and_dropped_commits(
    checkout: Path, run: Callable[..., int], project: Path
) -> None:
    """A name comes from the subject; comments in `series` stay with their patch."""
    assert run("import", checkout) == 0
    first, _, _, last = trees.git(
        checkout, "log", "--reverse", "--format=%H", "main..turbo"
    ).split()
    trees.git(checkout, "reset", "-q", "--hard", "main")
    trees.git(checkout, "cherry-pick", last)
    trees.git(checkout, "cherry-pick", first)
    (checkout / "vllm/platforms/cuda.py").write_text("new\n")
    text = trees.message("[CUDA] 3x the -- Speed!", [], "tests/turbo/test_format.py")
    trees.git(checkout, "commit", "-q", "-a", "-m", text)
    assert run("export", checkout) == 0
    assert (project / "patches/series").read_text().splitlines() == [
        "# The order.",
        "",
        "# About ci-step.patch.",
        "ci-step.patch",
        "# About cache-dtype.patch.",
        "cache-dtype.patch",
        "x-the-speed.patch",
    ]
    names = {path.name for path in (project / "patches").glob("*.patch")}
    assert names == {"ci-step.patch", "cache-dtype.patch", "x-the-speed.patch"}
    assert not (project / "vllm_overlay/vllm/turbo/csrc").exists()


@pytest.mark.parametrize("blank", ["", "\n"])
def test_comment_on_the_order(
    checkout: Path, run: Callable[..., int], project: Path, blank: str
) -> None:
    """The comment stays at the top, also when the entry below it goes."""
    order = project / "patches/series"
    names = [name for name, *_ in trees.PATCHES]
    order.write_text(f"# The order.\n{blank}" + "\n".join(names) + "\n")
    assert run("import", checkout) == 0
    trees.git(checkout, "rebase", "-q", "--onto", "main", "turbo~3")
    assert run("export", checkout, "--base", "main") == 0
    kept = "\n".join(names[1:])
    assert order.read_text() == f"# The order.\n{blank}{kept}\n"


def test_later_commit_edits_an_added_file(
    checkout: Path, run: Callable[..., int], project: Path
) -> None:
    """The overlay holds the file's last state, and no patch has any of it."""
    assert run("import", checkout) == 0
    (checkout / "vllm/turbo/format.py").write_text(trees.SPDX + "BITS = 8\n")
    _amend(checkout, "--no-edit")
    assert run("export", checkout) == 0
    overlay = project / "vllm_overlay/vllm/turbo/format.py"
    assert overlay.read_text().endswith("BITS = 8\n")
    assert "BITS" not in (project / "patches/ci-step.patch").read_text()


def _refusal(checkout: Path, project: Path) -> str:
    with pytest.raises(SeriesError) as error:
        read_branch(project, checkout, "turbo")
    return str(error.value)


def test_export_refusals(
    checkout: Path, run: Callable[..., int], project: Path
) -> None:
    assert run("import", checkout) == 0
    tip = trees.git(checkout, "rev-parse", "HEAD").strip()

    def reset() -> None:
        trees.git(checkout, "reset", "-q", "--hard", tip)

    def commit(*args: str) -> None:
        text = trees.message("[Core] Do more", [], "tests/turbo/test_format.py")
        trees.git(checkout, "add", "-A")
        trees.git(checkout, "commit", "-q", "-m", text, *args)

    (checkout / "vllm/turbo/format.py").write_text("x\n")
    commit()
    assert "edits no file of the base and adds none" in _refusal(checkout, project)
    reset()
    (checkout / "new.txt").write_text("x\n")
    (checkout / "setup.py").write_text("x\n")
    commit()
    assert "give it `Overlay: new.txt`" in _refusal(checkout, project)
    reset()
    (checkout / "setup.py").unlink()
    commit()
    assert "does more than edit setup.py (D)" in _refusal(checkout, project)
    reset()
    (checkout / "setup.py").chmod(0o755)
    commit()
    assert "setup.py: old mode 100644" in _refusal(checkout, project)
    reset()
    (checkout / "setup.py").write_text("x\n")
    trees.git(checkout, "commit", "-qam", "[Core] Do more\n\nBefore\n---\nafter")
    assert "mail would not keep this message" in _refusal(checkout, project)
    reset()
    trees.git(checkout, "checkout", "-q", "-b", "side", "main")
    (checkout / "tests/test_base.py").write_text("x\n")
    commit()
    trees.git(checkout, "checkout", "-q", "turbo")
    trees.git(checkout, "merge", "-q", "--no-edit", "side")
    assert "is a merge" in _refusal(checkout, project)
    trees.git(checkout, "update-ref", "-d", "refs/turbo-series/turbo")
    assert "name the commit with --base" in _refusal(checkout, project)
    reset()
    assert differences(project, read_branch(project, checkout, "turbo", "main")) == []


def test_export_after_a_rebase(
    checkout: Path,
    run: Callable[..., int],
    project: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The new base is named once, and remembered by an export that writes."""
    assert run("import", checkout) == 0
    trees.git(checkout, "switch", "-q", "--orphan", "newer")
    base = {**trees.BASE, "setup.py": "import os\n\n" + trees.BASE["setup.py"]}
    trees.write_tree(checkout, base)
    trees.git(checkout, "add", "-A", "-f")
    trees.git(checkout, "commit", "-q", "-m", "newer base")
    trees.git(checkout, "rebase", "-q", "--onto", "newer", "main", "turbo")
    capsys.readouterr()
    for args in ([], ["--check"]):
        assert run("export", checkout, *args) == 1
        assert capsys.readouterr().err.startswith("error: turbo does not start at ")
    assert run("export", checkout, "--base", "newer", "--check") == 1
    assert run("export", checkout, "--check") == 1
    assert capsys.readouterr().err.endswith("with --base\n")
    assert run("export", checkout, "--base", "newer") == 0
    assert "changed: patches/backend.patch" in capsys.readouterr().out
    assert "@@ -3,4 +3,5 @@" in (project / "patches/backend.patch").read_text()
    assert run("export", checkout, "--check") == 0


def test_import_refusals(
    checkout: Path,
    run: Callable[..., int],
    project: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trees.git(checkout, "branch", "turbo")
    assert run("import", checkout) == 1
    assert "has a branch turbo already" in capsys.readouterr().err
    assert run("import", checkout, "--branch", "a..b") == 1
    assert "no name for a branch" in capsys.readouterr().err
    (project / "vllm_overlay/stray.txt").write_text("x\n")
    assert run("import", checkout, "--branch", "topic") == 1
    assert "stray.txt is in no patch's Overlay" in capsys.readouterr().err
    assert trees.git(checkout, "branch", "--format=%(refname:short)") == "main\nturbo\n"


def test_commit_inside_a_hook(
    checkout: Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables of another repository's hook do not matter."""
    other = trees.make_checkout(checkout.parent / "other")
    head = trees.git(other, "rev-parse", "HEAD")
    with monkeypatch.context() as patch:
        patch.setenv("GIT_DIR", str(other / ".git"))
        patch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
        assert run("import", checkout) == 0
        assert run("export", checkout, "--check") == 0
    assert trees.git(other, "rev-parse", "HEAD") == head
    assert os.listdir(other / ".git/refs/heads") == ["main"]
