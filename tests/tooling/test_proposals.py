# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Proposals of a small series, on a checkout of the small vLLM; and the real ones."""

import itertools
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trees
from turbo_series import cli, propose, prove
from turbo_series.errors import SeriesError
from turbo_series.model import load_series
from turbo_series.proposals import (
    CODE_LINES,
    TEST_LINES,
    faults,
    find_waves,
    load_proposals,
    table,
)

NAME = "raise-the-size"
MESSAGE = f"""[Core] Raise the size

It was too small.

Upstream-Status: Pending
Drop-When: vLLM has it
Guarded-By: tests/test_base.py::test_size
Co-authored-by: Somebody <some@body.org>
{trees.message("", [], "").splitlines()[-1]}
"""
EDIT = ("vllm/config/cache.py", "SIZE = 1\n", "SIZE = 2\n")
TESTED = (
    "tests/test_base.py",
    "def test_base():\n    pass\n",
    "from vllm.config.cache import SIZE\n\n\ndef test_base():\n    pass\n\n\n"
    "def test_size():\n    assert SIZE == 2\n",
)
TITLE = "[Bugfix][Core] Raise the size"
BODY = """## Overview

A size.

## Claims

- It is 2.

## Validation

See here.

## Details

None.
"""
RELATED = "https://github.com/vllm-project/vllm/pull/1 is another matter.\n"
TEMPLATE = """## Overview

---

- [ ] AI assistance was used during the creation of this PR.
- [ ] **Design Fit:** it fits.

**BEFORE SUBMITTING, PLEASE READ**
"""
HOOKS = """
repos:
- repo: local
  hooks:
  - id: no-tabs
    name: No tabs
    language: python
    entry: python tools/no_tabs.py
    types: [python]
"""
NO_TABS = "import sys\nsys.exit(any('\\t' in open(x).read() for x in sys.argv[1:]))\n"
Edit = tuple[str, str, str]


def write_edit(root: Path, edit: Edit) -> None:
    path, old, new = edit
    text = (root / path).read_text()
    assert text.count(old) == 1
    (root / path).write_text(text.replace(old, new))


@dataclass
class Work:
    """A project whose series has one entry, and a checkout to propose it on."""

    project: Path
    checkout: Path

    @property
    def folder(self) -> Path:
        """The proposal's."""
        return self.project / "proposals" / NAME

    def write_entry(self, *edits: Edit, message: str = MESSAGE) -> None:
        """Make a patch of edits of the base."""
        base = self.git("rev-parse", "main").strip()
        for edit in edits:
            write_edit(self.checkout, edit)
        how = ("-q", "-a", "--allow-empty", "--cleanup=verbatim")
        self.git("commit", *how, "-m", message)
        patch = self.git("format-patch", "--stdout", *trees.FORMAT.split(), "-1")
        self.git("reset", "-q", "--hard", base)
        (self.project / f"patches/{NAME}.patch").write_text(patch)

    def write_tests(self, *edits: Edit) -> None:
        """Have `tests.patch` make edits of the base."""
        for edit in edits:
            write_edit(self.checkout, edit)
        diff = self.git("diff", "--full-index")
        self.git("reset", "-q", "--hard")
        (self.folder / "tests.patch").write_text(diff)

    def git(self, *args: str) -> str:
        return trees.git(self.checkout, *args)

    def state(self) -> object:
        """All that a refusal must not change."""
        refs = self.git("for-each-ref", "--format=%(refname) %(objectname)")
        trees_of_git = self.git("worktree", "list", "--porcelain")
        status = self.git("status", "--porcelain", "--ignored")
        return refs, trees_of_git, status, trees.snapshot(self.checkout)

    def run(self, *args: str) -> int:
        return cli.main(self.project, ["pr", NAME, str(self.checkout), *args])

    def body(self) -> str:
        return (self.project / f"build/pr/{NAME}.md").read_text()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    monkeypatch.setenv("PYTHON", sys.executable)
    checkout = trees.make_checkout(tmp_path / "checkout")
    extra = {
        ".pre-commit-config.yaml": HOOKS,
        "tools/no_tabs.py": NO_TABS,
        propose.TEMPLATE: TEMPLATE,
    }
    trees.write_tree(checkout, extra)
    trees.git(checkout, "add", "-A")
    trees.git(checkout, "commit", "-q", "-m", "tools")
    trees.git(checkout, "config", "user.name", "Ada Person")
    trees.git(checkout, "config", "user.email", "ada@person.org")
    made = Work(tmp_path / "project", checkout)
    files = {
        "patches/series": f"{NAME}.patch\n",
        "proposals/order": f"# The order.\n{NAME}\n",
        f"proposals/{NAME}/title": f"{TITLE}\n",
        f"proposals/{NAME}/body.md": BODY,
        f"proposals/{NAME}/related": RELATED,
    }
    trees.write_tree(made.project, files)
    for name in ("UPSTREAM.toml", "ci/vllm_hooks.py"):
        (made.project / name).parent.mkdir(exist_ok=True)
        shutil.copy(trees.ROOT / name, made.project / name)
    made.write_entry(EDIT, TESTED)
    return made


