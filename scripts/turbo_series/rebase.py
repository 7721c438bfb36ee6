# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The rebase of a step: its commits, its stops, and resolutions to refuse."""

import re
from collections.abc import Iterator

from .branch import find_commits
from .errors import SeriesError
from .git import Git
from .model import glob_regex
from .worklist import GONE, added

BRANCH = "turbo"
# The ends of a rebase, as refs that are out of the user's way.
OLD_TIP = "refs/turbo-step/series"
OLD_BASE = "refs/turbo-step/old"
NEW_BASE = "refs/turbo-step/new"
_WAY_OUT = "`git rm` it to drop the edit, or make the edit where its code is now"


def under_way(git: Git) -> bool:
    """Whether the rebase has stopped."""
    return (git.folder / ".git/rebase-merge").is_dir()


def is_based(git: Git) -> bool:
    """Whether the series lies on the new base."""
    return git.run("merge-base", "--is-ancestor", NEW_BASE, BRANCH).returncode == 0


def commits_above(git: Git, base: str, tip: str) -> list[str]:
    """The commits of the series above a base."""
    none = git.text("rev-parse", base) == git.text("rev-parse", tip)
    return [] if none else find_commits(git, tip, base)


def subject_of(git: Git, commit: str) -> str:
    """The subject of a commit."""
    return git.text("log", "-1", "--format=%s", commit)


def refuse_unresolved(git: Git) -> None:
    """Raise unless all conflicts are resolved and staged."""
    if not under_way(git):
        if git.out("status", "--porcelain", "--untracked-files=no"):
            raise SeriesError(f"{git.folder} has uncommitted changes")
        if is_based(git):
            _refuse_restored(git, BRANCH)
        return
    left = git.text("diff", "--name-only", "--diff-filter=U").splitlines()
    left += git.text("diff", "--name-only").splitlines()
    if left:
        raise SeriesError(
            f"{git.folder}: resolve and `git add` {', '.join(sorted(set(left)))}"
        )
    marks = git.run("diff", "--cached", "--check").stdout.decode()
    if "leftover conflict marker" in marks:
        raise SeriesError(f"{git.folder}: {marks.splitlines()[0]}")
    staged = added(git, "HEAD", git.text("write-tree"))
    for path in sorted(staged & added(git, NEW_BASE, OLD_BASE)):
        raise SeriesError(f"{GONE}: {path}; {_WAY_OUT}")
    _refuse_restored(git, "HEAD")


def _refuse_restored(git: Git, tip: str) -> None:
    """Raise if a commit brings back a file that was deleted upstream.

    It may, if an `Overlay:` trailer says that the file is the series' own now.
    """
    gone = added(git, NEW_BASE, OLD_BASE)
    for commit in commits_above(git, NEW_BASE, tip):
        message = git.text("log", "-1", "--format=%B", commit)
        globs = re.findall(r"^Overlay: *(.+?) *$", message, re.MULTILINE)
        for path in sorted(added(git, f"{commit}^", commit) & gone):
            if not any(glob_regex(glob).fullmatch(path) for glob in globs):
                raise SeriesError(
                    f"{GONE}: {path}, which {subject_of(git, commit)!r} brings back; "
                    f"edit that commit: git rebase -i {NEW_BASE} {BRANCH}"
                )


def unmerged(git: Git) -> tuple[list[str], list[str]]:
    """The files in conflict at a stop, and those that were deleted upstream."""
    stages: dict[str, set[str]] = {}
    for line in filter(None, git.out("ls-files", "-uz").decode().split("\0")):
        meta, path = line.split("\t", 1)
        stages.setdefault(path, set()).add(meta.split()[2])
    # Stage 1 is the common base, 2 the new release, 3 the patch.
    gone = [path for path, each in stages.items() if each == {"1", "3"}]
    return [path for path in stages if path not in gone], gone


def stop_lines(git: Git) -> Iterator[str]:
    """Yield why the rebase has stopped, by file, and the ways to go on."""
    conflicts, gone = unmerged(git)
    yield from (f"conflict in {path}" for path in conflicts)
    yield from (f"{GONE}: {path}; {_WAY_OUT}" for path in gone)
    ways = [f"resolve and `git add` {', '.join(conflicts)}"] if conflicts else []
    ways += [f"`git rm` {', '.join(gone)}"] if gone else []
    yield (
        f"In {git.folder} {' and '.join(ways)}, or `git rebase --skip` the patch; "
        "then series.py step --continue, or --abort"
    )


def rebase_blindly(git: Git) -> None:
    """Rebase to the end, for a forecast: conflicts keep the lines of both sides.

    Raises:
        SeriesError: if git does not get to the end.

    """
    attributes = git.folder / ".git/info/attributes"
    attributes.parent.mkdir(exist_ok=True)
    attributes.write_text("* merge=union\n")
    done = git.run("rebase", "--quiet", "--onto", NEW_BASE, OLD_BASE, BRANCH)
    last = ""
    while under_way(git):
        stop = git.text("rev-parse", "HEAD", "REBASE_HEAD")
        conflicts, gone = unmerged(git)
        if gone:
            git.out("rm", "--quiet", "--", *gone)
        if conflicts:
            git.out("checkout", "--theirs", "--", *conflicts)
            git.out("add", "--force", "--", *conflicts)
        done = git.run("rebase", "--skip" if stop == last else "--continue")
        last = stop
    if done.returncode:
        raise SeriesError(done.stderr.decode(errors="replace").strip())
