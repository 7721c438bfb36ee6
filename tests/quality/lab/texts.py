#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes texts of several kinds, for what a real language model loses.

    texts.py FOLDER

They come from Debian's packages and from Python's standard library, and are not kept
here: `apt-get download` fetches the packages, and nothing is installed.

| file | content | licence |
|---|---|---|
| manuals.txt | paragraphs of Perl's documentation (perl-doc) | GPL or Artistic |
| essays.txt | prose of An Anarchist FAQ (anarchism) | GPL or GFDL |
| french.txt | manual pages in French (manpages-fr) | GPL-3 and others |
| code.txt | modules of Python's standard library | PSF |
| chat.txt | questions and answers of Perl's FAQ as turns of a chat | GPL or Artistic |
| repeated.txt | one passage of the manuals, again and again | GPL or Artistic |
"""

import argparse
import gzip
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

PACKAGES = ("perl-doc", "anarchism", "manpages-fr")
# Characters of a text; a token has three to five.
LENGTH = 600_000
PASSAGE = 1200
MODULES = ("argparse", "ast", "asyncio/base_events", "datetime", "decimal", "difflib")
FORMATTING = re.compile(r"[A-Z]<+ ?|(?<=\S) ?>+")
SKIPPED_TAGS = frozenset({"head", "script", "style"})


def unpack(folder: Path) -> None:
    """Fetches and unpacks the packages.

    Raises:
        subprocess.CalledProcessError: If a package cannot be had.

    """
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)


def paragraphs(pod: str) -> Iterator[str]:
    """Paragraphs of prose; listings are left out, and a heading has an ``=``."""
    for block in re.split(r"\n\s*\n", pod):
        text = re.sub(r"\s+", " ", FORMATTING.sub("", block)).strip()
        if text and not block[0].isspace():
            yield text


def manuals(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("perl*.pod")):
        pod = file.read_text(encoding="utf-8", errors="replace")
        yield from (x for x in paragraphs(pod) if x[0] != "=")


def chat(folder: Path) -> Iterator[str]:
    """Turns of a chat, with the marks that SmolLM2's template has."""
    for file in sorted(folder.rglob("perlfaq[1-9].pod")):
        _, *entries = file.read_text(encoding="utf-8").split("\n=head2 ")
        for entry in entries:
            question, *answer = paragraphs(entry)
            said = " ".join(x for x in answer if x[0] != "=")
            yield f"<|im_start|>user\n{question}<|im_end|>"
            yield f"<|im_start|>assistant\n{said}<|im_end|>"


class Prose(HTMLParser):
    """Gathers the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.skipped += tag in SKIPPED_TAGS
        if tag == "p":
            self.words.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        self.skipped -= tag in SKIPPED_TAGS

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.words.append(re.sub(r"\s+", " ", data))


def essays(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("anarchism/**/*.html")):
        page = Prose()
        page.feed(file.read_text(encoding="utf-8", errors="replace"))
        yield from (
            x.strip() for x in "".join(page.words).split("\n\n") if len(x) > 200
        )


def french(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("man/fr/**/*.gz")):
        page = gzip.decompress(file.read_bytes()).decode("utf-8")
        lines = [x for x in page.splitlines() if x[:1] not in (".", "'")]
        yield re.sub(r"\\f[A-Z]|\\&|\\%", "", " ".join(lines)).replace("\\-", "-")


def code() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    return ((library / f"{x}.py").read_text(encoding="utf-8") for x in MODULES)


def write(folder: Path, sources: Path) -> None:
    repeated = "\n\n".join(manuals(sources))[:PASSAGE] + "\n\n"
    texts = {
        "manuals": manuals(sources),
        "essays": essays(sources),
        "french": french(sources),
        "code": code(),
        "chat": chat(sources),
        "repeated": [repeated] * (LENGTH // 6 // PASSAGE),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in texts.items():
        text = "\n\n".join(parts)[:LENGTH]
        if not text:
            raise SystemExit(f"{name}: the packages have no such text")
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}.txt: {len(text)} characters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        # apt's own user fetches into the folder.
        Path(name).chmod(0o755)
        unpack(Path(name))
        write(args.folder, Path(name))


if __name__ == "__main__":
    sys.exit(main())
