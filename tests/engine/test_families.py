# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Models with windowed layers and hybrids, in all ways of running.

One engine runs all ways. With --all each way also has an engine of its own.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import WINDOW, write_family
from harness import Call, Engine, Jobs, largest_divergences, requests_of, run_job
from safetensors.torch import load_file, save_file
from ways import KL_TOLERANCE, NUM_GENERATED, Answers, Ways

# Hits within a hybrid's block are multiples of so many tokens.
UNIT = 16
ALIGNED = {"mamba_cache_mode": "align"}
WINDOWED = Ways(
    32, scarce_blocks=45, more={"one kind": {"disable_hybrid_kv_cache_manager": True}}
)
# Their layers have two groups, which take half the blocks.
SHARING = Ways(32, scarce_blocks=25, more=WINDOWED.more)
# The blocks of chunks that have ended are free, so that no request grows.
CHUNKED = Ways(32, more=WINDOWED.more)


def hybrid(block: int) -> Ways:
    """The ways of a hybrid: vLLM makes a block as large as a state."""
    cached = {"enable_prefix_caching": True, "enable_chunked_prefill": True}
    return Ways(
        block,
        ALIGNED | {"prefix_match_unit": UNIT},
        scarce_blocks=9,
        more={"whole": cached | ALIGNED},
        has_control=True,
    )


WAYS = {
    "gemma2": WINDOWED,
    "gemma3": WINDOWED,
    "gemma3n": SHARING,
    "gemma4": SHARING,
    "cohere2": WINDOWED,
    "olmo3": WINDOWED,
    "granite": WINDOWED,
    # K of 192 and V of 128, with attention sinks beside windows.
    "mimo_v2": WINDOWED,
    "llama4": CHUNKED,
    # More of it is in test_mla.py.
    "deepseek_v2": Ways(64, scarce_blocks=14),
    "lfm2": hybrid(128),
    "nemotron_h": hybrid(80),
    "qwen3_next": hybrid(80),
}
GROUPS = {
    "gemma2": 4,
    "gemma3": 4,
    "gemma3n": 2,
    "gemma4": 2,
    "cohere2": 4,
    "olmo3": 4,
    "granite": 4,
    "mimo_v2": 4,
    "llama4": 4,
    "deepseek_v2": 1,
    "lfm2": 2,
    "nemotron_h": 2,
    "qwen3_next": 2,
}
# With seed 0 and the means of K a rounding moves a stored code of one prompt here. With
# 0.8 or 1.1 times granite's means it moves none.
SEEDS = {"granite": 1, "cohere2": 1}
WITH_WINDOWS = [name for name, ways in WAYS.items() if ways in (WINDOWED, SHARING)]
HYBRIDS = [name for name, ways in WAYS.items() if ways.has_control]


def some_marked(names: Iterable[str]) -> pytest.MarkDecorator:
    """Gives some models the mark of the matrix.

    Others with windows and with shared caches have no mark, and MLA has its own tests.
    """
    left_out = "cohere2", "deepseek_v2", "gemma3n", "olmo3"
    marks = dict.fromkeys(left_out, pytest.mark.matrix)
    cases = [pytest.param(name, marks=marks.get(name, ())) for name in names]
    return pytest.mark.parametrize("name", cases)


