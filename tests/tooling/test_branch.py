# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The series as commits, there and back."""

import os
import shutil
from pathlib import Path

import pytest
import trees
from turbo_series import cli
from turbo_series.branch import differences, read_branch
from turbo_series.errors import SeriesError


class Repository:
    """A checkout of the small vLLM, and the project whose series it gets."""

    def __init__(self, project: Path, path: Path) -> None:
        self.project = project
        self.path = trees.make_checkout(path)

    def git(self, *args: str) -> str:
        return trees.git(self.path, *args)

    def head(self) -> str:
        return self.git("rev-parse", "HEAD").strip()

    def run(self, command: str, *args: str) -> int:
        """Run a command of the series on the checkout."""
        return cli.main(self.project, [command, str(self.path), *args])

    def refusal(self) -> str:
        """Return the words that refuse the branch."""
        with pytest.raises(SeriesError) as error:
            read_branch(self.project, self.path, "turbo")
        return str(error.value)

    def amend(self) -> None:
        self.git("commit", "-q", "--amend", "--cleanup=verbatim", "-a", "--no-edit")


@pytest.fixture
def repo(project: Path, tmp_path: Path) -> Repository:
    return Repository(project, tmp_path / "checkout")


def test_commit(repo: Repository) -> None:
    """One commit a patch, with its author, date, message and overlay files."""
    base = repo.head()
    assert repo.run("apply", "--commit", "--check") == 0
    assert repo.head() == base
    assert repo.run("apply", "--commit") == 0
    assert repo.git("status", "--porcelain") == ""
    wanted = trees.expected("checkout")
    assert trees.contents(repo.path, wanted) == wanted
    log = repo.git("log", "--reverse", "--format=%H", f"{base}..HEAD")
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
        show = repo.git("show", "-s", "--format=%an|%ae|%aI|%B", commit)
        author, email, date, message = show.split("|", 3)
        assert (author, email) == ("Zoë Example", "zoe@example.com")
        assert date == "2026-01-05T10:00:00+01:00"
        text = trees.message(subject, globs, "tests/turbo/test_format.py::test_bits")
        assert message.rstrip("\n") == text.rstrip("\n")
        changes = repo.git("diff-tree", "-r", "--no-commit-id", "--name-status", commit)
        pairs = [line.split("\t") for line in changes.splitlines()]
        assert {p for s, p in pairs if s == "M"} == {path for path, *_ in edits}
        assert [p.rpartition("/")[2] for s, p in pairs if s == "A"] == names


def test_commit_twice(repo: Repository) -> None:
    assert repo.run("apply", "--commit") == 0
    head = repo.head()
    assert repo.run("apply", "--commit") == 0
    assert repo.head() == head


@pytest.mark.parametrize("kind", ["sdist", "installed"])
def test_commit_needs_a_checkout(
    project: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = trees.MAKERS[kind](tmp_path / kind)
    before = trees.snapshot(root)
    assert cli.main(project, ["apply", "--commit", str(root)]) == 1
    assert "commits need a git checkout" in capsys.readouterr().err
    assert trees.snapshot(root) == before


def test_commit_refusals(repo: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    """Uncommitted work, an applied series, a foreign file, another base."""
    head = repo.head()
    path = repo.path / "vllm/config/cache.py"

    def refused(reason: str) -> None:
        assert repo.run("apply", "--commit") == 1
        assert reason in capsys.readouterr().err
        assert repo.head() == head

    path.write_text("mine\n")
    refused("has uncommitted changes: M vllm/config/cache.py")
    repo.git("checkout", "-q", ".")
    assert repo.run("apply") == 0
    refused("run revert.sh first")
    assert repo.run("revert") == 0
    trees.write_tree(repo.path, {"vllm/turbo/format.py": "mine\n"})
    refused("exists already and is not ours")
    (repo.path / "vllm/turbo/format.py").unlink()
    path.write_text("other\n")
    repo.git("commit", "-q", "-am", "other")
    head = repo.head()
    refused("vllm/config/cache.py (other content in HEAD)")


def test_import_then_export(repo: Repository, project: Path) -> None:
    """An export gives back the same bytes, also where the overlay was removed."""
    assert repo.run("import", "--branch", "topic") == 0
    assert repo.git("branch", "--show-current") == "topic\n"
    before = trees.snapshot(project)
    assert repo.run("export", "--branch", "topic", "--check") == 0
    assert repo.run("export", "--branch", "topic") == 0
    assert trees.snapshot(project) == before
    for path in (project / "patches").glob("*.patch"):
        shutil.copy(path, path.with_suffix(".kept"))
        path.write_bytes(path.read_bytes() + b"-- \n2.0\n")
    shutil.rmtree(project / "vllm_overlay")
    assert repo.run("export", "--branch", "topic", "--check") == 1
    assert repo.run("export", "--branch", "topic") == 0
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
    repo: Repository, monkeypatch: pytest.MonkeyPatch, config: str, where: str
) -> None:
    assert repo.run("import") == 0
    path = repo.path / ".git/config"
    if where == "user":
        path = repo.path.parent / "gitconfig"
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(path))
    with path.open("a") as file:
        file.write(config)
    assert repo.run("export", "--check") == 0