def refused(work: Work, words: str, *args: str, capsys: pytest.CaptureFixture) -> None:
    before = work.state()
    assert work.run(*args) == 1
    assert words in capsys.readouterr().err
    assert work.state() == before
    assert not (work.project / "build").exists()


def test_branch_and_body(work: Work) -> None:
    """The branch has the change and its tests, signed by a person; the body has the
    output of both runs.
    """
    before = work.state()
    assert work.run() == 0
    tip = work.git("log", "-1", "--format=%P%n%an <%ae>%n%cn%n%B", NAME).rstrip("\n")
    base = work.git("rev-parse", "main").strip()
    assert tip.split("\n") == [
        base,
        "Ada Person <ada@person.org>",
        "Ada Person",
        TITLE,
        "",
        "It was too small.",
        "",
        "Co-authored-by: Somebody <some@body.org>",
        "Signed-off-by: Ada Person <ada@person.org>",
    ]
    changed = work.git("diff", "--name-only", "main", NAME).split()
    assert changed == ["tests/test_base.py", "vllm/config/cache.py"]
    body = work.body()
    parts = [
        "## Validation\n\nSee here.",
        "python -m pytest -q",
        "tests/test_base.py::test_size",
        "E   assert 1 == 2",
        "1 failed",
        "1 passed",
        "No tabs",
        "## Details\n\nNone.",
        RELATED,
        "- [x] AI assistance was used",
        "- [ ] **Design Fit:**",
    ]
    places = [body.index(part) for part in parts]
    assert places == sorted(places)
    assert "BEFORE SUBMITTING" not in body
    assert str(work.checkout.parent) not in body and "/turbo-series-" not in body
    work.git("branch", "-q", "-D", NAME)
    assert work.state() == before


def test_tests_of_the_proposal(work: Work) -> None:
    """An entry without a test gets it from `tests.patch`; the body can go anywhere."""
    work.write_entry(EDIT)
    work.write_tests(TESTED)
    body = work.project / "body.md"
    assert work.run("--body", str(body)) == 0
    changed = work.git("diff", "--name-only", "main", NAME).split()
    assert changed == ["tests/test_base.py", "vllm/config/cache.py"]
    assert "1 failed" in body.read_text()


def test_an_adapted_test(work: Work) -> None:
    """It may pass without the change, beside a new one that fails."""
    adapted = TESTED[2].replace(
        "test_base():\n    pass", "test_base():\n    assert SIZE"
    )
    work.write_entry(EDIT, (TESTED[0], TESTED[1], adapted))
    assert work.run() == 0
    assert "1 failed, 1 passed" in work.body() and "2 passed" in work.body()


def test_onto_another_commit(work: Work) -> None:
    """Lines have moved there, and one beside the change is another."""
    work.git("switch", "-q", "-c", "upstream")
    write_edit(work.checkout, ("vllm/config/cache.py", "DTYPES", "# Types\nDTYPES"))
    work.git("commit", "-q", "-a", "-m", "later")
    work.git("switch", "-q", "main")
    assert work.run("--onto", "upstream") == 0
    assert work.git("rev-parse", f"{NAME}^") == work.git("rev-parse", "upstream")
    assert "# Types" in work.git("show", f"{NAME}:vllm/config/cache.py")


