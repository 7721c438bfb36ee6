# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The generated index of the patches, and counts."""

from collections import Counter
from pathlib import Path

from .model import PATCHES, Patch, Series

_INTRO = """\
# Patches

Written by `scripts/series.py index`; edit the patches, not this file.

The series is for {project} {version}. `series` holds the order. A patch edits files of
vLLM; files that it needs and vLLM lacks are in `vllm_overlay/` and named in its
`Overlay` trailers.
"""
_COLUMNS = (
    "Patch",
    "Purpose",
    "Files",
    "Lines",
    "Upstream-Status",
    "Drop-When",
    "Guarded-By",
    "Overlay files",
)


def _cell(values: list[str]) -> str:
    return "<br>".join(value.replace("|", "\\|") for value in values)


def _row(patch: Patch) -> str:
    added = sum(len(file.added) for file in patch.files)
    removed = sum(len(file.removed) for file in patch.files)
    cells = (
        [f"[{patch.name}]({patch.name})"],
        [patch.subject],
        [f"`{file.path}`" for file in patch.files],
        [f"+{added} -{removed}"] if patch.files else [],
        patch.trailer("Upstream-Status"),
        patch.trailer("Drop-When"),
        [f"`{value}`" for value in patch.trailer("Guarded-By")],
        [f"`{glob}`" for glob in patch.trailer("Overlay")],
    )
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def index(series: Series) -> str:
    """The text of `patches/README.md`."""
    text = _INTRO.format(
        project=series.upstream.project, version=series.upstream.version
    )
    if not series.patches:
        return f"{text}\nThere is no patch yet.\n"
    lines = [
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + " --- |" * len(_COLUMNS),
        *(_row(patch) for patch in series.patches),
    ]
    return f"{text}\n" + "\n".join(lines) + "\n"


def index_path(series: Series) -> Path:
    return series.root / PATCHES / "README.md"


def stats(series: Series) -> str:
    """Changed lines a patch, and overlay lines a folder."""
    lines = ["changed lines  patch"]
    total = 0
    for patch in series.patches:
        total += patch.changed_lines
        lines.append(f"{patch.changed_lines:13}  {patch.name}")
    lines += [f"{total:13}  all {len(series.patches)} patches", ""]
    folders: Counter[str] = Counter()
    for path, file in series.overlay.items():
        folders[path.rpartition("/")[0] or "."] += file.data.count(b"\n")
    lines.append("overlay lines  folder")
    lines += [f"{count:13}  {folder}" for folder, count in sorted(folders.items())]
    lines.append(f"{folders.total():13}  all {len(series.overlay)} files")
    return "\n".join(lines)
