# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hybrids measure the means of K with real states in their other layers."""

import re
from pathlib import Path

import pytest
from families import write_family
from harness import Call, Engine, run_job
from safetensors.torch import load_file
from test_key_means import exact_means

# The modules whose outputs are K before RoPE, in Transformers.
KEYS = {"lfm2": "k_layernorm", "nemotron_h": "k_proj", "qwen3_next": "k_norm"}
# The most that a mean may be off, as a share of its length. Mamba2 of Transformers and
# of vLLM on a CPU differ by up to 1 % here, with any slices.
SHARES = {"nemotron_h": 2e-2}
# Slices of the text end within blocks and within chunks of the other layers' kernels.
ARGS = {"max_num_batched_tokens": 150, "enable_chunked_prefill": True}
ARGS |= {"kv_cache_dtype": "turbo4", "dtype": "float32"}


@pytest.mark.parametrize("name", KEYS)
def test_means_are_those_of_the_model(tmp_path: Path, name: str):
    folder = write_family(tmp_path / name, name)
    hits = {"enable_prefix_caching": name != "nemotron_h"}
    engines = {"one": Engine(ARGS | hits, {"call": Call([[1, 2, 3]], 4)})}
    variables = {"VLLM_CACHE_ROOT": str(tmp_path)}
    results = run_job(tmp_path / "job", folder, "v2", engines, variables)
    log = (tmp_path / "job" / "log").read_text()
    expected = exact_means(str(folder), KEYS[name])
    count = len(expected)
    assert f"the means of K are taken off in {count} of {count} layers" in log
    assert len(results["one"]["key_offsets"]) == count
    (path,) = set(re.findall(r"\S+\.safetensors", log))
    found = load_file(path)
    assert len(found) == 3 * count
    for part, means in zip(("first", "rest"), zip(*expected)):
        own = [found[key] for key in sorted(found) if key.endswith(f".{part}")]
        for each, mean in zip(own, means, strict=True):
            assert (each - mean).norm() < SHARES.get(name, 1e-4) * mean.norm()
