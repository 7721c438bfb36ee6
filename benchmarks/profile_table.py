# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keeps the metrics that were asked of Nsight Compute, without its other columns.

    python benchmarks/profile_table.py RAW.csv TABLE.csv

``ncu --csv --page raw`` writes RAW.csv: a row per kernel, and hundreds of columns about
the device. TABLE.csv keeps the kernel, its grid, and one value of each metric. Rows
stay in the benchmark's order: shapes; for each shape its arms; for each arm store,
decode and merge, and the store of a chunk.
"""

import csv
import sys
from pathlib import Path

# Attributes of the device, the launch and the profiler.
OTHERS = ("c2clink", "device", "launch", "numa", "nvlink", "profiler")
SUMS = ("gpu__time_duration", "smsp__inst_executed", "dram__bytes")
SHORT = {
    "smsp__average_warps_issue_stalled_": "stalled_",
    "_per_issue_active.ratio": "_per_issue",
    ".avg.pct_of_peak_sustained_active": "_percent",
    ".avg.pct_of_peak_sustained_elapsed": "_percent",
}


def is_asked_for(name: str) -> bool:
    """Whether a column is a metric's value, rather than an attribute or a rollup."""
    metric, separator, rest = name.partition(".")
    if "__" not in metric or metric.startswith(OTHERS) or "maximum_warps" in metric:
        return False
    if metric in SUMS:
        return rest == "sum"
    return separator == "." and not rest.startswith(("max", "min", "sum"))


def shorten(name: str, unit: str) -> str:
    """Returns a column's name in the table."""
    for long, short in SHORT.items():
        name = name.replace(long, short)
    name = name.removesuffix(".sum")
    return f"{name} ({unit})" if unit in ("ns", "us", "byte", "Mbyte") else name


def read_rows(path: Path) -> list[list[str]]:
    """Returns the table's rows; the first two are names and units.

    Raises:
        ValueError: If there is no table.

    """
    # Messages come before the table.
    with path.open(newline="") as file:
        rows = list(csv.reader(line for line in file if line.startswith('"')))
    if len(rows) < 3 or "Kernel Name" not in rows[0]:
        raise ValueError(f"{path} has no table of ncu --csv --page raw")
    return rows


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    names, units, *kernels = read_rows(source)
    kept = [names.index(name) for name in ("Kernel Name", "Grid Size")]
    kept += [i for i, name in enumerate(names) if is_asked_for(name)]
    with target.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(shorten(names[i], units[i]) for i in kept)
        for row in kernels:
            writer.writerow(row[i].replace(",", "") for i in kept)


if __name__ == "__main__":
    main()
