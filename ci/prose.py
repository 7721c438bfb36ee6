# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reads the docstrings and comments of the code: `prose.py [--check] [--list]`.

It counts docstrings and comments that begin with a word of `OPENINGS`, and sentences
of comments that are too long, in Python, CUDA and shell. `--list` prints each with its
place. `--check` exits with status 1 if a count is over its bound, and prints the files
that have most. A bound falls with its count. docs/writing.md has the rules.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from documents import Block
from words import ROOT, split_sentences

OPENINGS = ("Of", "What", "Those")
# The counts when they last fell.
BOUNDS = {"openings": 0, "long sentences": 0}
SUFFIXES = (".py", ".cu", ".cuh", ".h", ".cc", ".sh")
LICENCE = re.compile(r"SPDX-|shellcheck |!/")
# The marks of comments, in languages other than Python and C++.
MARKS = {".sh": "#"}


class Text(NamedTuple):
    """A docstring, or a comment of one or more lines.

    Attributes:
        line: Its first line's number.
        text: Its words, without its marks.
        is_comment: Whether it is a comment.

    """

    line: int
    text: str
    is_comment: bool


class Fault(NamedTuple):
    """A sentence to rewrite; its kind is a key of ``BOUNDS``."""

    path: str
    line: int
    kind: str
    text: str


def join_lines(lines: Iterator[tuple[int, str]]) -> Iterator[Text]:
    """Yields comments; neighbouring lines are one comment."""
    first, last, words = 0, -1, []
    for line, text in lines:
        if words and (line != last + 1 or not text):
            yield Text(first, "\n".join(words), True)
            words = []
        if text:
            first = first if words else line
            words.append(text)
        last = line
    if words:
        yield Text(first, "\n".join(words), True)


def python_comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_whole = token.line.lstrip().startswith("#")
        if token.type == tokenize.COMMENT and is_whole:
            yield token.start[0], token.string.lstrip("#").strip()


def other_comments(text: str, mark: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(mark):
            yield number, line.strip().removeprefix(mark).strip()


def docstrings(text: str) -> Iterator[Text]:
    """Yields each docstring, and each item of its lists of arguments and attributes."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, kinds):
            continue
        words = ast.get_docstring(node)
        if words is None:
            continue
        line = node.body[0].lineno
        for part in re.split(r"\n\s*\n|\n(?= +\w+: )", words):
            # The words behind the name of an argument begin a sentence.
            yield Text(line, re.sub(r"^ *\w+: ", "", part), False)


def read(path: Path) -> Iterator[Text]:
    """Yields the docstrings and comments of a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from docstrings(text)
        lines = python_comments(text)
    else:
        lines = other_comments(text, MARKS.get(path.suffix, "//"))
    yield from join_lines((n, x) for n, x in lines if not LICENCE.match(x))


def find_faults(path: Path, name: str) -> Iterator[Fault]:
    """Yields the sentences of a file that have to be rewritten."""
    opening = re.compile(rf"(?:{'|'.join(OPENINGS)})\b")
    for line, text, is_comment in read(path):
        if opening.match(text):
            yield Fault(name, line, "openings", text)
        if is_comment:
            for sentence in split_sentences(Block("paragraph", line, text)):
                if sentence.is_long:
                    yield Fault(name, sentence.line, "long sentences", sentence.text)


def find_files() -> Iterator[tuple[Path, str]]:
    command = ["git", "ls-files", *(f"*{suffix}" for suffix in SUFFIXES)]
    found = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    for name in found.stdout.split():
        if (ROOT / name).is_file():
            yield ROOT / name, name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="hold counts to bounds")
    parser.add_argument("--list", action="store_true", help="print each sentence")
    args = parser.parse_args()
    faults = [fault for each in find_files() for fault in find_faults(*each)]
    if args.list:
        for path, line, kind, text in faults:
            words = " ".join(text.split())
            print(f"{path}:{line}: {kind}: {words[:120]}")
    is_over = False
    for kind, bound in BOUNDS.items():
        places = Counter(fault.path for fault in faults if fault.kind == kind)
        count = places.total()
        if not args.check:
            print(f"{kind}: {count}, at most {bound} are allowed")
        elif count > bound:
            is_over = True
            print(f"{kind}: {count}, at most {bound} are allowed; most are in")
            print(*(f"  {path}: {n}" for path, n in places.most_common(5)), sep="\n")
    return int(args.check and is_over)


if __name__ == "__main__":
    sys.exit(main())
