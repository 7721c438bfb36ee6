# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A Qwen2 whose biases of K are longer than the turbo dtypes bear without an offset."""

import re
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Call, Engine, Jobs, kl_divergences
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(SCRIPTS))

from quality_cases import HELD_OUT, MODEL, Plan, Vocabulary, build_tasks  # noqa: E402

# It was trained to find facts, with biases as long as those of Qwen2.5-7B.
TRAINED = MODEL.with_name("needle-qwen2")
# Of its five layers, those that are warned of if nothing is taken off.
LONG = "0, 4"
MAX_TOKENS = 24


def with_other_biases(folder: Path) -> str:
    """The model with biases of K a quarter longer."""
    shutil.copytree(TRAINED, folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith("k_proj.bias"):
            weights[name] *= 1.25
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def tasks() -> list[dict[str, Any]]:
    plan = Plan(0, 0, 0, 0, (480,), (0.2, 0.8), 1)
    text = HELD_OUT.read_text(encoding="utf-8")
    return build_tasks(text, plan, 7, Vocabulary(TRAINED))


@pytest.fixture(scope="module")
def result(
    jobs: Jobs,
    tasks: list[dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    other = with_other_biases(tmp_path_factory.mktemp("qwen2") / "other")
    prompts = [task["prompt"] for task in tasks]

    def engine(dtype: str, remade: bool = False, **options: Any) -> Engine:
        calls = {"reloaded": Call(prompts, MAX_TOKENS, False, other, remade)}
        if not remade:
            calls = {"batched": Call(prompts, MAX_TOKENS)} | calls
        # Prompts have some six segments, and come in chunks that end within them.
        args = {"kv_cache_dtype": dtype, "max_num_batched_tokens": 600}
        args |= {"enable_chunked_prefill": True}
        return Engine(args, calls, model=str(TRAINED), offset_segment=64, **options)

    # What is said once a process would be said in the first engine.
    engines = {
        "auto": engine("auto"),
        "offset": engine("turbo4"),
        "none": engine("turbo4", without_key_offset=True),
        "remade": engine("turbo4", remade=True),
    }
    return jobs.start("key-bias", "v1", engines).result()


@pytest.fixture
def logs(result: dict[str, Any], jobs: Jobs) -> tuple[str, str]:
    """Of the engine with offsets and of that without."""
    log = (jobs.folder / "key-bias" / "log").read_text()
    _, _, after = log.partition("engine offset\n")
    first, _, rest = after.partition("engine none\n")
    return first, rest.partition("engine remade")[0]


def test_layers_with_an_offset_are_counted(logs: tuple[str, str]):
    assert "bias of K" not in logs[0]
    assert re.search(r"K offset: (\d+) of \1 layers", logs[0])


def test_long_biases_without_an_offset_are_named(logs: tuple[str, str]):
    (line,) = (line for line in logs[1].splitlines() if "bias of K" in line)
    assert f"layers {LONG} of Qwen2ForCausalLM is up to 462 long a head" in line
    assert line.endswith("--kv-cache-dtype-skip-layers " + LONG.replace(",", ""))


def right(result: dict[str, Any], tasks: list[dict[str, Any]], name: str) -> list[bool]:
    """Which of its answers an engine gets right."""
    requests = result[name]["calls"]["batched"]["requests"]
    return [
        request["tokens"][: len(task["answer"])] == task["answer"]
        for request, task in zip(requests, tasks, strict=True)
    ]


def test_the_offset_brings_answers_back(result: dict[str, Any], tasks):
    assert all(right(result, tasks, "auto"))
    assert all(right(result, tasks, "offset"))
    assert not all(right(result, tasks, "none"))


def divergence(
    result: dict[str, Any], reference: str, name: str, call: str = "batched"
) -> float:
    """Of an engine from another, in nats a token."""
    pairs = zip(
        result[reference]["calls"][call]["requests"],
        result[name]["calls"][call]["requests"],
    )
    return statistics.fmean(kl for pair in pairs for kl in kl_divergences(*pair))


def test_the_offset_brings_distributions_back(result: dict[str, Any]):
    found = divergence(result, "auto", "offset")
    assert found < 0.01
    assert divergence(result, "auto", "none") > 0.1


def test_another_bias_in_mid_request(result: dict[str, Any]):
    """Pages keep the offset that they were stored with, which stays the layer's: with
    another, all that was stored would be as many nats off as the biases are apart.
    """
    for name in ("auto", "offset"):
        calls = result[name]["calls"]
        assert calls["reloaded"] != calls["batched"]
    found = divergence(result, "auto", "offset", "reloaded")
    assert divergence(result, "auto", "remade", "reloaded") > 3 * found
