# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks the links and commands of documents: `references.py [FILE]...`.

A link must lead to a file, and to a heading of it. In code, a path of the project must
be a file, a script must have the options that it is given, and `ci/gpu.py` must know
the section, whose script has the options behind `--`. The check reads options from the
sources, because the scripts need vLLM to run. It prints a line for each fault, and
exits with status 1 if there is one.
"""

import argparse
import ast
import itertools
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

import documents

OVERLAY = "vllm_overlay"
FOLDERS = (
    "benchmarks",
    "ci",
    "cpu_standins",
    "docker",
    "docs",
    "models",
    "patches",
    "scripts",
    "tests",
    OVERLAY,
)
# Folders that scripts have on sys.path beside their own.
MODULES = (
    "scripts",
    "ci",
    "benchmarks",
    "cpu_standins",
    "tests/quality",
    f"{OVERLAY}/benchmarks/kernels",
)
SCRIPTS = ("scripts", "ci", "benchmarks", "docker", "tests", OVERLAY)

PATH = re.compile(rf"(?<![\w./$-])(?:\./)?((?:{'|'.join(FOLDERS)})/[\w.,/*{{}}+-]*)")
# A word that the reader replaces, as in models/NAME.
PLACEHOLDER = re.compile(r"[A-Z_]{2,}")
OPTION = re.compile(r"--[a-z][\w.-]*")
TURBO_OPTION = re.compile(r"--attention-config[.](turbo_\w+)")
OPERATORS = {"|", "||", "&&", ";", "&"}


class Project:
    """The files of a checkout that documents refer to.

    Args:
        root: The checkout.

    """

    def __init__(self, root: Path = documents.ROOT) -> None:
        self.root = root
        self._anchors: dict[Path, set[str]] = {}
        self._files: dict[Path, tuple[set[str], set[Path]]] = {}

    @cached_property
    def scripts(self) -> dict[str, Path]:
        """The scripts whose names are unique, by name."""
        found: dict[str, list[Path]] = {}
        for folder in SCRIPTS:
            for path in (self.root / folder).rglob("*.*"):
                if path.suffix in (".py", ".sh"):
                    found.setdefault(path.name, []).append(path)
        return {name: paths[0] for name, paths in found.items() if len(paths) == 1}

    @cached_property
    def turbo_options(self) -> set[str]:
        """The fields that the series adds to vLLM's AttentionConfig."""
        patches = sorted((self.root / "patches").glob("*.patch"))
        text = "\n".join(path.read_text(encoding="utf-8") for path in patches)
        return set(re.findall(r"^\+ +(turbo_\w+):", text, re.M))

    @cached_property
    def sections(self) -> dict[str, str]:
        """The sections of ci/gpu.py, each with its commands."""
        rows = runpy.run_path(str(self.root / "ci" / "gpu.py"))["SECTIONS"]
        return {name: row.commands for name, row in rows.items()}

    @cached_property
    def steps(self) -> set[str]:
        """The steps of scripts/test.sh."""
        text = (self.root / "scripts" / "test.sh").read_text(encoding="utf-8")
        known = re.search(r"case \$step in\n +(\w+(?: \| \w+)+)\) ;;", text)
        return set(known[1].split(" | ")) if known else set()

    def anchors(self, document: Path) -> set[str]:
        """The anchors of a document of Markdown."""
        if document not in self._anchors:
            text = document.read_text(encoding="utf-8")
            self._anchors[document] = documents.anchors(text)
        return self._anchors[document]

    def find(self, word: str, folder: Path) -> Path | None:
        """Returns the project's script that a word of a command names, if it does.

        Args:
            word: The word.
            folder: The tree where its paths begin.

        """
        word = word.removeprefix("./").strip("[]()`")
        if not word.endswith((".py", ".sh")):
            return None
        if "/" not in word:
            return self.scripts.get(word)
        places = (folder / word, self.root / word)
        return next((place for place in places if place.is_file()), None)

    def find_module(self, name: str, folder: Path) -> Path | None:
        """Returns the file of the module `name`, which a script in `folder` imports."""
        bases = [folder, *(self.root / module for module in MODULES)]
        if folder.is_relative_to(self.root / OVERLAY):
            # Only the overlay's scripts take options from a module of vLLM.
            bases.append(self.root / OVERLAY)
        for base in bases:
            file = base / name.replace(".", "/")
            for path in (file.with_name(f"{file.name}.py"), file / "__init__.py"):
                if path.is_file():
                    return path
        return None

    def _read(self, path: Path) -> tuple[set[str], set[Path]]:
        """Returns a file's own options, and the files that it imports or runs."""
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            nodes = list(ast.walk(ast.parse(text)))
            others = {self.find_module(x, path.parent) for x in _imported(nodes)}
            return set(_added_options(nodes)), {x for x in others if x}
        text = re.sub(r"^\s*#.*", "", text, flags=re.M)
        names = re.findall(r"[\w-]+\.(?:py|sh)\b", text)
        return set(OPTION.findall(text)), {
            self.scripts[name] for name in names if name in self.scripts
        }

    def options(self, script: Path) -> set[str]:
        """Returns the options of a script and of the project's modules that it imports.

        A shell script has the options in its text, and those of scripts that it names.
        """
        found: set[str] = {"--help"}
        seen = {script}
        queue = [script]
        while queue:
            path = queue.pop()
            if path not in self._files:
                self._files[path] = self._read(path)
            options, others = self._files[path]
            found |= options
            queue += others - seen
            seen |= others
        return found


