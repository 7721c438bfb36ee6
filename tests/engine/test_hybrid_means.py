# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hybrids measure the means of K with real states in their other layers."""

import pytest
from families import write_family
from harness import Call, Engine
from safetensors.torch import load_file
from test_key_means import Runs, exact_means

# The modules whose outputs are K before RoPE, in Transformers.
KEYS = {"lfm2": "k_layernorm", "nemotron_h": "k_proj", "qwen3_next": "k_norm"}
# The most that a mean may be off, as a share of its length. Mamba2 of Transformers and
# of vLLM on a CPU differ by up to 1 % here, with any slices.
SHARES = {"nemotron_h": 2e-2}
# Slices of the text end within blocks and within chunks of the other layers' kernels.
ARGS = {"max_num_batched_tokens": 150, "enable_chunked_prefill": True}
ARGS |= {"kv_cache_dtype": "turbo4", "dtype": "float32"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found = Runs(tmp_path_factory.mktemp("hybrids"))
    call = {"call": Call([[1, 2, 3]], 4)}
    engines = {}
    for name in KEYS:
        folder = str(write_family(found.folder / f"{name}-model", name))
        # With hits, states are in the place of a request's last block.
        hits = {"enable_prefix_caching": name != "nemotron_h"}
        engines[name] = Engine(ARGS | hits, call, model=folder)
    found.run(engines, "v2")
    return found


@pytest.mark.parametrize("name", KEYS)
def test_means_are_those_of_the_model(runs: Runs, name: str):
    expected = exact_means(str(runs.folder / f"{name}-model"), KEYS[name])
    count = len(expected)
    assert f"are taken off in {count} of {count} layers" in runs.line(name)
    assert len(runs.results[name]["key_offsets"]) == count
    found = load_file(runs.file(name))
    assert len(found) == 4 * count
    for part, means in zip(("first", "rest"), zip(*expected)):
        own = [found[key] for key in sorted(found) if key.endswith(f".{part}")]
        for each, mean in zip(own, means, strict=True):
            assert (each - mean).norm() < SHARES.get(name, 1e-4) * mean.norm()
