# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes the results of the lab's programmes: all figures, and tables of them."""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch


def kl_cell(figures: dict[str, float], digits: int = 2) -> str:
    """A divergence in millinats with the standard error of its mean."""
    return f"{1e3 * figures['kl']:.{digits}f} ± {1e3 * figures['kl_error']:.{digits}f}"


def table(rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a table in Markdown, of its head and its rows."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    num_columns = lines[0].count(" | ") + 1
    return [lines[0], "|---" * num_columns + "|", *lines[1:]]


def page(title: str, about: str, rows: Iterable[Iterable[object]]) -> str:
    """A page of Markdown: a title, a paragraph, and a table of a head and rows."""
    return "\n".join([f"# {title}", "", about, "", *table(rows)]) + "\n"


def add_text_arguments(parser: argparse.ArgumentParser, first: int) -> None:
    """Adds the texts of a programme that measures means, its device and its output.

    Args:
        parser: The programme's.
        first: The default of ``--first``.

    """
    add = parser.add_argument
    add("--texts", type=int, default=4, help="number of held-out texts")
    add("--others", type=int, default=2, help="texts of the means")
    add("--length", type=int, default=2048, help="tokens of a text")
    add("--first", type=int, default=first, help="positions not counted")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output", type=Path, required=True, help="folder")


def setting(args: argparse.Namespace) -> dict[str, object]:
    """The machine, the model and the text of a run, by which it can be repeated."""
    on_gpu = torch.device(args.device).type == "cuda"
    weights = args.model / "model.safetensors"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "model": args.model.name,
        "model_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "text_sha256": hashlib.sha256(args.text.read_bytes()).hexdigest(),
    }


def write_results(folder: Path, name: str, figures: dict, tables: str) -> None:
    """Writes NAME.json and NAME.md to the folder, and prints the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(figures, indent=1) + "\n"
    (folder / f"{name}.json").write_text(content, encoding="utf-8")
    (folder / f"{name}.md").write_text(tables, encoding="utf-8")
    print(tables)


def run_programme(
    name: str,
    description: str,
    measure: Callable[[], list[dict]],
    markdown: Callable[[list[dict]], str],
) -> None:
    """Measures and reports, for a programme whose only argument is --output."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder")
    args = parser.parse_args()
    rows = measure()
    figures = {"torch": torch.__version__, "rows": rows}
    write_results(args.output, name, figures, markdown(rows))