all_models = some_marked(WAYS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {
        name: write_family(folder / name, name, SEEDS.get(name, 0)) for name in WAYS
    }


class Families:
    """Runs a family's one engine, or all of them, once."""

    def __init__(self, jobs: Jobs, folder: Path, models: dict[str, Path]) -> None:
        self.jobs, self.folder, self.models = jobs, folder, models
        self.found: dict[tuple[str, bool], Any] = {}

    def answers(self, name: str, every: bool = False) -> Answers:
        key = name, every
        if key not in self.found:
            folder = self.folder / f"{name}-{every}"
            engines = WAYS[name].engines()
            few = engines.pop("few")
            chosen = engines if every else {"few": few}
            self.found[key] = self.jobs.pool.submit(
                run_job, folder, self.models[name], "v2", chosen
            )
        return Answers(WAYS[name], self.found[key].result())


@pytest.fixture(scope="module")
def families(
    jobs: Jobs, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Families:
    return Families(jobs, tmp_path_factory.mktemp("runs"), folders)


@all_models
def test_one_engine(families: Families, name: str):
    """Prompts run in chunks one by one, batched behind hits, and batched in chunks."""
    answers = families.answers(name)
    steps = answers.call("few", "cold")["steps"]
    assert any(len(step) > 1 for step in steps)
    assert sum(new > 1 and computed > 0 for step in steps for new, computed in step)
    assert not any(answers.cached("few", "cold"))
    assert sum(answers.cached("few", "warm")) >= sum(answers.whole_blocks()) > 0
    answers.assert_alike("few", "warm", "cold")


@all_models
def test_groups(families: Families, name: str):
    assert families.answers(name).engines["few"]["num_kv_cache_groups"] == GROUPS[name]


@pytest.mark.parametrize("name", HYBRIDS)
def test_hits_within_a_block(families: Families, name: str):
    """The block that a hybrid's hit ends in is copied, state and pages."""
    answers = families.answers(name)
    warm = answers.cached("few", "warm")
    assert all(num % UNIT == 0 for num in warm)
    assert sum(num % answers.ways.block > 0 for num in warm) >= 2
    answers.assert_alike("few", "warm")


@some_marked(WITH_WINDOWS)
def test_windows_are_packed(families: Families, name: str):
    """Pages are as large as full attention's, and windows are outgrown."""
    pages = families.answers(name).engines["few"]["pages"].values()
    assert len({size for size, _ in pages}) == 1
    assert not any(is_padded for _, is_padded in pages)
    assert max(map(len, WAYS[name].prompts)) > 2 * WINDOW


@pytest.mark.matrix
def test_sinks_count(families: Families, tmp_path: Path):
    """Answers change without them."""
    folder = write_family(tmp_path / "granite", "granite")
    weights = load_file(folder / "model.safetensors")
    weights |= {k: torch.full_like(v, -99) for k, v in weights.items() if "sinks" in k}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    few = {"few": WAYS["granite"].engines()["few"]}
    without = run_job(tmp_path / "run", folder, "v2", few)
    alone = requests_of(families.answers("granite").engines["few"], "alone")
    # A token alone sees itself and a sink.
    found = largest_divergences(alone, requests_of(without["few"], "cold"))
    assert min(found) > 100 * KL_TOLERANCE


@pytest.mark.matrix
def test_soft_cap_counts(folders: dict[str, Path], tmp_path: Path):
    """Answers with the cap are near those of vLLM's own attention, which has it.

    Answers without it are far.
    """
    ways = WAYS["gemma2"]
    common = {"dtype": "float32", "block_size": ways.block}
    calls = {"alone": Call(ways.prompts, NUM_GENERATED, one_by_one=True)}
    packed = {"kv_cache_dtype": "turbo4"}
    uncapped = {"hf_overrides": {"attn_logit_softcapping": None}}
    engines = {
        "auto": Engine(common, calls),
        "capped": Engine(common | packed, calls),
        "uncapped": Engine(common | packed | uncapped, calls),
    }
    found = run_job(tmp_path / "run", folders["gemma2"], "v2", engines)
    # A token alone sees itself, and is left out.
    own, *others = (requests_of(found[name], "alone")[1:] for name in engines)
    near, far = (largest_divergences(own, requests) for requests in others)
    assert max(near) < min(far) / 10, (near, far)


@pytest.mark.matrix
@all_models
def test_batched_as_alone(families: Families, name: str):
    families.answers(name, every=True).assert_batched()


@pytest.mark.matrix
@all_models
def test_prefix_hits(families: Families, name: str):
    """Hits are of whole blocks, and a hybrid's also of parts of blocks."""
    answers = families.answers(name, every=True)
    warm = answers.cached("prefix", "warm")
    if name not in HYBRIDS:
        assert warm == answers.whole_blocks()
    else:
        assert sum(warm) > sum(answers.whole_blocks())
    answers.assert_alike("prefix", "cold", "warm")


@pytest.mark.matrix
@all_models
def test_other_ways_to_cache(families: Families, name: str):
    """A hybrid hits whole blocks alone; windows and full attention share a group."""
    answers = families.answers(name, every=True)
    for engine in answers.ways.more:
        cached = answers.cached(engine, "warm")
        assert cached == (answers.whole_blocks() if engine == "whole" else [0] * 5)
        answers.assert_alike(engine, "cold", "warm")
    if "one kind" in answers.engines:
        assert answers.engines["one kind"]["num_kv_cache_groups"] == 1


@pytest.mark.matrix
@pytest.mark.parametrize("name", HYBRIDS)
def test_control(families: Families, name: str):
    """A cache in the model's dtype answers in all ways as in its own run alone."""
    answers = families.answers(name, every=True)
    control = answers.engines["control"]
    assert sum(answers.cached("control", "warm")) > 0
    for call in ("warm", "cold"):
        runs = requests_of(control, "alone"), requests_of(control, call)
        assert max(largest_divergences(*runs)) < KL_TOLERANCE


@pytest.mark.matrix
@all_models
def test_chunked_prefill(families: Families, name: str):
    families.answers(name, every=True).assert_chunked()


@pytest.mark.matrix
@pytest.mark.parametrize("name", [x for x, ways in WAYS.items() if ways.scarce_blocks])
def test_preemption(families: Families, name: str):
    families.answers(name, every=True).assert_preempted()


@pytest.mark.matrix
@all_models
def test_attention_decides_every_answer(families: Families, name: str):
    families.answers(name, every=True).assert_attention_decides()
