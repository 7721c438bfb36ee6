# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Apply the series to a tree, and take it off again."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from . import record
from .disk import Disk, temporary_of
from .errors import SeriesError
from .kernels import FOLDER
from .model import OverlayFile, Series
from .plan import (
    Plan,
    Reader,
    describe_left_out,
    make_plan,
    target_name,
    with_kernels,
)
from .state import (
    BACKUP,
    IGNORE,
    MANIFEST,
    Entry,
    FileState,
    Manifest,
    backup_name,
    base_is_gone,
    locked,
    read_backup,
    read_manifest,
    refuse_orphan_backups,
    remove_state,
    sha256,
    survey,
)
from .target import STATE_FOLDER, Target

Say = Callable[[str], None]


def base_reader(target: Target, manifest: Manifest | None) -> Reader:
    """Read the tree as it will be once an earlier apply is undone."""
    if manifest is None:
        return target.read
    entries = {entry.path: entry for entry in manifest.files}
    states = survey(target, manifest)

    def read(path: str) -> bytes | None:
        if states.get(path) is not FileState.APPLIED:
            return target.read(path)
        entry = entries[path]
        return None if entry.kind == "added" else read_backup(target, entry)

    return read


def obstacles(target: Target, manifest: Manifest) -> list[str]:
    """Files that somebody else changed since, each with its state."""
    gone = base_is_gone(target, manifest)
    kinds = {entry.path: entry.kind for entry in manifest.files}
    return [
        f"{path} ({state.value})"
        for path, state in survey(target, manifest).items()
        if state in (FileState.CHANGED, FileState.MISSING)
        and not (gone and kinds[path] == "modified")
    ]


def _refuse_obstacles(target: Target, manifest: Manifest) -> None:
    if found := obstacles(target, manifest):
        raise SeriesError(
            f"{target.root}: changed by somebody else since the series was applied: "
            f"{', '.join(found)}; nothing was touched (revert.sh --force discards "
            "those changes)"
        )


def _refuse_read_only(target: Target, paths: list[str]) -> None:
    """Raise unless every folder to be written to lets us."""
    for path in ["x", *paths]:
        folder = (target.root / path).parent
        while not folder.is_dir():
            folder = folder.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise SeriesError(f"{folder} is not writable; nothing was changed")


def _missing_folders(target: Target, paths: list[str]) -> tuple[str, ...]:
    """The folders that new files need, outermost first."""
    return tuple(
        folder
        for folder in reversed(_parents(paths))
        if not (target.root / folder).is_dir()
    )


def _parents(paths: Iterable[str]) -> list[str]:
    """The folders above these paths within the tree, innermost first."""
    found = {parent for path in paths for parent in PurePosixPath(path).parents}
    return sorted((path.as_posix() for path in found if path.parts), reverse=True)


class _Writer:
    """The write half of an apply: journal, originals, files, journal."""

    def __init__(self, series: Series, target: Target, plan: Plan, disk: Disk) -> None:
        self.target = target
        self.disk = disk
        self.before = dict(plan.before)
        self.after = dict(plan.after)
        self.added = plan.added
        if target.record is not None:
            self._extend_record(target.record)
        self.manifest = Manifest(
            state="applying",
            kind=target.kind,
            version=target.version(),
            revision=series.revision,
            record=target.record,
            folders=_missing_folders(target, list(plan.added)),
            files=tuple(self._entries()),
        )

    def _extend_record(self, path: str) -> None:
        old = (self.target.root / path).read_bytes()
        kept = {backup_name(sha256(data)): data for data in self.before.values()}
        kept[backup_name(sha256(old))] = old
        new = {name: file.data for name, file in self.added.items()}
        manifest = f"{STATE_FOLDER}/{MANIFEST}"
        self.after[path] = record.updated(old, self.after, {**new, **kept}, [manifest])
        self.before[path] = old

    def _entries(self) -> list[Entry]:
        entries = [
            Entry(path, "modified", sha256(self.before[path]), sha256(data))
            for path, data in self.after.items()
        ]
        # RECORD first: a path listed too early does no harm, but pip would leave behind
        # a file that is listed too late.
        entries.sort(key=lambda entry: (entry.path != self.target.record, entry.path))
        added = sorted(self.added.items())
        return entries + [Entry(p, "added", None, sha256(f.data)) for p, f in added]

    def _write_manifest(self, manifest: Manifest) -> None:
        self.disk.write(self.target.state / MANIFEST, manifest.to_bytes())

    def run(self) -> None:
        root, disk = self.target.root, self.disk
        disk.make_folder(self.target.state)
        if self.target.kind == "checkout":
            disk.write(self.target.state / IGNORE, b"*\n")
        self._write_manifest(self.manifest)
        disk.make_folder(self.target.state / BACKUP)
        for data in self.before.values():
            disk.write(root / backup_name(sha256(data)), data)
        for folder in self.manifest.folders:
            disk.make_folder(root / folder)
        for entry in self.manifest.files:
            file = self.added.get(entry.path)
            if file is None:
                disk.write(root / entry.path, self.after[entry.path])
            else:
                disk.write(root / entry.path, file.data, file.executable)
            disk.drop_bytecode(root / entry.path)
        self._write_manifest(self.manifest.with_state("applied"))


