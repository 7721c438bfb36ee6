# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds the training text and the held-out text from documentation of packages.

Sources are the running Python's standard library and the source archives named in
SOURCES, all under permissive licences. A document is held out by the hash of its name;
one that shares more than a few long lines with training text is left out of both.
"""

import argparse
import ast
import hashlib
import json
import lzma
import platform
import subprocess
import sys
import sysconfig
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tasks import HELD_OUT_TEXT, SEPARATOR


@dataclass(frozen=True)
class Source:
    """A package's source archive."""

    name: str
    version: str
    licence: str

    def archive(self, folder: Path) -> Path:
        """Returns the archive in `folder`, fetched with pip if it is not there."""
        stem = f"{self.name.lower()}-{self.version}"
        if not (found := sorted(folder.glob(f"{stem}.tar.gz"))):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--no-binary", ":all:", "--dest", str(folder)]
            subprocess.run([*command, f"{self.name}=={self.version}"], check=True)
            found = sorted(folder.glob(f"{stem}.tar.gz"))
        return found[0]


SOURCES = (
    Source("Django", "5.2.19", "BSD-3-Clause"),
    Source("Flask", "3.1.3", "BSD-3-Clause"),
    Source("Jinja2", "3.1.6", "BSD-3-Clause"),
    Source("networkx", "3.6.1", "BSD-3-Clause"),
    Source("pytest", "9.2.0", "MIT"),
    Source("Sphinx", "9.0.4", "BSD-2-Clause"),
    Source("sympy", "1.14.0", "BSD-3-Clause"),
    Source("vllm", "0.33.0", "Apache-2.0"),
    Source("Werkzeug", "3.1.9", "BSD-3-Clause"),
)
PROSE = {".rst", ".md", ".txt"}
LEFT_OUT = {"test", "tests", "testing", "locale", "idlelib", "lib2to3", "site-packages"}
LEFT_OUT |= {"_vendor", "requirements", "ensurepip", "turtledemo", "third_party"}
MANIFEST = HELD_OUT_TEXT.with_name("heldout.json")
HELD_OUT_SHARE = 24
# One Python file in so many is taken whole, and of the others the docstrings.
CODE_SHARE = 12
SHORTEST, LONGEST = 800, 200_000
LONG_LINE = 50


@dataclass(frozen=True)
class Document:
    """The text of a file, or of its docstrings."""

    source: str
    name: str
    text: str

    def chance(self, purpose: str) -> int:
        digest = hashlib.sha256(f"{purpose} {self.source} {self.name}".encode())
        return int.from_bytes(digest.digest()[:4], "big")

    @property
    def is_held_out(self) -> bool:
        return self.chance("held out") % HELD_OUT_SHARE == 0

    def long_lines(self) -> set[str]:
        lines = (line.strip() for line in self.text.splitlines())
        return {line for line in lines if len(line) >= LONG_LINE}


def archive_files(path: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and member.size <= LONGEST:
                content = archive.extractfile(member)
                assert content is not None
                yield member.name.partition("/")[2], content.read()


def standard_library() -> Iterator[tuple[str, bytes]]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder).as_posix(), path.read_bytes()


def documents(source: str, files: Iterator[tuple[str, bytes]]) -> Iterator[Document]:
    for name, content in files:
        path = PurePosixPath(name)
        if LEFT_OUT & set(path.parts) or path.name.upper().startswith("LICEN"):
            continue
        try:
            text = content.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        document = Document(source, name, text)
        if path.suffix == ".py":
            if document.chance("code") % CODE_SHARE and "topics" not in name:
                document = Document(source, name, docstrings(text))
        elif path.suffix not in PROSE:
            continue
        document = Document(source, name, tidy(document.text))
        if is_readable(document.text):
            yield document