def test_entries_before_it(work: Work) -> None:
    """The branch does not have them, though the entry follows them in its file."""
    first = ("vllm/config/cache.py", "DTYPES = [\n", "# First\nDTYPES = [\n")
    write_edit(work.checkout, first)
    work.git("commit", "-q", "-a", "-m", MESSAGE.replace("Raise the", "Name a"))
    patch = work.git("format-patch", "--stdout", *trees.FORMAT.split(), "-1")
    (work.project / "patches/first.patch").write_text(patch)
    write_edit(work.checkout, EDIT)
    write_edit(work.checkout, TESTED)
    work.git("commit", "-q", "-a", "-m", MESSAGE)
    patch = work.git("format-patch", "--stdout", *trees.FORMAT.split(), "-1")
    (work.project / f"patches/{NAME}.patch").write_text(patch)
    work.git("reset", "-q", "--hard", "HEAD~2")
    (work.project / "patches/series").write_text(f"first.patch\n{NAME}.patch\n")
    assert work.run() == 0
    text = work.git("show", f"{NAME}:vllm/config/cache.py")
    assert "# First" not in text and "SIZE = 2" in text


def status(value: str) -> Callable[[Work], None]:
    def change(work: Work) -> None:
        message = MESSAGE.replace("Pending", value).replace("vLLM has it", "#7 is it")
        work.write_entry(EDIT, TESTED, message=message)

    return change


def named(name: str, text: str) -> Callable[[Work], None]:
    return lambda work: trees.write_tree(work.folder, {name: text})


def entry(*edits: Edit) -> Callable[[Work], None]:
    return lambda work: work.write_entry(*edits)


def more_tests(*edits: Edit) -> Callable[[Work], None]:
    return lambda work: work.write_tests(*edits)


def configured(name: str, value: str) -> Callable[[Work], object]:
    return lambda work: work.git("config", name, value)


def move_base(work: Work) -> None:
    write_edit(work.checkout, ("vllm/config/cache.py", "SIZE = 1", "SIZE = 3"))
    work.git("commit", "-q", "-a", "-m", "moved")


TURBO = (
    TESTED[0],
    TESTED[1],
    TESTED[2].replace("SIZE ==", "len('turbo4') and SIZE =="),
)
OTHER = ("setup.py", "    'b',\n", "    'b',\n    'c',\n")
LONG = (EDIT[0], EDIT[1], EDIT[2] + "X = 1\n" * 500)
URL = "https://github.com/vllm-project/vllm/pull/7"
REFUSALS = {
    "tracked": (status(f"Tracked {URL}"), f"open upstream: {URL}"),
    "submitted": (status(f"Submitted {URL}"), f"not to be proposed: Submitted {URL}"),
    "other-files": (more_tests(OTHER), "changes setup.py, which is no test"),
    "turbo": (entry(EDIT, TURBO), "names turbo4, which vLLM does not have"),
    "no-test": (entry(EDIT), "has no test in vLLM's own files"),
    "title": (named("title", "Raise the size"), "title is not"),
    "no-type": (named("title", "[KV Cache] Raise the size"), "title is not"),
    "long-title": (named("title", TITLE + " of it" * 9), "characters, over 72"),
    "sections": (named("body.md", "## Overview\n"), "body.md does not have"),
    "related": (named("related", ""), "what a search for duplicates found"),
    "address": (named("related", "https://github.com/x"), "related is not ADDRESS"),
    "size": (entry(LONG, TESTED), "over 500 need an RFC"),
    "example": (configured("user.email", "a@b.example"), "config user.email YOURS"),
    "no-address": (configured("user.email", "nobody"), "config user.email YOURS"),
    "no-name": (configured("user.name", ""), "user.name is not set"),
    "branch": (lambda work: work.git("branch", NAME), f"has a branch {NAME}"),
    "base": (move_base, "HEAD is not vLLM"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(work: Work, case: str, capsys: pytest.CaptureFixture) -> None:
    change, words = REFUSALS[case]
    change(work)
    refused(work, words, capsys=capsys)


PASSES = (TESTED[0], TESTED[1], TESTED[2].replace("SIZE == 2", "SIZE"))
FAILS = (TESTED[0], TESTED[1], TESTED[2].replace("SIZE == 2", "SIZE == 3"))
SKIPS = (
    TESTED[0],
    TESTED[1],
    "import pytest\n"
    + TESTED[2].replace("    assert", "    if SIZE == 2: pytest.skip()\n    assert"),
)
TAB = (EDIT[0], EDIT[1], EDIT[2] + "TAB = '\t'\n")


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ((EDIT, PASSES), "test_base.py::test_size does not fail without the change"),
        ((EDIT, FAILS), "test_base.py::test_size does not pass:"),
        ((EDIT, SKIPS), "test_base.py::test_size does not pass:"),
        ((TAB, TESTED), "pre-commit fails"),
    ],
    ids=["passes-before", "fails-after", "skips-after", "hook"],
)
def test_failures(
    work: Work, edits: tuple[Edit, ...], words: str, capsys: pytest.CaptureFixture
) -> None:
    """A failed step leaves the checkout as it was."""
    work.write_entry(*edits)
    refused(work, words, capsys=capsys)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ("SIZE = 5", "does not merge onto other: vllm/config/cache.py"),
        ("SIZE = 2", "changes nothing of other: vLLM has it"),
    ],
)
def test_other_trees(
    work: Work, new: str, words: str, capsys: pytest.CaptureFixture
) -> None:
    work.git("switch", "-q", "-c", "other")
    write_edit(work.checkout, ("vllm/config/cache.py", "SIZE = 1", new))
    work.git("commit", "-q", "-a", "-m", "other")
    work.git("switch", "-q", "main")
    refused(work, words, "--onto", "other", capsys=capsys)