def _restore(target: Target, manifest: Manifest, disk: Disk) -> list[Path]:
    """Bring the tree back to its base; return folders that could not go.

    Every file is judged again by content, so this also finishes an interrupted run.
    """
    states = survey(target, manifest)
    gone = base_is_gone(target, manifest)
    originals = {}
    for entry in manifest.files:
        wanted = states[entry.path] is not FileState.BASE
        abandoned = gone and states[entry.path] is not FileState.APPLIED
        if entry.kind == "modified" and wanted and not abandoned:
            originals[entry.path] = read_backup(target, entry)
    disk.write(target.state / MANIFEST, manifest.with_state("reverting").to_bytes())
    # RECORD, first in the manifest, comes last here, for the same reason.
    for entry in reversed(manifest.files):
        path = target.root / entry.path
        if entry.path in originals:
            disk.write(path, originals[entry.path])
        elif entry.kind == "added":
            disk.remove(path)
        disk.remove(temporary_of(path))
        disk.drop_bytecode(path)
    stuck = [
        target.root / folder
        for folder in reversed(manifest.folders)
        if not disk.remove_folder(target.root / folder)
    ]
    if gone:
        # An uninstall left these because our files were in them.
        for folder in _parents(entry.path for entry in manifest.files):
            disk.remove_folder(target.root / folder)
    remove_state(target, disk)
    return stuck


def apply(
    series: Series,
    target: Target,
    check: bool = False,
    disk: Disk | None = None,
    say: Say = print,
    kernels: Mapping[str, OverlayFile] | None = None,
) -> None:
    """Apply the series, or with `check` only find out whether it would apply.

    Args:
        series: the series to apply.
        target: the tree.
        check: write nothing.
        disk: the writer.
        say: gets lines about the outcome.
        kernels: libraries to add as well: see `load_kernels`. If None, those of an
            earlier apply of the same series stay.

    """
    disk = disk or Disk()
    with locked(target.root):
        manifest = read_manifest(target)
        if manifest is None:
            refuse_orphan_backups(target)
        elif _is_current(series, target, manifest, kernels):
            if not check:
                disk.remove(temporary_of(target.state / MANIFEST))
            say(f"already applied: {_revision(series)} on {target_name(target)}")
            return
        else:
            _refuse_obstacles(target, manifest)
        if not (target.root / "vllm").is_dir():
            raise SeriesError(f"{target.root} holds no vllm/: it was uninstalled")
        plan = make_plan(series, target, base_reader(target, manifest))
        if plan.left_out:
            say(describe_left_out(plan.left_out))
        if plan.present and kernels:
            raise SeriesError(
                f"{target.root} holds the series as part of the tree itself; unpack "
                f"the kernels into {FOLDER}"
            )
        if plan.present:
            say(f"already applied, as part of the tree itself: {target_name(target)}")
            return
        plan = with_kernels(plan, kernels or {}, target, base_reader(target, manifest))
        extra = [target.record] if target.record else []
        _refuse_read_only(target, [*plan.after, *plan.added, *extra])
        if manifest is not None:
            say(_undo_reason(target, manifest, series))
        if check:
            say(f"would apply: {_revision(series)} to {target_name(target)}")
            return
        if manifest is not None:
            _restore(target, manifest, disk)
        _write(series, target, plan, disk)
        say(
            f"applied: {_revision(series)} to {target_name(target)}: "
            f"{len(plan.after)} file(s) changed, {len(plan.added)} added"
        )


def _is_current(
    series: Series,
    target: Target,
    manifest: Manifest,
    kernels: Mapping[str, OverlayFile] | None,
) -> bool:
    if manifest.state != "applied" or manifest.revision != series.revision:
        return False
    if kernels is not None:
        applied = {e.path: e.after for e in manifest.files if e.path.startswith(FOLDER)}
        if applied != {path: sha256(file.data) for path, file in kernels.items()}:
            return False
    return all(
        state is FileState.APPLIED for state in survey(target, manifest).values()
    )


def _undo_reason(target: Target, manifest: Manifest, series: Series) -> str:
    if manifest.state != "applied":
        return "an interrupted run is undone first"
    if manifest.revision != series.revision:
        return f"revision {manifest.revision[:12]} is taken off first"
    if all(state is FileState.APPLIED for state in survey(target, manifest).values()):
        return "the series with other kernels is taken off first"
    return "the rest of an earlier apply is taken off first"


def _revision(series: Series) -> str:
    return f"revision {series.revision[:12]}"


def _write(series: Series, target: Target, plan: Plan, disk: Disk) -> None:
    """Write the plan; on an error put everything back."""
    writer = _Writer(series, target, plan, disk)
    try:
        writer.run()
    except (Exception, KeyboardInterrupt) as error:
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        try:
            if read_manifest(target) is None:
                remove_state(target, disk)
            else:
                _restore(target, writer.manifest, disk)
        except OSError:
            raise SeriesError(
                f"{target.root}: {reason}; run revert.sh to put everything back"
            ) from error
        raise SeriesError(
            f"{target.root}: {reason}; everything was put back"
        ) from error


def revert(
    target: Target,
    force: bool = False,
    check: bool = False,
    disk: Disk | None = None,
    say: Say = print,
) -> None:
    """Restore every file as it was before the series was applied."""
    disk = disk or Disk()
    with locked(target.root):
        manifest = read_manifest(target)
        if manifest is None:
            refuse_orphan_backups(target)
            if not target.state.exists():
                raise SeriesError(f"{target.root}: the series was not applied here")
            if not check:
                remove_state(target, disk)
            say(f"nothing had been applied to {target_name(target)}; cleared the rest")
            return
        if not force:
            _refuse_obstacles(target, manifest)
        _refuse_read_only(target, [entry.path for entry in manifest.files])
        count = len(manifest.files)
        if check:
            say(f"would revert {count} file(s) in {target_name(target)}")
            return
        for folder in _restore(target, manifest, disk):
            say(f"left {folder}: it holds files that are not ours")
        say(f"reverted {count} file(s) in {target_name(target)}")
