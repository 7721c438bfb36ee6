# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading patches, globs and paths."""

import pytest
import trees
from turbo_series.errors import SeriesError
from turbo_series.model import Series, glob_regex
from turbo_series.patchfile import parse_diff, parse_patch, safe_path

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


def test_lines_that_look_like_headers() -> None:
    """A removed `-- a/x` reads `--- a/x`; the counts tell."""
    hunk = (
        b"@@ -1,3 +1,3 @@\n--- a/x\n-@@ -1 +1 @@\n+++ b/x\n+diff --git a/y b/y\n \r\r\n"
    )
    files, tail = parse_diff(HEADER + hunk + HEADER + b"@@ -1 +1 @@\n-a\n+b\n")
    assert len(files) == 2
    assert files[0].removed == (b"-- a/x\n", b"@@ -1 +1 @@\n")
    assert files[0].added == (b"++ b/x\n", b"diff --git a/y b/y\n")
    assert tail == b""


def test_no_newline_at_the_end() -> None:
    hunk = b"@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n"
    hunk += b"\\ No newline at end of file\n"
    files, tail = parse_diff(HEADER + hunk + b"-- \n2.39\n")
    assert files[0].text == HEADER + hunk
    assert tail == b"-- \n2.39\n"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ("new file mode 100644\n", "added"),
        ("deleted file mode 100644\n", "deleted"),
        ("similarity index 100%\nrename from x\nrename to y\n", "renamed"),
        ("old mode 100644\nnew mode 100755\n", "mode changed"),
        ("index 1..2 100644\nGIT binary patch\nliteral 1\nxyz\n", "binary"),
    ],
)
def test_kinds(lines: str, kind: str) -> None:
    files, _ = parse_diff(b"diff --git a/x b/x\n" + lines.encode())
    assert [file.kind for file in files] == [kind]


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
