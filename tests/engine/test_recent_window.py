# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A trained model whose newest tokens are read in 8 bits, and not as codes."""

from typing import Any

import pytest
import trained
from harness import Call, Engine, Jobs, mean_divergence, requests_of
from turbo_quality.cases import MODEL

# A model each layer of which may have a sliding window.
LLAMA = MODEL.with_name("needle-llama")
BLOCK = 64
# Rows of a block of turbo4 with vectors of 128, without the one that is written.
NUM_TOKENS = 23
# Prompts end at a block's border, beside one, and within a block.
LENGTHS = (2 * BLOCK, 3 * BLOCK + 1, 2 * BLOCK + 20, 3 * BLOCK + 40)
# Tokens of prompts that hit all but their last: only that is written to their windows.
ALIKE = (3 * BLOCK + 1,) * 4
MAX_TOKENS = 24
# The window of all layers but the last. Requests outgrow it, and lose blocks.
SLIDING_WINDOW = BLOCK // 2 + 4
# So few that some requests are preempted. Each request has one more block.
NUM_SCARCE_BLOCKS = 18
# The blocks that hits leave, and few more: windows get blocks that others had.
NUM_HIT_BLOCKS = 24


PROMPTS, ALIKE_PROMPTS = trained.texts(LENGTHS), trained.texts(ALIKE)


def engine(window: int | str, dtype: str = "turbo4", **args: Any) -> Engine:
    settings = {"kv_cache_dtype": dtype, "block_size": BLOCK, "dtype": "bfloat16"}
    if dtype != "auto":
        settings["attention_config"] = {"turbo_window": window}
    made = args.pop("calls", None) or {"batched": Call(PROMPTS, MAX_TOKENS)}
    model = args.pop("model", MODEL)
    return Engine(settings | args, made, model=str(model))


@pytest.fixture(scope="module")
def result(jobs: Jobs) -> dict[str, Any]:
    alike = Call(ALIKE_PROMPTS, MAX_TOKENS)
    both = {"batched": Call(PROMPTS, MAX_TOKENS), "alike": alike}
    again = {"cold": alike, "warm": Call(ALIKE_PROMPTS[::-1], MAX_TOKENS)}
    hits = {
        "calls": again,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": NUM_HIT_BLOCKS,
    }
    engines = {
        "exact": engine(0, "auto", calls=both),
        "none": engine(0, calls=both),
        "window": engine("auto"),
        "short": engine(4),
        "hits": engine("auto", **hits),
        "skipped": engine("auto", kv_cache_dtype_skip_layers=["0", "5"]),
        "scarce": engine("auto", num_gpu_blocks_override=NUM_SCARCE_BLOCKS),
    }
    return jobs.start("recent-window", "v2", engines).result()


@pytest.fixture(scope="module")
def sliding(jobs: Jobs) -> dict[str, Any]:
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    args: dict[str, Any] = {
        "model": LLAMA,
        "calls": {"batched": Call(PROMPTS[1:3], MAX_TOKENS)},
        "hf_overrides": {"sliding_window": SLIDING_WINDOW, "layer_types": kinds},
    }
    engines = {
        "exact": engine(0, "auto", **args),
        "none": engine(0, **args),
        "window": engine("auto", **args),
    }
    return jobs.start("recent-window-sliding", "v2", engines).result()


@pytest.fixture
def log(result: dict[str, Any], jobs: Jobs) -> str:
    return (jobs.folder / "recent-window" / "log").read_text()


def divergence(
    result: dict[str, Any], name: str, call: str = "batched", exact: str = "batched"
) -> float:
    """Returns decoded tokens' mean divergence from the exact cache's, in nats."""
    requests = requests_of(result["exact"], exact)
    if call == "warm":
        requests = requests[::-1]
    # The first token is the prefill's.
    return mean_divergence(requests, requests_of(result[name], call), skipped=1)


def test_the_window_is_nearer_to_the_exact_cache(result: dict[str, Any]):
    assert divergence(result, "window") < divergence(result, "none") / 2
    assert divergence(result, "short") < divergence(result, "none")


def test_its_length_is_told(log: str):
    assert f"recent window: {NUM_TOKENS} tokens in 8 bits" in log
    assert "recent window: 4 tokens in 8 bits" in log


def test_hits(result: dict[str, Any]):
    """Tokens of a hit are packed; the window has the tokens from there on."""
    warm = requests_of(result["hits"], "warm")
    assert all(request["num_cached_tokens"] == 3 * BLOCK for request in warm)
    none = divergence(result, "none", "alike", "alike")
    assert divergence(result, "hits", "cold", "alike") < none / 2
    assert divergence(result, "hits", "warm", "alike") < none


def test_beside_layers_that_are_not_packed(result: dict[str, Any]):
    """The pages of these layers have another size."""
    assert divergence(result, "skipped") < divergence(result, "none") / 2


def test_layers_with_a_sliding_window(sliding: dict[str, Any]):
    """They have a recent window as well, in groups with those of other layers."""
    assert divergence(sliding, "window") < divergence(sliding, "none") / 2
    counts = {name: sliding[name]["num_kv_cache_groups"] for name in sliding}
    assert counts == {"exact": 5, "none": 5, "window": 10}


def test_preemption(result: dict[str, Any]):
    assert result["scarce"]["calls"]["batched"]["num_preemptions"] > 0
    assert divergence(result, "scarce") < divergence(result, "none") / 2
