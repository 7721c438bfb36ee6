# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""benchmarks/turbo_offload.py: an arm of copies, one of an engine, and the ratios."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from harness import BASE_ARGS, ROOT, child_variables, run_python
from turbo_offload import COPIES, parse_arm, ratios
from turbo_process.log import ROW
from turbo_quality.cases import MODEL

CHILD = Path(__file__).with_name("offload_child.py")
CONTEXT, TOKENS = 150, 128


def rows_of_arm(arm: str, *options: str) -> list[dict[str, Any]]:
    words = (CHILD, ROOT / "benchmarks" / "turbo_offload.py", "--child", arm)
    variables = child_variables("v2") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    more = ("--output", os.devnull, *options)
    result = run_python(*words, *more, env=os.environ | variables)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith(ROW)]
    return [json.loads(line.removeprefix(ROW)) for line in lines]


def test_arms() -> None:
    assert parse_arm("turbo4") == ("turbo4", "LBHNC", 16)
    assert parse_arm("k4v3@BLHNC") == ("k4v3", "BLHNC", 16)
    assert parse_arm("auto@BHLNC@64") == ("auto", "BHLNC", 64)


def test_copies() -> None:
    options = ["--copied-tokens", str(TOKENS), "--rounds", "2"]
    options += ["--copied-dtypes", "auto", "turbo4", "--block-sizes", "16", "64"]
    rows = rows_of_arm(COPIES, *options)
    found = {(r["dtype"], r["layout"], r["block_size"]): r["page_bytes"] for r in rows}
    pages = {"auto": 64 << 10, "turbo4": 17 << 10}
    assert found == {
        (dtype, layout, size): page * size // 16 * (1 if layout == "LBHNC" else 32)
        for dtype, page in pages.items()
        for layout in ("LBHNC", "BLHNC")
        for size in (16, 64)
    }
    for row in rows:
        assert row["bytes"] == 2 * pages[row["dtype"]] * 32 * TOKENS // 32
        assert row["load_gb_per_s"] > 0 and row["store_tokens_per_s"] > 0


@pytest.mark.matrix
def test_an_engine_restores() -> None:
    names = ("dtype", "enforce_eager", "compilation_config")
    engine_args = {name: BASE_ARGS[name] for name in names}
    options = ["--model", MODEL, "--context", CONTEXT, "--repeats", 2]
    options += ["--host-bytes", 32 << 20, "--kv-cache-memory-bytes", 32 << 20]
    options += ["--max-num-batched-tokens", 512]
    options += ["--engine-args", json.dumps(engine_args)]
    (row,) = rows_of_arm("turbo4@BLHNC@64", *map(str, options))
    assert row["part"] == "restore" and row["tokens"] == 128
    assert (row["dtype"], row["layout"], row["block_size"]) == ("turbo4", "BLHNC", 64)
    for name in ("computed", "restored", "cached"):
        assert len(row[f"all_{name}_s"]) == 2


def test_ratios_are_of_the_best() -> None:
    def copy(dtype: str, layout: str, rate: float) -> dict[str, Any]:
        row = {"part": "copy", "dtype": dtype, "layout": layout, "block_size": 16}
        return row | {"load_tokens_per_s": rate}

    rows = [copy("auto", "LBHNC", 10.0), copy("auto", "BLHNC", 20.0)]
    rows += [copy("turbo4", "BLHNC", 70.0), copy("turbo4", "LBHNC", 30.0)]
    rows += [{"part": "restore", "dtype": "turbo4", "error": "stopped"}]
    (ratio,) = ratios(rows)
    assert ratio["dtype"] == "turbo4" and ratio["layout"] == "BLHNC"
    assert ratio["times_bf16"] == pytest.approx(3.5)
