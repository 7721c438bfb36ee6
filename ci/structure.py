# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks which turbo modules import which: `structure.py [ROOT]`.

Sets of kernels do not import each other, planning imports no kernels, and only CPUs and
tests use the reference in PyTorch. No module imports itself through others. An import
within a function counts. One that is only for annotations counts for circles.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "vllm_overlay"
ATTENTION = "vllm.v1.attention"
TURBO = f"{ATTENTION}.ops.turbo"
BACKENDS = (
    f"{ATTENTION}.backends.turbo_attn",
    f"{ATTENTION}.backends.mla.turbo_mla",
)
# Modules beside the packages of kernels that these may import. Other modules may import
# all but the reference.
KERNELS = ("format", "formats", "interface", "latent.format", "latent.interface")
ALLOWED = {
    "formats": ("format", "formats"),
    "triton": (*KERNELS, "triton"),
    "cuda": (*KERNELS, "cuda"),
    "reference": (*KERNELS, "reference"),
    "planning": (
        "formats.output_scratch",
        "formats.tail_pages",
        "interface",
        "planning",
    ),
}
# The modules of a CPU's attention.
IMPORT_THE_REFERENCE = (*BACKENDS, f"{TURBO}.reference")


def is_within(module: str, package: str) -> bool:
    """Whether a module is a package, or lies in it."""
    return module == package or module.startswith(f"{package}.")


def imported(tree: ast.AST, for_annotations: bool) -> Iterator[str]:
    """Yields the imported names, of modules and of their members; those that are only
    for annotations if `for_annotations`.
    """
    for node in ast.iter_child_nodes(tree):
        is_annotation = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(
            node.test
        )
        if is_annotation and not for_annotations:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            yield from imported(node, for_annotations)


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def read_imports(root: Path, for_annotations: bool = False) -> dict[str, set[str]]:
    """Returns the turbo modules below a folder, each with those that it imports."""
    files = [
        *root.glob(f"{TURBO.replace('.', '/')}/**/*.py"),
        *root.glob(f"{ATTENTION.replace('.', '/')}/backends/**/turbo_*.py"),
    ]
    trees = {module_name(path, root): ast.parse(path.read_text()) for path in files}

    def owner(name: str) -> str | None:
        """Returns the module that a name is, or is in."""
        while name and name not in trees:
            name = name.rpartition(".")[0]
        return name or None

    return {
        module: {o for name in imported(tree, for_annotations) if (o := owner(name))}
        - {module}
        for module, tree in trees.items()
    }


def complaints(
    imports: dict[str, set[str]], all_imports: dict[str, set[str]] | None = None
) -> Iterator[str]:
    """Yields a line for each fault of a graph of imports.

    Args:
        imports: The modules that each module imports.
        all_imports: The same with imports for annotations; None if there are none.

    """
    for module, targets in sorted(imports.items()):
        package = module.removeprefix(f"{TURBO}.").split(".")[0]
        for target in sorted(targets):
            if package in ALLOWED and module != TURBO:
                allowed = [f"{TURBO}.{name}" for name in ALLOWED[package]]
                if not any(is_within(target, name) for name in allowed):
                    yield f"{module} imports {target}, which {package}/ may not"
            elif is_within(target, f"{TURBO}.reference") and not any(
                is_within(module, name) for name in IMPORT_THE_REFERENCE
            ):
                yield f"{module} imports {target}: the reference is for CPUs and tests"
    try:
        TopologicalSorter(all_imports or imports).prepare()
    except CycleError as error:
        yield f"modules import each other: {' <- '.join(error.args[1])}"


def main(root: Path = ROOT) -> int:
    imports = read_imports(root)
    found = list(complaints(imports, read_imports(root, for_annotations=True)))
    if len(imports) < 2:
        found.append(f"no turbo modules in {root}")
    print("\n".join(found) or f"{len(imports)} modules")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
