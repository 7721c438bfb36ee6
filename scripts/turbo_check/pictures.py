# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draws the results of `check_model.py`: KL by context, and against bytes.

Usage: python pictures.py CHECK.JSON. `kl.svg` goes into the same folder.
"""

import json
import sys
from pathlib import Path
from typing import Any

# The packages beside this one.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from turbo_quality.pictures import family, plt, save  # noqa: E402

Row = dict[str, Any]


def draw(rows: list[Row], path: Path) -> None:
    """Draws each arm but the first, the reference, which has no divergence."""
    reference, *others = rows
    figure, (by_context, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for row in others:
        if row["kl_mean"] <= 0:
            continue
        contexts = [int(context) for context in row["decode"]]
        means = [part["kl_mean"] for part in row["decode"].values()]
        by_context.plot(contexts, means, marker="o", label=row["arm"])
        _, colour, marker = family(row["cache_dtype"])
        point = row["bytes_per_token"], row["kl_mean"]
        by_bytes.scatter(*point, color=colour, marker=marker)
        by_bytes.annotate(
            row["arm"], point, xytext=(4, 3), textcoords="offset points", fontsize=7
        )
    by_context.set(xlabel="context, tokens", xscale="log", yscale="log")
    by_context.set_ylabel(f"mean KL divergence from {reference['arm']}, nats")
    by_bytes.set(xlabel="bytes a token, all layers")
    for axis in (by_context, by_bytes):
        axis.grid(True, which="major", alpha=0.3)
    if by_context.lines:
        by_context.legend(fontsize=8)
    save(figure, path)


def main() -> None:
    path = Path(sys.argv[1])
    rows = [row for row in json.loads(path.read_text())["arms"] if "error" not in row]
    draw(rows, path.with_name("kl.svg"))


if __name__ == "__main__":
    main()
