# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Names the kernels that have changed since their tests last passed on a GPU.

    native_kernels.py                        prints their names on a line
    native_kernels.py --tests FAMILY...      prints the test files of some families
    native_kernels.py --passed [FAMILY...]   records that their tests have passed
        [--shard 1/2] [--gpu NAME] [--commit REV]

A family is a CUDA kernel, such as "cuda/decode", or a file that launches Triton
kernels, such as "triton/merge". A CUDA family's digest covers its sources, headers of
constants and flags, for all instances and architectures. A Triton family's digest
covers its sources and the formats, without types of arguments. Neither paths nor
comments nor docstrings count.

Without families --passed is for all, after a whole run of the suite. With --shard the
record counts when all parts have passed with the same sources.
"""

import argparse
import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks/results/native_kernels.json"
TESTS = ROOT / "vllm_overlay/tests/kernels/turbo"
TURBO = "vllm.v1.attention.ops.turbo"
# Modules whose constants Triton's kernels take.
FORMATS = ("format", "formats.tail", "latent.format")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"(.+?)"', re.MULTILINE)


def digest(parts: Iterable[str]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode() + b"\0")
    return state.hexdigest()[:16]


def normalised_cuda(text: str) -> str:
    """Returns a source without comments, paths of its own includes, and white space."""
    return " ".join(_INCLUDE.sub("", _COMMENT.sub(" ", text)).split())


def with_included(source: Path, folder: Path) -> set[Path]:
    """Returns a source, and all files of a folder that it includes, at any depth."""
    found, unread = {source}, [source]
    while unread:
        for name in _INCLUDE.findall(unread.pop().read_text()):
            path = folder / name
            if path.is_file() and path not in found:
                found.add(path)
                unread.append(path)
    return found


def normalised_python(text: str) -> str:
    """Returns a module's code without docstrings, comments and imports."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        node.body = [  # type: ignore[attr-defined]
            x
            for x in body
            if not isinstance(x, (ast.Import, ast.ImportFrom))
            and not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))
        ]
    return _dumped(tree)


def _dumped(node: object) -> str:
    """Returns a syntax tree as text, without fields that only later Pythons have."""
    if isinstance(node, list):
        return f"[{','.join(map(_dumped, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, x) for name, x in ast.iter_fields(node) if x not in (None, [])]
    inner = ",".join(f"{name}={_dumped(x)}" for name, x in fields)
    return f"{type(node).__name__}({inner})"


def imported(path: Path) -> set[str]:
    """Returns the dotted names that a Python file imports, without leading dots."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names |= {module, *(f"{module}.{x.name}".lstrip(".") for x in node.names)}
        elif isinstance(node, ast.Import):
            names |= {x.name for x in node.names}
    return names


def _launches(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(
        isinstance(x, ast.Call) and isinstance(x.func, ast.Subscript) for x in nodes
    )


def served() -> Iterator[tuple[int, Any]]:
    """Yields each CUDA module that serving may ask for, with its compute capability."""
    from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES
    from vllm.v1.attention.ops.turbo.cuda.prebuild import HEAD_SIZES, served_modules
    from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS

    for capability in ARCHITECTURES:
        found = served_modules(capability, [*TURBO_PRESETS], HEAD_SIZES)
        yield from ((capability, module) for module in found.values())


def normalised_sources(source: Path) -> list[str]:
    """Returns a kernel's source and included headers, normalised and sorted."""
    from vllm.v1.attention.ops.turbo.cuda.build import SOURCE_DIR

    paths = with_included(source, SOURCE_DIR)
    return sorted({normalised_cuda(path.read_text()) for path in paths})


def cuda_families() -> Iterator[tuple[str, str]]:
    """Yields each CUDA kernel and its digest."""
    parts: dict[str, set[str]] = {}
    sources: dict[str, Path] = {}
    for _, module in served():
        flags = " ".join(module.flags)
        parts.setdefault(module.kernel, set()).add(f"{flags}\n{module.header}")
        sources[module.kernel] = module.source
    for kernel, own in parts.items():
        yield (
            f"cuda/{kernel}",
            digest([*sorted(own), *normalised_sources(sources[kernel])]),
        )


