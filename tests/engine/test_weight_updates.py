# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engines that start with dummy weights and load others later.

Reinforcement learning uses such engines. They answer as if they had started with the
later weights. The model has long biases of K, from which its offset is computed.
"""

import re
from typing import Any

import pytest
import trained
from harness import Call, Engine, Jobs, requests_of
from test_key_bias import with_other_biases
from trained import TRAINED

# The tasks with short answers are asked.
MAX_TOKENS = 8
TASKS = [task for task in trained.tasks() if len(task["answer"]) <= MAX_TOKENS]
# Each way's weights: the model's, or those with other biases.
BASE, OTHER = "base", "other"
WAYS = {
    "load_weights": BASE,
    "path": OTHER,
    "iterator": BASE,
    "copy": OTHER,
    "kernel format": BASE,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("qwen2") / "other"
    return {BASE: str(TRAINED), OTHER: with_other_biases(folder)}


@pytest.fixture(scope="module")
def result(jobs: Jobs, folders: dict[str, str]) -> dict[str, Any]:
    prompts = [task["prompt"] for task in TASKS]

    def loading(weights: str, way: str = "load_weights", forgets: bool = True) -> Call:
        folder = folders[weights]
        return Call(prompts, MAX_TOKENS, loaded=folder, way=way, forgets=forgets)

    def engine(dtype: str, calls: dict[str, Call], **options: Any) -> Engine:
        args: dict[str, Any] = {"kv_cache_dtype": dtype, "enable_prefix_caching": True}
        if options.get("model"):
            # An engine that starts with dummy weights measures no means of K.
            args["attention_config"] = {"turbo_means": "off"}
        else:
            args["load_format"] = "dummy"
            options["model"] = folders[BASE]
        return Engine(args, calls, **options)

    loads = {way: loading(weights, way) for way, weights in WAYS.items()}
    updates = loads | {
        "stale": loading(OTHER, forgets=False),
        "running": Call(prompts, MAX_TOKENS, forgets=True, reloaded=folders[BASE]),
        "after": Call(prompts, MAX_TOKENS, forgets=True),
    }
    started = {"batched": Call(prompts, MAX_TOKENS)}
    engines = {
        f"turbo4 {weights}": engine("turbo4", started, model=folders[weights])
        for weights in (BASE, OTHER)
    }
    engines |= {
        "updates": engine("turbo4", updates),
        "turbo3": engine("turbo3", loads),
        "fixed": engine("turbo4", {"batched": loading(BASE)}, fixed_key_offset=True),
    }
    return jobs.start("weight-updates", "v1", engines).result()


def all_right(requests: list[dict[str, Any]]) -> bool:
    """Whether all facts were found."""
    return all(
        request["tokens"][: len(task["answer"])] == task["answer"]
        for request, task in zip(requests, TASKS, strict=True)
    )


@pytest.fixture
def lines(result: dict[str, Any], jobs: Jobs) -> list[str]:
    """The lines that the engine with all updates has logged about its offset."""
    log = (jobs.folder / "weight-updates" / "log").read_text()
    _, _, after = log.partition("engine updates\n")
    said = after.partition("engine turbo3")[0].splitlines()
    return [line for line in said if re.search("offset|bias of K", line)]


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_an_engine_that_starts_so(
    result: dict[str, Any], way: str
):
    found = requests_of(result["updates"], way)
    assert found == requests_of(result[f"turbo4 {WAYS[way]}"])
    assert all_right(found)


@pytest.mark.parametrize("way", WAYS)
def test_answers_of_three_bits(result: dict[str, Any], way: str):
    assert all_right(requests_of(result["turbo3"], way))


def test_an_offset_of_dummy_weights_loses_answers(result: dict[str, Any]):
    """Guards the tests above: the offset has to follow the weights."""
    assert not all_right(requests_of(result["fixed"]))


def digests(lines: list[str]) -> list[str]:
    return [x for line in lines for x in re.findall(r"\(([0-9a-f]{8})\)", line)]


def test_offsets_are_said(lines: list[str]):
    """There is one at the start, and one after each update without running requests."""
    dummy, *others = digests(lines)
    base, other = others[:2]
    assert others == [base, other, base, other, base, other, base]
    assert len({dummy, base, other}) == 3


def test_blocks_of_the_weights_before_are_warned_of(lines: list[str]):
    (line,) = (line for line in lines if "prefix cache" in line)
    assert "WARNING" in line and "Call reset_prefix_cache" in line


def test_requests_in_flight_keep_their_offset(result: dict[str, Any], lines: list[str]):
    """A warning tells it, and the next requests have the new offset."""
    (line,) = (line for line in lines if "requests are running" in line)
    assert "WARNING" in line and "pause with clear_cache" in line
    after = requests_of(result["updates"], "after")
    assert after == requests_of(result["turbo4 base"])
