# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Work out, without touching a target, what applying the series would write."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from .errors import SeriesError
from .git import Git, blob_id, scratch
from .model import OverlayFile, Series
from .patchfile import FileDiff, Patch
from .target import KIND_NAMES, PACKAGE, Target

Reader = Callable[[str], bytes | None]


@dataclass(frozen=True)
class Chain:
    """A file's blob ids before the first patch that edits it and after the last."""

    base: str
    final: str


@dataclass(frozen=True)
class Plan:
    """Contents before and after. `present`: the tree holds all of it already."""

    before: dict[str, bytes]
    after: dict[str, bytes]
    added: dict[str, OverlayFile]
    left_out: tuple[str, ...]
    present: bool


def chains(patches: tuple[Patch, ...]) -> dict[str, Chain]:
    """Join the `index` lines of each file over the series.

    Raises:
        SeriesError: a patch does not start from the result of the one before it.

    """
    found: dict[str, Chain] = {}
    for patch in patches:
        for file in patch.files:
            where = f"{patch.name}: {file.path}"
            if file.kind != "edited":
                raise SeriesError(f"{where}: {file.kind}; a patch may only edit")
            if not file.new_id:
                raise SeriesError(f"{where} has no full ids on its index line")
            before = found.get(file.path)
            if before is not None and before.final != file.old_id:
                raise SeriesError(f"{where} does not start from the patch before it")
            base = file.old_id if before is None else before.base
            found[file.path] = Chain(base, file.new_id)
    return found


def describe_left_out(paths: tuple[str, ...]) -> str:
    """One line: how many files were left out, and of which folders."""
    folders = Counter(path.split("/")[0] for path in paths)
    parts = ", ".join(f"{name} {count}" for name, count in sorted(folders.items()))
    return f"left out {len(paths)} file(s) that are for checkouts alone: {parts}"


def apply_patch(git: Git, patch: Patch, files: list[FileDiff], *options: str) -> None:
    """Apply the diffs of some of a patch's files in `git`, exactly where they say."""
    text = b"".join(file.text for file in files)
    options = ("apply", "--verbose", "--whitespace=nowarn", "-p1", *options, "-")
    done = git.run(*options, data=text)
    said = done.stderr.decode(errors="replace")
    if done.returncode:
        reason = re.search(r"^error: (?!while )(.+)$", said, re.MULTILINE)
        raise SeriesError(
            f"{patch.name} does not apply: {reason[1] if reason else said.strip()}"
        )
    if moved := re.search(r"^Hunk .*(offset|fuzz).*$", said, re.MULTILINE):
        raise SeriesError(f"{patch.name} does not apply exactly: {moved[0]}")


def require_id(patch: Patch, file: FileDiff, found: str) -> None:
    """Raise unless a patch's result has the id of its index line."""
    if found != file.new_id:
        raise SeriesError(
            f"{patch.name}: {file.path} came out as {found[:12]}, "
            f"but the index line says {file.new_id[:12]}"
        )


def patched(series: Series, before: dict[str, bytes]) -> dict[str, bytes]:
    """Run the series over the files in `before` and return what they become."""
    with scratch() as git:
        for path, data in before.items():
            full = git.folder / path
            full.parent.mkdir(parents=True, exist_ok=True)
            full.write_bytes(data)
        for patch in series.patches:
            files = [file for file in patch.files if file.path in before]
            if not files:
                continue
            apply_patch(git, patch, files)
            for file in files:
                made = blob_id((git.folder / file.path).read_bytes())
                require_id(patch, file, made)
        return {path: (git.folder / path).read_bytes() for path in before}


def refuse_base(series: Series, target: Target, path: str, problem: str) -> None:
    """Raise: the tree is not the base of the series."""
    raise SeriesError(
        f"{target.root} is not the {series.upstream.project} "
        f"{series.upstream.version} that this series is for: found version "
        f"{target.version()}; first file that differs: {path} ({problem})"
    )


def _judge_without_patches(series: Series, target: Target) -> None:
    """Judge by version a series that edits nothing here."""
    if target.version().split("+")[0] != series.upstream.version:
        raise SeriesError(
            f"{target.root}: found version {target.version()}, "
            f"wanted {series.upstream.version}"
        )


def make_plan(series: Series, target: Target, read: Reader) -> Plan:
    """Judge the base file by file and compute every result.

    Args:
        series: what to apply.
        target: the tree it is for.
        read: returns the bytes of a path of the tree in its base state.

    """
    if not series.patches and not series.overlay:
        raise SeriesError(f"{series.root}: the series is empty")
    every = chains(series.patches)
    inside = {path: chain for path, chain in every.items() if target.covers(path)}
    found = {path: read(path) for path in inside}
    # An sdist may lack files that only the repository has; vllm/ is always whole.
    lacking = {
        path
        for path, data in found.items()
        if data is None and not path.startswith(PACKAGE)
    }
    inside = {path: chain for path, chain in inside.items() if path not in lacking}
    added = {path: f for path, f in series.overlay.items() if target.covers(path)}
    kept = inside.keys() | added.keys()
    left_out = tuple(sorted((every.keys() | series.overlay.keys()) - kept))

    before = {path: data for path, data in found.items() if data is not None}
    ids = {path: blob_id(data) for path, data in before.items()}
    edited = all(ids.get(path) == chain.final for path, chain in inside.items())
    if kept and edited and all(read(p) == file.data for p, file in added.items()):
        return Plan({}, {}, {}, left_out, present=True)
    if not inside:
        _judge_without_patches(series, target)
    for path, chain in inside.items():
        if path not in ids:
            refuse_base(series, target, path, "missing")
        if ids[path] != chain.base:
            patched_already = "already patched" if ids[path] == chain.final else ""
            refuse_base(series, target, path, patched_already or "other content")
    _refuse_existing(target, read, added)
    return Plan(before, patched(series, before), added, left_out, present=False)


def _refuse_existing(target: Target, read: Reader, paths: Iterable[str]) -> None:
    for path in paths:
        if read(path) is not None:
            raise SeriesError(f"{target.root / path} exists already and is not ours")


def with_kernels(
    plan: Plan, kernels: Mapping[str, OverlayFile], target: Target, read: Reader
) -> Plan:
    """The plan, with libraries to add."""
    _refuse_existing(target, read, kernels)
    return replace(plan, added={**plan.added, **kernels})


def target_name(target: Target) -> str:
    """The tree, for a message."""
    return f"{KIND_NAMES[target.kind]}, {target.root}"
