# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Apply and revert on each kind of tree, and what they refuse."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trees
from turbo_series import cli
from turbo_series.disk import Disk
from turbo_series.errors import SeriesError
from turbo_series.model import Series, load_series
from turbo_series.operate import apply, revert
from turbo_series.target import Target, open_target
from turbo_series.verify import verify


def test_apply_then_revert(tree: Target, series: Series) -> None:
    """Apply writes the series whole; revert restores every byte and mode."""
    (tree.root / "vllm/platforms/cuda.py").chmod(0o755)
    before = trees.snapshot(tree.root)
    apply(series, tree)
    wanted = trees.expected(tree.kind)
    assert trees.contents(tree.root, wanted) == wanted
    assert verify(series, tree) == []
    assert (tree.root / "vllm/platforms/cuda.py").stat().st_mode & 0o777 == 0o755
    revert(tree)
    assert trees.snapshot(tree.root) == before
    assert verify(series, tree) == ["the series is not applied"]


def test_apply_twice_changes_nothing(
    tree: Target, series: Series, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(series, tree)
    stamps = {p: p.stat().st_mtime_ns for p in tree.root.rglob("*")}
    apply(series, tree)
    assert "already applied" in capsys.readouterr().out.splitlines()[-1]
    assert stamps == {p: p.stat().st_mtime_ns for p in tree.root.rglob("*")}


def test_check_writes_nothing(
    tree: Target, series: Series, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trees.snapshot(tree.root)
    apply(series, tree, check=True)
    assert "would apply" in capsys.readouterr().out
    assert trees.snapshot(tree.root) == before
    apply(series, tree)
    applied = trees.snapshot(tree.root)
    revert(tree, check=True)
    assert trees.snapshot(tree.root) == applied


def test_installed_tree_leaves_out_the_rest(
    make: Callable[[str], Target], series: Series, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make("installed")
    apply(series, target)
    for path in ("setup.py", ".buildkite", "tests", "docs"):
        assert not (target.root / path).exists()
    said = capsys.readouterr().out
    assert "left out 4 file(s)" in said
    assert ".buildkite 1, docs 1, setup.py 1, tests 1" in said


def test_sdist_without_a_repository_file(
    make: Callable[[str], Target], series: Series, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make("sdist")
    (target.root / ".buildkite/steps.yaml").unlink()
    apply(series, target)
    assert "left out 1 file(s)" in capsys.readouterr().out
    assert verify(series, target) == []
    assert not (target.root / ".buildkite/steps.yaml").exists()


def test_other_content_is_refused(tree: Target, series: Series) -> None:
    path = tree.root / "vllm/platforms/cuda.py"
    path.write_text(path.read_text() + "\n")
    with trees.refusing(tree.root, "found version 0.33.0") as error:
        apply(series, tree)
    assert "that this series is for" in str(error.value)
    assert "vllm/platforms/cuda.py (other content)" in str(error.value)


def test_missing_file_is_refused(tree: Target, series: Series) -> None:
    (tree.root / "vllm/config/cache.py").unlink()
    with pytest.raises(SeriesError, match=r"vllm/config/cache\.py \(missing\)"):
        apply(series, tree)


def test_versions_found(tmp_path: Path, series: Series) -> None:
    """The version in a refusal comes from the best source that the tree has."""
    trees.make_installed(tmp_path / "a", "0.32.1")
    (tmp_path / "a/vllm/config/cache.py").write_text("old\n")
    checkout = trees.make_checkout(tmp_path / "b")
    trees.git(checkout, "tag", "v0.31.0")
    (tmp_path / "b/vllm/config/cache.py").write_text("old\n")
    trees.make_sdist(tmp_path / "c")
    (tmp_path / "c/PKG-INFO").unlink()
    (tmp_path / "c/vllm/_version.py").unlink()
    (tmp_path / "c/vllm/config/cache.py").write_text("old\n")
    for name, version in (("a", "0.32.1"), ("b", "0.31.0"), ("c", "unknown")):
        with pytest.raises(SeriesError, match=rf"found version {version}"):
            apply(series, open_target(str(tmp_path / name)))


def test_local_version_is_judged_by_content(tmp_path: Path, series: Series) -> None:
    target = open_target(str(trees.make_installed(tmp_path / "s", "0.33.0+cu129")))
    assert target.version() == "0.33.0+cu129"
    apply(series, target)
    assert verify(series, target) == []


def test_foreign_file_is_not_overwritten(tree: Target, series: Series) -> None:
    mine = tree.root / "vllm/turbo/format.py"
    mine.parent.mkdir()
    mine.write_text("mine\n")
    with trees.refusing(tree.root, "exists already and is not ours"):
        apply(series, tree)


def test_revert_refuses_changed_files(tree: Target, series: Series) -> None:
    before = trees.snapshot(tree.root)
    apply(series, tree)
    for path in ("vllm/config/cache.py", "vllm/turbo/format.py"):
        full = tree.root / path
        full.write_text(full.read_text() + "# mine\n")
    with trees.refusing(tree.root, r"vllm/config/cache\.py \(changed\)") as error:
        revert(tree)
    assert "vllm/turbo/format.py (changed)" in str(error.value)
    assert "cuda.py" not in str(error.value)
    with trees.refusing(tree.root, "cache.py"):
        apply(series, tree)
    revert(tree, force=True)
    assert trees.snapshot(tree.root) == before


def test_revert_keeps_files_that_are_not_ours(
    tree: Target, series: Series, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(series, tree)
    note = tree.root / "vllm/turbo/csrc/note.txt"
    note.write_text("mine\n")
    revert(tree)
    assert note.read_text() == "mine\n"
    assert f"left {note.parent}" in capsys.readouterr().out
    assert not (tree.root / "vllm/turbo/format.py").exists()


def test_damaged_backup_is_refused(tree: Target, series: Series) -> None:
    apply(series, tree)
    for path in (tree.state / "backup").iterdir():
        path.write_bytes(b"gone bad")
    with trees.refusing(tree.root, "the copy of the original is damaged"):
        revert(tree, force=True)


def test_backups_without_manifest_are_refused(tree: Target, series: Series) -> None:
    apply(series, tree)
    (tree.state / "manifest.json").unlink()
    for run in (lambda: apply(series, tree), lambda: revert(tree)):
        with trees.refusing(tree.root, "no manifest.json"):
            run()


def test_new_revision_replaces_the_old(
    tree: Target, series: Series, project: Path
) -> None:
    before = trees.snapshot(tree.root)
    apply(series, tree)
    (project / "vllm_overlay/vllm/turbo/format.py").write_text(
        trees.SPDX + "BITS = 3\n"
    )
    (project / "vllm_overlay/vllm/turbo/csrc/kernel.cu").unlink()
    order = project / "patches/series"
    order.write_text(order.read_text().replace("\nci-step.patch", ""))
    newer = load_series(project)
    assert verify(newer, tree)[0].startswith(f"revision {series.revision[:12]}")
    apply(newer, tree)
    assert verify(newer, tree) == []
    assert (tree.root / "vllm/turbo/format.py").read_text().endswith("BITS = 3\n")
    assert not (tree.root / "vllm/turbo/csrc").exists()
    if tree.kind != "installed":
        steps = tree.root / ".buildkite/steps.yaml"
        assert steps.read_text() == trees.BASE[".buildkite/steps.yaml"]
    revert(tree)
    assert trees.snapshot(tree.root) == before


def test_hard_links_keep_the_old_content(tree: Target, series: Series) -> None:
    """Installers link files to a cache that other environments share."""
    cached = tree.root.parent / "cached.py"
    os.link(tree.root / "vllm/config/cache.py", cached)
    apply(series, tree)
    assert cached.read_text() == trees.BASE["vllm/config/cache.py"]
    applied = tree.root.parent / "applied.py"
    os.link(tree.root / "vllm/config/cache.py", applied)
    text = applied.read_text()
    revert(tree)
    assert applied.read_text() == text


def test_symbolic_links_are_refused(tree: Target, series: Series) -> None:
    elsewhere = tree.root.parent / "elsewhere.py"
    path = tree.root / "vllm/config/cache.py"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(SeriesError, match="through a symbolic link"):
        apply(series, tree)
    assert elsewhere.read_text() == trees.BASE["vllm/config/cache.py"]


@pytest.mark.parametrize("kind", ["sdist", "installed"])
def test_inside_another_work_tree(tmp_path: Path, series: Series, kind: str) -> None:
    """The tree may lie in a project's repository, as a .venv does, ignored or not."""
    trees.write_tree(tmp_path, {"README.md": "mine\n", ".gitignore": ".venv/\n"})
    trees.git(tmp_path, "init", "-q")
    trees.git(tmp_path, "add", "-A")
    trees.git(tmp_path, "commit", "-q", "-m", "mine")
    for place in (".venv/lib/site-packages", "vendor"):
        target = open_target(str(trees.MAKERS[kind](tmp_path / place)))
        assert target.kind == kind
        apply(series, target)
        wanted = trees.expected(kind)
        assert trees.contents(target.root, wanted) == wanted
        revert(target)
    assert trees.git(tmp_path, "status", "--porcelain") == "?? vendor/\n"


def test_git_variables_do_not_redirect(
    tree: Target, series: Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables that a hook of another repository exports are ignored."""
    other = trees.make_checkout(tmp_path / "other")
    before = trees.snapshot(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    assert open_target(str(tree.root)).kind == tree.kind
    apply(series, tree)
    assert verify(series, tree) == []
    assert trees.snapshot(other) == before


def test_user_configuration_does_not_matter(
    tree: Target, series: Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "gitconfig"
    config.write_text("[core]\nautocrlf = true\n[apply]\nwhitespace = error-all\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    apply(series, tree)
    wanted = trees.expected(tree.kind)
    assert trees.contents(tree.root, wanted) == wanted


def _edit_backend(project: Path, old: str, new: str) -> Series:
    """The series with a change in its backend.patch."""
    path = project / "patches/backend.patch"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return load_series(project)


def test_offset_is_refused(tree: Target, project: Path) -> None:
    shifted = _edit_backend(project, "@@ -3,4 +3,4 @@", "@@ -2,4 +2,4 @@")
    with trees.refusing(tree.root, "does not apply exactly: .*offset"):
        apply(shifted, tree)


def test_reason_of_a_refusal(tree: Target, project: Path) -> None:
    other = _edit_backend(project, " def backend():", " def other():")
    with pytest.raises(SeriesError) as error:
        apply(other, tree)
    assert str(error.value) == (
        "backend.patch does not apply: patch failed: vllm/platforms/cuda.py:1"
    )


def test_result_is_judged_by_blob_id(tree: Target, project: Path) -> None:
    """Git is content with this patch; the ids on its index lines are not."""
    wrong = _edit_backend(project, "+SIZE = 2", "+SIZE = 3")
    with trees.refusing(tree.root, "cache.py came out as"):
        apply(wrong, tree)


def test_silent_git_is_not_trusted(
    tree: Target, series: Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`git apply` that returns 0 and does nothing is noticed."""
    real = shutil.which("git")
    fake = tmp_path / "bin/git"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\n[ "$1" = apply ] && exit 0\nexec {real} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with trees.refusing(tree.root, "came out as"):
        apply(series, tree)


def test_tree_that_holds_the_commits(
    tmp_path: Path, project_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tree patched by other means is recognised and left alone."""
    checkout = trees.make_checkout(tmp_path / "checkout")
    assert cli.main(project_source, ["apply", "--commit", str(checkout)]) == 0
    before = trees.snapshot(checkout)
    capsys.readouterr()
    assert cli.main(project_source, ["apply", str(checkout)]) == 0
    assert "already applied, as part of the tree" in capsys.readouterr().out
    assert cli.main(project_source, ["verify", str(checkout)]) == 0
    assert trees.snapshot(checkout) == before


@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_second_run_is_locked_out(tree: Target, series: Series, kind: int) -> None:
    """Apply and revert take an exclusive lock, which even a shared one keeps out."""

    def refused(run: Callable[[], None]) -> None:
        handle = os.open(tree.root, os.O_RDONLY)
        try:
            fcntl.flock(handle, kind)
            with trees.refusing(tree.root, "another run"):
                run()
        finally:
            os.close(handle)

    refused(lambda: apply(series, tree))
    apply(series, tree)
    refused(lambda: revert(tree))
    revert(tree)


@pytest.mark.parametrize("path", ["../outside", "/outside", ".git/hooks"])
@pytest.mark.parametrize("field", ["folders", "files"])
def test_manifest_that_leads_out_is_refused(
    make: Callable[[str], Target], series: Series, field: str, path: str
) -> None:
    target = make("sdist")
    outside = target.root.parent / "outside"
    outside.mkdir()
    apply(series, target)
    manifest = target.state / "manifest.json"
    fields = json.loads(manifest.read_bytes())
    if field == "folders":
        fields["folders"].append(path)
    else:
        fields["files"].append({**fields["files"][-1], "path": path})
    manifest.write_text(json.dumps(fields))
    runs: list[Callable[[], object]] = [
        lambda: apply(series, target),
        lambda: revert(target, force=True),
        lambda: verify(series, target),
    ]
    for run in runs:
        with trees.refusing(target.root, "unsafe path"):
            run()
    assert outside.is_dir()


def test_owner_carries_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file keeps its owner when it is rewritten. Only root can give files away."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    if os.geteuid() == 0:
        os.chown(path, 12345, 54321)
    old = path.stat()
    given = []
    chown = os.fchown

    def fchown(handle: int, user: int, group: int) -> None:
        given.append((user, group))
        chown(handle, user, group)

    monkeypatch.setattr(os, "fchown", fchown)
    Disk().write(path, b"new")
    assert path.read_bytes() == b"new"
    assert given == [(old.st_uid, old.st_gid)]
    assert (path.stat().st_uid, path.stat().st_gid) == given[0]
