#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Asks vLLM which models of its recipes a turbo cache dtype serves.

Each model is built without weights, as on an H200, on a machine without a GPU. Without
arguments, docs/recipes.json and docs/recipes.md are written again.
"""

import argparse
import gc
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from turbo_recipes import table
from turbo_recipes.shapes import Shape, load_shapes
from turbo_series.upstream import load_upstream

ROOT = Path(__file__).resolve().parent.parent
JSON, PAGE = ROOT / "docs/recipes.json", ROOT / "docs/recipes.md"


def one_of_each_kind(shapes: Iterable[Shape]) -> list[Shape]:
    """Returns the shape with the fewest layers of each model class and family."""
    kinds: dict[tuple[str, str], Shape] = {}
    for shape in sorted(shapes, key=lambda shape: shape.num_layers):
        kinds.setdefault((shape.architecture, shape.family), shape)
    return list(kinds.values())


def examine(shapes: Iterable[Shape], ways_out: bool) -> dict[str, dict[str, Any]]:
    """Returns the verdict on each shape, by its name; prints defects and unknowns."""
    from turbo_recipes import device

    device.pretend()
    from turbo_recipes import build, verdict

    build.inspect_in_this_process()
    # Imported modules stay, so that no collection need look at them.
    gc.freeze()
    verdicts = {}
    for shape in shapes:
        found = verdicts[shape.name] = verdict.examine(shape, build.build, ways_out)
        for each in (found, found.get("flags", {})):
            if each.get("outcome") in ("defect", "unknown"):
                print(f"{shape.name}: {each['outcome']}: {each['message']}")
    return verdicts


def compare(
    shapes: Iterable[Shape], verdicts: dict[str, dict[str, Any]], committed: Any
) -> list[str]:
    """Returns a sentence for each verdict that differs from the committed one."""
    problems = []
    for name, entry in table.make_content(shapes, verdicts)["shapes"].items():
        theirs = committed["shapes"].get(name, {})
        if "instead" not in entry:
            # The dtypes and flags to use instead were not tried.
            theirs = {key: theirs[key] for key in theirs.keys() - table.WAYS_OUT}
        if entry != theirs:
            problems.append(f"{name}: {entry}\n  committed: {theirs}")
    return problems


def check_sdist(folder: Path, shapes: Iterable[Shape]) -> list[str]:
    """Returns a sentence for each recipe that shapes or an unpacked sdist lack."""
    models = folder / "recipes/models"
    shipped = {
        path.relative_to(models).with_suffix("").as_posix()
        for path in models.glob("*/*.yaml")
    }
    ours = {recipe for shape in shapes for recipe in shape.recipes}
    return [f"{name}: of no shape" for name in sorted(shipped - ours)] + [
        f"{name}: no recipe of this vLLM" for name in sorted(ours - shipped)
    ]


def write_page(content: dict[str, Any]) -> None:
    """Writes docs/recipes.md, which alone has the tables."""
    PAGE.write_text(table.page(content, load_upstream(ROOT).version))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if anything differs"
    )
    parser.add_argument(
        "--kinds",
        action="store_true",
        help="with --check: one model of each class and family, without its cures",
    )
    parser.add_argument(
        "--sdist", type=Path, help="only compare the ids with an unpacked sdist's"
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="only write docs/recipes.md, from the committed docs/recipes.json",
    )
    args = parser.parse_args()
    if args.kinds and not args.check:
        parser.error("--kinds is for --check")
    if args.page and (args.check or args.sdist):
        parser.error("--page neither checks nor builds: pass it alone")
    shapes = load_shapes()
    if args.sdist:
        problems = check_sdist(args.sdist, shapes)
    elif args.page:
        write_page(json.loads(JSON.read_text()))
        problems = []
    elif args.check:
        chosen = one_of_each_kind(shapes) if args.kinds else shapes
        committed = json.loads(JSON.read_text())
        problems = compare(chosen, examine(chosen, not args.kinds), committed)
    else:
        content = table.make_content(shapes, examine(shapes, True))
        JSON.write_text(table.dump(content))
        write_page(content)
        problems = []
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