def _added_options(nodes: list[ast.AST]) -> Iterator[str]:
    """Yields the options that calls of add_argument, or of its alias `add`, name."""
    for node in nodes:
        if isinstance(node, ast.Call) and re.fullmatch(
            r".*[.]add_argument|add", ast.unparse(node.func)
        ):
            for word in node.args:
                if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                    yield str(word.value)
                    if "BooleanOptionalAction" in ast.unparse(node):
                        yield f"--no-{str(word.value)[2:]}"


def _imported(nodes: list[ast.AST]) -> Iterator[str]:
    """Yields the names that a module imports or runs; some of them are no modules."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "run_module" in ast.unparse(node.func):
            # The argument ends in the name of a module beside this one.
            yield ast.unparse(node.args[0]).rstrip("'\"").rpartition(".")[2]


def _is_of_overlay(project: Project, document: Path) -> bool:
    return document.is_relative_to(project.root / OVERLAY)


def check_links(document: Path, project: Project) -> Iterator[tuple[int, str]]:
    """Yields the lines and descriptions of links that lead nowhere."""
    for line, target in documents.links(document.read_text(encoding="utf-8")):
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        path = document
        if name:
            path = (document.parent / unquote(name)).resolve()
        if _is_of_overlay(project, document):
            if not _is_of_overlay(project, path):
                yield line, f"{target}: out of vLLM's tree"
                continue
            if not path.exists() and "turbo" not in path.name:
                # A page of vLLM's, which is not here.
                continue
        if not path.exists() or not path.is_relative_to(project.root):
            yield line, f"{target}: no such file"
        elif anchor and path.suffix == ".md" and anchor not in project.anchors(path):
            yield line, f"{target}: no such heading"


def _expand(path: str) -> list[str]:
    """Returns a path for each choice of its braces."""
    parts = [part.split(",") for part in re.split(r"[{}]", path)]
    # Text between braces is at odd places; a comma elsewhere ends the path.
    choices = [part if place % 2 else part[:1] for place, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _exists(path: str, bases: list[Path]) -> bool:
    """Returns whether a path exists, up to the first part that a reader fills in."""
    parts = []
    for part in path.rstrip(".,").split("/"):
        if "..." in part or PLACEHOLDER.fullmatch(part):
            break
        parts.append(part)
    pattern = "/".join(part for part in parts if part)
    return any(any(base.glob(pattern)) for base in bases)


def _split(command: str) -> list[str]:
    """Returns the words of a command, without its prompt and its comment."""
    command = re.sub(r"(?:^|\s)#.*", "", command).removeprefix("$ ")
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def _check_command(command: str, folder: Path, project: Project) -> Iterator[str]:
    """Yields descriptions of options and sections that a command's scripts lack."""
    script: Path | None = None
    names: set[str] | None = None
    section = ""
    words = iter(_split(command))
    for word in words:
        if word in OPERATORS or word == "pytest":
            script = names = None
            if word == "pytest":
                return
        elif word == "-m":
            name = next(words, "")
            script = project.find_module(name, project.root / OVERLAY)
            if script is None:
                if ".turbo." in name:
                    yield f"{name}: no such module"
                return
        elif found := project.find(word, folder):
            script = found
            names = {
                "gpu.py": set(project.sections),
                "test.sh": project.steps,
            }.get(script.name)
        elif word == "--" and section in project.sections:
            first = project.sections[section].split("\n")[0].split()[0]
            script, names = project.find(first, project.root), None
        elif script and word.strip("[]").startswith("--"):
            option = OPTION.match(word.strip("[]()"))
            if option and option[0] not in project.options(script):
                yield f"{option[0]}: no option of {script.name}"
        elif script and names is not None and re.fullmatch(r"[a-z_]+", word):
            section = word
            if word not in names:
                yield f"{word}: no section of {script.name}"


def check_commands(document: Path, project: Project) -> Iterator[tuple[int, str]]:
    """Yields lines and descriptions of names in commands that the project lacks."""
    bases = [project.root]
    if _is_of_overlay(project, document):
        bases.insert(0, project.root / OVERLAY)
    for line, command in documents.code(document.read_text(encoding="utf-8")):
        for match in PATH.finditer(command):
            for path in _expand(match[1]):
                if not _exists(path, bases):
                    yield line, f"{path}: no such file"
        for name in TURBO_OPTION.findall(command):
            if name not in project.turbo_options:
                yield line, f"{name}: no option of the series"
        for fault in _check_command(command, bases[0], project):
            yield line, fault


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    args = parser.parse_args()
    project = Project()
    is_wrong = False
    paths = args.files or documents.find_documents()
    for document in (path.resolve() for path in paths):
        faults = [*check_links(document, project), *check_commands(document, project)]
        for line, fault in sorted(faults):
            print(f"{document.relative_to(project.root)}:{line}: {fault}")
        is_wrong |= bool(faults)
    return 1 if is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
