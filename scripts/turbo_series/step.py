# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Step the series to another release of vLLM.

The work is done in a repository of its own, by `git rebase`. The project's files are
written in the end, all at once, so that a step can be given up at any time. They depend
on that repository alone, so they can also be written again.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from .branch import (
    commit_series,
    project_files,
    prune,
    read_branch,
    remember_base,
    write_export,
)
from .errors import SeriesError
from .git import Git
from .model import PATCHES, load_series
from .rebase import (
    BRANCH,
    NEW_BASE,
    OLD_BASE,
    OLD_TIP,
    commits_above,
    is_based,
    rebase_blindly,
    refuse_unresolved,
    stop_lines,
    subject_of,
    under_way,
)
from .report import index, index_path
from .sdist import WHO, download, unpack
from .series_file import patch_name, subjects
from .target import open_target
from .upstream import PIN_FILE, Upstream, load_upstream, to_toml
from .worklist import compare, finding_lines, judge, work_list

Say = Callable[[str], None]


def _state(folder: Path) -> Path:
    """Where a step keeps the project's files as they were, and the new pins."""
    return folder / ".git" / "turbo-step"


def _before(folder: Path) -> Path:
    return _state(folder) / "before"


def _git(folder: Path) -> Git:
    """Git in the repository of a step under way, without the user's settings."""
    if not _state(folder).is_dir():
        raise SeriesError(f"no step is under way in {folder}")
    who = {"GIT_COMMITTER_NAME": "vLLM", "GIT_COMMITTER_EMAIL": "vllm@localhost"}
    return Git(folder, isolated=True, env={**who, "GIT_EDITOR": "true"})


def prepare(root: Path, folder: Path, new: Upstream) -> None:
    """Make the repository of a step: both bases, and the series on the old one."""
    unpack(download(load_upstream(root)), folder, git=True)
    before = _before(folder)
    before.mkdir(parents=True)
    _copy(root, before, _files(root))
    git = _git(folder)
    # The user's own git also works here.
    git.out("config", "core.autocrlf", "false")
    git.out("config", "maintenance.auto", "false")
    commit_series(load_series(before), open_target(str(folder)), BRANCH, say=_quiet)
    git.out("update-ref", OLD_BASE, "main")
    git.out("update-ref", OLD_TIP, BRANCH)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpack-") as name:
        fresh = Path(name) / "new"
        unpack(download(new), fresh, git=False)
        theirs = {"GIT_DIR": f"{folder}/.git", "GIT_INDEX_FILE": f"{name}/index"}
        own = Git(fresh, env={**git.env, **theirs, "GIT_WORK_TREE": str(fresh)})
        own.out("add", "--all", "--force")
        tree = own.text("write-tree")
        commit = own.text("commit-tree", tree, "-p", OLD_BASE, "-m", "base", env=WHO)
        git.out("update-ref", NEW_BASE, commit)
    (_state(folder) / PIN_FILE).write_text(to_toml(new), encoding="utf-8")


def _files(root: Path) -> set[str]:
    """The files of a project that a step may write."""
    others = (f"{PATCHES}/series", f"{PATCHES}/README.md", PIN_FILE)
    return project_files(root) | {name for name in others if (root / name).is_file()}


def _copy(source: Path, target: Path, names: set[str]) -> None:
    """Bring files of one project to another; those that it lacks are deleted."""
    for name in sorted(names):
        path = target / name
        if (source / name).is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, path)
        elif path.is_file():
            path.unlink()
            prune(path.parent, target / name.partition("/")[0])


def _quiet(text: str) -> None:
    pass


def resume(root: Path, folder: Path, say: Say = print) -> bool:
    """Rebase as far as it goes; then write the series. Returns whether it is done."""
    git = _git(folder)
    refuse_unresolved(git)
    begins = not under_way(git) and not is_based(git)
    if under_way(git):
        done = git.run("rebase", "--continue")
    elif begins:
        done = git.run("rebase", "--quiet", "--onto", NEW_BASE, OLD_BASE, BRANCH)
    else:
        done = None
    if done is not None and done.returncode and not under_way(git):
        raise SeriesError(f"{folder}: {done.stderr.decode(errors='replace').strip()}")
    rows = _report(git)
    width = max(len(name) for name, _ in rows)
    for name, verdict in rows:
        say(f"{name:{width}}  {verdict}")
    if under_way(git):
        if begins:
            # Known before the first conflict is resolved.
            findings = compare(git, (OLD_BASE, OLD_TIP), (NEW_BASE, NEW_BASE))
            say("\n" + "\n".join(finding_lines(findings)))
        say("\n" + "\n".join(stop_lines(git)))
        return False
    _finish(root, git, rows, say)
    return True


def forecast(root: Path, new: Upstream, say: Say = print) -> None:
    """Say what a person must look at in a step, and write nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "step"
        prepare(root, folder, new)
        git = _git(folder)
        rebase_blindly(git)
        _say_work(git, _report(git), NEW_BASE, say)


def _say_work(git: Git, rows: list[tuple[str, str]], tip: str, say: Say) -> None:
    """Say what a person must look at, with the series at a tip."""
    new = load_upstream(_state(git.folder))
    findings = compare(git, (OLD_BASE, OLD_TIP), (NEW_BASE, tip))
    for line in work_list(f"{new.project} {new.version}", rows, findings):
        say(line)


def _report(git: Git) -> list[tuple[str, str]]:
    """Each patch, and how it came to the new base, as far as that is known."""
    known = subjects(_before(git.folder))
    tip = "HEAD" if under_way(git) else BRANCH
    made = {
        subject_of(git, commit): commit for commit in commits_above(git, NEW_BASE, tip)
    }
    stopped = git.run("rev-parse", "--verify", "--quiet", "REBASE_HEAD").stdout.decode()
    rows = []
    for commit in commits_above(git, OLD_BASE, OLD_TIP):
        subject = subject_of(git, commit)
        if subject in made:
            verdict = judge(git, commit, f"{made.pop(subject)}^")
        elif under_way(git) and commit == stopped.strip():
            rows.append((patch_name(known, subject), "conflict, to be resolved"))
            break
        else:
            verdict = "dropped"
        rows.append((patch_name(known, subject), verdict))
    return rows + [(patch_name(known, subject), "new") for subject in made]


def _finish(root: Path, git: Git, rows: list[tuple[str, str]], say: Say) -> None:
    """Write the files of the series, its pins and its index."""
    before = _before(git.folder)
    with tempfile.TemporaryDirectory() as scratch:
        after = Path(scratch)
        _copy(before, after, _files(before))
        write_export(after, read_branch(after, git.folder, BRANCH, NEW_BASE))
        shutil.copy(_state(git.folder) / PIN_FILE, after)
        series = load_series(after)
        index_path(series).write_text(index(series), encoding="utf-8")
        names = _files(before) | _files(after)
        for name in sorted(names | _files(root)):
            if _read(root / name) not in (_read(before / name), _read(after / name)):
                raise SeriesError(
                    f"{root / name} has changed since the step began; undo that first"
                )
        _copy(after, root, names)
    remember_base(git, BRANCH, NEW_BASE)
    _say_work(git, rows, BRANCH, say)
    shutil.rmtree(_state(git.folder))
    say(f"\nthe series is for {series.upstream.project} {series.upstream.version} now")


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def abort(folder: Path, say: Say = print) -> None:
    """Give a step up; the project's files are as they were."""
    git = _git(folder)
    if under_way(git):
        git.out("rebase", "--abort")
    shutil.rmtree(_state(folder))
    say(f"given up; {folder} can be deleted")
