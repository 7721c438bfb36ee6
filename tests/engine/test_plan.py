# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""scripts/plan.py, held to what engines on an H200 had and took."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS

ROOT = SCRIPTS.parent
sys.path.insert(0, str(SCRIPTS))

from turbo_plan.estimate import Experts, LayerCache, Model, Weights  # noqa: E402
from turbo_plan.gpus import ATTENTION, GPUS  # noqa: E402
from turbo_plan.report import user_counts  # noqa: E402

RESULTS = ROOT / "benchmarks/results/h200"
# The longest contexts of the shapes that a file's engines were made for, unless their
# commands say.
LONGEST = {"engine": 65536, "engine_window": 65536, "models": 32768}
STEPS = 64
# Of the capacity; of time, where weights and attention are most of it.
TOKENS, TPOT = 0.001, 0.12
H200 = GPUS["H200"]


@dataclass
class Run:
    """How an engine was started, and what was measured.

    Attributes:
        model: The configuration's name.
        arm: The benchmark's.
        layers: The first so many, if not all.
        context: `max_model_len`.
        prefix_caching: Whether there was a prefix cache.
        utilization: `gpu_memory_utilization`.
        cache_bytes: Of the cache, if it was not what was left.
        tokens: That the cache held.
        tpots: Milliseconds, by shape.

    """

    model: str
    arm: str
    layers: int | None
    context: int
    prefix_caching: bool
    utilization: float
    cache_bytes: int | None
    tokens: int
    tpots: dict[str, float] = field(default_factory=dict)


