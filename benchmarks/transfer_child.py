# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs one of two engines between which NIXL moves pages.

Usage: python transfer_child.py SOCKET OPTIONS. OPTIONS are JSON of `LLM`'s arguments.
SOCKET brings calls, which are arguments of `answer`, and None at the end.
"""

import json
import sys
import time
from multiprocessing.connection import Client
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.metrics.reader import Histogram, get_metrics_snapshot

# NIXL's own counters, by name in the result.
COUNTERS = {
    "bytes": "vllm:nixl_bytes_transferred",
    "descriptors": "vllm:nixl_num_descriptors",
    "seconds": "vllm:nixl_xfer_time_seconds",
}


def counters() -> dict[str, float]:
    """Returns NIXL's counters since the start, by the name in COUNTERS."""
    found = dict.fromkeys(COUNTERS, 0.0)
    for metric in get_metrics_snapshot():
        for name, full_name in COUNTERS.items():
            if metric.name == full_name and isinstance(metric, Histogram):
                found[name] += metric.sum
    return found


def margins(logprobs: list[Any]) -> list[float]:
    """Returns the gap of the two likeliest tokens of each position."""
    found = []
    for position in logprobs:
        best, second, *_ = sorted((p.logprob for p in position.values()), reverse=True)
        found.append(best - second)
    return found


def answer(
    llm: LLM,
    prompts: list[list[int]],
    max_tokens: int,
    transfers: list[dict[str, Any] | None] | None = None,
    with_margins: bool = False,
) -> dict[str, Any]:
    """Generates greedily for all prompts at once.

    Args:
        llm: The engine.
        prompts: Token ids of each.
        max_tokens: Tokens to generate for each.
        transfers: `kv_transfer_params` of each.
        with_margins: Whether to return the margin of each token.

    Returns:
        `start` and `end` by the machine's monotonic clock, `tokens`, `margins`,
        `transfers` for the next engine, `reasons` of the ends, and NIXL's `counters`.

    """
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=2 if with_margins else None,
            extra_args=transfer and {"kv_transfer_params": transfer},
        )
        for transfer in transfers or [None] * len(prompts)
    ]
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    start = time.monotonic()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    end = time.monotonic()
    completions = [output.outputs[0] for output in outputs]
    return {
        "start": start,
        "end": end,
        "tokens": [list(each.token_ids) for each in completions],
        "margins": [margins(each.logprobs or []) for each in completions],
        "transfers": [output.kv_transfer_params for output in outputs],
        "reasons": [each.finish_reason for each in completions],
        "counters": counters(),
    }


def main() -> None:
    address, options = sys.argv[1:]
    with Client(address) as connection:
        llm = LLM(**json.loads(options))
        config = llm.llm_engine.vllm_config
        connection.send(
            {
                "vocab_size": config.model_config.get_vocab_size(),
                "kv_cache_tokens": config.cache_config.kv_cache_size_tokens,
            }
        )
        while (call := connection.recv()) is not None:
            connection.send(answer(llm, **call))
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
