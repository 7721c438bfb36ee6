# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""README's figures, computed again from the committed results."""

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import documents
import pytest
from trees import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "h200"

# The commit of today's kernels of extends.
EXTENDS = "7916f84"
FORMAT = "vllm_overlay/vllm/v1/attention/ops/turbo/format.py"
HEAD_SIZE = 128
COLUMNS = ("bf16", "fp8", "turbo4", "k4v3", "turbo3")
# The arms, by column. check_model.py has the recent window without being asked.
ARMS = ("auto", "fp8", "turbo4:window", "k4v3:window", "turbo3:window")
CHECK = ("auto", "fp8", "turbo4", "k4v3", "turbo3")


class Measured(NamedTuple):
    """The source of a row.

    Attributes:
        file: A file below benchmarks/results/h200.
        arms: The arm of each column.
        where: The fields, and their values, that pick one row of an arm; a value of
            None: the row lacks the field.
        field: The keys that lead to the figure in that row.
        factor: The measured unit's size in the printed one.
        digits: Digits after the decimal point.
        unit: The text behind each figure.

    """

    file: str
    arms: tuple[str, ...]
    where: dict[str, Any]
    field: tuple[str, ...]
    factor: float = 1.0
    digits: int = 0
    unit: str = ""


# In README's order, by the first cell.
ROWS: dict[str, Measured | None] = {
    "bytes a token and KV head": None,
    "tokens in the cache, thousands": Measured(
        "engine_defaults.jsonl",
        ARMS,
        {
            "part": "startup",
            "gpu_memory_utilization": 0.85,
            "kv_cache_memory_bytes": None,
        },
        ("kv_cache_tokens",),
        factor=1e-3,
    ),
    "ms per output token, 16 x 32768": Measured(
        "engine_defaults.jsonl",
        ARMS,
        {"part": "decode", "shape": "16x32768"},
        ("tpot_ms",),
        digits=1,
    ),
    "ms per output token, 64 x 4096": Measured(
        "engine_defaults.jsonl",
        ARMS,
        {"part": "decode", "shape": "64x4096"},
        ("tpot_ms",),
        digits=1,
    ),
    "divergence of SmolLM2-135M, millinats": Measured(
        "check-smollm2-direction/check.json",
        CHECK,
        {},
        ("kl_mean",),
        factor=1e3,
        digits=1,
    ),
    "divergence of needle-llama, millinats": Measured(
        "quality-direction/llama.json",
        ARMS,
        {},
        ("decode", "kl_mean"),
        factor=1e3,
        digits=1,
    ),
    "facts found in long texts": Measured(
        "quality-direction/llama.json",
        ARMS,
        {},
        ("tasks", "needle", "score"),
        factor=100,
        unit=" %",
    ),
}


@cache
def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results: lines of JSON, or the arms of a quality run."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)["arms"]


def measure(measured: Measured, results: Path = RESULTS) -> list[str]:
    """The figures of a row of README, by column."""
    cells = []
    for arm in measured.arms:
        where = {"arm": arm, **measured.where}
        found = [
            row
            for row in read_rows(results / measured.file)
            if all(row.get(key) == value for key, value in where.items())
        ]
        assert len(found) == 1, f"{len(found)} rows of {measured.file} have {where}"
        value: Any = found[0]
        for key in measured.field:
            value = value[key]
        figure = value * measured.factor
        # The unquantised cache has no divergence from itself.
        digits = measured.digits if figure else 0
        cells.append(f"{figure:.{digits}f}{measured.unit}")
    return cells


