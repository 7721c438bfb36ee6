# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""scripts/plan.py, held to the memory and the times of engines on an H200."""

import json
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from turbo_plan.estimate import Experts, LayerCache, Model, Weights
from turbo_plan.gpus import (
    ATTENTION,
    GPUS,
    LATENT_US,
    WEIGHTS,
    latent_seconds,
)

RESULTS = ROOT / "benchmarks/results/h200"
# The longest context of a file's engines, unless their commands say another one.
LONGEST = {"engine": 65536, "engine_window": 65536, "models": 32768}
STEPS = 64
# Relative errors of the capacity, and of times that are mostly weights and attention.
TOKENS, TPOT = 0.001, 0.12
H200 = GPUS["H200"]


@dataclass
class Run:
    """The settings of an engine, and its measurements.

    Attributes:
        model: The configuration's name.
        arm: The benchmark's arm.
        layers: The number of first layers, if not all.
        context: `max_model_len`.
        prefix_caching: Whether there was a prefix cache.
        utilization: `gpu_memory_utilization`.
        cache_bytes: Bytes of the cache, if they were given.
        tokens: Tokens that the cache held.
        tpots: Milliseconds per output token, by shape.

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
            has_steps = "--steps" in words
            steps = int(words[words.index("--steps") + 1]) if has_steps else STEPS
            found[kind] = Run(
                row.get("model", "llama-8b"),
                row["arm"],
                row.get("layers"),
                longest + steps + 1,
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
    """Models have states and windows, and the cache's bytes are estimated or given."""
    wrong = {
        (run.model, run.layers, run.arm): (row, run.tokens)
        for run, row in zip(RUNS, planned, strict=True)
        if row.get("tokens") != pytest.approx(run.tokens, rel=TOKENS)
    }
    assert not wrong


def test_steps_take_as_long(planned: list[dict[str, Any]]):
    """The model had all its weights and layers, and was alone on its GPU."""
    wrong, compared = {}, 0
    for run, row in zip(RUNS, planned, strict=True):
        if run.model == "llama-8b":
            for shape, tpot in run.tpots.items():
                compared += 1
                if row["tpots"][shape] != pytest.approx(tpot, rel=TPOT):
                    wrong[run.arm, shape] = (row["tpots"][shape], tpot)
    assert compared == 50 and not wrong


def test_dtypes_rank_as_measured_with_latents(planned: list[dict[str, Any]]):
    """The rows are of 24 layers with MLA, where attention was most of a step."""
    for shape in ("16x32768", "64x4096"):
        found = {
            run.arm: (row["tpots"][shape], run.tpots[shape])
            for run, row in zip(RUNS, planned, strict=True)
            if run.model == "glm-4.7-flash-dense"
        }
        for column in (0, 1):
            ranked = sorted(found, key=lambda arm: found[arm][column])
            assert ranked == ["fp8", "turbo4", "auto"], shape
        for estimate, measured in found.values():
            assert estimate == pytest.approx(measured, rel=0.2)


def test_weights_that_are_read(planned: list[dict[str, Any]]):
    """A Llama reads all weights but the rows of its embedding. Experts are apart."""
    rows = {run.model: row for run, row in zip(RUNS, planned, strict=True)}
    hidden, inner, kv_size, vocab = 4096, 14336, 1024, 128256
    layer = 2 * hidden * (hidden + kv_size) + 3 * hidden * inner + 2 * hidden
    assert rows["llama-8b"]["dense"] == 2 * (32 * layer + hidden + vocab * hidden)
    assert rows["llama-8b"]["experts"] == []
    experts = {"size": 2 * 256 * 3 * 2048 * 512, "count": 256, "chosen": 8}
    assert rows["qwen3.6-35b-a3b"]["experts"] == [experts] * 8


def test_efficiencies_are_the_measured_ones():
    """They are measured by decode attention alone, without an engine."""
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
    assert model.state_bytes == 1000
    assert model.user_bytes(100) == 4 * 100 + 4 * 16 + 1000
    assert model.user_bytes(10) == 2 * 4 * 10 + 1000

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
    # A state is read and written, whatever the context.
    of_state = 2 * 1000 / WEIGHTS / H200.bandwidth
    assert tpot(state, "turbo4", 10**6) == pytest.approx(fixed + of_state, rel=1e-9)
    weights = Model(Weights(size=1, dense=900, layers=2, experts=[experts]), [])
    one, two = (weights.tpot(H200, "auto", users, 1) for users in (1, 2))
    assert two - one == pytest.approx(150 / WEIGHTS / H200.bandwidth + 9e-6)
    assert one == pytest.approx(1100 / WEIGHTS / H200.bandwidth + 2 * 42e-6 + 9e-6)


def test_times_of_latents_are_the_measured_ones():
    """They are measured by attention to MLA's latents alone, without an engine."""
    arms = {"bf16": "auto", "fp8": "fp8", "turbo4": "turbo4"}
    measured: dict[str, dict[int, float]] = {name: {} for name in arms.values()}
    for line in (RESULTS / "mla.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("part") != "attention" or row["arm"] not in arms:
            continue
        sequences, context, heads, queries = map(int, row["shape"].split("x"))
        if (sequences, context, queries) == (32, 32768, 1):
            measured[arms[row["arm"]]][heads] = row["median_us"]
    for dtype, times in LATENT_US.items():
        assert times == pytest.approx(measured[dtype], abs=0.06), dtype


# Microseconds of `ci/gpu.py mla`'s benchmark on an H100 80GB: 32 x 32768 tokens.
H100_LATENTS = {
    ("auto", 16): 418, ("fp8", 16): 230, ("turbo4", 16): 201,
    ("auto", 64): 432, ("fp8", 64): 240, ("turbo4", 64): 382,
}  # fmt: skip


@pytest.mark.parametrize(("arm", "measured"), H100_LATENTS.items())
def test_latents_on_another_hopper(arm: tuple[str, int], measured: float):
    """Its bandwidth is 0.7 of an H200's, and its arithmetic the same."""
    token = {"auto": 1152, "fp8": 576, "turbo4": 340}[arm[0]]
    seconds = latent_seconds(GPUS["H100"], *arm, token)
    assert seconds is not None
    assert 1e6 * 32 * 32768 * seconds == pytest.approx(measured, rel=0.1)


def test_what_was_not_measured_of_latents_has_no_time():
    assert latent_seconds(H200, "turbo3", 16, 276) is None
    assert latent_seconds(GPUS["A100"], "turbo4", 16, 340) is None
    assert latent_seconds(H200, "turbo4", 256, 340) is None
    latent = LayerCache(token=340, head_size=576, queries=16, is_latent=True)
    narrow = LayerCache(token=204, head_size=320, queries=16, is_latent=True)
    times = [
        Model(Weights(1, 0, 0), [cache]).tpot(H200, "turbo4", 32, 32768)
        for cache in (latent, narrow)
    ]
    assert times[1] is None
    assert times[0] == pytest.approx(202.3e-6 + 32 * 9e-6)
