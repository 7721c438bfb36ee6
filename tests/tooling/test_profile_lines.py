# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The text of benchmarks/profile_lines.py about a kernel."""

import csv
import sys
from pathlib import Path

import trees

PEAK = ".avg.pct_of_peak_sustained_elapsed"
UNITS = {
    "gpu__time_duration.sum": "168.384",
    f"sm__issue_active{PEAK}": "52.83",
    f"l1tex__data_pipe_lsu_wavefronts{PEAK}": "73.66",
    f"sm__pipe_tensor_cycles_active{PEAK}": "23.47",
    f"sm__pipe_fma_cycles_active{PEAK}": "41.01",
    f"sm__pipe_alu_cycles_active{PEAK}": "26.86",
    f"lts__throughput{PEAK}": "59.4",
    f"gpu__dram_throughput{PEAK}": "44.41",
}
COLUMNS = (
    "Address", "Source", "# Samples", "Instructions Executed", "L1 Wavefronts Shared",
    "stall_wait", "stall_barrier", "stall_wait (Not Issued)",
)  # fmt: skip
ROWS = (
    ("0", "  HMUL2 R1, R2, R3", "60", "3000000", "0", "50", "10", "9"),
    ("10", "  @!P0 LDS.128 R4, [R5]", "0", "1000000", "4000000", "", "", ""),
    ("20", "  HMUL2.BF16 R6, R7", "140", "2000000", "0", "20", "120", "9"),
)


def write(path: Path, *rows: tuple[str, ...]) -> None:
    with path.open("w", newline="") as file:
        file.write("==PROF== Connected\n")
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)


def run(tmp_path: Path, *source: tuple[str, ...]) -> trees.Done:
    names = "Kernel Name", *UNITS
    write(tmp_path / "raw.csv", names, ("",) * len(names), ("f", *UNITS.values()))
    write(tmp_path / "source.csv", ("Kernel Name", "f"), *source)
    script = trees.ROOT / "benchmarks/profile_lines.py"
    return trees.run(sys.executable, script, "raw.csv", "source.csv", cwd=tmp_path)


def test_units_sums_and_lines(tmp_path: Path) -> None:
    result = run(tmp_path, COLUMNS, *ROWS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "microseconds: 168.4",
        "issue slots, %: 52.8",
        "shared memory and L1, %: 73.7",
        "tensor core, %: 23.5",
        "FMA pipe, %: 41.0",
        "ALU pipe, %: 26.9",
        "L2, %: 59.4",
        "DRAM, %: 44.4",
        "reasons of samples, %: barrier 65.0, wait 35.0",
        "Instructions Executed, M: 6.0; HMUL2 5.0, LDS 1.0",
        "L1 Wavefronts Shared, M: 4.0; LDS 4.0, HMUL2 0.0",
        " 70.0 % barrier    HMUL2.BF16 R6, R7, after @!P0 LDS.128 R4, [R5]",
    ]


def test_no_table(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode != 0 and "source.csv has no table" in result.stderr
