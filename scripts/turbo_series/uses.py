# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compare the names of vLLM that the overlay uses in two releases."""

import ast
from dataclasses import dataclass, field

from .facts import (
    Class,
    Function,
    Signature,
    dotted,
    imported,
    module_of,
    read_facts,
    read_name,
)
from .release import PACKAGE, Changes, Foreign, Meaning, Module, Release


@dataclass(frozen=True)
class Use:
    """A name that the overlay reads.

    Attributes:
        line: Its line.
        owner: The full name of the module or class that should have it; "" if the
            source does not tell.
        name: The name.
        how: "imports", "reads", "calls" or "passes" (an argument by this keyword).
        num_positional: Positional arguments of a call; None if it unpacks arguments.
        keywords: The keywords of a call.

    """

    line: int
    owner: str
    name: str
    how: str
    num_positional: int | None = None
    keywords: tuple[str, ...] = ()


@dataclass
class Finding:
    """Something that a person must look at.

    Attributes:
        is_change: Whether it is a change of parameters, rather than a loss.
        text: A sentence.
        places: Paths and lines in the overlay.

    """

    is_change: bool
    text: str
    places: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        more = f" and {len(self.places) - 1} more" if len(self.places) > 1 else ""
        return f"{self.places[0]}{more} {self.text}"