def runs_of(name: str) -> list[Run]:
    """The runs of a file that measured decode steps, the last of each kind."""
    found: dict[tuple, Run] = {}
    for line in (RESULTS / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        words = shlex.split(row["command"])
        kind = row["arm"], row.get("model"), row.get("layers")
        if row["arm"].partition(":")[0] not in ATTENTION or "--throughput" in words:
            continue
        if row.get("part") == "startup":
            after = (
                words.index("--kv-cache-memory-bytes") + 1 if "models" in name else 0
            )
            size = row.get("kv_cache_memory_bytes") or (after and int(words[after]))
            longest = 30720 if "16x30720" in words else LONGEST[name]
            found[kind] = Run(
                row.get("model", "llama-8b"),
                row["arm"],
                row.get("layers"),
                longest + STEPS + 1,
                name != "models",
                row["gpu_memory_utilization"],
                size or None,
                row["kv_cache_tokens"],
            )
        elif row.get("part") == "decode":
            found[kind].tpots[row["shape"]] = row["tpot_ms"]
    return list(found.values())


RUNS = [run for name in LONGEST for run in runs_of(name)]


@pytest.fixture(scope="module")
def planned() -> list[dict[str, Any]]:
    child = Path(__file__).with_name("plan_child.py")
    runs = json.dumps([asdict(run) for run in RUNS])
    result = subprocess.run(
        [sys.executable, child],
        input=runs,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_rows_are_of_every_kind():
    assert {run.model for run in RUNS} > {"llama-8b", "qwen3.6-35b-a3b", "gemma-4-31b"}
    assert {run.arm for run in RUNS} == {*ATTENTION, "turbo4:window"}
    assert sum(run.model == "llama-8b" for run in RUNS) == 8


def test_as_many_tokens_fit(planned: list[dict[str, Any]]):
    """Of hybrids and windows, too; where the cache's bytes are estimated, and where
    they are given.
    """
    wrong = {
        (run.model, run.layers, run.arm): (row, run.tokens)
        for run, row in zip(RUNS, planned, strict=True)
        if row.get("tokens") != pytest.approx(run.tokens, rel=TOKENS)
    }
    assert not wrong


def test_steps_take_as_long(planned: list[dict[str, Any]]):
    """Of the model whose weights and layers were all there, alone on its GPU."""
    wrong, compared = {}, 0
    for run, row in zip(RUNS, planned, strict=True):
        if run.model == "llama-8b":
            for shape, tpot in run.tpots.items():
                compared += 1
                if row["tpots"][shape] != pytest.approx(tpot, rel=TPOT):
                    wrong[run.arm, shape] = (row["tpots"][shape], tpot)
    assert compared == 50 and not wrong


def test_weights_that_are_read(planned: list[dict[str, Any]]):
    """All of a Llama's but the rows of its embedding; experts apart."""
    rows = {run.model: row for run, row in zip(RUNS, planned, strict=True)}
    hidden, inner, kv_size, vocab = 4096, 14336, 1024, 128256
    layer = 2 * hidden * (hidden + kv_size) + 3 * hidden * inner + 2 * hidden
    assert rows["llama-8b"]["dense"] == 2 * (32 * layer + hidden + vocab * hidden)
    assert rows["llama-8b"]["experts"] == []
    experts = {"size": 2 * 256 * 3 * 2048 * 512, "count": 256, "chosen": 8}
    assert rows["qwen3.6-35b-a3b"]["experts"] == [experts] * 8


def test_efficiencies_are_the_measured_ones():
    """By decode attention alone, without an engine."""
    names = {"bf16" if name == "auto" else name: name for name in ATTENTION}
    shapes = {"32x65536x32x8x128": 0, "32x32768x16x2x256": 1}
    measured = {}
    for line in (RESULTS / "decode.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("part") != "attention" or row["arm"] not in names:
            continue
        if row["shape"] in shapes:
            share = row["gb_per_s"] * 1e9 / H200.bandwidth
            measured[names[row["arm"]], shapes[row["shape"]]] = share
    assert len(measured) == 2 * len(ATTENTION)
    for (name, index), share in measured.items():
        assert ATTENTION[name][index] == pytest.approx(share, abs=0.001), name


def test_what_a_step_reads():
    experts = Experts(size=800, count=8, chosen=2)
    assert experts.read(1) == 200
    assert experts.read(2) == 350
    assert experts.read(100) == pytest.approx(800)
    full, window = LayerCache(token=4, head_size=128), LayerCache(4, 0, 16, 128)
    state = LayerCache(state=1000)
    model = Model(Weights(size=1, dense=0, layers=0), [full, window, state])
    assert model.token_bytes == 4
    assert model.user_bytes(100) == 4 * 16 + 1000
    assert model.user_bytes(10) == 4 * 10 + 1000

    def tpot(cache: LayerCache, dtype: str, context: int) -> float:
        alone = Model(Weights(size=1, dense=0, layers=0), [cache])
        return alone.tpot(H200, dtype, 1, context)

    fixed = tpot(full, "turbo4", 0)
    read = tpot(full, "turbo4", 10**6) - fixed
    assert read == pytest.approx(4e6 / ATTENTION["turbo4"][0] / H200.bandwidth)
    assert tpot(window, "turbo4", 10**6) == tpot(window, "turbo4", 16)
    twice = LayerCache(token=4, head_size=128, readings=2)
    assert tpot(twice, "turbo4", 10**6) - fixed == pytest.approx(2 * read)
    own = LayerCache(token=4, head_size=128, dtype="auto")
    assert tpot(own, "turbo4", 10**6) == tpot(full, "auto", 10**6)


def test_users_that_are_drawn():
    assert user_counts(0.9) == []
    assert user_counts(1) == [1]
    assert user_counts(9.7) == [1, 2, 4, 8, 9]


def run_plan(*args: str | Path, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPTS / "plan.py", *args],
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )


def test_a_plan_for_two_gpus(tmp_path: Path):
    """Of a checkpoint: five layers of two KV heads of 64, of which each GPU has one."""
    model, picture = ROOT / "models/needle-llama", tmp_path / "plan.png"
    args = ["--gpu", "L4", "--tp", "2", "--context", "1024", "--json"]
    done = run_plan(model, *args, "--plot", picture)
    assert (done.returncode, done.stderr) == (0, f"{picture}\n")
    content = json.loads(done.stdout)
    rows = {row["kv_cache_dtype"]: row for row in content["rows"]}
    assert "misreads an NVFP4 KV cache at head_size 64" in rows.pop("nvfp4")["refused"]
    size = (model / "model.safetensors").stat().st_size
    assert rows["auto"]["weights_bytes"] == size // 2
    token = {name: row["bytes_per_token"] for name, row in rows.items()}
    assert token["auto"] == 5 * 2 * 64 * 2 and token["fp8"] == token["auto"] / 2
    packed = (token["turbo4"], token["k4v3"], token["turbo3"])
    assert packed == (5 * 68, 5 * 60, 5 * 52)
    for row in rows.values():
        assert row["users"] == row["tokens"] // 1024 and row["tpot_ms"] > 0
    assert content["is_estimate"] and content["gpus"] == 2
    notes = " ".join(content["notes"])
    assert "NVIDIA L4 nothing was measured" in notes and "GPUs take to exch" in notes
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_does_not_go_says_why(tmp_path: Path):
    refusal = "--context", "9000", "--kv-cache-dtype", "turbo4"
    done = run_plan(ROOT / "models/needle-qwen3", *refusal)
    assert done.returncode == 1 and "max_model_len (9000) is greater" in done.stdout
    done = run_plan(tmp_path / "nothing", HF_ENDPOINT="http://127.0.0.1:9")
    assert (
        done.returncode == 2 and "a folder with its config.json will do" in done.stderr
    )
    done = run_plan(ROOT / "models")
    assert done.returncode == 2 and "has no config.json" in done.stderr