def test_check_writes_nothing(work: Work, capsys: pytest.CaptureFixture) -> None:
    """It needs no person, and is also for entries that are tracked."""
    status(f"Tracked {URL}")(work)
    work.git("config", "user.email", "a@b.example")
    refused(work, "has no comment.md", "--check", capsys=capsys)
    for name in ("title", "body.md", "related"):
        (work.folder / name).unlink()
    (work.folder / "comment.md").write_text("It is so here, too.\n")
    before = work.state()
    assert work.run("--check") == 0
    assert "fail without the change and pass with it" in capsys.readouterr().out
    assert work.state() == before
    assert not (work.project / "build").exists()


def test_a_python_without_pytest(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", "false")
    monkeypatch.setattr(prove, "settings", lambda python: {})
    with pytest.raises(SeriesError, match="false cannot run the tests"):
        propose.check(load_series(work.project), NAME, work.checkout)


MYPY = """
import subprocess, sys
sys.exit(subprocess.run(["mypy", *sys.argv[2:]]).returncode)
"""
WRONG = "NAME: int = 'a'\n"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("", "", "mypy: no errors"),
        (WRONG, "", "mypy: 1 errors without the change, none new with it"),
        ("", WRONG, "cache.py: Incompatible types in assignment"),
    ],
)
def test_mypy(
    work: Work, old: str, new: str, words: str, capsys: pytest.CaptureFixture
) -> None:
    """Errors that are there without the change are no hindrance."""
    pytest.importorskip("mypy")
    files = {"tools/pre_commit/mypy.py": MYPY, EDIT[0]: trees.BASE[EDIT[0]] + old}
    trees.write_tree(work.checkout, files)
    work.git("add", "-A")
    work.git("commit", "-q", "-m", "mypy")
    work.write_entry((EDIT[0], EDIT[1], EDIT[2] + new), TESTED)
    assert work.run() == bool(new)
    said = capsys.readouterr()
    assert words in (said.err if new else said.out)


