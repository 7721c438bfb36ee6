# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Counts the words of documents, and holds them to bounds: `words.py [FILE]...`.

Without a file it counts all documents of the project. With `--check` it prints the
broken bounds with their places, and exits with status 1 if there is one. With `--list`
it also prints each sentence that is too long or begins with "Of".

A number counts where it stands by itself, with or without a unit. One within a name
(H200, Qwen2.5), a release (0.33.0), a link's target or code does not count. A code span
that begins with a digit counts as text.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import documents

ROOT = documents.ROOT
SENTENCE_WORDS = 30


class Bounds(NamedTuple):
    """The most that a document may have; None where there is no bound."""

    lines: int | None = None
    bytes: int | None = None
    numbers: int | None = None
    cell: int | None = 160
    long_sentences: int | None = None


BOUNDS = {
    "README.md": Bounds(lines=120, bytes=8192, numbers=80, long_sentences=0),
    "vllm_overlay/docs/features/quantization/turbo.md": Bounds(lines=250),
    **{name: Bounds(cell=None) for name in documents.GENERATED},
}
# The bounds of any other document.
DEFAULT = Bounds()
WORDS = {
    "lines": "lines",
    "bytes": "bytes",
    "numbers": "numbers",
    "cell": "characters in a cell",
    "long_sentences": f"sentences over {SENTENCE_WORDS} words",
}

UNITS = "%|x|ms|us|µs|ns|s|h|k|K|M|[KMGT]i?B|kB|GHz|W|bits?|th|st|[nr]d"
# A digit behind a letter and a hyphen belongs to a name, as in Gemma-3.
NUMBER = re.compile(
    rf"(?<![\w.])(?<![A-Za-z]-)\d+(?:,\d{{3}})*(?:\.\d+)?(?:{UNITS})?(?!\w|\.\d)"
)
ABBREVIATION = re.compile(r"(?:^|[\s(])(?:e\.g|i\.e|etc|vs|cf)\.$")


@dataclass(frozen=True)
class Sentence:
    """A sentence of a paragraph or a list's item, by its first line's number."""

    line: int
    text: str

    @property
    def num_words(self) -> int:
        return sum(bool(re.search(r"\w", word)) for word in self.text.split())

    @property
    def is_long(self) -> bool:
        return self.num_words > SENTENCE_WORDS

    @property
    def begins_with_of(self) -> bool:
        return bool(re.match(r"\W*Of\b", self.text))


@dataclass(frozen=True)
class Counts:
    """The counts of a document.

    Attributes:
        lines: Lines.
        bytes: Bytes, in UTF-8.
        numbers: Numbers.
        cells: The line of each cell of a table, and its characters, as read.
        sentences: Sentences of paragraphs and lists.

    """

    lines: int
    bytes: int
    numbers: int
    cells: tuple[tuple[int, int], ...]
    sentences: tuple[Sentence, ...]

    @property
    def cell(self) -> int:
        """Characters of the longest cell."""
        return max((size for _, size in self.cells), default=0)

    @property
    def long(self) -> list[Sentence]:
        return [sentence for sentence in self.sentences if sentence.is_long]

    @property
    def of(self) -> list[Sentence]:
        return [sentence for sentence in self.sentences if sentence.begins_with_of]

    @property
    def long_sentences(self) -> int:
        return len(self.long)


def count_numbers(text: str) -> int:
    """Counts a block's numbers; 16x32768 has two."""
    text = documents.plain(text, lambda span: span if span[0].isdigit() else "code")
    return len(NUMBER.findall(re.sub(r"(?<=\d)[x×^](?=[-\d])", " x ", text)))


def split_sentences(block: documents.Block) -> Iterator[Sentence]:
    """Yields the sentences of a block; a code span is one word."""
    text = documents.plain(block.text, lambda span: "code" + "\n" * span.count("\n"))
    begin = 0
    for match in re.finditer(r"[.!?][\"')\]]*(?=\s|$)|\Z", text):
        words = text[begin : match.end()]
        if not ABBREVIATION.search(words):
            if words.strip():
                first = begin + len(words) - len(words.lstrip())
                line = block.line + text.count("\n", 0, first)
                yield Sentence(line, " ".join(words.split()))
            begin = match.end()


def count(text: str) -> Counts:
    """Counts a document."""
    blocks = documents.parse(text)
    cells = (
        (block.line, len(documents.plain(cell)))
        for block in blocks
        if block.kind == "row"
        for cell in block.cells
    )
    prose = [block for block in blocks if block.kind in ("paragraph", "item")]
    return Counts(
        lines=len(text.splitlines()),
        bytes=len(text.encode()),
        numbers=sum(count_numbers(x.text) for x in blocks if x.kind != "code"),
        cells=tuple(cells),
        sentences=tuple(x for block in prose for x in split_sentences(block)),
    )


def faults(name: str, counts: Counts) -> Iterator[str]:
    """Yields the bounds that a document breaks, with places of cells and sentences."""
    for bound, most in BOUNDS.get(name, DEFAULT)._asdict().items():
        found = getattr(counts, bound)
        if most is None or found <= most:
            continue
        if bound == "cell":
            sizes = [each for each in counts.cells if each[1] > most]
            places = [(f"{name}:{line}", size) for line, size in sizes]
        else:
            places = [(name, found)]
        for place, size in places:
            yield f"{place}: {size:,} {WORDS[bound]}, at most {most:,} are allowed"
        if bound == "long_sentences":
            yield from (describe(name, sentence) for sentence in counts.long)


def describe(name: str, sentence: Sentence) -> str:
    """Returns a sentence with its place."""
    return f"{name}:{sentence.line}: {sentence.num_words} words: {sentence.text}"


def table(counted: dict[str, Counts]) -> Iterator[str]:
    """Yields the lines of a table of documents."""
    header = ("lines", "bytes", "numbers", "cell", "sentences", "long", "of")
    width = max(len(name) for name in counted)
    yield "".join([" " * width, *(f"{title:>14}" for title in header)])
    for name, counts in counted.items():
        total = len(counts.sentences)
        shares = [
            f"{len(found)} ({len(found) / max(total, 1):.1%})"
            for found in (counts.long, counts.of)
        ]
        figures = (counts.lines, counts.bytes, counts.numbers, counts.cell, total)
        columns = [f"{figure:,}" for figure in figures] + shares
        yield "".join([f"{name:{width}}", *(f"{column:>14}" for column in columns)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="print broken bounds")
    parser.add_argument(
        "--list", action="store_true", help="print the sentences to rewrite"
    )
    args = parser.parse_args()
    counted = {}
    for path in args.files or documents.find_documents():
        absolute = path.resolve()
        inside = absolute.is_relative_to(ROOT)
        name = absolute.relative_to(ROOT).as_posix() if inside else str(path)
        counted[name] = count(path.read_text(encoding="utf-8"))
    broken = []
    if args.check:
        broken = [line for name in counted for line in faults(name, counted[name])]
        print("\n".join(broken), end="\n" if broken else "")
        return 1 if broken else 0
    print("\n".join(table(counted)))
    if args.list:
        for name, counts in counted.items():
            for sentence in counts.sentences:
                if sentence.is_long or sentence.begins_with_of:
                    print(describe(name, sentence))
    return 0


if __name__ == "__main__":
    sys.exit(main())