def test_export_of_an_edited_branch(repo: Repository, project: Path) -> None:
    """Fixups go to their patch or the overlay; the names of patches stay."""
    assert repo.run("import") == 0
    steps = repo.path / ".buildkite/steps.yaml"
    steps.write_text(steps.read_text() + "  - more\n")
    (repo.path / "docs/turbo.md").write_text("# Turbo, edited\n")
    (repo.path / "tests/turbo/test_format.py").unlink()
    tool = repo.path / "tests/turbo/tool.sh"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    repo.git("add", "tests")
    repo.amend()
    before = trees.snapshot(project)
    assert repo.run("export") == 0
    after = trees.snapshot(project)
    changed = {p for p in before | after if before.get(p) != after.get(p)}
    assert changed == {
        "patches/ci-step.patch",
        "vllm_overlay/docs/turbo.md",
        "vllm_overlay/tests/turbo/test_format.py",
        "vllm_overlay/tests/turbo/tool.sh",
    }
    assert after["vllm_overlay/tests/turbo/tool.sh"][0] & 0o111
    again = Repository(project, repo.path.parent / "again")
    assert again.run("import") == 0
    assert again.run("export", "--check") == 0
    assert (again.path / "tests/turbo/tool.sh").stat().st_mode & 0o100


def test_export_of_new_reordered_and_dropped_commits(
    repo: Repository, project: Path
) -> None:
    """A name comes from the subject; comments in `series` stay with their patch."""
    assert repo.run("import") == 0
    first, _, _, last = repo.git(
        "log", "--reverse", "--format=%H", "main..turbo"
    ).split()
    repo.git("reset", "-q", "--hard", "main")
    repo.git("cherry-pick", last)
    repo.git("cherry-pick", first)
    (repo.path / "vllm/platforms/cuda.py").write_text("new\n")
    text = trees.message("[CUDA] 3x the -- Speed!", [], "tests/turbo/test_format.py")
    repo.git("commit", "-q", "-a", "-m", text)
    assert repo.run("export") == 0
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
def test_comment_on_the_order(repo: Repository, project: Path, blank: str) -> None:
    """The comment stays at the top, also when the entry below it goes."""
    order = project / "patches/series"
    names = [name for name, *_ in trees.PATCHES]
    order.write_text(f"# The order.\n{blank}" + "\n".join(names) + "\n")
    assert repo.run("import") == 0
    repo.git("rebase", "-q", "--onto", "main", "turbo~3")
    assert repo.run("export", "--base", "main") == 0
    kept = "\n".join(names[1:])
    assert order.read_text() == f"# The order.\n{blank}{kept}\n"


def test_later_commit_edits_an_added_file(repo: Repository, project: Path) -> None:
    """The overlay holds the file's last state, and no patch has any of it."""
    assert repo.run("import") == 0
    (repo.path / "vllm/turbo/format.py").write_text(trees.SPDX + "BITS = 8\n")
    repo.amend()
    assert repo.run("export") == 0
    overlay = project / "vllm_overlay/vllm/turbo/format.py"
    assert overlay.read_text().endswith("BITS = 8\n")
    assert "BITS" not in (project / "patches/ci-step.patch").read_text()


