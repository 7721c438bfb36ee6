# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draws the benchmarks' results, without a GPU.

Each decode.jsonl gets a decode.svg beside it: microseconds of decode attention, and
percent of the memory's bandwidth, against context. Each engine.jsonl gets a tpot.svg:
time per output token against context. The last of several equal measurements counts.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from common import ROOT

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# Text stays text, and the same rows give the same file.
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "benchmarks"})


class Look(NamedTuple):
    """The look of a line.

    Attributes:
        arms: Its names in decode.jsonl and in engine.jsonl.
        label: Its label in the legend.
        colour: The colour of its line and markers.
        marker: The marker of its points.

    """

    arms: tuple[str, ...]
    label: str
    colour: str
    marker: str


LOOKS = (
    Look(("bf16", "auto"), "bf16", "black", "s"),
    Look(("fp8",), "fp8", "tab:blue", "D"),
    Look(("fp8_flashinfer", "fp8:FLASHINFER"), "fp8, FlashInfer", "skyblue", "D"),
    Look(("nvfp4",), "nvfp4", "tab:purple", "^"),
    Look(("turboquant_4bit_nc",), "turboquant_4bit_nc", "tab:red", "v"),
    Look(("turbo4",), "turbo4", "tab:green", "o"),
    Look(("k4v3",), "k4v3", "tab:olive", "o"),
    Look(("turbo3",), "turbo3", "tab:cyan", "o"),
)

# Bandwidth of the GPU's memory by its data sheet, by torch's name of the GPU.
BANDWIDTH_GB_PER_S = {"NVIDIA H200": 4800}

Row = dict[str, Any]
# Rows by arm, batch and context.
Rows = dict[tuple[str, int, int], Row]


def read_rows(path: Path, part: str, heads: str = "") -> Rows:
    """Returns a file's rows of one part, for shapes with one length and these heads."""
    rows = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        shape = row.get("shape", "")
        if row.get("part") != part or "error" in row or "+" in shape:
            continue
        batch, context, *sizes = shape.split("x")
        if "x".join(sizes) == heads:
            rows[row["arm"], int(batch), int(context)] = row
    return rows


def draw_lines(axis: Any, rows: Rows, batch: int, field: str) -> None:
    contexts = sorted({context for _, size, context in rows if size == batch})
    for look in LOOKS:
        points = sorted(
            (context, row[field])
            for (arm, size, context), row in rows.items()
            if arm in look.arms and size == batch
        )
        if points:
            style = {"color": look.colour, "marker": look.marker, "markersize": 4}
            axis.plot(*zip(*points), label=look.label, **style)
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [thousands(context) for context in contexts])
    axis.set_xlabel("context, tokens")
    axis.grid(True, which="major", alpha=0.3)


def draw_legend(axes: Any) -> None:
    """Draws one legend in the first panel, for the lines of all panels."""
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= {line.get_label(): line for line in axis.get_lines()}
    axes[0].legend(handles.values(), handles.keys(), fontsize=8)


def thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def gpus(rows: Rows) -> str:
    return ", ".join(sorted({row["gpu"] for row in rows.values()}))


def add_share(rows: Rows) -> tuple[str, str]:
    """Returns the field of the rows' reading rate, and its unit in words.

    The unit is percent of the memory's bandwidth, which is added to the rows. It is
    GB/s if the bandwidth of a GPU is not known.
    """
    if any(row["gpu"] not in BANDWIDTH_GB_PER_S for row in rows.values()):
        return "gb_per_s", "GB/s"
    for row in rows.values():
        limit = BANDWIDTH_GB_PER_S[row["gpu"]]
        row["percent_of_bandwidth"] = 100 * row["gb_per_s"] / limit
    limits = {f"{BANDWIDTH_GB_PER_S[row['gpu']] / 1000:g}" for row in rows.values()}
    name = f"percent of the memory's {', '.join(sorted(limits))} TB/s"
    return "percent_of_bandwidth", name


def draw_decode(rows: Rows, batches: list[int], heads: str, path: Path) -> None:
    """Draws decode attention: a column per batch size, with time above rate."""
    figure, grid = plt.subplots(
        2, len(batches), figsize=(5 * len(batches), 7.5), squeeze=False, sharex="col"
    )
    share, name = add_share(rows)
    for batch, (above, below) in zip(batches, grid.T):
        draw_lines(above, rows, batch, "median_us")
        draw_lines(below, rows, batch, share)
        above.set(title=f"batch {batch}", yscale="log", xlabel="")
        below.set_ylim(bottom=0)
    grid[0, 0].set_ylabel("decode attention, microseconds")
    grid[1, 0].set_ylabel(f"bytes read, {name}")
    draw_legend(grid[0])
    num_heads, num_kv_heads, head_size = heads.split("x")
    shape = f"{num_heads}/{num_kv_heads} heads of {head_size}"
    figure.suptitle(f"{gpus(rows)}, {shape}", fontsize=10)
    save(figure, path)


def draw_tpot(rows: Rows, path: Path) -> None:
    """Draws the time per output token, with a panel per batch size."""
    batches = sorted({batch for _, batch, _ in rows})
    figure, axes = plt.subplots(
        1, len(batches), figsize=(1 + 3.5 * len(batches), 4), squeeze=False
    )
    for batch, axis in zip(batches, axes[0]):
        draw_lines(axis, rows, batch, "tpot_ms")
        axis.set(title=f"batch {batch}", yscale="log")
        for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            ticks("{x:g}")
        axis.tick_params(axis="y", which="minor", labelsize=7)
    axes[0, 0].set_ylabel("time per output token, ms")
    draw_legend(axes[0])
    figure.suptitle(gpus(rows), fontsize=10)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    print(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "results", nargs="?", type=Path, default=ROOT / "benchmarks" / "results",
        help="folder to search, with all folders below it",
    )  # fmt: skip
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--heads", default="32x8x128", help="heads in decode.svg")
    args = parser.parse_args()
    drawn = 0
    for path in sorted(args.results.rglob("decode.jsonl")):
        rows = read_rows(path, "attention", args.heads)
        rows = {key: row for key, row in rows.items() if key[1] in args.batches}
        if rows:
            batches = [b for b in args.batches if any(key[1] == b for key in rows)]
            draw_decode(rows, batches, args.heads, path.with_name("decode.svg"))
            drawn += 1
    for path in sorted(args.results.rglob("engine.jsonl")):
        rows = read_rows(path, "decode")
        if rows:
            draw_tpot(rows, path.with_name("tpot.svg"))
            drawn += 1
    if not drawn:
        print(f"pictures.py: nothing to draw in {args.results}", file=sys.stderr)
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
