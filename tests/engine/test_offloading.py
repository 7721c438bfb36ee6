# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pages that are copied to the host's memory, a disk or a folder, and come back.

Other texts have taken their blocks by then, or another process reads them. The copies
are stand-ins for the driver's: see cpu_standins.
"""

import statistics
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from harness import Call, Engine, Jobs, kl_divergences
from turbo_quality.cases import HELD_OUT, MODEL

BLOCK = 64
NUM_BLOCKS = 16
MAX_TOKENS = 5
# Tokens of texts: they end at a block's border, beside one, and within a block.
LENGTHS = (128, 65, 148, 193)
# Tokens of the texts that take their blocks.
OTHERS = (193,) * 6
HOST_BYTES = 8 << 20


def prompts(lengths: tuple[int, ...], first: int = 0) -> list[list[int]]:
    """Texts, a token a byte."""
    text = HELD_OUT.read_bytes()
    starts = range(first, first + 1000 * len(lengths), 1000)
    return [list(text[i : i + n]) for i, n in zip(starts, lengths)]


TEXTS = prompts(LENGTHS)


def call(**options: bool) -> Call:
    # One by one: else the pages' arrival would decide how many decode together, and
    # that number may decide a code between two levels.
    return Call(TEXTS, MAX_TOKENS, one_by_one=True, **options)


def engine(
    connector: str | None,
    calls: dict[str, Call],
    dtype: str = "turbo4",
    **extra: Any,
) -> Engine:
    args: dict[str, Any] = {
        "kv_cache_dtype": dtype,
        "block_size": BLOCK,
        "num_gpu_blocks_override": NUM_BLOCKS,
        # In this dtype the number of tokens at once hardly changes results.
        "dtype": "float32",
        "max_model_len": 256,
        "enable_prefix_caching": True,
        "attention_config": {"turbo_prefill": "stored"},
    }
    if connector is not None:
        args["kv_transfer_config"] = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES} | extra,
        }
    return Engine(args, calls, model=str(MODEL))


def tiered(folder: Path, calls: dict[str, Call], dtype: str = "turbo4") -> Engine:
    """An engine whose pages go on from the host's memory to files."""
    tier = {"type": "fs", "root_dir": str(folder)}
    return engine(
        "OffloadingConnector",
        calls,
        dtype,
        spec_name="TieringOffloadingSpec",
        secondary_tiers=[tier],
    )


@pytest.fixture(scope="module")
def evicted(
    jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The calls of engines in which other texts take the texts' blocks."""
    calls = {"first": call(), "other": Call(prompts(OTHERS, 10_000), 2)}
    calls["again"] = call()
    disk = {
        "kv_offload_backend": "disk",
        "disk_path": str(tmp_path_factory.mktemp("disk") / "pages"),
        "disk_capacity_bytes": HOST_BYTES,
        "use_page_cache": True,
    }
    engines = {
        "none": engine(None, calls),
        "native": engine("OffloadingConnector", calls),
        "simple": engine("SimpleCPUOffloadConnector", calls),
        "disk": engine("SimpleCPUOffloadConnector", calls, **disk),
    }
    found = jobs.start("offloaded", "v2", engines).result()
    return {name: found[name]["calls"] for name in engines}


@pytest.fixture(scope="module")
def tier(
    jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The calls of three processes with one folder, which the first one fills."""
    folder = tmp_path_factory.mktemp("tier")
    calls = {"first": call(), "again": call(), "emptied": call(forgets_host=True)}
    writer = jobs.start("tier-writer", "v2", {"writer": tiered(folder, calls)})
    found = {"writer": writer.result()["writer"]["calls"]}
    once = {"first": call()}
    later: dict[str, Future] = {
        name: jobs.start(f"tier-{name}", "v2", {name: tiered(folder, once, dtype)})
        for name, dtype in (("reader", "turbo4"), ("stranger", "turbo3"))
    }
    return found | {name: job.result()[name]["calls"] for name, job in later.items()}


def cached(call: dict[str, Any]) -> list[int]:
    """Tokens of each prompt that were in the cache."""
    return [request["num_cached_tokens"] for request in call["requests"]]


def tokens(call: dict[str, Any]) -> list[list[int]]:
    return [request["tokens"] for request in call["requests"]]


def divergence(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The second call's divergence from the first, in nats a token."""
    pairs = zip(first["requests"], second["requests"], strict=True)
    return statistics.fmean(kl for pair in pairs for kl in kl_divergences(*pair))


def whole(lengths: Iterable[int]) -> list[int]:
    """Tokens of whole blocks."""
    return [n // BLOCK * BLOCK for n in lengths]


# SimpleCPUOffloadConnector leaves the last token out. OffloadingConnector brings it
# back, and it is computed again.
WHOLE = whole(LENGTHS)
SIMPLE = whole(n - 1 for n in LENGTHS)


def test_other_texts_take_the_blocks(evicted):
    assert cached(evicted["none"]["again"]) == [0] * len(LENGTHS)


@pytest.mark.parametrize(
    "name, blocks", [("native", WHOLE), ("simple", SIMPLE), ("disk", SIMPLE)]
)
def test_evicted_blocks_come_back(evicted, name, blocks):
    calls, alone = evicted[name], evicted["none"]["again"]
    assert cached(calls["first"]) == [0] * len(LENGTHS)
    assert cached(calls["again"]) == blocks
    assert tokens(calls["again"]) == tokens(alone)
    assert divergence(alone, calls["again"]) < 1e-6


def test_files_come_back_in_one_process(tier):
    """They come from the files, because the host's memory is empty."""
    calls = tier["writer"]
    assert cached(calls["emptied"]) == WHOLE
    assert tokens(calls["emptied"]) == tokens(calls["first"])
    assert divergence(calls["first"], calls["emptied"]) < 1e-6


def test_another_process_reads_the_files(tier):
    first, read = tier["writer"]["first"], tier["reader"]["first"]
    assert cached(read) == WHOLE
    assert tokens(read) == tokens(first)
    assert divergence(first, read) < 1e-6


def test_another_dtype_finds_none_of_the_files(tier):
    assert cached(tier["stranger"]["first"]) == [0] * len(LENGTHS)