def test_export_refusals(repo: Repository, project: Path) -> None:
    assert repo.run("import") == 0
    tip = repo.head()

    def reset() -> None:
        repo.git("reset", "-q", "--hard", tip)

    def commit(*args: str) -> None:
        text = trees.message("[Core] Do more", [], "tests/turbo/test_format.py")
        repo.git("add", "-A")
        repo.git("commit", "-q", "-m", text, *args)

    (repo.path / "vllm/turbo/format.py").write_text("x\n")
    commit()
    assert "edits no file of the base and adds none" in repo.refusal()
    reset()
    (repo.path / "new.txt").write_text("x\n")
    (repo.path / "setup.py").write_text("x\n")
    commit()
    assert "give it `Overlay: new.txt`" in repo.refusal()
    reset()
    (repo.path / "setup.py").unlink()
    commit()
    assert "does more than edit setup.py (D)" in repo.refusal()
    reset()
    (repo.path / "setup.py").chmod(0o755)
    commit()
    assert "setup.py: old mode 100644" in repo.refusal()
    reset()
    (repo.path / "setup.py").write_text("x\n")
    repo.git("commit", "-qam", "[Core] Do more\n\nBefore\n---\nafter")
    assert "mail would not keep this message" in repo.refusal()
    reset()
    repo.git("checkout", "-q", "-b", "side", "main")
    (repo.path / "tests/test_base.py").write_text("x\n")
    commit()
    repo.git("checkout", "-q", "turbo")
    repo.git("merge", "-q", "--no-edit", "side")
    assert "is a merge" in repo.refusal()
    repo.git("update-ref", "-d", "refs/turbo-series/turbo")
    assert "name the commit with --base" in repo.refusal()
    reset()
    assert differences(project, read_branch(project, repo.path, "turbo", "main")) == []


def test_export_after_a_rebase(
    repo: Repository, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new base is named once, and remembered by an export that writes."""
    assert repo.run("import") == 0
    repo.git("switch", "-q", "--orphan", "newer")
    base = {**trees.BASE, "setup.py": "import os\n\n" + trees.BASE["setup.py"]}
    trees.write_tree(repo.path, base)
    repo.git("add", "-A", "-f")
    repo.git("commit", "-q", "-m", "newer base")
    repo.git("rebase", "-q", "--onto", "newer", "main", "turbo")
    capsys.readouterr()
    for args in ([], ["--check"]):
        assert repo.run("export", *args) == 1
        assert capsys.readouterr().err.startswith("error: turbo does not start at ")
    assert repo.run("export", "--base", "newer", "--check") == 1
    assert repo.run("export", "--check") == 1
    assert capsys.readouterr().err.endswith("with --base\n")
    assert repo.run("export", "--base", "newer") == 0
    assert "changed: patches/backend.patch" in capsys.readouterr().out
    assert "@@ -3,4 +3,5 @@" in (project / "patches/backend.patch").read_text()
    assert repo.run("export", "--check") == 0


def test_import_refusals(
    repo: Repository, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.git("branch", "turbo")
    assert repo.run("import") == 1
    assert "has a branch turbo already" in capsys.readouterr().err
    assert repo.run("import", "--branch", "a..b") == 1
    assert "no name for a branch" in capsys.readouterr().err
    (project / "vllm_overlay/stray.txt").write_text("x\n")
    assert repo.run("import", "--branch", "topic") == 1
    assert "stray.txt is in no patch's Overlay" in capsys.readouterr().err
    assert repo.git("branch", "--format=%(refname:short)") == "main\nturbo\n"


def test_commit_inside_a_hook(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables of another repository's hook do not matter."""
    other = trees.make_checkout(repo.path.parent / "other")
    head = trees.git(other, "rev-parse", "HEAD")
    with monkeypatch.context() as patch:
        patch.setenv("GIT_DIR", str(other / ".git"))
        patch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
        assert repo.run("import") == 0
        assert repo.run("export", "--check") == 0
    assert trees.git(other, "rev-parse", "HEAD") == head
    assert os.listdir(other / ".git/refs/heads") == ["main"]
