# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks the entries of the series one by one, each on the tree after it.

The series must be a branch of a checkout, as `series.py import` makes it. The files
that an entry touches have to compile. Its new modules can be imported, and its tests
collected, without any later entry. Its guards pass: the first case of each test that
`Guarded-By` names, as soon as an entry has brought the test. A skipped guard counts as
failed. Tests of the whole engine are not the series' own.
"""

import argparse
import contextlib
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from queue import SimpleQueue

import pytest

# Where the tests run: on any machine.
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
}

OWN_TESTS = Path("tests/kernels/turbo")


@dataclass(frozen=True)
class Entry:
    """A commit of the series.

    Attributes:
        commit: Its id.
        subject: Its first line.
        touched: The paths that it edits or adds.
        added: The paths that it adds.
        guards: The tests that its `Guarded-By` trailers name.

    """

    commit: str
    subject: str
    touched: tuple[str, ...]
    added: tuple[str, ...]
    guards: tuple[str, ...]

    @property
    def modules(self) -> list[str]:
        """The modules of vLLM that it adds."""
        paths = (Path(path) for path in self.added)
        return [
            ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            for path in paths
            if path.suffix == ".py" and path.parts[0] == "vllm"
        ]

    @property
    def tests(self) -> list[str]:
        """The test files that it adds."""
        names = [path for path in self.added if path.startswith("tests/")]
        return [path for path in names if Path(path).match("test_*.py")]


@dataclass(frozen=True)
class Task:
    """The work of one entry's process, in `folder`."""

    folder: Path
    modules: list[str]
    tests: list[str]
    guards: list[str]


class Guards:
    """A pytest plugin that runs the first case of each guard, and notes which pass."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.passed: set[str] = set()

    def guards_of(self, nodeid: str) -> set[str]:
        """Returns the guards that a test is, or belongs to."""
        plain = nodeid.split("[")[0]
        return {name for name in self.names if f"{plain}::".startswith(f"{name}::")}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        first: dict[str, pytest.Item] = {}
        for item in items:
            if self.guards_of(item.nodeid):
                first.setdefault(item.nodeid.split("[")[0], item)
        kept = list(first.values())
        config.hook.pytest_deselected(items=[i for i in items if i not in kept])
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed |= self.guards_of(report.nodeid)


def git(folder: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", *args], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout


def read_entries(folder: Path, branch: str) -> list[Entry]:
    """Returns the entries of an imported series, in order."""
    commits = git(
        folder, "rev-list", "--reverse", f"refs/turbo-series/{branch}..{branch}"
    )
    entries = []
    for commit in commits.split():
        form = "--format=%s%n%(trailers:key=Guarded-By,valueonly)"
        subject, *guards = git(folder, "log", "-1", form, commit).splitlines()
        how = ("-r", "-z", "--no-commit-id", "--name-status", "--no-renames")
        changes = git(folder, "diff-tree", *how, commit).split("\0")[:-1]
        paths = changes[1::2]
        added = [path for kind, path in zip(changes[::2], paths) if kind == "A"]
        entries.append(
            Entry(
                commit, subject, tuple(paths), tuple(added), tuple(filter(None, guards))
            )
        )
    return entries


def highest_folder(path: str) -> Path:
    """Returns the folder whose conftest.py is the highest that a test needs."""
    folder = Path(path).parent
    return OWN_TESTS if folder.is_relative_to(OWN_TESTS) else folder


def perform(task: Task, log: Path) -> bool:
    """Runs a task with its output in `log`; returns whether all passed."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(task.folder)
    sys.path.insert(0, str(task.folder))
    try:
        for module in task.modules:
            importlib.import_module(module)
    except Exception:
        traceback.print_exc()
        return False
    if not task.tests and not task.guards:
        return True
    files = {*task.tests, *(name.split("::")[0] for name in task.guards)}
    plugin = Guards(task.guards)
    options = ["-q", "-rs", "-pno:cacheprovider", "--disable-warnings"]
    options += ["--continue-on-collection-errors"]
    statuses = set()
    for folder in sorted(set(map(highest_folder, files))):
        names = sorted(path for path in files if highest_folder(path) == folder)
        # vLLM's own conftest.py is for its other tests, and needs more than these.
        cut = f"--confcutdir={folder}"
        statuses.add(pytest.main([*options, cut, *names], plugins=[plugin]))
    missing = set(task.guards) - plugin.passed
    for name in sorted(missing):
        print(f"guard did not pass: {name}")
    # The log is read before this process ends.
    sys.stdout.flush()
    good = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    return not missing and statuses <= good