def test_list(work: Work, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(work.project, ["pr", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1", "2", "1", "ready", NAME]
    named("title", "Raise the size")(work)
    assert cli.main(work.project, ["pr", "--list"]) == 1
    out = capsys.readouterr().out
    assert "not ready" in out and f"{NAME}: title is not" in out


def test_waves(work: Work) -> None:
    """Six are open at once. One that waits comes last, and a tracked one has none."""
    (one,) = load_proposals(load_series(work.project))
    names = [f"p{number}" for number in range(8)]
    many = [
        replace(one, patch=replace(one.patch, name=f"{name}.patch"), waits=waits)
        for name, waits in zip(names, ["", "", "p9", *[""] * 5])
    ]
    trailers = (("Upstream-Status", f"Tracked {URL}"),)
    many.append(replace(one, patch=replace(one.patch, trailers=trailers)))
    waves = find_waves(many)
    assert waves == dict.fromkeys(names, 1) | {"p2": 3, "p7": 2}
    lines = table(many).splitlines()
    assert lines[3].split()[0] == "3" and lines[9].split()[0] == "-"
    assert "p2 waits for p9" in lines
    assert f"{NAME}: a comment and tests for {URL}" in lines


@pytest.mark.parametrize(
    ("order", "words"),
    [("", f"has no {NAME}"), (f"{NAME}\nother\n", "names other, without a folder")],
)
def test_order(work: Work, order: str, words: str) -> None:
    (work.project / "proposals/order").write_text(order)
    with pytest.raises(SeriesError, match=words):
        load_proposals(load_series(work.project))


def test_a_folder_of_no_entry(work: Work) -> None:
    (work.project / f"patches/{NAME}.patch").rename(work.project / "patches/b.patch")
    (work.project / "patches/series").write_text("b.patch\n")
    with pytest.raises(SeriesError, match="belongs to no entry"):
        load_proposals(load_series(work.project))


@pytest.fixture
def alone(work: Work, monkeypatch: pytest.MonkeyPatch) -> Work:
    """A proposal that is no entry: an edit, and files that it adds."""
    # The small vLLM has no platforms.
    monkeypatch.setattr(prove, "PLUGINS", "-p no:cacheprovider")
    message = MESSAGE.replace("Guarded-By: ", "Overlay: **\nGuarded-By: ")
    work.write_entry(EDIT, message=message)
    entry = work.project / f"patches/{NAME}.patch"
    entry.rename(work.folder / "wiring.patch")
    (work.project / "patches/series").write_text("")
    added = {
        "files/vllm/turbo_new.py": "NEW = 1\n",
        "files/tests/test_new.py": "from vllm.turbo_new import NEW\n\n\n"
        "def test_new():\n    assert NEW\n",
    }
    trees.write_tree(work.folder, added)
    return work


def test_alone(alone: Work, tmp_path: Path) -> None:
    """It is applied without the series, to a tree and as a branch."""
    site = tmp_path / "site"
    alone.git("worktree", "add", "-q", "--detach", str(site), "main")
    assert cli.main(alone.project, ["pr", NAME, "--site", str(site)]) == 0
    assert (site / "vllm/turbo_new.py").read_text() == "NEW = 1\n"
    assert "SIZE = 2" in (site / "vllm/config/cache.py").read_text()
    alone.git("worktree", "remove", "--force", str(site))
    assert alone.run() == 0
    changed = alone.git("diff", "--name-only", "main", NAME).split()
    expected = ["tests/test_new.py", "vllm/config/cache.py", "vllm/turbo_new.py"]
    assert changed == expected
    assert "Overlay" not in alone.git("log", "-1", "--format=%B", NAME)


@pytest.mark.parametrize(
    ("path", "lines", "words"),
    [
        ("vllm/long.py", CODE_LINES, "lines of Python outside tests, over"),
        ("tests/long.py", TEST_LINES, "lines of tests, over"),
    ],
)
def test_alone_is_long(alone: Work, path: str, lines: int, words: str) -> None:
    (one,) = load_proposals(load_series(alone.project))
    assert faults(one) == []
    trees.write_tree(alone.folder / "files", {path: "x = 1\n" * lines})
    (one,) = load_proposals(load_series(alone.project))
    assert any(words in fault for fault in faults(one))


def test_site_is_for_no_entry(work: Work, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(work.project, ["pr", NAME, "--site", str(work.checkout)]) == 1
    assert "is an entry of the series" in capsys.readouterr().err


def test_alone_and_an_entry(alone: Work) -> None:
    wiring = (alone.folder / "wiring.patch").read_text()
    (alone.project / f"patches/{NAME}.patch").write_text(wiring)
    (alone.project / "patches/series").write_text(f"{NAME}.patch\n")
    with pytest.raises(SeriesError, match="is an entry of the series"):
        load_proposals(load_series(alone.project))


def test_real_proposals() -> None:
    """All entries of vLLM's own code have one, which is ready as far as text says."""
    series = load_series(trees.ROOT)
    proposals = load_proposals(series)
    assert {each.name: faults(each) for each in proposals if faults(each)} == {}
    # The first entries of vLLM's own code; the files of ours follow them.
    fixes = itertools.takewhile(
        lambda patch: not series.overlay_of(patch), series.patches
    )
    names = {patch.name.removesuffix(".patch") for patch in fixes}
    ours = "add-the-turbo-cache-dtypes"
    entries = {each.name for each in proposals if not each.added}
    assert names - {ours} == entries
