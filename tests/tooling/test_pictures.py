# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The pictures of the benchmarks' results."""

import json
import sys
from pathlib import Path

import pytest
import trees

pytest.importorskip("matplotlib")

import pictures


def draw(folder: Path) -> trees.Done:
    return trees.run(sys.executable, trees.ROOT / "benchmarks/pictures.py", folder)


def write(path: Path, *rows: dict) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def kernel_row(arm: str, context: int, **fields) -> dict:
    shape = f"32x{context}x32x8x128"
    row = {"shape": shape, "arm": arm, "part": "attention", "gpu": "A"}
    return row | {"median_us": 9.0, "gb_per_s": 2400.0} | fields


def test_a_line_an_arm(tmp_path: Path) -> None:
    write(
        tmp_path / "decode.jsonl",
        *(kernel_row(arm, n) for arm in ("bf16", "turbo4") for n in (1024, 2048)),
        kernel_row("fp8", 1024, error="none such"),
        kernel_row("k4v3", 1024, part="store"),
    )
    row = {"arm": "auto", "shape": "16x2048", "part": "decode", "gpu": "A"}
    write(tmp_path / "engine.jsonl", row | {"tpot_ms": 5.0})
    assert draw(tmp_path).returncode == 0
    decode = (tmp_path / "decode.svg").read_text()
    drawn = {label for label in ("bf16", "turbo4", "fp8", "k4v3") if label in decode}
    assert drawn == {"bf16", "turbo4"}
    assert ">batch 32<" in decode and ">2k<" in decode
    assert ">bf16<" in (tmp_path / "tpot.svg").read_text()


def test_bytes_are_held_to_the_bandwidth(tmp_path: Path) -> None:
    """The bandwidth is the GPU's, if it is known.

    The rate of a copy is no limit: some kernels beat it.
    """
    row = kernel_row("bf16", 1024, gpu="NVIDIA H200", copy_gb_per_s=1200.0)
    rows = {("bf16", 32, 1024): row}
    assert pictures.add_share(rows) == (
        "percent_of_bandwidth",
        "percent of the memory's 4.8 TB/s",
    )
    assert row["percent_of_bandwidth"] == 50.0
    rows["bf16", 1, 1024] = kernel_row("bf16", 1024)
    assert pictures.add_share(rows) == ("gb_per_s", "GB/s")
    write(tmp_path / "decode.jsonl", row)
    assert draw(tmp_path).returncode == 0
    drawn = (tmp_path / "decode.svg").read_text()
    assert "bytes read, percent of the memory's 4.8 TB/s" in drawn


def test_nothing_to_draw(tmp_path: Path) -> None:
    write(tmp_path / "decode.jsonl", kernel_row("fp8", 1024, error="none such"))
    result = draw(tmp_path)
    assert result.returncode == 1 and "nothing to draw" in result.stderr
