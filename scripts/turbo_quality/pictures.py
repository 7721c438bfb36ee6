# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draws the results of `quality.py`: KL against bytes, and the needle grids.

Usage: python pictures.py QUALITY.JSON. `kl_bytes.svg` and `needles.svg` go into
the same folder.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# Text stays text, and the same figures give the same file.
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "quality"})
OURS = ("turbo", "tab:green", "o")
# Prefix of an arm's name; then its legend, colour and marker.
FAMILIES = (
    ("turboquant_", ("vLLM's turboquant", "tab:red", "s")),
    ("turbo", OURS),
    ("k4v3", OURS),
    ("", ("other", "tab:gray", "^")),
)

Row = dict[str, Any]


def family(arm: str) -> tuple[str, str, str]:
    """Returns an arm's legend, colour and marker."""
    return next(look for prefix, look in FAMILIES if arm.startswith(prefix))


def draw_kl(rows: list[Row], path: Path) -> None:
    """Draws each arm's KL divergence against its bytes per token."""
    reference, *others = rows
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, part in zip(axes, ("decode", "prefill")):
        for row in others:
            x, y = row["bytes_per_token"], row[part]["kl_mean"]
            if x == reference["bytes_per_token"]:
                axis.axhline(y, color="tab:gray", linestyle=":", label=row["arm"])
                continue
            label, colour, marker = family(row["arm"])
            face = "none" if row["mixed_layers"] else colour
            axis.scatter(
                x, y, edgecolors=colour, facecolors=face, marker=marker, label=label
            )
            axis.annotate(
                row["arm"], (x, y), xytext=(4, 3), textcoords="offset points",
                fontsize=7,
            )  # fmt: skip
        axis.set(title=part, xlabel="bytes a token, all layers", yscale="log")
        axis.grid(True, which="major", alpha=0.3)
    axes[0].set_ylabel(f"mean KL divergence from {reference['arm']}, nats")
    handles, labels = axes[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    title = "hollow: some layers in bf16"
    axes[0].legend(
        unique.values(), unique.keys(), fontsize=8, title=title, loc="upper right"
    )
    save(figure, path)


def draw_needles(rows: list[Row], path: Path) -> None:
    """Draws the share of needles found: arms downwards, depths in lengths across."""
    grids = [row["tasks"]["needle"]["grid"] for row in rows]
    lengths = sorted({cell["length"] for cell in grids[0]})
    depths = sorted({cell["depth"] for cell in grids[0]})
    # The cells are in order of length, then depth.
    scores = [[cell["score"] for cell in grid] for grid in grids]
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.25 * len(rows)))
    image = axis.imshow(scores, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    figure.colorbar(image, label="needles found")
    totals = [f"{row['tasks']['needle']['score']:.1%}" for row in rows]
    names = [f"{row['arm']}  {total}" for row, total in zip(rows, totals)]
    axis.set_yticks(range(len(rows)), names, fontsize=7)
    axis.set_xticks(
        range(len(scores[0])), [f"{depth:g}" for depth in depths] * len(lengths),
        fontsize=6, rotation=90,
    )  # fmt: skip
    for index, length in enumerate(lengths):
        start = index * len(depths) - 0.5
        axis.axvline(start, color="white", linewidth=2)
        middle = start + len(depths) / 2
        axis.text(middle, -0.7, f"{length} tokens", ha="center", fontsize=7)
    axis.set_xlabel("depth of the needle, within each length")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    path = Path(sys.argv[1])
    rows = [row for row in json.loads(path.read_text())["arms"] if "error" not in row]
    draw_kl(rows, path.with_name("kl_bytes.svg"))
    draw_needles(rows, path.with_name("needles.svg"))


if __name__ == "__main__":
    main()
