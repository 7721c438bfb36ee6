# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The lab's texts, from small files in the packages' forms."""

import gzip
from pathlib import Path

import pytest
import texts

POD = """=head1 NAME

perlfaq4 - Data

=head2 How do I C<sort> a list?

Use L<< sort|perlfunc >>. It is
B<fast>.

    print sort @x;

=head2 Why?

Because.
"""
PAGE = """<html><head><title>no</title></head><body><h1>short</h1>
<p>{}</p><p>brief</p><script>no()</script></body></html>"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a file of each package."""
    pod = tmp_path / "pod"
    pod.mkdir()
    (pod / "perlfaq4.pod").write_text(POD, encoding="utf-8")
    prose = tmp_path / "anarchism" / "html"
    prose.mkdir(parents=True)
    (prose / "a.html").write_text(PAGE.format("long words " * 30), encoding="utf-8")
    man = tmp_path / "man" / "fr" / "man1"
    man.mkdir(parents=True)
    (man / "x.1.gz").write_bytes(gzip.compress(b'.TH X\n\\fBmot\\fR \\-x\n."no\nfin\n'))
    return tmp_path


def test_prose_without_marks(packages: Path):
    """No listing, heading, mark of a format or script is left."""
    assert list(texts.manuals(packages)) == [
        "perlfaq4 - Data", "Use sort|perlfunc. It is fast.", "Because.",
    ]  # fmt: skip
    assert list(texts.essays(packages)) == [("long words " * 30).strip()]
    assert list(texts.french(packages)) == ["mot -x fin"]


def test_turns_of_a_chat(packages: Path):
    assert list(texts.chat(packages)) == [
        "<|im_start|>user\nHow do I sort a list?<|im_end|>",
        "<|im_start|>assistant\nUse sort|perlfunc. It is fast.<|im_end|>",
        "<|im_start|>user\nWhy?<|im_end|>",
        "<|im_start|>assistant\nBecause.<|im_end|>",
    ]


def test_files(packages: Path, tmp_path: Path):
    folder = tmp_path / "new" / "texts"
    texts.write(folder, packages)
    found = {file.stem: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    names = {"manuals", "essays", "french", "code", "chat", "repeated"}
    assert found.keys() == names and all(found.values())
    assert found["repeated"].count("perlfaq4 - Data") > 50
    assert "class ArgumentParser" in found["code"]
    with pytest.raises(SystemExit, match="manuals: the packages have no such text"):
        texts.write(folder, packages / "man")
