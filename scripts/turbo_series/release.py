# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Python sources of a vLLM tree, and the meaning of full names in it."""

import re
from collections.abc import Callable, Iterator
from functools import cached_property

from .facts import Class, Facts, Signature, module_of, read_facts
from .git import Git

PACKAGE = "vllm/"


class Module(str):
    """The full name of a module."""


class Foreign(str):
    """The full name of something of another package."""


Meaning = Module | Class | Signature | Foreign | None


def read_sources(git: Git, commit: str) -> dict[str, str]:
    """The Python sources of a commit by path."""
    listed = git.text("ls-tree", "-r", "-z", commit).split("\0")
    paths = {}
    for line in filter(None, listed):
        meta, path = line.split("\t", 1)
        mode, _, blob = meta.split()
        if path.endswith(".py") and mode.startswith("100"):
            paths[path] = blob
    data = "".join(f"{blob}\n" for blob in paths.values()).encode()
    out = git.out("cat-file", "--batch", data=data)
    sources, at = {}, 0
    for path in paths:
        end = out.index(b"\n", at)
        size = int(out[at:end].split()[2])
        sources[path] = out[end + 1 : end + 1 + size].decode(errors="replace")
        at = end + size + 2
    return sources


class Release:
    """A tree of sources.

    Args:
        sources: The sources by path.

    """

    def __init__(self, sources: dict[str, str]) -> None:
        self.sources = sources
        self.unreadable: set[str] = set()

    @cached_property
    def _paths(self) -> dict[str, str]:
        return {module_of(path): path for path in self.sources}

    def facts(self, path: str) -> Facts:
        """The facts of a source; none if this Python cannot read it."""
        try:
            return read_facts(path, self.sources[path])
        except SyntaxError:
            self.unreadable.add(path)
            return Facts()

    @cached_property
    def _packages(self) -> set[str]:
        """The full names of modules, and of folders that have some."""
        parts = (name.split(".") for name in self._paths)
        return {".".join(x[:n]) for x in parts for n in range(1, len(x) + 1)}

    def find(self, name: str) -> Meaning:
        """The meaning of a full name; None for a value, whose own names are not known.

        Raises:
            LookupError: if there is no such name.

        """
        return self._resolve(name)[1]

    def _resolve(self, name: str, depth: int = 20) -> tuple[str, Meaning]:
        """The full name under which a name is defined, past imports; its meaning."""
        if name in self._packages:
            return name, Module(name)
        if name.partition(".")[0] not in self._packages:
            return name, Foreign(name)
        if not depth:
            raise LookupError(name)
        before, _, last = name.rpartition(".")
        home, owner = self._resolve(before, depth - 1)
        if isinstance(owner, Class):
            return self.member(home, last)
        if not isinstance(owner, Module):
            return name, Foreign(name) if isinstance(owner, Foreign) else None
        path = self._paths.get(owner)
        facts = self.facts(path) if path else Facts()
        if last in facts.names:
            return f"{owner}.{last}", facts.names[last]
        if last in facts.imports:
            return self._resolve(facts.imports[last], depth - 1)
        if last in facts.strings:
            return name, None
        for star in facts.stars:
            try:
                return self._resolve(f"{star}.{last}", depth - 1)
            except LookupError:
                continue
        raise LookupError(name)

    def lineage(self, name: str) -> Iterator[tuple[str, Class]]:
        """Yield a class and its bases, near ones first, as far as they are here.

        Raises:
            LookupError: if a base ought to be here and is not.

        """
        seen: set[str] = set()
        queue = [name]
        while queue:
            home, found = self._resolve(queue.pop(0))
            if home in seen or not isinstance(found, Class):
                continue
            seen.add(home)
            yield home, found
            module = home.rpartition(".")[0]
            queue += filter(None, (self._full(module, base) for base in found.bases))

    def _full(self, module: str, name: str) -> str | None:
        """The full name of a name as written in a module; None if it is not known."""
        facts = self.facts(self._paths[module])
        first, _, rest = name.partition(".")
        if first in facts.names:
            return f"{module}.{name}"
        full = facts.imports.get(first)
        return f"{full}.{rest}" if full and rest else full

    def member(
        self, name: str, member: str, among: Callable[[str], bool] = lambda home: True
    ) -> tuple[str, Signature | None]:
        """The class of a lineage that has a member, and the member's signature.

        Raises:
            LookupError: if none of them has it.

        """
        for home, each in self.lineage(name):
            if member in each.members and among(home):
                return home, each.members[member]
        raise LookupError(f"{name}.{member}")

    def has_fields(self, name: str) -> bool:
        """Whether the constructor of a class takes its fields."""
        line = [each for _, each in self.lineage(name)]
        written = any("__init__" in each.members for each in line)
        return not written and any(each.has_fields for each in line)

    def constructor(self, name: str) -> Signature | None:
        """The parameters of a class's constructor; None if they are not known."""
        line = [each for _, each in self.lineage(name)]
        if self.has_fields(name):
            fields = (field for each in reversed(line) for field in each.fields)
            return tuple({field.rstrip("="): field for field in fields}.values())
        known = (
            each.members["__init__"] for each in line if "__init__" in each.members
        )
        return next(known, None)


class Changes:
    """Names that one release has and another lacks.

    Only sources that differ are read as a whole. The others are read if they have the
    word.

    Args:
        old: One release.
        new: The other one.
        own: Paths to leave out, in either.

    """

    def __init__(self, old: Release, new: Release, own: set[str]) -> None:
        self.old, self.new = old, new
        package = {x for x in old.sources if x.startswith(PACKAGE)} - own
        self.shared = {x for x in package if new.sources.get(x) == old.sources[x]}
        self.gone = package - self.shared
        self.come = {x for x in new.sources if x.startswith(PACKAGE)} - own
        self.come -= self.shared

    def lost(self, names: set[str], kind: str) -> set[str]:
        """Names that the old release has, as `kind`, and the new one lacks.

        Args:
            names: The names to try.
            kind: An attribute of Facts: "defined" or "read".

        """
        return self.missing(names & self._all(self.old, self.gone, kind), kind)

    def missing(self, names: set[str], kind: str) -> set[str]:
        """Names that the new release lacks as `kind`."""
        left = names - self._all(self.new, self.come, kind)
        word = re.compile(rf"\b(?:{'|'.join(map(re.escape, left))})\b")
        for path in self.shared:
            if left and word.search(self.new.sources[path]):
                left = left - getattr(self.new.facts(path), kind)
        return left

    @staticmethod
    def _all(release: Release, paths: set[str], kind: str) -> set[str]:
        return set().union(*(getattr(release.facts(x), kind) for x in paths))

    @cached_property
    def _shared_functions(self) -> set[str]:
        texts = (self.new.sources[path] for path in self.shared)
        return {name for text in texts for name in re.findall(r"\bdef (\w+)", text)}

    @cached_property
    def _signatures(self) -> list[dict[str, set[Signature]]]:
        """The signatures of each name in the sources that differ, old and new."""
        sides = []
        for release, paths in ((self.old, self.gone), (self.new, self.come)):
            found: dict[str, set[Signature]] = {}
            for path in paths:
                for name, each in release.facts(path).signatures.items():
                    found.setdefault(name, set()).update(each)
            sides.append(found)
        return sides

    def signatures(self, name: str) -> list[set[Signature]]:
        """All signatures of a name, old and new; none if a shared source has it."""
        is_shared = name in self._shared_functions
        return [set() if is_shared else x.get(name, set()) for x in self._signatures]