def triton_families() -> Iterator[tuple[str, str]]:
    """Yields each file that launches Triton kernels, and its digest."""
    from vllm.v1.attention.ops import turbo

    folder = Path(turbo.__path__[0])
    files = {f"{TURBO}.triton.{x.stem}": x for x in folder.glob("triton/*.py")}
    for name in FORMATS:
        files[f"{TURBO}.{name}"] = folder / f"{name.replace('.', '/')}.py"
    for path in sorted(folder.glob("triton/*.py")):
        if not _launches(path):
            continue
        closure, unread = {path}, [path]
        while unread:
            for name in imported(unread.pop()) & files.keys():
                if files[name] not in closure:
                    closure.add(files[name])
                    unread.append(files[name])
        texts = sorted(normalised_python(x.read_text()) for x in closure)
        yield f"triton/{path.stem}", digest(texts)


def digests() -> dict[str, str]:
    """Returns the digests of all families."""
    return dict(sorted([*cuda_families(), *triton_families()]))


def read_record(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"families": {}}
    return json.loads(path.read_text())


def changed(found: dict[str, str], record: dict[str, Any]) -> list[str]:
    """Returns the families whose digests differ from the recorded ones."""
    recorded = record["families"]
    return [
        name
        for name, value in found.items()
        if recorded.get(name, {}).get("digest") != value
    ]


def mark_passed(
    record: dict[str, Any],
    found: dict[str, str],
    families: list[str],
    shard: str | None,
    run: dict[str, str],
) -> None:
    """Note that the tests of families have passed, or a part of all tests."""
    if shard is not None:
        number, _, count = shard.partition("/")
        begun = record.get("unfinished", {})
        if begun.get("digests") != found or begun.get("count") != int(count):
            begun = {"digests": found, "count": int(count), "passed": []}
        begun["passed"] = sorted({*begun["passed"], int(number)})
        record["unfinished"] = begun
        if begun["passed"] != list(range(1, int(count) + 1)):
            return
    record.pop("unfinished", None)
    if families == list(found):
        record["families"] = {}
    for name in families:
        record["families"][name] = {"digest": found[name], **run}


def tests_of(families: Iterable[str]) -> list[Path]:
    """Returns test files that import families' modules, or helpers that import them.
    Only whole runs have the tests that reach kernels through the backend. CUDA's
    families always have the file that compiles for other GPUs.
    """
    modules = set()
    for family in families:
        kind, _, name = family.partition("/")
        name = "extend_wgmma" if name == "extend_outputs" else name
        modules.add(f"{TURBO}.{kind}.{name}")
    paths = {path.stem: path for path in TESTS.rglob("*.py")}
    names = {stem: imported(path) for stem, path in paths.items()}
    found = {stem for stem, own in names.items() if own & modules}
    if any(x.startswith(f"{TURBO}.cuda.") for x in modules):
        found.add("test_cuda_architectures")
    # Names of modules, with their folders, that are imported from these tests.
    helpers = {
        stem: {part for x in own if not x.startswith("vllm.") for part in x.split(".")}
        for stem, own in names.items()
    }
    while True:
        more = {stem for stem, own in helpers.items() if own & found}
        if more <= found:
            return sorted(paths[x] for x in found if x.startswith("test_"))
        found |= more


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, default=RECORD, help="the file")
    parser.add_argument("--tests", nargs="+", metavar="FAMILY")
    parser.add_argument("--passed", nargs="*", metavar="FAMILY")
    parser.add_argument("--shard", help="such as 1/2, of a whole run")
    parser.add_argument("--gpu", default="")
    parser.add_argument("--commit", default="")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    if find_spec("vllm") is None:
        print("native_kernels: apply the series to an installed vLLM", file=sys.stderr)
        return 2
    found = digests()
    asked = [*(args.tests or []), *(args.passed or [])]
    unknown = sorted({*asked} - found.keys())
    if unknown or (args.shard and args.passed):
        known = ", ".join(found)
        words = f"no family {', '.join(unknown)}; there are {known}"
        if not unknown:
            words = "--shard is of a whole run, without families"
        print(f"native_kernels: {words}", file=sys.stderr)
        return 2
    if args.tests:
        print(*tests_of(args.tests), sep="\n")
        return 0
    record = read_record(args.record)
    if args.passed is not None:
        run = {"gpu": args.gpu, "commit": args.commit, "date": str(date.today())}
        mark_passed(record, found, args.passed or list(found), args.shard, run)
        args.record.parent.mkdir(parents=True, exist_ok=True)
        args.record.write_text(json.dumps(record, indent=1) + "\n")
    left = changed(found, record)
    words = ", ".join(left) if left != list(found) else "all"
    print(f"kernels changed since their tests passed on a GPU: {words or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
