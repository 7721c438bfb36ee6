# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A Qwen2 whose biases of K are too long for the turbo dtypes without an offset."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import trained
from harness import Call, Engine, Jobs, mean_divergence, requests_of
from safetensors.torch import load_file, save_file
from trained import MAX_TOKENS, TRAINED

# The layers, of five, that a warning names if they have no offset.
LONG = "0, 4"


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
def result(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    other = with_other_biases(tmp_path_factory.mktemp("qwen2") / "other")
    prompts = trained.prompts()

    def engine(
        dtype: str, remade: bool = False, impl: str = "vllm", **options: Any
    ) -> Engine:
        calls = {
            "reloaded": Call(
                prompts, MAX_TOKENS, reloaded=other, remade_key_offset=remade
            )
        }
        if not remade:
            calls = {"batched": Call(prompts, MAX_TOKENS)} | calls
        if impl == "transformers":
            del calls["reloaded"]
        # Prompts have some six segments, and come in chunks that end within them.
        # Else the mean of K, with the bias in it, would take the offset's place.
        args: dict[str, Any] = {"attention_config": {"turbo_means": "off"}}
        args |= {"kv_cache_dtype": dtype, "max_num_batched_tokens": 600}
        args |= {"enable_chunked_prefill": True, "model_impl": impl}
        return Engine(args, calls, model=str(TRAINED), offset_segment=64, **options)

    # A line that is logged once a process would be in the first engine's log.
    engines = {
        "auto": engine("auto"),
        "offset": engine("turbo4"),
        "none": engine("turbo4", without_key_offset=True),
        "remade": engine("turbo4", remade=True),
        "transformers": engine("turbo4", impl="transformers"),
    }
    return jobs.start("key-bias", "v1", engines).result()


@pytest.fixture
def logs(result: dict[str, Any], jobs: Jobs) -> tuple[str, str]:
    """The logs of the engine with offsets, and of the one without."""
    log = (jobs.folder / "key-bias" / "log").read_text()
    _, _, after = log.partition("engine offset\n")
    first, _, rest = after.partition("engine none\n")
    return first, rest.partition("engine remade")[0]


def test_layers_with_an_offset_are_counted(logs: tuple[str, str]):
    """A warning comes when requests run that have the offset of the old bias."""
    (line,) = (line for line in logs[0].splitlines() if "bias of K" in line)
    assert "up to 115 apart" in line and "requests are running" in line
    assert re.search(r"K offset: (\d+) of \1 layers", logs[0])


def test_long_biases_without_an_offset_are_named(logs: tuple[str, str]):
    (line,) = (line for line in logs[1].splitlines() if "bias of K" in line)
    assert f"layers {LONG} of Qwen2ForCausalLM is up to 462 long a head" in line
    assert line.endswith("--kv-cache-dtype-skip-layers " + LONG.replace(",", ""))


def right(result: dict[str, Any], name: str) -> list[bool]:
    """Returns by prompt whether an engine has found its fact."""
    return trained.right(requests_of(result[name]))


def test_the_offset_brings_answers_back(result: dict[str, Any]):
    assert all(right(result, "auto"))
    assert all(right(result, "offset"))
    assert not all(right(result, "none"))


def divergence(
    result: dict[str, Any], reference: str, name: str, call: str = "batched"
) -> float:
    """Returns an engine's divergence from another, in nats a token."""
    runs = (requests_of(result[each], call) for each in (reference, name))
    return mean_divergence(*runs)


def test_the_offset_brings_distributions_back(result: dict[str, Any]):
    found = divergence(result, "auto", "offset")
    assert found < 0.01
    assert divergence(result, "auto", "none") > 0.1


def test_another_bias_in_mid_request(result: dict[str, Any]):
    """The layer keeps the offset that its pages were stored with.

    With another offset all stored scores would be off by the biases' difference.
    """
    for name in ("auto", "offset"):
        calls = result[name]["calls"]
        assert calls["reloaded"] != calls["batched"]
    found = divergence(result, "auto", "offset", "reloaded")
    assert divergence(result, "auto", "remade", "reloaded") > 3 * found


def test_modeling_code_of_transformers(result: dict[str, Any]):
    """There RoPE is the model's, and not the layer's."""
    assert all(right(result, "transformers"))
    own, other = (result[name]["key_offsets"] for name in ("offset", "transformers"))
    assert len(own) == len(other) == 5
    for first, second in zip(own, other):
        norm = math.hypot(*first)
        assert norm > 1 and math.dist(first, second) < 1e-3 * norm


def test_formats_are_those_of_the_offsets(result: dict[str, Any]):
    """Engines of one checkpoint take each other's pages, and no others."""
    formats = {name: result[name]["format"] for name in result}
    assert formats["offset"] == formats["remade"]
    assert re.fullmatch(r"turbo4\.\d+-[0-9a-f]{16}", formats["offset"])
    assert re.fullmatch(r"turbo4\.\d+", formats["none"])
    assert formats["auto"] == "auto"
