# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kill a run at every step, then go on both ways."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trees
from turbo_series import record
from turbo_series.disk import Disk
from turbo_series.errors import SeriesError
from turbo_series.model import Series
from turbo_series.operate import apply, revert
from turbo_series.target import Target, open_target
from turbo_series.verify import verify

KILLED = 9
Run = Callable[[Target, Disk], None]


def _quiet(text: str) -> None:
    pass


def _applying(series: Series) -> Run:
    return lambda target, disk: apply(series, target, disk=disk, say=_quiet)


def _revert(target: Target, disk: Disk) -> None:
    revert(target, disk=disk, say=_quiet)


def _killed_at(step: int, run: Run, target: Target) -> bool:
    """Run in a child that dies, cleaning up nothing, before its n-th change.

    Returns:
        Whether it died; False if the run was over before.

    """
    child = os.fork()
    if child == 0:
        steps = iter(range(step))

        def on_step(_: str) -> None:
            if next(steps, None) is None:
                os._exit(KILLED)

        try:
            run(target, Disk(on_step))
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


def _copy(tree: Path, name: str) -> Target:
    """A copy of a tree beside it, opened."""
    folder = tree.parent / name
    shutil.rmtree(folder, ignore_errors=True)
    return open_target(str(shutil.copytree(tree, folder)))


def _killed(start: Target, run: Run) -> Iterator[tuple[int, Target]]:
    """Yield each step that a run is killed before, and the copy that it leaves."""
    step = 0
    while _killed_at(step, run, target := _copy(start.root, "killed")):
        yield step, target
        step += 1


def _unlisted(target: Target) -> set[str]:
    """Modules that an uninstall would leave behind."""
    if target.record is None:
        return set()
    listed = record.listed_paths((target.root / target.record).read_bytes())
    files = (target.root / "vllm").rglob("[!.]*.py")
    return {path.relative_to(target.root).as_posix() for path in files} - listed


def _kill_everywhere(
    start: Target, run: Run, series: Series, base: dict, applied: dict
) -> int:
    """Check both ways out of every interruption; return how many there were."""
    step = -1
    for step, target in _killed(start, run):
        assert _unlisted(target) == set(), f"after step {step}"
        again = _copy(target.root, "again")
        apply(series, again, say=_quiet)
        assert verify(series, again) == [], f"apply after step {step}"
        assert trees.snapshot(again.root) == applied, f"apply after step {step}"
        if target.state.exists():
            revert(target, say=_quiet)
        assert trees.snapshot(target.root) == base, f"revert after step {step}"
    return step + 1


def _add_stale_bytecode(target: Target) -> None:
    """Leave a stale module cache, so that its removal is among the steps."""
    cache = target.root / "vllm/config/__pycache__"
    cache.mkdir()
    (cache / "cache.cpython-399.pyc").write_bytes(b"stale")


def test_synced_before_the_next_step(
    make: Callable[[str], Target], series: Series, synced: list[int]
) -> None:
    """A file is durable before it takes its place, its folder before what follows."""
    target = make("installed")
    pending: list[tuple[Path, int]] = []
    replaced = 0

    def on_step(text: str) -> None:
        nonlocal replaced
        verb, _, name = text.partition(" ")
        path = Path(name)
        if pending:
            folder, before = pending.pop()
            assert folder.stat().st_ino in synced[before:], f"before {text}"
        if verb == "replace":
            replaced += 1
            temporary = path.with_name(f".{path.name}.turbo-tmp")
            assert synced[-1] == temporary.stat().st_ino
        if verb in ("replace", "remove"):
            pending.append((path.parent, len(synced)))

    apply(series, target, disk=Disk(on_step), say=_quiet)
    # The manifest twice, 3 originals, 3 modified files with RECORD, 3 added ones.
    assert replaced == 2 + 3 + 3 + 3
    revert(target, disk=Disk(on_step), say=_quiet)


@pytest.mark.parametrize("kind", ["checkout", "installed"])
def test_killed_apply(make: Callable[[str], Target], series: Series, kind: str) -> None:
    start = make(kind)
    _add_stale_bytecode(start)
    base = trees.snapshot(start.root)
    whole = _copy(start.root, "whole")
    apply(series, whole, say=_quiet)
    applied = trees.snapshot(whole.root)
    steps = _kill_everywhere(start, _applying(series), series, base, applied)
    assert steps > 3 * len(trees.expected(kind).keys() - trees.BASE.keys())


@pytest.mark.parametrize("kind", ["checkout", "installed"])
def test_killed_revert(
    make: Callable[[str], Target], series: Series, kind: str
) -> None:
    start = make(kind)
    base = trees.snapshot(start.root)
    apply(series, start, say=_quiet)
    _add_stale_bytecode(start)
    applied = trees.snapshot(start.root)
    steps = _kill_everywhere(start, _revert, series, base, applied)
    assert steps > len(trees.expected(kind).keys() - trees.BASE.keys())


def test_every_interruption_is_noticed(
    make: Callable[[str], Target], series: Series
) -> None:
    """Verify passes only once apply has made its last step."""
    start = make("installed")
    run = _applying(series)
    step = -1
    for step, target in _killed(start, run):
        assert verify(series, target), f"after step {step}"
    assert not _killed_at(step + 1, run, start)
    assert verify(series, start) == []


def test_interrupted_recovery(make: Callable[[str], Target], series: Series) -> None:
    """A revert is killed while it cleans up after a killed apply."""
    start = make("installed")
    base = trees.snapshot(start.root)
    assert _killed_at(25, _applying(series), start)
    step = -1
    for step, target in _killed(start, _revert):
        if target.state.exists():
            revert(target, say=_quiet)
        assert trees.snapshot(target.root) == base, f"after step {step}"
    assert step >= 10


class _FullDisk(Disk):
    """Fails once, before its n-th change."""

    def __init__(self, step: int) -> None:
        super().__init__(self._fail)
        self.left = step
        self.failed = ""

    def _fail(self, text: str) -> None:
        self.left -= 1
        if self.left == -1:
            self.failed = text
            raise OSError(errno.ENOSPC, "No space left on device")


def test_failed_write_puts_everything_back(tree: Target, series: Series) -> None:
    base = trees.snapshot(tree.root)
    step = 0
    while True:
        disk = _FullDisk(step)
        try:
            apply(series, tree, disk=disk, say=_quiet)
        except SeriesError as error:
            assert "No space left on device; everything was put back" in str(error)
        if not disk.failed:
            break
        assert trees.snapshot(tree.root) == base, disk.failed
        step += 1
    assert step > 20
    assert verify(series, tree) == []
