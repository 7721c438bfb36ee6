# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The complaints of `memory.py`, and a small run of it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import memory
import pytest
from harness import ROOT, TIMEOUT_S, as_words
from memory import LINE, MAX_EXTRA_MIB, MIB, complaints
from turbo_process import runner
from turbo_process.log import ROW

GIB = 1 << 30
# A block of 16 tokens, 32 layers and 8 KV heads.
BLOCK_BYTES = 16 * 32 * 8 * 136
# As large as blocks of 32 tokens in bf16.
BF16_BLOCK_BYTES = 32 * 32 * 8 * 512
FOR_CACHE = 90 * GIB


@pytest.fixture
def baseline() -> dict[str, Any]:
    start = {
        "reserved": 100 * GIB,
        "taken": 101 * GIB,
        "requested": 103 * GIB,
        "activations": 2 * GIB,
        "for_cache": FOR_CACHE + 100 * MIB,
    }
    grown = {"reserved": 101 * GIB, "taken": 102 * GIB}
    return {
        "memory": {"start": start, "full_step": start | grown, "end": start | grown},
        "blocks": (FOR_CACHE + 100 * MIB) // BF16_BLOCK_BYTES,
        "bytes_a_block": BF16_BLOCK_BYTES,
    }


@pytest.fixture
def row(baseline: dict[str, Any]) -> dict[str, Any]:
    result = deepcopy(baseline)
    blocks = FOR_CACHE // BLOCK_BYTES
    for seen in result["memory"].values():
        seen["for_cache"] = FOR_CACHE
        # Blocks are whole: bf16's take all of the memory, and these leave some.
        seen["taken"] -= FOR_CACHE - blocks * BLOCK_BYTES
    return result | {
        "blocks": blocks,
        "block_size": 16,
        "tokens": 16 * blocks,
        "max_model_len": 131072,
        "window_blocks": 0,
        "bytes_a_block": BLOCK_BYTES,
        "cached_tokens": [1000, 2000],
        "workspace_mib": 100.0,
    }


def test_nothing_is_wrong(row, baseline):
    assert complaints(row, baseline) == []
    assert row["extra_mib"] == 100
    assert row["reserved_grown_mib"] == 1024
    assert row["reserved_grown_since_full_step_mib"] == 0


def test_recent_windows_take_blocks(row, baseline):
    """Each of the longest requests has one more block."""
    row["window_blocks"] = 1
    assert any("the blocks hold" in text for text in complaints(row, baseline))
    row["tokens"] = int(row["blocks"] / (131072 / 16 + 1) * 131072)
    assert complaints(row, baseline) == []


def test_what_no_block_fits_in_counts_as_taken(row, baseline):
    """Larger blocks of bf16 may leave more memory over."""
    baseline["blocks"] -= 1
    for seen in baseline["memory"].values():
        seen["taken"] -= BF16_BLOCK_BYTES
    assert complaints(row, baseline) == []
    for seen in row["memory"].values():
        seen["taken"] += 3 * MIB
    assert any("of the device" in text for text in complaints(row, baseline))


def test_each_allocator_has_a_granule_more(row, baseline):
    """PyTorch has the rest of a segment at the start, the driver one where it loads."""
    for seen in row["memory"].values():
        seen["taken"] += MIB
    row["memory"]["end"]["taken"] += 2 * MIB
    assert complaints(row, baseline) == []
    for seen in row["memory"].values():
        seen["taken"] += 2 * MIB
    assert any("of the device" in text for text in complaints(row, baseline))


def test_mla_grows_late_as_bf16_does(row, baseline):
    """MLA may grow by as much as bf16 after the first full step; others may not."""
    for seen in (row, baseline):
        seen["memory"]["end"] = deepcopy(seen["memory"]["end"])
        for what in ("reserved", "taken"):
            seen["memory"]["end"][what] += 100 * MIB
    late = "after the first full step"
    assert any(late in text for text in complaints(row, baseline))
    row["use_mla"] = True
    assert complaints(row, baseline) == []
    row["memory"]["end"]["reserved"] += 1
    assert any(late in text for text in complaints(row, baseline))


def test_a_context_that_bf16_cannot_hold(row):
    assert complaints(row, None) == []
    row["memory"]["end"]["reserved"] += MIB
    assert complaints(row, None) != []


@pytest.mark.parametrize(
    "path, change, said",
    [
        (("memory", "end", "reserved"), 1, "after the first full step"),
        (("memory", "end", "reserved"), 2 * GIB, "left for activations"),
        (("memory", "end", "reserved"), 3 * MIB, "after the start than in bf16"),
        (("memory", "end", "taken"), 3 * MIB, "the driver takes more after the start"),
        (("memory", "end", "for_cache"), -MAX_EXTRA_MIB * MIB, "beside the cache"),
        (("memory", "end", "for_cache"), -BLOCK_BYTES, "there is room for"),
        (("workspace_mib",), 200, "workspace"),
        (("tokens",), -16, "the blocks hold"),
        (("cached_tokens", 0), -1000, "not hit"),
    ],
)
def test_each_fault_is_named(row, baseline, path, change, said):
    *outer, last = path
    part = row
    for name in outer:
        part = part[name]
    part[last] += change
    assert any(said in text for text in complaints(row, baseline))