def _load_format() -> ModuleType:
    """The module that defines the bytes, which needs the standard library alone."""
    spec = importlib.util.spec_from_file_location("turbo_format", ROOT / FORMAT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look themselves up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def count_bytes() -> list[str]:
    """The bytes of K and V of a token and KV head, by column."""
    make: Callable[[str, int], Any] = _load_format().TurboFormat.from_cache_dtype
    packed = [make(dtype, HEAD_SIZE).slot_size for dtype in COLUMNS[2:]]
    return [str(size) for size in (2 * HEAD_SIZE * 2, 2 * HEAD_SIZE, *packed)]


def read_table(text: str) -> dict[str, list[str]]:
    """The rows of the table whose columns are the dtypes, without emphasis."""
    rows = [
        (block.line, [documents.plain(cell) for cell in block.cells])
        for block in documents.parse(text)
        if block.kind == "row"
    ]
    table: dict[str, list[str]] = {}
    end = 0
    for line, (name, *cells) in rows:
        if not end and tuple(cells) == COLUMNS:
            # The separator follows.
            end = line + 2
        elif line == end:
            table[name] = cells
            end += 1
    return table


def test_figures_of_the_readme():
    table = read_table((ROOT / "README.md").read_text(encoding="utf-8"))
    assert list(table) == list(ROWS)
    wanted = {
        name: measure(measured) if measured else count_bytes()
        for name, measured in ROWS.items()
    }
    assert table == wanted


def times(slow: float, fast: float) -> str:
    return f"{slow / fast:.1f}"


def gain_in_tokens() -> list[str]:
    """Tokens that the least and the most packed dtype hold, as a multiple of bf16's."""
    bf16, _, *packed = map(int, count_bytes())
    return [times(bf16, packed[0]), times(bf16, packed[-1])]


def cost_of_the_window() -> list[str]:
    """Per cent that the window adds to the time per output token, at its most."""
    found: dict[str, dict[str, float]] = {}
    for row in read_rows(RESULTS / "engine_window.jsonl"):
        if row["part"] == "decode":
            found.setdefault(row["shape"], {})[row["arm"]] = row["tpot_ms"]
    most = max(shape["turbo4:window"] / shape["turbo4"] for shape in found.values())
    return [f"{100 * (most - 1):.1f}"]


def spread_of_repeats() -> list[str]:
    """Per cent that the slowest repeat of a dtype's run takes more than the fastest."""
    repeats = [
        row["all_tpot_ms"]
        for row in read_rows(RESULTS / "engine_defaults.jsonl")
        if row["part"] == "decode"
    ]
    most = max(max(times) / min(times) for times in repeats)
    return [f"{100 * (most - 1):.0f}"]


def cost_of_extends() -> list[str]:
    """The most new tokens that README names, and their time over bf16's at its most.

    The rows are of today's kernels.
    """
    most_tokens = 64
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in read_rows(RESULTS / "extend.jsonl"):
        is_said = (
            row["commit"].startswith(EXTENDS) and row["query_tokens"] <= most_tokens
        )
        if is_said and row["way"] in ("bf16", "extend"):
            shape = row["shape"], row["query_tokens"]
            found.setdefault(shape, {})[row["way"]] = row["median_us"]
    most = max(us["extend"] / us["bf16"] for us in found.values())
    return [str(most_tokens), f"{most:.1f}"]


def workspace() -> list[str]:
    """The largest workspace of all measured engines, in MiB."""
    rows = read_rows(RESULTS / "memory.jsonl")
    return [f"{max(row.get('workspace_mib') or 0 for row in rows):.0f}"]


def rows_of_mla() -> list[str]:
    """The most query heads whose decode takes less time than bf16's."""
    found: dict[int, dict[str, float]] = {}
    for row in read_rows(RESULTS / "mla.jsonl"):
        sequences, _, heads, query_len = map(int, row["shape"].split("x"))
        is_said = sequences == 32 and query_len == 1 and row["part"] == "attention"
        if is_said and row["arm"] in ("bf16", "turbo4"):
            found.setdefault(heads, {})[row["arm"]] = row["median_us"]
    return [str(max(n for n, us in found.items() if us["turbo4"] < us["bf16"]))]


# Sentences of README, and the functions that compute their figures.
SENTENCES: dict[str, Callable[[], list[str]]] = {
    r"They hold (\S+) to (\S+) times bf16's tokens": gain_in_tokens,
    r"on by default and adds at most (\S+) %": cost_of_the_window,
    r"Repeats of one run differ by up to (\S+) %": spread_of_repeats,
    r"up to (\d+) new tokens takes up to (\S+) times bf16's": cost_of_extends,
    r"Memory: (\d+) MiB of workspace": workspace,
    r"MLA with more than (\d+) query heads": rows_of_mla,
}


@pytest.mark.parametrize("pattern", SENTENCES)
def test_figures_of_a_sentence(pattern: str):
    words = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    found = re.search(pattern, words)
    assert found, "README has no such sentence"
    assert list(found.groups()) == SENTENCES[pattern]()


def test_table_is_found():
    text = """\
| a | b |
|---|---|
| no | 1 |

| | bf16 | fp8 | `turbo4` | `k4v3` | `turbo3` |
|---|---|---|---|---|---|
| a row | 1 | 2 | **3** | 4 | 5 % |

| another | table |
|---|---|
| no | 1 |
"""
    assert read_table(text) == {"a row": ["1", "2", "3", "4", "5 %"]}


def test_rows_are_picked_by_all_values(tmp_path: Path):
    rows = [
        {"arm": "a", "part": "decode", "shape": "1x2", "ms": 1.26},
        {"arm": "a", "part": "decode", "shape": "3x4", "ms": 2.0},
        {"arm": "b", "part": "decode", "shape": "1x2", "ms": 0.0},
        {"arm": "b", "part": "decode", "shape": "1x2", "bytes": 8, "ms": 4.0},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    where = {"part": "decode", "shape": "1x2", "bytes": None}
    measured = Measured("a.jsonl", ("a", "b"), where, ("ms",), digits=1, unit=" ms")
    assert measure(measured, tmp_path) == ["1.3 ms", "0 ms"]
    del where["bytes"]
    with pytest.raises(AssertionError, match="2 rows of a.jsonl"):
        measure(measured, tmp_path)
    with pytest.raises(AssertionError, match="0 rows of a.jsonl"):
        measure(measured._replace(arms=("c",)), tmp_path)
