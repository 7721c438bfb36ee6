# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The metrics that are kept of Nsight Compute's table."""

import sys
from pathlib import Path

import trees

NAMES = (
    "ID", "Kernel Name", "Grid Size", "device__attribute_chip",
    "gpu__time_duration.avg", "gpu__time_duration.sum",
    "launch__registers_per_thread", "smsp__maximum_warps_avg_per_active_cycle",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_alu.max.pct_of_peak_sustained_active",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
)  # fmt: skip
UNITS = ("", "", "", "", "ns", "ns", "", "warp", "%", "%", "inst")
ROW = ("0", "decode<1, 12>", "(132, 1, 1)", "384", "9", "1,234", "168", "12") + (
    "54.7", "60.0", "0.91",
)  # fmt: skip


def run(tmp_path: Path, *rows: tuple[str, ...]) -> trees.Done:
    lines = [",".join(f'"{cell}"' for cell in row) for row in rows]
    (tmp_path / "raw.csv").write_text("\n".join(["==PROF== Connected", *lines]) + "\n")
    script = trees.ROOT / "benchmarks/profile_table.py"
    return trees.run(sys.executable, script, "raw.csv", "t.csv", cwd=tmp_path)


def test_metrics_stay(tmp_path: Path) -> None:
    assert run(tmp_path, NAMES, UNITS, ROW).returncode == 0
    assert (tmp_path / "t.csv").read_text().splitlines() == [
        "Kernel Name,Grid Size,gpu__time_duration (ns),"
        "sm__inst_executed_pipe_alu_percent,stalled_wait_per_issue",
        "decode<1 12>,(132 1 1),1234,54.7,0.91",
    ]


def test_no_table(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode != 0 and "raw.csv has no table" in result.stderr
    assert not (tmp_path / "t.csv").exists()
