# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The index of the patches and the counts."""

from pathlib import Path

import pytest
from turbo_series import cli
from turbo_series.model import Series, load_series
from turbo_series.report import index, stats


def test_index(series: Series) -> None:
    rows = [line for line in index(series).splitlines() if line.startswith("| [")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0].split("]")[0][1:] for row in cells] == [
        patch.name for patch in series.patches
    ]
    assert cells[1][2:] == [
        "`setup.py`<br>`vllm/config/cache.py`<br>`vllm/platforms/cuda.py`",
        "+3 -2",
        "Pending",
        "vLLM has it",
        "`tests/turbo/test_format.py::test_bits`",
        "`vllm/turbo/csrc/**`",
    ]
    assert cells[2][2:4] == ["", ""]
    assert cells[2][-1] == "`docs/turbo.md`"


def test_index_of_nothing(project: Path) -> None:
    for path in (project / "patches").glob("*.patch"):
        path.unlink()
    (project / "patches/series").write_text("# Nothing yet.\n")
    assert "There is no patch yet." in index(load_series(project))


def test_stale_index_is_noticed(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(project, ["index", "--check"]) == 1
    assert not (project / "patches/README.md").exists()
    assert cli.main(project, ["index"]) == 0
    assert cli.main(project, ["index", "--check"]) == 0
    path = project / "patches/backend.patch"
    path.write_text(path.read_text().replace("Drop-When: vLLM", "Drop-When: a | vLLM"))
    assert cli.main(project, ["index", "--check"]) == 1
    assert cli.main(project, ["index"]) == 0
    assert "a \\| vLLM has it" in (project / "patches/README.md").read_text()


def test_stats(series: Series) -> None:
    lines = [line.split(None, 1) for line in stats(series).splitlines() if line]
    assert ["1", "cache-dtype.patch"] in lines
    assert ["5", "backend.patch"] in lines
    assert ["0", "docs.patch"] in lines
    assert ["7", "all 4 patches"] in lines
    assert ["5", "vllm/turbo"] in lines
    assert ["3", "vllm/turbo/csrc"] in lines
    assert ["13", "all 5 files"] in lines
