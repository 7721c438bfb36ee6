# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read from a Python source the names that it defines and reads."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

# Each parameter's name, with the marks of Python's own syntax: `*` before the name of
# all further ones, `=` behind one that has a default.
Signature = tuple[str, ...]
Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = ast.If | ast.Try | ast.With


@dataclass
class Class:
    """A class of a module.

    Attributes:
        bases: Its bases as written, without their type arguments.
        members: Methods with their signatures, and attributes of the class or of
            `self`, which have none.
        lines: The line of each member.
        fields: The annotated attributes of the class's body, as parameters.
        has_fields: Whether a decorator makes a constructor of the fields.

    """

    bases: list[str]
    members: dict[str, Signature | None] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    has_fields: bool = False


@dataclass
class Facts:
    """The names of a source.

    Attributes:
        imports: Names bound by imports, and the full names that they stand for.
        stars: Modules all of whose names are imported.
        names: All other names of the module: classes, functions and values.
        strings: Names that the module's `__getattr__` may know; else empty.
        defined: Every attribute, function and class that is defined anywhere, and the
            values of the module and its classes.
        read: Every attribute that is read, but for those read of `super()`.
        signatures: All signatures of functions and methods of each name.

    """

    imports: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    names: dict[str, Class | Signature | None] = field(default_factory=dict)
    strings: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    signatures: dict[str, set[Signature]] = field(default_factory=dict)


def module_of(path: str) -> str:
    """The full name of the module at a path, as `vllm/a/b.py`."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def signature(node: Function) -> Signature:
    """The parameters of a function, without annotations and values."""
    own = node.args
    plain = [*own.posonlyargs, *own.args]
    required = len(plain) - len(own.defaults)
    found = [x.arg + "=" * (at >= required) for at, x in enumerate(plain)]
    if own.posonlyargs:
        found.insert(len(own.posonlyargs), "/")
    if own.vararg or own.kwonlyargs:
        found.append(f"*{own.vararg.arg if own.vararg else ''}")
    keywords = zip(own.kwonlyargs, own.kw_defaults)
    found += [x.arg + "=" * (default is not None) for x, default in keywords]
    return (*found, *([f"**{own.kwarg.arg}"] if own.kwarg else []))


def imported(node: ast.AST, path: str) -> Iterator[tuple[str, str]]:
    """Yield the names that a statement binds by import, with their full names.

    `import a.b` yields `a.b` for itself, though it binds `a`.
    """
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name, alias.name
    elif isinstance(node, ast.ImportFrom):
        parts = module_of(path).split(".")
        if not path.endswith("/__init__.py"):
            parts = parts[:-1]
        parts = parts[: len(parts) - node.level + 1] if node.level else []
        module = ".".join([*parts, *([node.module] if node.module else [])])
        for alias in node.names:
            yield alias.asname or alias.name, f"{module}.{alias.name}"


def dotted(node: ast.AST) -> str:
    """A name or attribute as written, type arguments left out; "" if it is neither."""
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def is_call_of(node: ast.AST, *names: str) -> bool:
    """Whether a node calls a function by one of these names."""
    return isinstance(node, ast.Call) and dotted(node.func) in names


def read_name(node: ast.AST) -> str | None:
    """The attribute that an expression reads, `getattr` included; else None."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return None if is_call_of(node.value, "super") else node.attr
    if is_call_of(node, "getattr", "hasattr"):
        assert isinstance(node, ast.Call)
        name = node.args[1] if len(node.args) > 1 else None
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return name.value
    return None


def _stored(node: ast.AST) -> str | None:
    """The name or attribute that a node assigns to; None if it does not."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    return None


def _block(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a block, and of `if`, `try` and `with` in it."""
    for node in body:
        yield node
        if isinstance(node, _BLOCKS):
            for name in ("body", "orelse", "finalbody"):
                yield from _block(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _block(handler.body)


def _members(
    body: list[ast.stmt],
) -> Iterator[tuple[str, ast.stmt | ast.expr, Signature | None]]:
    """Yield the names that a class or module defines, and the nodes that do."""
    for node in _block(body):
        if isinstance(node, Function):
            yield node.name, node, signature(node)
        elif isinstance(node, ast.ClassDef):
            yield node.name, node, None
        elif not isinstance(node, _BLOCKS):
            for each in ast.walk(node):
                if isinstance(each, ast.expr) and (stored := _stored(each)):
                    yield stored, each, None


def _class(node: ast.ClassDef) -> Class:
    """A class with the members of its body."""
    made = Class([name for base in node.bases if (name := dotted(base))])
    decorators = [ast.unparse(each) for each in node.decorator_list]
    made.has_fields = any("dataclass" in x or "config" in x for x in decorators)
    for name, each, parameters in _members(node.body):
        made.lines.setdefault(name, each.lineno)
        made.members.setdefault(name, parameters)
    for part in node.body:
        if not isinstance(part, ast.AnnAssign):
            continue
        if "ClassVar" not in dotted(part.annotation):
            made.fields.append(dotted(part.target) + "=" * bool(part.value))
    return made


def _walk(
    node: ast.AST, owner: ast.ClassDef | None = None
) -> Iterator[tuple[ast.AST, ast.ClassDef | None]]:
    """Yield the nodes below one, each with the class whose body it is in."""
    left = [(node, owner)]
    while left:
        node, owner = left.pop()
        yield node, owner
        inner = node if isinstance(node, ast.ClassDef) else owner
        left += [(each, inner) for each in ast.iter_child_nodes(node)]


@cache
def read_facts(path: str, source: str) -> Facts:
    """The facts of a source at a path.

    Raises:
        SyntaxError: if this Python cannot read it.

    """
    facts = Facts()
    tree = ast.parse(source)
    for node in _block(tree.body):
        for name, full in imported(node, path):
            if name == "*":
                facts.stars.append(full.removesuffix(".*"))
            else:
                facts.imports[name] = full
    classes: dict[ast.AST, Class] = {}
    for each, owner in _walk(tree):
        if isinstance(each, ast.Attribute):
            if stored := _stored(each):
                facts.defined.add(stored)
                if owner and dotted(each.value) == "self":
                    classes[owner].lines.setdefault(stored, each.lineno)
                    classes[owner].members.setdefault(stored, None)
        elif isinstance(each, Function):
            facts.defined.add(each.name)
            facts.signatures.setdefault(each.name, set()).add(signature(each))
        elif isinstance(each, ast.ClassDef):
            classes[each] = _class(each)
            facts.defined.update(classes[each].members)
        if read := read_name(each):
            facts.read.add(read)
    for name, each, parameters in _members(tree.body):
        facts.names.setdefault(name, classes.get(each, parameters))
    facts.defined.update(facts.names)
    if "__getattr__" in facts.names:
        texts = (x.value for x in ast.walk(tree) if isinstance(x, ast.Constant))
        facts.strings = {text for text in texts if isinstance(text, str)}
    return facts
