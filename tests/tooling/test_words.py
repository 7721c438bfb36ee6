# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The counts of words, and the bounds of documents."""

import sys
from pathlib import Path

import documents
import pytest
import trees
import words
from trees import ROOT

DOCUMENT = """\
# A heading with 1 number

<!-- 2 numbers, 3 of a comment -->
One fact. Of two facts this is the second, at vLLM 0.33.0. A third
follows it (see [`format.py`](a/3/b.py "4")): 5.5 ms.

- An item ends
  here. Of an item.

      6 in indented code

```text
7 in fenced code
```

| name | value |
|---|---|
| [a link](target/of/thirty/characters) | 12 ms |
| `a \\| b` | |

!!! note

    A note is prose, not code.
"""


def _blocks(text: str, kind: str) -> list[documents.Block]:
    return [block for block in documents.parse(text) if block.kind == kind]


def _numbers(text: str) -> int:
    return sum(words.count_numbers(block.text) for block in documents.parse(text))


def test_blocks():
    kinds = [(block.kind, block.line) for block in documents.parse(DOCUMENT)]
    assert kinds == [
        ("heading", 1),
        ("paragraph", 4),
        ("item", 7),
        ("code", 10),
        ("code", 13),
        ("row", 16),
        ("row", 18),
        ("row", 19),
        ("item", 23),
    ]
    assert _blocks(DOCUMENT, "row")[-1].cells == ["`a \\| b`", ""]
    assert documents.plain(_blocks(DOCUMENT, "row")[-1].cells[0]) == "a \\| b"


def test_code_of_a_list_is_indented_further():
    text = "1. An item\n\n   goes on\n\n       command\n\nends.\n\n    command"
    kinds = [block.kind for block in documents.parse(text)]
    assert kinds == ["item", "item", "code", "paragraph", "code"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 x 32768", 2),
        ("16x32768", 2),
        ("1,292 and 3.76x", 2),
        ("26.6 % or 26.6%, and 10 ms or 10ms", 4),
        ("in 8-bit, 4.8 TB/s (2^-22)", 4),
        ("0.5 ± 0.1, 8.9/9.1", 4),
        ("turbo4 k4v3 H200 Qwen2.5 Qwen2.5-7B fp8 bf16 Gemma-3-27B", 0),
        ("vLLM 0.33.0, commit 591568a, 3rd", 1),
        ("[99](a/1/2.md#3) ![4](5.svg)", 2),
        ("`turbo_window=8` `0` `16x32768` `4bit_nc`", 3),
    ],
)
def test_numbers(text: str, number: int):
    assert _numbers(text) == number


def test_numbers_of_a_document():
    assert words.count(DOCUMENT).numbers == 3


def test_sentences():
    found = words.count(DOCUMENT).sentences
    assert [(each.line, each.text, each.num_words) for each in found] == [
        (4, "One fact.", 2),
        (4, "Of two facts this is the second, at vLLM 0.33.0.", 10),
        (4, "A third follows it (see code): 5.5 ms.", 8),
        (7, "An item ends here.", 4),
        (8, "Of an item.", 3),
        (23, "A note is prose, not code.", 6),
    ]
    assert [each.line for each in words.count(DOCUMENT).of] == [4, 8]


def test_names_begin_sentences():
    block = documents.Block(
        "paragraph", 1, 'It is "so." vLLM (e.g. this) is `a.b c`. x'
    )
    found = [each.text for each in words.split_sentences(block)]
    assert found == ['It is "so."', "vLLM (e.g. this) is code.", "x"]


def test_long_sentences():
    text = " ".join(["word"] * 30)
    assert not words.count(f"{text}.").long
    assert [each.num_words for each in words.count(f"{text} more.").long] == [31]


def test_cells_are_measured_as_read():
    counts = words.count(DOCUMENT)
    assert counts.cell == len("a link")
    assert words.count(f"| {'x' * 161} |\n|---|\n").cells == ((1, 161),)


GOOD = "One fact.\n"
LONG = " ".join(["word"] * 31) + ".\n"


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("README.md", GOOD * 120, None),
        ("README.md", GOOD * 121, "README.md: 121 lines, at most 120 are allowed"),
        ("README.md", "x" * 8191 + "\n", None),
        ("README.md", "x" * 8192 + "\n", "8,193 bytes, at most 8,192"),
        ("README.md", "1 " * 80, "1 sentences over 30 words"),
        ("README.md", "a 1. 1. " * 40, None),
        ("README.md", "a 1. 1. " * 40 + "1.", "81 numbers, at most 80"),
        ("README.md", LONG, "README.md:1: 31 words: word"),
        ("docs/a.md", LONG * 500, None),
        ("docs/a.md", f"\n| {'x' * 161} |\n", "docs/a.md:2: 161 characters in a cell"),
        ("docs/recipes.md", f"| {'x' * 161} |\n", None),
        (
            "vllm_overlay/docs/features/quantization/turbo.md",
            GOOD * 251,
            "251 lines, at most 250",
        ),
    ],
)
def test_bounds(name: str, text: str, fault: str | None):
    faults = [*words.faults(name, words.count(text))]
    if fault is None:
        assert not faults
    else:
        assert any(fault in line for line in faults), faults


def _run(*args: object) -> trees.Done:
    return trees.run(sys.executable, ROOT / "ci" / "words.py", *args)


def test_command(tmp_path: Path):
    document = tmp_path / "a.md"
    document.write_text(f"{GOOD}\n| {'x' * 161} |\n\nOf this.\n")
    counted = _run(document)
    assert counted.returncode == 0
    assert str(document) in counted.stdout and "161" in counted.stdout
    assert f"{document}:5: 2 words: Of this." in _run("--list", document).stdout
    checked = _run("--check", document)
    assert checked.returncode == 1
    assert checked.stdout.startswith(f"{document}:3: 161 characters in a cell")
    document.write_text(GOOD)
    assert _run("--check", document).returncode == 0


def test_bounds_are_of_documents():
    names = {path.relative_to(ROOT).as_posix() for path in documents.find_documents()}
    assert set(words.BOUNDS) <= names
