# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The proposals: entries of the series that are ready for vLLM, one pull request each.

`proposals/order` names them as maintainers would take them. `proposals/NAME/` belongs
to the entry `patches/NAME.patch` and holds what its pull request needs beside it. An
entry that tracks somebody else's change has a comment for that one in place of a body.

A proposal that is no entry has its edits of vLLM's files in `wiring.patch`, and files
that it adds below `files/`. It is a series of one entry on the pinned release.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from .errors import SeriesError
from .git import scratch
from .model import OverlayFile, Series, overlay_files
from .patchfile import FileDiff, Patch, parse_diff, parse_patch

PROPOSALS = "proposals"
WIRING = "wiring.patch"
FILES = "files"
# Pull requests of one author that vLLM has open at once.
OPEN_AT_ONCE = 6
# Lines outside tests from which vLLM asks for an RFC.
RFC_LINES = 500
# Lines of Python of one that comes after its RFC: outside tests, and of tests.
CODE_LINES = 2500
TEST_LINES = 900
TITLE_LENGTH = 72
# vLLM's well-known tags (docs/contributing/README.md); further tags may follow.
TYPE_TAGS = (
    "Bugfix", "Feature", "Perf", "Refactor", "CI", "CI/Build", "Test", "Doc", "Docs",
    "Misc",
)  # fmt: skip
SECTIONS = ("## Overview", "## Claims", "## Validation", "## Details")
_TITLE = re.compile(r"\[(?P<tag>[^\]]+)\](?:\[[A-Z0-9][^\]]*\])* [A-Z]\S* .*[^.\s]")
_TEST = re.compile(rb"^\+ *(?:async )?def (test_\w+)", re.MULTILINE)
# Names of the series' own dtypes, modules and options; vLLM has a TurboQuant.
_OURS = re.compile(rb"(?i)\bturbo(?!_?quant)(?:[34]|_\w+|/|\b)|\bk4v3\b")
_ADDRESS = re.compile(r"https://github\.com/vllm-project/vllm/(?:pull|issues)/\d+\b.+")


@dataclass(frozen=True)
class Proposal:
    """An entry of the series, and what `proposals/` has on it.

    Attributes:
        patch: The entry.
        title: The pull request's title; empty if there is none.
        text: The pull request's body, or the comment.
        tests: Changes of tests beyond those of the entry.
        tests_data: The same as the bytes of a diff.
        related: A line for each issue or pull request that a duplicate search found.
        waits: The thing that has to come first, in words; empty for nothing.
        added: The files that one which is no entry of the series adds, by path.

    """

    patch: Patch
    title: str
    text: str
    tests: tuple[FileDiff, ...]
    tests_data: bytes
    related: tuple[str, ...]
    waits: str
    added: dict[str, OverlayFile] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.patch.name.removesuffix(".patch")

    @property
    def status(self) -> str:
        return " ".join(self.patch.trailer("Upstream-Status"))

    @property
    def is_tracked(self) -> bool:
        return self.status.startswith("Tracked ")

    @property
    def files(self) -> tuple[FileDiff, ...]:
        """All changes of files."""
        added = (added_file(file) for file in self.added.values())
        return (*self.patch.files, *self.tests, *added)

    def python_lines(self, of_tests: bool) -> int:
        """The number of changed lines of Python, of tests or of all else."""
        return sum(
            len(file.added) + len(file.removed)
            for file in self.files
            if file.path.endswith(".py") and is_test(file.path) == of_tests
        )

    def alone(self, series: Series) -> Series:
        """The series of a proposal that is no entry: itself alone."""
        return replace(series, patches=(self.patch,), overlay=self.added)

    @property
    def num_lines(self) -> int:
        """The number of changed lines outside tests."""
        return sum(
            len(file.added) + len(file.removed)
            for file in self.files
            if not is_test(file.path)
        )

    @property
    def test_names(self) -> list[str]:
        """The tests that it adds."""
        tests = (file.text for file in self.files if is_test(file.path))
        return [name.decode() for text in tests for name in _TEST.findall(text)]


def added_file(file: OverlayFile) -> FileDiff:
    """The change that adds a file."""
    lines = tuple(file.data.splitlines(keepends=True))
    text = b"".join(b"+" + line for line in lines)
    return FileDiff(file.path, "new file", "", "", lines, (), text, False)


def is_test(path: str) -> bool:
    return path.startswith("tests/")


def read_waiting(root: Path) -> dict[str, str]:
    """Map the proposals in `proposals/order` to what each waits for."""
    path = root / PROPOSALS / "order"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SeriesError(f"cannot read {path}: {error.strerror}") from None
    parts = (line.partition(":") for line in lines if line and line[0] != "#")
    return {name.strip(): waits.strip() for name, _, waits in parts}


def load_proposals(series: Series) -> list[Proposal]:
    """Read the proposals, in the order in which they are proposed.

    Raises:
        SeriesError: `proposals/order` and the folders or entries do not agree.

    """
    folder = series.root / PROPOSALS
    waiting = read_waiting(series.root)
    here = {path.name for path in folder.iterdir() if path.is_dir()}
    entries = {patch.name.removesuffix(".patch"): patch for patch in series.patches}
    for name in sorted(here ^ waiting.keys()):
        where = f"has no {name}" if name in here else f"names {name}, without a folder"
        raise SeriesError(f"{folder / 'order'} {where}")
    for name in waiting:
        path = folder / name / WIRING
        if name in entries and path.exists():
            raise SeriesError(f"{path}: but {name} is an entry of the series")
        if name not in entries and not path.is_file():
            raise SeriesError(f"{folder / name} belongs to no entry of the series")
        if name not in entries:
            entries[name] = parse_patch(f"{name}.patch", path.read_bytes())
    return [
        _load(folder / name, entries[name], waits) for name, waits in waiting.items()
    ]


