# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pages that are copied to the host's memory, a disk or a folder, and come back.

Other texts have taken their blocks by then, or another process reads them. The copies
are stand-ins for the driver's: see cpu_standins.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import trained
from harness import Call, Engine, Jobs, mean_divergence, requests_of, tokens_of
from turbo_quality.cases import MODEL

BLOCK = 64
NUM_BLOCKS = 16
MAX_TOKENS = 5
# Tokens of texts: they end at a block's border, beside one, and within a block.
LENGTHS = (128, 65, 148, 193)
# Tokens of the texts that take their blocks.
OTHERS = (193,) * 6
# The divergence of answers from the same pages, and the least one that a block of
# another text makes.
SAME, WRONG = 1e-6, 1e-4
HOST_BYTES = 8 << 20


def call(prompts: list[list[int]] | None = None, **options: bool) -> Call:
    # One by one: else the pages' arrival would decide how many decode together, and
    # that number may decide a code between two levels.
    prompts = prompts or trained.texts(LENGTHS)
    return Call(prompts, MAX_TOKENS, one_by_one=True, **options)


def with_a_block_of_another_text() -> list[list[int]]:
    """The texts, each with the first block of the next one."""
    texts = trained.texts(LENGTHS)
    return [
        other[:BLOCK] + text[BLOCK:] for text, other in zip(texts, texts[1:] + texts)
    ]


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
    """Results of engines in which other texts take the texts' blocks."""
    calls = {"first": call(), "kept": call()}
    calls |= {"other": Call(trained.texts(OTHERS, 10_000), 2), "again": call()}
    disk = {
        "kv_offload_backend": "disk",
        "disk_path": str(tmp_path_factory.mktemp("disk") / "pages"),
        "disk_capacity_bytes": HOST_BYTES,
        "use_page_cache": True,
    }
    mixed = calls | {"mixed": call(with_a_block_of_another_text())}
    engines = {
        "none": engine(None, mixed),
        "native": engine("OffloadingConnector", calls),
        "simple": engine("SimpleCPUOffloadConnector", calls),
        "disk": engine("SimpleCPUOffloadConnector", calls, **disk),
    }
    return jobs.start("offloaded", "v2", engines).result()


@pytest.fixture(scope="module")
def tier(
    jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Results of three processes with one folder, which the first one fills."""
    folder = tmp_path_factory.mktemp("tier")
    calls = {"first": call(), "again": call(), "emptied": call(forgets_host=True)}
    writer = jobs.start("tier-writer", "v2", {"writer": tiered(folder, calls)})
    found = writer.result()
    once = {"first": call()}
    later: dict[str, Future] = {
        name: jobs.start(f"tier-{name}", "v2", {name: tiered(folder, once, dtype)})
        for name, dtype in (("reader", "turbo4"), ("stranger", "turbo3"))
    }
    return found | {name: job.result()[name] for name, job in later.items()}


def cached(requests: list[dict[str, Any]]) -> list[int]:
    """Tokens of each prompt that were in the cache."""
    return [request["num_cached_tokens"] for request in requests]


def assert_alike(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    assert tokens_of(second) == tokens_of(first)
    assert mean_divergence(first, second) < SAME


def whole(lengths: Iterable[int]) -> list[int]:
    """Tokens of whole blocks."""
    return [n // BLOCK * BLOCK for n in lengths]


# SimpleCPUOffloadConnector leaves the last token out. OffloadingConnector brings it
# back, and it is computed again.
WHOLE = whole(LENGTHS)
SIMPLE = whole(n - 1 for n in LENGTHS)


def test_other_texts_take_the_blocks(evicted):
    assert cached(requests_of(evicted["none"], "again")) == [0] * len(LENGTHS)


def test_a_block_of_another_text_is_seen(evicted):
    """The tests below could see one wrong block of a prompt."""
    right, mixed = (requests_of(evicted["none"], call) for call in ("again", "mixed"))
    for one, other in zip(right, mixed, strict=True):
        assert mean_divergence([one], [other]) > len(LENGTHS) * WRONG


@pytest.mark.parametrize(
    "name, blocks", [("native", WHOLE), ("simple", SIMPLE), ("disk", SIMPLE)]
)
def test_evicted_blocks_come_back(evicted, name, blocks):
    """The last tokens of a prompt are computed alone, as behind blocks that stayed.

    Together with all others they would be rounded in another way, which may move their
    codes.
    """
    calls = ("first", "kept", "again")
    first, kept, again = (requests_of(evicted[name], call) for call in calls)
    assert cached(first) == [0] * len(LENGTHS)
    assert cached(kept) == cached(again) == blocks
    assert_alike(kept, again)


def test_files_come_back_in_one_process(tier):
    """They come from the files, because the host's memory is empty."""
    again, emptied = (
        requests_of(tier["writer"], call) for call in ("again", "emptied")
    )
    assert cached(again) == cached(emptied) == WHOLE
    assert_alike(again, emptied)


def test_another_process_reads_the_files(tier):
    read = requests_of(tier["reader"], "first")
    assert cached(read) == WHOLE
    assert_alike(requests_of(tier["writer"], "again"), read)


def test_another_dtype_finds_none_of_the_files(tier):
    assert cached(requests_of(tier["stranger"], "first")) == [0] * len(LENGTHS)
