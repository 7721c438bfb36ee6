# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading patches, globs and paths."""

import pytest
import trees
from turbo_series.errors import SeriesError
from turbo_series.git import scratch
from turbo_series.model import Series, glob_regex
from turbo_series.patchfile import FileDiff, parse_diff, parse_patch, safe_path

HEADER = b"diff --git a/x b/x\nindex %s..%s 100644\n--- a/x\n+++ b/x\n" % (
    b"1" * 40,
    b"2" * 40,
)


def test_patch(series: Series) -> None:
    patch = series.patches[1]
    name, subject, _, globs = trees.PATCHES[1]
    assert (patch.name, patch.subject) == (name, subject)
    assert (patch.author, patch.email) == ("Zoë Example", "zoe@example.com")
    assert patch.trailer("Overlay") == globs
    assert patch.trailer("upstream-status") == ["Pending"]
    assert patch.message == trees.message(
        subject, globs, "tests/turbo/test_format.py::test_bits"
    )
    assert [file.path for file in patch.files] == [
        "setup.py",
        "vllm/config/cache.py",
        "vllm/platforms/cuda.py",
    ]
    assert b"".join(file.text for file in patch.files) in patch.data
    assert patch.changed_lines == 5


def _parse(data: bytes) -> tuple[FileDiff, ...]:
    with scratch(init=False) as git:
        return parse_diff(git, data)


def test_lines_that_look_like_headers() -> None:
    """A removed `-- a/x` reads `--- a/x`."""
    hunk = (
        b"@@ -1,3 +1,3 @@\n--- a/x\n-@@ -1 +1 @@\n+++ b/x\n+diff --git a/y b/y\n \r\r\n"
    )
    other = HEADER.replace(b"/x", b"/y") + b"@@ -1 +1 @@\n-a\n+b\n"
    first, second = _parse(HEADER + hunk + other)
    assert first.removed == (b"-- a/x\n", b"@@ -1 +1 @@\n")
    assert first.added == (b"++ b/x\n", b"diff --git a/y b/y\n")
    assert (first.path, first.text, first.stray) == ("x", HEADER + hunk, False)
    assert (second.path, second.text, second.stray) == ("y", other, False)


NO_NEWLINE = b"\\ No newline at end of file\n"


@pytest.mark.parametrize(
    "stray", [b"-- \n2.39\n", b"-- \n", b"2.39\n", b"\n", b"+more\n"]
)
def test_what_follows_a_change(stray: bytes) -> None:
    """Text behind a change is stray: the hunks' counts tell where the change ends."""
    hunk = b"@@ -1 +1 @@\n-a\n" + NO_NEWLINE + b"+b\n" + NO_NEWLINE
    other = HEADER.replace(b"/x", b"/y") + b"@@ -1 +1 @@\n-a\n+b\n"
    assert [file.stray for file in _parse(HEADER + hunk + other)] == [False, False]
    assert [file.stray for file in _parse(HEADER + hunk + stray)] == [True]
    strays = [file.stray for file in _parse(HEADER + hunk + stray + other)]
    assert strays == [True, False]


@pytest.mark.parametrize(
    "lines",
    [
        "new file mode 100644\n",
        "deleted file mode 100644\n",
        "similarity index 100%\nrename from x\nrename to x\n",
        "old mode 100644\nnew mode 100755\n",
        f"index {'1' * 40}..{'2' * 40} 100644\nGIT binary patch\n"
        + 2 * "literal 0\nHcmV?d00001\n\n",
    ],
)
def test_kinds(lines: str) -> None:
    """A change that is no plain edit is named by its first line, and has no ids."""
    (file,) = _parse(b"diff --git a/x b/x\n" + lines.encode())
    assert file.kind == lines.splitlines()[0]
    assert not file.new_id


def test_patch_without_hunks(series: Series) -> None:
    patch = series.patches[2]
    assert patch.name == "docs.patch"
    assert patch.files == ()
    assert patch.changed_lines == 0
    assert patch.trailer("Overlay") == ["docs/turbo.md"]
    assert patch.data.decode().endswith("Zoë Example <zoe@example.com>\n")


@pytest.mark.parametrize("cut", ["diff", "hunk", "subject"])
def test_broken_patches(series: Series, cut: str) -> None:
    data = series.patches[0].data
    broken = {
        "diff": data[: data.index(b"diff --git")],
        "hunk": data[: data.rindex(b"\n ")],
        "subject": data.replace(b"From: ", b"X-From: "),
    }[cut]
    with pytest.raises(SeriesError, match="^p.patch: "):
        parse_patch("p.patch", broken)


@pytest.mark.parametrize("path", ["", "/etc/x", "../x", "a/../../x", ".git/config"])
def test_paths_that_lead_out(path: str) -> None:
    with pytest.raises(SeriesError, match="unsafe path"):
        safe_path(path)


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("a/*.py", "a/b.py", True),
        ("a/*.py", "a/b/c.py", False),
        ("a/**", "a/b/c.py", True),
        ("a/**", "ab/c.py", False),
        ("a/**/c.py", "a/c.py", True),
        ("a/**/c.py", "a/b/b/c.py", True),
        ("**/c.py", "c.py", True),
        ("a/?.py", "a/b.py", True),
        ("a/?.py", "a//py", False),
        ("a/b.py", "a/bxpy", False),
    ],
)
def test_globs(glob: str, path: str, matches: bool) -> None:
    assert bool(glob_regex(glob).fullmatch(path)) is matches
