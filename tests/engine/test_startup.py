# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The line that an engine logs about its cache at the start, with its numbers."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness import BASE_ARGS, Engine, Jobs
from scenarios import SLOT_BYTES, TURBO_DTYPES


class Started(NamedTuple):
    """Engines' results by name, and the lines that their process logged."""

    engines: dict[str, Any]
    lines: list[str]

    def line(self, dtype: str) -> str:
        """Returns the one line on a dtype's bytes."""
        wanted = re.compile(f"KV cache {dtype}: .* bytes a token and layer")
        (line,) = filter(wanted.search, self.lines)
        return line

    def windowed(self) -> set[str]:
        """Returns the dtypes with a recent window: runner V2's that prefill raw."""
        raw = ("turbo4", "k4v3")
        return {dtype for dtype in raw if self.engines[dtype]["runner"] == "v2"}


@pytest.fixture(scope="module")
def config(model: Path) -> dict[str, Any]:
    return json.loads((model / "config.json").read_text())


@pytest.fixture(scope="module", params=["v1", "v2"])
def started(request: pytest.FixtureRequest, jobs: Jobs) -> Started:
    engines = {
        dtype: Engine({"kv_cache_dtype": dtype}) for dtype in ("auto", *TURBO_DTYPES)
    }
    engines["turbo3"].args |= {
        "kv_cache_dtype_skip_layers": ["0"],
        "attention_config": {"turbo_prefill": "stored"},
    }
    name = f"startup-{request.param}"
    results = jobs.start(name, request.param, engines).result()
    return Started(results, (jobs.folder / name / "log").read_text().splitlines())


@pytest.mark.parametrize("dtype", TURBO_DTYPES)
def test_one_line_has_the_engines_numbers(
    started: Started, config: dict[str, Any], dtype: str
):
    heads, size = config["num_key_value_heads"], config["head_dim"]
    num_skipped = 1 if dtype == "turbo3" else 0
    num_bytes = heads * size * SLOT_BYTES[dtype] // 128
    num_layers = config["num_hidden_layers"] - num_skipped
    line = started.line(dtype)
    layers = f"layers: {num_layers}, KV heads: {heads}, head size: {size}"
    assert f"{num_bytes} bytes a token and layer ({layers}; PyTorch's op" in line
    ratio = 4 * size * heads / num_bytes
    assert f"{ratio:.2f} times fewer than in bf16" in line
    assert "; 0.0 MiB of workspace" in line
    assert f"attends to {'stored' if dtype == 'turbo3' else 'raw'} K and V" in line
    assert ("recent window" in line) == (dtype in started.windowed())
    of_all = f"; {num_skipped} of {config['num_hidden_layers']} layers are not packed."
    assert line.endswith(of_all) == bool(num_skipped)


def test_capacity_is_what_vllm_says(started: Started):
    sizes = [
        found[1]
        for line in started.lines
        if (found := re.search(r"KV cache size: ([\d,]+) tokens", line))
    ]
    results = started.engines.items()
    assert sizes == [f"{engine['num_tokens']:,}" for _, engine in results]
    # A recent window takes one block of each request.
    whole = [e for dtype, e in results if dtype not in started.windowed()]
    assert all(e["num_tokens"] % BASE_ARGS["block_size"] == 0 for e in whole)


def test_other_dtypes_have_none(started: Started):
    lines = [line for line in started.lines if "bytes a token" in line]
    assert len(lines) == len(TURBO_DTYPES)
