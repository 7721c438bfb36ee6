# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The prompts and the engines that a cache dtype is put through."""

import random
from typing import Any

from harness import BASE_ARGS, Call, Engine, Runner

BLOCK = BASE_ARGS["block_size"]
MAX_LEN = BASE_ARGS["max_model_len"]
# Bytes of K and V of 128 coordinates. They take 512 in bf16.
SLOT_BYTES = {"turbo4": 136, "k4v3": 120, "turbo3": 104}
GAIN = {dtype: 512 / size for dtype, size in SLOT_BYTES.items()}
TURBO_DTYPES = tuple(GAIN)
NUM_GENERATED = 6


def text(length: int, seed: int) -> list[int]:
    """Returns seeded printable bytes, which are the model's token ids."""
    return random.Random(seed).choices(range(32, 127), k=length)


# One token, lengths around a block, and several blocks.
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 1, 9 * BLOCK + 12)
PROMPTS = [text(length, seed) for seed, length in enumerate(LENGTHS)]

# A prefix of whole blocks; its followers hit it and bring a few tokens each.
PREFIX = text(4 * BLOCK, 100)
FOLLOWERS = [PREFIX + text(length, 101 + length) for length in (3, 7)]
# Longer than the followers, so that it is the batch's longest query and context.
LONG = text(6 * BLOCK + 5, 200)
MIXED = [LONG, *FOLLOWERS]

# Four of these outgrow the blocks below while they generate.
NUM_SCARCE_BLOCKS = 15
SCARCE = [text(3 * BLOCK - 4, 300 + index) for index in range(4)]

# A draft repeats the tokens that followed the last token's earlier occurrence. A prompt
# of all bytes always has one, and the others sometimes do.
NUM_DRAFTS = 3
ALL_BYTES = random.Random(400).sample(range(256), k=256)
DRAFTED = [ALL_BYTES, *PROMPTS[2:5]]
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}

REFERENCE = [*PROMPTS, *MIXED, *SCARCE, ALL_BYTES]


def engines(
    kv_cache_dtype: str,
    prefill: str | None,
    runner: Runner,
    has_window: bool = False,
) -> dict[str, Engine]:
    """Returns the engines of one dtype, which should all answer alike.

    Args:
        kv_cache_dtype: The dtype, as on vLLM's command line.
        prefill: `turbo_prefill`, or None where there is no such setting.
        runner: Model runner. V2 has no engine with drafts: the interpreter cannot run
            the kernels of vLLM that drafts take there.
        has_window: Whether the newest tokens are read in 8 bits.

    """
    common: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "dtype": "float32"}
    if prefill is not None:
        window = "auto" if has_window else 0
        common["attention_config"] = {"turbo_prefill": prefill, "turbo_window": window}

    def call(prompts: list[list[int]], **options: Any) -> Call:
        return Call(prompts, NUM_GENERATED, **options)

    result = {
        "plain": Engine(
            common,
            {
                "one_by_one": call(REFERENCE, one_by_one=True),
                "batched": call(PROMPTS),
            },
        ),
        "prefix": Engine(
            common | {"enable_prefix_caching": True},
            {
                "cold": call(PROMPTS),
                "warm": call(PROMPTS),
                "fill": call([PREFIX]),
                "mixed": call(MIXED),
            },
        ),
        "chunked": Engine(
            common | {"enable_chunked_prefill": True, "max_num_batched_tokens": 48},
            {"chunked": call(PROMPTS)},
        ),
        "scarce": Engine(
            common
            | {
                # A window takes a block a prompt.
                "num_gpu_blocks_override": NUM_SCARCE_BLOCKS + has_window * len(SCARCE),
                "max_model_len": 8 * BLOCK,
            },
            {"scarce": call(SCARCE)},
        ),
        "zeroed": Engine(common, {"batched": call(PROMPTS)}, zero_attention=True),
    }
    if runner == "v1":
        # Numba, which finds drafts, undoes the setup that vLLM's CPU platform makes at
        # an engine's start: no engine can follow in the process.
        result["drafts"] = Engine(
            common | {"speculative_config": NGRAMS},
            {"batched": call(DRAFTED), "one": call([ALL_BYTES])},
        )
    return result
