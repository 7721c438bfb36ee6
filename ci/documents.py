# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The project's documents, and the Markdown that their checks read.

It knows the Markdown that the documents use: headings with ``#``, paragraphs, lists,
quotes, admonitions, tables, fenced and indented code, links and code spans.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "benchmarks/results/README.md",
    "cpu_standins/README.md",
    "models/*/README.md",
    "vllm_overlay/docs/features/quantization/*.md",
)
# Scripts write these documents, so a cell may be as long as a list of models.
GENERATED = (
    "docs/recipes.md",
    "vllm_overlay/docs/features/quantization/turbo_refused.md",
)

COMMENT = re.compile(r"<!--.*?-->", re.S)
FENCE = re.compile(r"(`{3,}|~{3,})")
HEADING = re.compile(r"#{1,6}\s+(.*?)\s*#*$")
ITEM = re.compile(r"(?:[-*+]|\d+[.)])\s+")
ADMONITION = re.compile(r"(?:!!!|\?\?\?\+?)\s.*")
SEPARATOR = re.compile(r"\|?[\s:|-]*-[\s:|-]*$")
DEFINITION = re.compile(r"\[[^\]]+\]:\s*(\S+)")
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
TARGET = r"\(\s*<?([^()\s<>]*(?:\([^()\s]*\)[^()\s]*)*)>?(?:\s+\"[^\"]*\")?\s*\)"
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]" + TARGET)
LINK_TARGET = re.compile(r"\]" + TARGET)
REFERENCE = re.compile(r"!?\[([^\[\]]*)\]\[[^\[\]]*\]")
TAG = re.compile(r"</?[A-Za-z][^<>]*>|<https?://[^<>\s]*>")
ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")

Kind = Literal["heading", "paragraph", "item", "row", "code"]


@dataclass(frozen=True)
class Block:
    """A heading, paragraph, list item, row of a table, or line of code.

    Attributes:
        kind: The kind of block.
        line: The number of its first line.
        text: Its Markdown, without the marks at the start of its lines.

    """

    kind: Kind
    line: int
    text: str

    @property
    def cells(self) -> list[str]:
        """A row's cells; a bar in one is written with a backslash."""
        inner = re.sub(r"^\||(?<!\\)\|$", "", self.text.strip())
        return [cell.strip() for cell in re.split(r"(?<!\\)\|", inner)]

    @property
    def spans(self) -> Iterator[tuple[int, str]]:
        """The line and the content of each code span."""
        for match in SPAN.finditer(self.text):
            line = self.line + self.text.count("\n", 0, match.start())
            content = re.sub(r"\s*\n\s*", " ", match[2])
            yield line, content.replace(r"\|", "|") if self.kind == "row" else content


def find_documents(root: Path = ROOT) -> list[Path]:
    """Returns all documents of the project at `root`."""
    return [path for pattern in PATTERNS for path in sorted(root.glob(pattern))]


def parse(text: str) -> list[Block]:
    """Returns the blocks of a document, in order, without separators of tables."""
    text = COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
    blocks: list[Block] = []
    kind, start, held = "paragraph", 0, list[str]()
    fence, content, after_blank = "", 0, True

    def close() -> None:
        if held:
            blocks.append(Block(kind, start, "\n".join(held)))
            held.clear()

    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        while not fence and words.startswith(">"):
            words = words[1:].strip()
            line = words
        indent = len(line) - len(line.lstrip())
        opening = FENCE.match(words)
        if fence:
            if words.startswith(fence) and not words.strip(fence[0]):
                fence = ""
            else:
                blocks.append(Block("code", number, line))
            continue
        if not words:
            close()
            after_blank = True
            continue
        if after_blank and indent < content and not ITEM.match(words):
            content = 0
        if opening:
            close()
            fence = opening[1]
        elif not held and indent >= content + 4:
            blocks.append(Block("code", number, line))
        elif heading := HEADING.match(words):
            close()
            blocks.append(Block("heading", number, heading[1]))
        elif words.startswith("|"):
            close()
            if not SEPARATOR.match(words):
                blocks.append(Block("row", number, words))
        elif ADMONITION.match(words):
            close()
            content = indent + 4
        elif DEFINITION.match(words) and not held:
            # `links` reads these from the text.
            blocks.append(Block("code", number, ""))
        elif item := ITEM.match(words):
            close()
            kind, start, content = "item", number, indent + item.end()
            held.append(words[item.end() :])
        elif held:
            held.append(words)
        else:
            kind, start = ("item" if content else "paragraph"), number
            held.append(words)
        after_blank = False
    close()
    return blocks


def plain(text: str, span: Callable[[str], str] = str) -> str:
    """Returns the words that a reader sees, without marks and targets of links.

    Args:
        text: Markdown of a block or a cell.
        span: Replaces a code span, given its content.

    """
    contents: list[str] = []

    def hide(match: re.Match[str]) -> str:
        contents.append(match[2])
        return f"\0{len(contents) - 1}\0"

    text = SPAN.sub(hide, text)
    before = None
    while before != text:
        before = text
        text = REFERENCE.sub(r"\1", LINK.sub(r"\1", text))
    text = re.sub(r"\*\*|__|(?<!\w)[*_](?=\S)|(?<=\S)[*_](?!\w)", "", TAG.sub("", text))
    text = re.sub(r"\\([^\w\s])", r"\1", text)
    return re.sub(r"\0(\d+)\0", lambda match: span(contents[int(match[1])]), text)


def links(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the target of each link of a document, also of pictures."""
    for block in parse(text):
        if block.kind != "code":
            bare = SPAN.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), block.text)
            for match in LINK_TARGET.finditer(bare):
                yield block.line + bare.count("\n", 0, match.start()), match[1]
    for number, line in enumerate(text.splitlines(), 1):
        if match := DEFINITION.match(line):
            yield number, match[1]


def anchors(text: str) -> set[str]:
    """Returns the anchors of a document that GitHub makes from its headings."""
    found: set[str] = set(ANCHOR.findall(text))
    for block in parse(text):
        if block.kind == "heading":
            words = re.sub(r"[^\w\- ]", "", plain(block.text).lower())
            base = slug = words.replace(" ", "-")
            count = 0
            while slug in found:
                count += 1
                slug = f"{base}-{count}"
            found.add(slug)
    return found


def code(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each command in a document.

    A command is a line of a code block, joined where it ends in a backslash, or a code
    span.
    """
    held, start, end = "", 0, 0
    for block in parse(text):
        if block.kind != "code":
            yield from block.spans
            continue
        if not held or block.line != end + 1:
            held, start = "", block.line
        end = block.line
        held += block.text.strip()
        if held.endswith("\\"):
            held = held[:-1]
        else:
            yield start, held
            held = ""