class _Reader(ast.NodeVisitor):
    """Finds the uses of a source.

    Args:
        path: Its path.
        source: Its text.

    """

    def __init__(self, path: str, source: str) -> None:
        self.path, self.uses = path, list[Use]()
        facts = read_facts(path, source)
        own = {name: f"{module_of(path)}.{name}" for name in facts.names}
        # The full names that names stand for, or whose instances they are; inner
        # scopes last.
        self.scopes: list[dict[str, str]] = [own | facts.imports]
        self.owner: str | None = None
        self.visit(ast.parse(source))

    def _full(self, node: ast.AST) -> str:
        """The full name of an expression; "" if it is not known."""
        head, _, rest = dotted(node).partition(".")
        known = (scope[head] for scope in reversed(self.scopes) if head in scope)
        full = next(known, "")
        return f"{full}.{rest}" if full and rest else full

    def _type(self, node: ast.AST | None) -> str:
        """The full name of the class that an annotation names, None beside it."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self._type(ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.BinOp):
            return self._type(node.left) or self._type(node.right)
        return self._full(node) if isinstance(node, ast.Name | ast.Attribute) else ""

    def _add(self, node: ast.expr | ast.stmt, full: str, how: str) -> None:
        owner, _, name = full.rpartition(".")
        self.uses.append(Use(node.lineno, owner, name, how))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name, full in imported(node, self.path):
            self.scopes[-1][name.partition(".")[0]] = (
                full if name != full else full.partition(".")[0]
            )
            self._add(node, full, "imports")

    visit_Import = visit_ImportFrom = _import

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.owner = self.owner, f"{module_of(self.path)}.{node.name}"
        self.generic_visit(node)
        self.owner = outer

    def _function(self, node: Function | ast.Lambda) -> None:
        own = node.args
        listed = [*own.posonlyargs, *own.args, *own.kwonlyargs]
        listed += filter(None, (own.vararg, own.kwarg))
        scope = {each.arg: self._type(each.annotation) for each in listed}
        if self.owner and listed[:1] and listed[0].arg in ("self", "cls"):
            scope[listed[0].arg] = self.owner
        self.scopes.append(scope)
        self.generic_visit(node)
        self.scopes.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if name := read_name(node):
            self._add(node, f"{self._full(node.value)}.{name}", "reads")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if name := read_name(node):
            self._add(node, f"{self._full(node.args[0])}.{name}", "reads")
        full = self._full(node.func)
        if not full and read_name(node.func):
            full = f".{read_name(node.func)}"
        keywords = [each.arg for each in node.keywords]
        if full:
            unpacks = any(isinstance(each, ast.Starred) for each in node.args)
            count = None if unpacks or None in keywords else len(node.args)
            names = tuple(filter(None, keywords))
            owner, _, name = full.rpartition(".")
            self.uses.append(Use(node.lineno, owner, name, "calls", count, names))
        for keyword in filter(None, keywords if dotted(node.func) != "dict" else []):
            self._add(node, f".{keyword}", "passes")
        self.generic_visit(node)


def _difference(old: Signature, new: Signature) -> str:
    lost = [x for x in old if x not in new]
    come = [x for x in new if x not in old]
    words = [f"-{x}" for x in lost] + [f"+{x}" for x in come]
    return ", ".join(words) if words else "their order"


def _fits(use: Use, old: Signature, new: Signature) -> bool:
    """Whether a call that fits the fields of a class fits others, which may be more."""
    before, after = ([x.rstrip("=") for x in each] for each in (old, new))
    count = use.num_positional
    # A call that unpacks arguments may give any.
    given = {*before} if count is None else {*before[:count], *use.keywords}
    required = {x for x in new if x[-1] != "="} - {x for x in old if x[-1] != "="}
    same_places = before[: count or 0] == after[: count or 0]
    # A field that neither release has is the series' own.
    return same_places and required <= given and given & {*before} <= {*after}


class Comparison:
    """Compares two releases with the overlay, for the overlay's sake.

    Args:
        old: The release that the overlay is for, with the overlay.
        new: The other release, with the overlay.
        own: The overlay's paths.

    """

    def __init__(self, old: Release, new: Release, own: set[str]) -> None:
        self.old, self.new = old, new
        # The product is before its tests.
        here = (path for path in own if path in new.sources)
        self.own = sorted(here, key=lambda path: (not path.startswith(PACKAGE), path))
        self.homes = {module_of(path) for path in own}
        self.changes = Changes(old, new, own)
        self.found: dict[str, Finding] = {}

    def _find(self, place: str, text: str, is_change: bool = False) -> None:
        finding = self.found.setdefault(text, Finding(is_change, text))
        if place not in finding.places:
            finding.places.append(place)

    def findings(self) -> list[Finding]:
        """All findings: losses first, and the product before its tests."""
        classes = [
            (path, name, each)
            for path in self.own
            for name, each in self.new.facts(path).names.items()
            if isinstance(each, Class)
        ]
        members = {member for *_, each in classes for member in each.members}
        unread = self.changes.lost(members - {"__init__"}, "read")
        for path, name, each in classes:
            self._overrides(path, name, each, unread)
        by_name: list[tuple[str, Use]] = []
        for path in self.own:
            if path in self.new.unreadable:
                continue
            for use in _Reader(path, self.new.sources[path]).uses:
                if not self._known(path, use):
                    by_name.append((path, use))
        self._by_name(by_name)
        for path in sorted(self.old.unreadable | self.new.unreadable):
            self._find(path, "cannot be read by this Python")

        def order(finding: Finding) -> tuple[bool, bool, str]:
            is_product = finding.places[0].startswith(PACKAGE)
            return finding.is_change, not is_product, finding.text

        return sorted(self.found.values(), key=order)

    def _is_theirs(self, home: str) -> bool:
        return home.rpartition(".")[0] not in self.homes

    def _overrides(self, path: str, name: str, each: Class, unread: set[str]) -> None:
        """Find members of vLLM's classes that a class of the overlay overrides.

        Args:
            path: The source.
            name: The class's name.
            each: The class.
            unread: Members that vLLM does not read any more.

        """
        full = f"{module_of(path)}.{name}"
        try:
            list(self.new.lineage(full))
        except LookupError:
            # Its import is a finding.
            return
        members = [x for x in each.members if x[:2] != "__" or x == "__init__"]
        for member in members:
            place = f"{path}:{each.lines[member]}"
            try:
                home, before = self.old.member(full, member, self._is_theirs)
            except LookupError:
                continue
            text = f"overrides {home.rpartition('.')[2]}.{member}"
            never = member in unread
            try:
                after = self.new.member(full, member, self._is_theirs)[1]
            except LookupError:
                more = ", and nothing reads it" if never else ""
                self._find(place, f"{text}, which is gone{more}")
                continue
            if never:
                self._find(place, f"{text}, which nothing reads any more")
            if before and after and before != after:
                difference = _difference(before, after)
                self._find(
                    place, f"{text}, whose parameters change: {difference}", True
                )

    def _known(self, path: str, use: Use) -> bool:
        """Find a use of a known module or class; return False if it is none."""
        full, place = f"{use.owner}.{use.name}", f"{path}:{use.line}"
        is_import = use.how == "imports"
        if not use.owner:
            return is_import
        try:
            owner = self.old.find(use.owner)
            if not isinstance(owner, Module | Class):
                return is_import or isinstance(owner, Foreign)
            before = self.old.find(full)
        except LookupError:
            return is_import
        try:
            after = self.new.find(full)
        except LookupError:
            if use.how != "calls":
                self._find(place, f"{use.how} {full}, which is gone")
            return True
        if use.how == "calls":
            self._call(place, use, before, after)
        return True

    def _call(self, place: str, use: Use, before: Meaning, after: Meaning) -> None:
        """Find a call of a function or class whose parameters change."""
        full = f"{use.owner}.{use.name}"
        if isinstance(before, Class) and isinstance(after, Class):
            fields = self.old.has_fields(full) and self.new.has_fields(full)
            before, after = self.old.constructor(full), self.new.constructor(full)
            if fields and before and after and _fits(use, before, after):
                return
        if isinstance(before, tuple) and isinstance(after, tuple) and before != after:
            difference = _difference(before, after)
            text = f"calls {full}, whose parameters change: {difference}"
            self._find(place, text, True)

    def _by_name(self, uses: list[tuple[str, Use]]) -> None:
        """Find attributes of unknown objects by their names alone.

        An attribute that the new release reads and does not define is another
        package's.
        """
        ours: set[str] = set()
        for path in self.own:
            facts = self.new.facts(path)
            ours |= facts.defined
            parameters = (x for each in facts.signatures.values() for x in each)
            ours |= {x.strip("*=") for each in parameters for x in each}
        names = {use.name for _, use in uses} - ours
        lost = self.changes.lost(names, "defined")
        unread = self.changes.missing(lost, "read")
        for path, use in uses:
            place = f"{path}:{use.line}"
            if use.how != "calls" and use.name in unread:
                self._find(place, f"{use.how} {use.name}, which nothing defines")
            elif use.how == "calls" and use.name in names - lost:
                old, new = self.changes.signatures(use.name)
                if old and new and not old & new:
                    difference = _difference(min(old), min(new))
                    text = f"calls {use.name}, whose parameters change: {difference}"
                    self._find(place, text, True)