def test_kernels_that_bf16_does_not_launch_late(row, baseline):
    baseline["new_kernels"] = row["new_kernels"] = ["gemm"]
    assert complaints(row, baseline) == []
    row["new_kernels"] = ["flash", "gemm"]
    assert complaints(row, baseline) == [
        "first launched after the first full step: flash"
    ]


def test_the_start_up_line_is_read():
    text = (
        "INFO [startup.py:60] KV cache turbo4: 1088 bytes a token and layer (layers: "
        "32, KV heads: 8, head size: 128; CUDA kernels, because they could be built), "
        "3.76 times fewer than in bf16; 337.1 MiB of workspace; prefill attends to raw "
        "K and V."
    )
    found = LINE.search(text)
    assert found and found[1] == "337.1"


@pytest.mark.parametrize(
    "ended, changes, status",
    [
        (None, {}, 0),
        (None, {"cached_tokens": [1000, 1000]}, 1),
        (None, None, 1),
        ("status 1", {}, 1),
    ],
)
def test_the_exit_status_says_whether_all_is_well(
    row, baseline, ended, changes, status, tmp_path, monkeypatch, capsys
):
    """All but the engines is the script's own; turbo4's may fail."""

    def run_child(command: list[Any], log: Path, *_: Any) -> str | None:
        if command[-2] == "auto":
            log.write_text(f"{ROW}{json.dumps(baseline)}\n")
            return None
        own = "" if changes is None else f"{ROW}{json.dumps(row | changes)}\n"
        log.write_text(f"KV cache turbo4: a line; 100.0 MiB of workspace\n{own}")
        return ended

    del row["workspace_mib"]
    monkeypatch.setattr(runner, "run_child", run_child)
    command = ["memory.py", "--max-model-lens", "131072", "--logs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert memory.main() == status
    _, found = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert bool(found["wrong"]) == bool(status)


@pytest.mark.matrix
def test_a_small_run(model, tmp_path):
    """On a CPU all but the device's memory is checked."""
    output = tmp_path / "memory.jsonl"
    options = {
        "--model": model,
        "--max-model-lens": 1024,
        "--longest": 700,
        # More than a block on a CPU, so that the prompt hits when it comes again.
        "--suffixes": 200,
        "--tokens": 4,
        "--max-num-seqs": 5,
        "--max-num-batched-tokens": 1024,
        "--kv-cache-memory-bytes": 32 * MIB,
        "--arm-timeout": TIMEOUT_S,
        "--output": output,
        "--logs": tmp_path,
    }
    command = [sys.executable, ROOT / "benchmarks/memory.py", *as_words(options)]
    assert subprocess.run(command).returncode == 0
    plain, packed = map(json.loads, output.read_text().splitlines())
    assert packed["tokens"] > 3 * plain["tokens"]
    assert 0 < packed["cached_tokens"][0] < packed["cached_tokens"][1]


def test_kernels_are_named(monkeypatch: pytest.MonkeyPatch):
    """Kernels of the GPU are named, once each, and no others."""
    import torch
    from torch.autograd import DeviceType
    from torch.autograd.profiler_util import FunctionEvent

    ran = [("gemm", "CUDA"), ("store", "CUDA"), ("gemm", "CUDA"), ("launch", "CPU")]

    @contextmanager
    def profile(activities: list[Any]) -> Iterator[Any]:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        events = [
            FunctionEvent(0, name, 0, 0, 0, device_type=getattr(DeviceType, device))
            for name, device in ran
        ]
        yield SimpleNamespace(events=lambda: events)

    monkeypatch.setattr(torch.profiler, "profile", profile)
    names = {"rotate"}
    with memory.launched(names):
        assert names == {"rotate"}
    assert names == {"rotate", "gemm", "store"}


def test_a_context_without_room_in_bf16(
    row: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bf16's row has vLLM's refusal alone, and the turbo dtype has no baseline."""
    refusal = (
        "To serve at least one request with the model's max seq len (1048576), (128.0 "
        "GiB KV cache is needed, which is larger than the available KV cache memory "
        "(112.46 GiB)"
    )
    log = f"status 1\nINFO: lines\nValueError: {refusal}. Based on the available ..."
    rows = {"auto": {"wrong": [log]}, "turbo4": row}
    monkeypatch.setattr(memory, "run_arm", lambda dtype, *_: dict(rows[dtype]))
    monkeypatch.setattr(memory, "exit_when_told", lambda: None)
    judged: list[dict[str, Any] | None] = []
    monkeypatch.setattr(
        memory, "complaints", lambda _row, baseline: judged.append(baseline) or []
    )
    argv = ["memory.py", "--max-model-lens", "1048576", "--dtypes", "turbo4"]
    monkeypatch.setattr(sys, "argv", argv)
    assert memory.main() == 0
    printed = capsys.readouterr().out.splitlines()
    reported = [json.loads(line) for line in printed if line.startswith("{")]
    assert [row["wrong"] for row in reported] == [[refusal], []]
    assert judged == [None]