def check_out(folder: Path, entry: Entry) -> list[str]:
    """Brings the tree to an entry; returns the files that do not compile."""
    differ = git(folder, "diff", "--name-only", "-z", "HEAD", entry.commit)
    git(folder, "checkout", "--quiet", "--detach", entry.commit)
    for path in map(Path, {*differ.split("\0")[:-1], *entry.touched}):
        # Python takes a module of the same second and size for unchanged.
        for compiled in (folder / path).parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()
    broken = []
    for path in (folder / path for path in entry.touched if path.endswith(".py")):
        try:
            compile(path.read_bytes(), path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            broken.append(f"{path}: {error}")
    return broken


def holds(folder: Path, commit: str, path: str) -> bool:
    """Whether a commit has a file."""
    command = ["git", "cat-file", "-e", f"{commit}:{path}"]
    return not subprocess.run(command, cwd=folder, stderr=subprocess.DEVNULL).returncode


def ready_guards(folder: Path, entries: list[Entry]) -> list[list[str]]:
    """Returns the guards whose tests each entry is the first to have."""
    waiting: list[str] = []
    found = []
    for entry in entries:
        waiting += [name for name in entry.guards if name not in waiting]
        ready = [n for n in waiting if holds(folder, entry.commit, n.split("::")[0])]
        waiting = [name for name in waiting if name not in ready]
        found.append(ready)
    return found


@contextlib.contextmanager
def work_trees(folder: Path, count: int) -> Iterator[SimpleQueue[Path]]:
    """Yields trees, each for one entry at a time: the checkout and copies of it."""
    trees: SimpleQueue[Path] = SimpleQueue()
    trees.put(folder)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        for number in range(1, count):
            tree = str(Path(scratch) / str(number))
            git(folder, "worktree", "add", "--quiet", "--detach", tree)
            stack.callback(git, folder, "worktree", "remove", "--force", tree)
            trees.put(Path(tree))
        yield trees


def check_entry(
    tree: Path, entry: Entry, guards: list[str], context: ForkServerContext
) -> tuple[str, list[str]]:
    """Checks an entry; returns a line on the checks, and the problems."""
    start = time.monotonic()
    problems = check_out(tree, entry)
    task = Task(tree, entry.modules, entry.tests, guards)
    if not problems and (task.modules or task.tests or task.guards):
        # A process of its own, because imports cannot be undone.
        with tempfile.TemporaryDirectory() as scratch, context.Pool(1) as pool:
            log = Path(scratch) / "log"
            if not pool.apply(perform, (task, log)):
                problems = log.read_text(errors="replace").splitlines()
    said = (
        f"{entry.subject}: {len(task.modules)} module(s), {len(task.tests)} test "
        f"file(s), {len(guards)} guard(s): {'failed' if problems else 'passed'} in "
        f"{time.monotonic() - start:.0f} s"
    )
    return said, problems


def check(
    folder: Path, entries: list[Entry], preload: list[str], jobs: int
) -> list[str]:
    """Checks the entries; returns the subjects of those that fail."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    failed = []
    with work_trees(folder, jobs) as trees, ThreadPoolExecutor(jobs) as threads:

        def run(entry: Entry, guards: list[str]) -> tuple[str, list[str]]:
            tree = trees.get()
            try:
                return check_entry(tree, entry, guards, context)
            finally:
                trees.put(tree)

        results = threads.map(run, entries, ready_guards(folder, entries))
        for number, (entry, (said, problems)) in enumerate(zip(entries, results), 1):
            print(f"[{number}/{len(entries)}] {said}", *problems, sep="\n", flush=True)
            failed += [entry.subject] if problems else []
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the checkout, which is changed")
    parser.add_argument("--branch", default="turbo", help="its name (default: turbo)")
    parser.add_argument(
        "--preload", nargs="*", default=[], help="modules that every process needs"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="entries at a time (default: 2)"
    )
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    folder = args.folder.resolve()
    entries = read_entries(folder, args.branch)
    try:
        failed = check(folder, entries, args.preload, args.jobs)
    finally:
        git(folder, "checkout", "--quiet", args.branch)
    for subject in failed:
        print(f"failed: {subject}")
    return 1 if failed or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