def _load(folder: Path, patch: Patch, waits: str) -> Proposal:
    def read(name: str) -> str:
        path = folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    data = read("tests.patch").encode()
    is_tracked = any(
        value.startswith("Tracked ") for value in patch.trailer("Upstream-Status")
    )
    with scratch(init=False) as git:
        tests = parse_diff(git, data)
    return Proposal(
        patch=patch,
        title=read("title").strip(),
        text=read("comment.md" if is_tracked else "body.md"),
        tests=tests,
        tests_data=data,
        related=tuple(read("related").splitlines()),
        waits=waits,
        added=overlay_files(folder / FILES),
    )


def find_waves(proposals: list[Proposal]) -> dict[str, int]:
    """Deal the pull requests into waves; the last is for those that have to wait."""
    own = [each for each in proposals if not each.is_tracked]
    free = [each.name for each in own if not each.waits]
    found = {name: 1 + number // OPEN_AT_ONCE for number, name in enumerate(free)}
    last = 1 + max(found.values(), default=0)
    return found | {each.name: last for each in own if each.waits}


Rule = Callable[[Proposal], Iterator[str]]


def _alone(proposal: Proposal) -> Iterator[str]:
    """It needs no file of the series, and edits tests alone beside the entry."""
    if proposal.patch.trailer("Overlay") and not proposal.added:
        yield "adds files of the series' own"
    for file in proposal.tests:
        if not is_test(file.path):
            yield f"tests.patch changes {file.path}, which is no test"
    for file in () if proposal.added else proposal.files:
        added = b"".join(file.added)
        if match := _OURS.search(added):
            yield f"{file.path} names {match[0].decode()}, which vLLM does not have"


def _tested(proposal: Proposal) -> Iterator[str]:
    """It has a test of its own, in vLLM's files."""
    if not proposal.test_names:
        yield "has no test in vLLM's own files"


def _titled(proposal: Proposal) -> Iterator[str]:
    """Its title is as vLLM's contributing guide asks."""
    if proposal.is_tracked:
        return
    match = _TITLE.fullmatch(proposal.title)
    if match is None or match["tag"] not in TYPE_TAGS:
        yield f"title is not `[Bugfix][Area] Do something`: {proposal.title!r}"
    if len(proposal.title) > TITLE_LENGTH:
        yield f"title has {len(proposal.title)} characters, over {TITLE_LENGTH}"


def _described(proposal: Proposal) -> Iterator[str]:
    """Its body has the sections of vLLM's template; a duplicate search is noted."""
    if proposal.is_tracked:
        if not proposal.text:
            yield "has no comment.md for the change that it tracks"
        return
    lines = proposal.text.splitlines()
    if [line for line in lines if line.startswith("## ")] != list(SECTIONS):
        yield f"body.md does not have the sections {', '.join(SECTIONS)}"
    if not proposal.related:
        yield "related does not say what a search for duplicates found"
    for line in proposal.related:
        if line.startswith("http") and not _ADDRESS.fullmatch(line):
            yield f"related is not ADDRESS, and why it is another matter: {line!r}"


def _small(proposal: Proposal) -> Iterator[str]:
    """It is of a size that needs no RFC, or that can be read after one."""
    if proposal.added:
        for of_tests, most in ((False, CODE_LINES), (True, TEST_LINES)):
            if (lines := proposal.python_lines(of_tests)) > most:
                kind = "tests" if of_tests else "Python outside tests"
                yield f"has {lines} lines of {kind}, over {most}"
    elif proposal.num_lines > RFC_LINES:
        yield f"changes {proposal.num_lines} lines; over {RFC_LINES} need an RFC"


RULES: tuple[Rule, ...] = (_alone, _tested, _titled, _described, _small)


def faults(proposal: Proposal) -> list[str]:
    """The reasons why a proposal is not ready, as far as its text says."""
    return [text for rule in RULES for text in rule(proposal)]


def find_proposal(series: Series, name: str) -> Proposal:
    """The proposal of an entry of the series."""
    proposals = {each.name: each for each in load_proposals(series)}
    if name not in proposals:
        raise SeriesError(
            f"there is no proposal {name}; there are {', '.join(sorted(proposals))}"
        )
    return proposals[name]


def table(proposals: list[Proposal]) -> str:
    """A line for each proposal, and one for each fault."""
    rows = [("wave", "lines", "tests", "state", "proposal")]
    waves = find_waves(proposals)
    notes = []
    for each in proposals:
        found = faults(each)
        state = "not ready" if found else "ready"
        if not each.is_tracked and each.status != "Pending":
            state = each.status.split()[0].lower()
        sizes = (str(each.num_lines), str(len(each.test_names)))
        rows.append((str(waves.get(each.name, "-")), *sizes, state, each.name))
        notes += [f"{each.name}: {text}" for text in found]
        if each.is_tracked:
            where = each.status.removeprefix("Tracked ")
            notes.append(f"{each.name}: a comment and tests for {where}")
        elif each.waits:
            notes.append(f"{each.name} waits for {each.waits}")
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in rows
    ]
    lines += ["", f"At most {OPEN_AT_ONCE} are open at once.", *notes]
    return "\n".join(lines)
