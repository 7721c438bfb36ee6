# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs one mode of `equality.py`, in a process of its own.

Usage: python equality_child.py JOB RESULT. RESULT is a .npz: `tokens` (request,
position), `logprobs` (request, position, token), `right`, whether each answer is the
task's, `cached_tokens` of each request, `from_cpu`, tokens whose cache came from the
CPU's memory, `most_at_once`, requests that ran, `capacity`, tokens that the cache
holds, and how many `preemptions`, `drafted` and `accepted` tokens there were.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.model_executor.layers.attention import Attention
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot

# To empty the prefix cache.
ATTEMPTS = 100
# Of vLLM's counters, by name in the result.
COUNTS = {
    "from_cpu": "vllm:external_prefix_cache_hits",
    "preemptions": "vllm:num_preemptions",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def find(tokens: list[int], part: list[int]) -> int:
    """Returns where a part first begins."""
    starts = range(len(tokens) - len(part) + 1)
    return next(i for i in starts if tokens[i : i + len(part)] == part)


class Swap:
    """Lets each of two decoding requests read one page of the other's cache.

    Attributes:
        page: Which of their pages, in order; None: nothing is swapped.

    """

    def __init__(self) -> None:
        self.page: int | None = None

    @contextmanager
    def installed(self) -> Iterator["Swap"]:
        builder = TurboAttentionBackend.get_builder_cls()
        build = builder.build

        def swapped(*args: Any, **kwargs: Any) -> Any:
            metadata = build(*args, **kwargs)
            if self.page is not None and metadata.num_decodes == 2:
                table = metadata.block_table.clone()
                table[:2, self.page] = table[:2, self.page].flip(0)
                metadata.block_table = table
            return metadata

        builder.build = swapped  # type: ignore[method-assign]
        try:
            yield self
        finally:
            builder.build = build  # type: ignore[method-assign]


@contextmanager
def zeroed_attention() -> Iterator[None]:
    """Lets every attention layer return zeros, after it has run."""
    forward = Attention.forward

    def zeroed(layer: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros_like(forward(layer, *args, **kwargs))

    Attention.forward = zeroed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Attention.forward = forward  # type: ignore[method-assign]


def logprobs_of(output: RequestOutput) -> list[list[float]]:
    """Returns the log-probabilities of all tokens, by position."""
    positions = output.outputs[0].logprobs
    assert positions is not None
    return [[p[token].logprob for token in sorted(p)] for p in positions]


def counted(name: str) -> int:
    """Returns a counter of vLLM's, over all engines."""
    metrics = get_metrics_snapshot()
    return sum(int(metric.value) for metric in metrics if metric.name == name)


def most_at_once(outputs: list[RequestOutput]) -> int:
    """Returns how many requests ran at the same time, at most."""
    changes = []
    for output in outputs:
        assert output.metrics is not None
        changes += [
            (output.metrics.scheduled_ts, 1),
            (output.metrics.last_token_ts, -1),
        ]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def sampling_params(job: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=job["tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def as_inputs(prompts: list[list[int]]) -> list[TokensPrompt]:
    return [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]


def generate(llm: LLM, job: dict[str, Any], swap: Swap | None) -> list[RequestOutput]:
    """Generates greedily for all prompts, so many at a time."""
    prompts = job["prompts"]
    half = -(-len(prompts) // 2) if job["sleep"] else 0
    size = job["batch"] or half or len(prompts)
    outputs: list[RequestOutput] = []
    for first in range(0, len(prompts), size):
        if first and job["sleep"]:
            sleep_and_wake(llm, job["sleep"])
        if swap is not None:
            # The page where the first one's answer begins, or the first of its values.
            value = bytes(job["answers"][first][:-1]).split(b",")[0]
            place = find(prompts[first], list(value))
            swap.page = place // llm.llm_engine.vllm_config.cache_config.block_size
        batch = as_inputs(prompts[first : first + size])
        outputs += llm.generate(batch, sampling_params(job), use_tqdm=False)
    return outputs


def sleep_and_wake(llm: LLM, level: int) -> None:
    """Takes all memory from an engine and gives it back; weights as vLLM documents."""
    llm.sleep(level=level)
    if level == 1:
        llm.wake_up()
        return
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])


def empty_prefix_cache(llm: LLM) -> None:
    """Lets the GPU forget all; blocks on their way to the CPU's memory are not free.

    Raises:
        RuntimeError: If some never are.

    """
    other = as_inputs([[0] * 8])
    for _ in range(ATTEMPTS):
        # A step is what notices that blocks have arrived.
        llm.generate(other, SamplingParams(max_tokens=4), use_tqdm=False)
        if llm.reset_prefix_cache():
            return
        time.sleep(0.1)
    raise RuntimeError("the prefix cache cannot be emptied")


def run(job: dict[str, Any]) -> tuple[list[RequestOutput], int]:
    """Returns the outputs that count, and the tokens that the cache holds."""
    llm = LLM(job["model"], disable_log_stats=False, **job["engine_args"])
    swap = Swap() if job["defect"] == "swapped" else None
    broken = zeroed_attention() if job["defect"] == "zeroed" else nullcontext()
    with broken, swap.installed() if swap else nullcontext():
        outputs = generate(llm, job, swap)
        if job["from_cpu"]:
            empty_prefix_cache(llm)
        if job["repeat"]:
            outputs = generate(llm, job, swap)
    return outputs, llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens or 0


async def run_ranks(job: dict[str, Any]) -> tuple[list[RequestOutput], int]:
    """The same where engines share the requests, which `LLM` has no way to."""
    args = AsyncEngineArgs(job["model"], **job["engine_args"])
    engine = AsyncLLM.from_engine_args(args)

    async def answer(number: int, prompt: TokensPrompt) -> RequestOutput:
        stream = engine.generate(prompt, sampling_params(job), str(number))
        outputs = [output async for output in stream]
        return outputs[-1]

    prompts = as_inputs(job["prompts"])
    try:
        outputs = await asyncio.gather(*map(answer, range(len(prompts)), prompts))
        return outputs, engine.vllm_config.cache_config.kv_cache_size_tokens or 0
    finally:
        engine.shutdown()


def main() -> None:
    job_path, result_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    if job["engine_args"].get("data_parallel_size", 1) > 1:
        outputs, capacity = asyncio.run(run_ranks(job))
    else:
        outputs, capacity = run(job)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    pairs = zip(tokens, job["answers"], strict=True)
    np.savez(
        result_path,
        tokens=np.array(tokens),
        logprobs=np.array([logprobs_of(output) for output in outputs], np.float32),
        right=np.array([own[: len(answer)] == answer for own, answer in pairs]),
        cached_tokens=np.array([output.num_cached_tokens or 0 for output in outputs]),
        most_at_once=np.array(most_at_once(outputs)),
        capacity=np.array(capacity),
        **{name: np.array(counted(metric)) for name, metric in COUNTS.items()},
    )


if __name__ == "__main__":
    main()
