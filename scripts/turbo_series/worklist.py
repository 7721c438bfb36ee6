# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The list of places that a person must look at when the series is stepped."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from .git import Git
from .model import OVERLAY
from .release import Release, read_sources
from .uses import Comparison, Finding

GONE = "deleted upstream"
CLEAN, MERGED, CONFLICT = "clean", "3-way", "conflict"


def added(git: Git, base: str, tip: str) -> set[str]:
    """The files that a tip has and its base lacks."""
    flags = ("-r", "-z", "--name-only", "--no-renames", "--diff-filter=A")
    return {*git.out("diff-tree", *flags, base, tip).decode().split("\0")} - {""}


def compare(git: Git, before: tuple[str, str], after: tuple[str, str]) -> list[Finding]:
    """Compare the names of vLLM that the overlay uses.

    Args:
        git: The repository.
        before: The base of the series and its tip on that base.
        after: The same of the release that is stepped to. If they are equal, the
            series is not there yet, and the base is compared with the base.

    """
    old, new = (read_sources(git, tip) for _, tip in (before, after))
    own = added(git, *before)
    overlay = {path: text for path, text in old.items() if path in own}
    if after[0] == after[1]:
        old = read_sources(git, before[0]) | overlay
        new |= overlay
    else:
        own |= added(git, *after)
    return Comparison(Release(old), Release(new), own).findings()


def judge(git: Git, commit: str, parent: str) -> str:
    """How a commit comes to another parent than its own.

    Returns:
        "clean" if its diff applies as it is, though maybe at other lines; "3-way" if
        a merge of each file has no conflict; else "conflict in" the other files, and
        "deleted upstream" with those that the parent lacks.

    """
    with tempfile.TemporaryDirectory() as scratch:
        own = Git(git.folder, env={**git.env, "GIT_INDEX_FILE": f"{scratch}/index"})
        own.out("read-tree", parent)
        change = (f"{commit}^", commit)
        diff = own.out("diff-tree", "-p", "--binary", *change)
        if own.run("apply", "--cached", "--check", data=diff).returncode == 0:
            return CLEAN
        conflicts, gone = [], []
        for path in own.text("diff-tree", "-r", "--name-only", *change).splitlines():
            names = {}
            for side in (parent, *change):
                blob = own.run("cat-file", "blob", f"{side}:{path}")
                if blob.returncode == 0:
                    names[side] = f"{scratch}/{side.replace('/', '-')}"
                    Path(names[side]).write_bytes(blob.stdout)
            if len(names) == 1:
                continue
            if parent not in names:
                gone.append(path)
            elif (
                len(names) < 3
                or own.run(
                    "merge-file", "--quiet", "--stdout", *names.values()
                ).returncode
            ):
                conflicts.append(path)
    return describe(conflicts, gone) or MERGED


def describe(conflicts: list[str], gone: list[str]) -> str:
    """The verdict on files in conflict, and on those that a release lacks."""
    words = [f"{CONFLICT} in {', '.join(conflicts)}"] if conflicts else []
    return "; ".join(words + ([f"{GONE}: {', '.join(gone)}"] if gone else []))


def work_list(
    version: str, rows: list[tuple[str, str]], findings: list[Finding]
) -> Iterator[str]:
    """Yield the lines of the list.

    Args:
        version: The release that is stepped to.
        rows: Patches, and how they came to it.
        findings: The findings of the overlay.

    """
    yield f"\nTo look at, for {version}:"
    yield from patch_lines(rows)
    yield from finding_lines(findings)
    yield "- CONTRIBUTING.md, Stepping to a new vLLM: its other steps"


def patch_lines(rows: list[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each patch that is not clean."""
    left = [(name, verdict) for name, verdict in rows if verdict != CLEAN]
    yield f"- patches that do not apply as they are: {len(left)}"
    yield from (f"  {name}: {verdict}" for name, verdict in left)


def finding_lines(findings: list[Finding]) -> Iterator[str]:
    """Yield a line for each finding of the overlay, losses first."""
    for is_change, title in (
        (False, "names of vLLM that the overlay uses and that are gone"),
        (True, "functions that the overlay calls or overrides, with new parameters"),
    ):
        those = [each for each in findings if each.is_change == is_change]
        yield f"- {title}: {len(those)}"
        yield from (f"  {OVERLAY}/{each}" for each in those)
