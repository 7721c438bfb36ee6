# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measures the shape of the code, and holds it to bounds: `house.py [--check]`.

Without an option it prints a table of counts and bounds. With `--check` it prints the
broken bounds with their places, and exits with status 1 if there is one. A bound is the
count of the day it was set, so it falls with the count. Totals of lines have no bound.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import structure

ROOT = Path(__file__).resolve().parents[1]
OVERLAY = ROOT / "vllm_overlay"
TURBO = OVERLAY / "vllm/v1/attention/ops/turbo"
MANY_PARAMETERS = 10
SOURCES = (".py", ".cu", ".cuh")
LONG_FILE = 400
# The format is one table, which is read as a whole.
MAY_BE_LONG = "format.py"
# The counts of the tree when they last fell.
BOUNDS = {
    "parameters": 3,
    "files": 0,
    "root": 6,
    "kernel_lines": 138,
    "kernel_parameters": 30,
}


class Function(NamedTuple):
    """A function of the product.

    Attributes:
        place: Its file and name.
        num_parameters: Parameters, including `self`.
        num_lines: Lines, decorators not counted.
        is_kernel: Whether Triton compiles it.

    """

    place: str
    num_parameters: int
    num_lines: int
    is_kernel: bool


class Count(NamedTuple):
    """A count and its bound.

    Attributes:
        name: Its name in the table.
        value: The count.
        bound: The most that is allowed; None for no bound.
        places: Places of the counted things, for messages.

    """

    name: str
    value: int
    bound: int | None = None
    places: tuple[str, ...] = ()


def count_lines(*paths: Path, suffixes: tuple[str, ...] = (".py",)) -> int:
    """Returns the lines of files, and of the files below folders."""
    files = [
        file
        for path in paths
        for file in ([path] if path.is_file() else path.rglob("*"))
        if file.suffix in suffixes and "build" not in file.relative_to(ROOT).parts
    ]
    return sum(file.read_bytes().count(b"\n") for file in files)


def find_functions() -> Iterator[Function]:
    """Yields every function of the product, including nested ones and methods."""
    for path in sorted((OVERLAY / "vllm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = node.args
            num_parameters = len(
                [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            )
            assert node.end_lineno is not None
            yield Function(
                f"{path.relative_to(OVERLAY)}:{node.lineno} {node.name}",
                num_parameters,
                node.end_lineno - node.lineno + 1,
                any("triton.jit" in ast.unparse(x) for x in node.decorator_list),
            )


def find_counts() -> list[Count]:
    """Returns all counts of the tree."""
    functions = list(find_functions())
    wide = [
        x for x in functions if not x.is_kernel and x.num_parameters >= MANY_PARAMETERS
    ]
    kernels = [x for x in functions if x.is_kernel]
    longest = max(kernels, key=lambda x: x.num_lines)
    widest = max(kernels, key=lambda x: x.num_parameters)
    sources = [x for x in (OVERLAY / "vllm").rglob("*") if x.suffix in SOURCES]
    long_files = [
        str(x.relative_to(OVERLAY))
        for x in sorted(sources)
        if x.read_bytes().count(b"\n") > LONG_FILE and x.name != MAY_BE_LONG
    ]
    at_root = [x.name for x in sorted(TURBO.glob("*.py"))]
    imports = structure.read_imports(structure.ROOT, for_annotations=True)
    circles = [x for x in structure.complaints(imports, imports) if "each other" in x]
    return [
        Count("lines of the product, Python", count_lines(OVERLAY / "vllm")),
        Count(
            "lines of the product, CUDA",
            count_lines(OVERLAY / "vllm", suffixes=(".cu", ".cuh")),
        ),
        Count(
            "lines of the kernels' tests", count_lines(OVERLAY / "tests/kernels/turbo")
        ),
        Count(
            "lines of scripts, ci, benches, stand-ins",
            count_lines(
                ROOT / "scripts",
                ROOT / "ci",
                ROOT / "benchmarks",
                OVERLAY / "benchmarks",
                ROOT / "cpu_standins",
                suffixes=(".py", ".sh", ".h", ".cc"),
            ),
        ),
        Count(
            f"functions with {MANY_PARAMETERS} or more parameters, no kernels",
            len(wide),
            BOUNDS["parameters"],
            tuple(x.place for x in wide),
        ),
        Count(
            f"files of the product over {LONG_FILE} lines",
            len(long_files),
            BOUNDS["files"],
            tuple(long_files),
        ),
        Count("files at turbo/", len(at_root), BOUNDS["root"], tuple(at_root)),
        Count("import circles", len(circles), 0, tuple(circles)),
        Count(
            "lines of the longest Triton kernel",
            longest.num_lines,
            BOUNDS["kernel_lines"],
            (longest.place,),
        ),
        Count(
            "parameters of the widest Triton kernel",
            widest.num_parameters,
            BOUNDS["kernel_parameters"],
            (widest.place,),
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="print broken bounds")
    args = parser.parse_args()
    counts = find_counts()
    if not args.check:
        for name, value, bound, _ in counts:
            most = "" if bound is None else f"at most {bound}"
            print(f"{name:<60} {value:>6} {most}")
        return 0
    broken = [x for x in counts if x.bound is not None and x.value > x.bound]
    for name, value, bound, places in broken:
        print(f"{name}: {value}, at most {bound} are allowed")
        print(*(f"  {place}" for place in places), sep="\n")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