def docstrings(code: str) -> str:
    """Returns a module's docstrings, each under the name it belongs to."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return ""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    parts = []
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            name = getattr(node, "name", "")
            parts.append(f"{name}\n\n{text}" if name else text)
    return "\n\n\n".join(parts)


def tidy(text: str) -> str:
    """Strips line ends, and cuts runs of blank lines to two."""
    lines = [line.rstrip() for line in text.expandtabs(4).split("\n")]
    text = "\n".join(lines).strip("\n") + "\n"
    while "\n\n\n\n" in text:
        text = text.replace("\n\n\n\n", "\n\n\n")
    return text


def is_readable(text: str) -> bool:
    """Whether text is mostly ASCII words in lines, without control characters."""
    if not SHORTEST <= len(text) <= LONGEST or SEPARATOR in text:
        return False
    if any(ord(char) < 32 and char != "\n" for char in text):
        return False
    plain = sum(char.isascii() and (char.isalpha() or char == " ") for char in text)
    other = sum(not char.isascii() for char in text)
    return plain >= 0.6 * len(text) and other <= 0.02 * len(text)


def split(found: list[Document]) -> tuple[list[Document], list[Document]]:
    """Returns training and held-out documents without copies of one another."""
    seen: set[str] = set()
    unique = []
    for document in found:
        digest = hashlib.sha256("".join(document.text.split()).encode()).hexdigest()
        if digest not in seen:
            seen.add(digest)
            unique.append(document)
    training = [d for d in unique if not d.is_held_out]
    known = Counter(line for d in training for line in d.long_lines())
    held_out = []
    for document in unique:
        if document.is_held_out:
            lines = document.long_lines()
            shared = sum(line in known for line in lines)
            if shared <= 0.05 * len(lines):
                held_out.append(document)
    return training, held_out


def sample(held_out: list[Document], limit: int) -> list[Document]:
    """Returns documents of a page or more, in the order of a hash, up to a size."""
    chosen: list[Document] = []
    room = limit
    for document in sorted(held_out, key=lambda d: d.chance("sample")):
        size = len(document.text.encode()) + len(SEPARATOR)
        if 3000 <= size <= min(room, 40_000):
            chosen.append(document)
            room -= size
    return chosen


def joined(chosen: list[Document]) -> str:
    return SEPARATOR.join(document.text for document in chosen)


def sizes(chosen: list[Document]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for document in chosen:
        counted[document.source] += len(document.text.encode())
    return dict(counted)


def main(args: argparse.Namespace) -> None:
    args.archives.mkdir(parents=True, exist_ok=True)
    python = f"Python {platform.python_version()} standard library"
    found = list(documents(python, standard_library()))
    origins = {python: {"licence": "PSF-2.0"}}
    for source in SOURCES:
        path = source.archive(args.archives)
        name = f"{source.name} {source.version}"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        origins[name] = {"licence": source.licence, "sha256": digest}
        found += documents(name, archive_files(path))
    training, held_out = split(found)
    training.sort(key=lambda d: d.chance("order"))
    committed = sample(held_out, args.sample_bytes)
    text = joined(training).encode()
    args.output.write_bytes(lzma.compress(text, preset=9))
    HELD_OUT_TEXT.write_text(joined(committed), encoding="utf-8")
    manifest = {
        "sources": origins,
        "training": {"bytes": len(text), "documents": len(training)},
        "training_bytes": sizes(training),
        "training_sha256": hashlib.sha256(text).hexdigest(),
        "held_out_bytes": sizes(committed),
        "held_out": [
            {
                "source": d.source,
                "name": d.name,
                "licence": origins[d.source]["licence"],
            }
            for d in committed
        ],
    }
    MANIFEST.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in manifest.items() if k != "held_out"}, indent=1))
    print(f"{args.output}: {args.output.stat().st_size / 2**20:.1f} MiB")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="the training text, an .xz file")
    parser.add_argument("--archives", type=Path, required=True, help="a folder")
    parser.add_argument("--sample-bytes", type=int, default=250_000)
    return parser


if __name__ == "__main__":
    main(build_parser().parse_args())
