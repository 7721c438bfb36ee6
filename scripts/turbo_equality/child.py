# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs one mode of `equality.py`, in a process of its own.

Usage: python child.py JOB RESULT. RESULT is a .npz with these arrays: `tokens`
(request, position); `logprobs` (request, position, token); `right`, whether each answer
is the task's; `cached_tokens` of each request; `from_cpu`, tokens whose cache came from
the CPU's memory; `most_at_once`, the most requests that ran together; `capacity`,
tokens that the cache holds; the counts `preemptions`, `drafted` and `accepted`. `ran`
is JSON of the engine's settings: `ranks`, `replays` of CUDA graphs, and others by the
names of `LLM`'s arguments.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.inputs import TokensPrompt
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.turbo_mla_metadata import TurboMLAMetadataBuilder
from vllm.v1.attention.backends.turbo_attn import TurboMetadataBuilder
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot

# Metadata builders whose requests may read each other's pages.
BUILDERS = TurboMetadataBuilder, TurboMLAMetadataBuilder
# Attempts to empty the prefix cache.
ATTEMPTS = 100
# vLLM's counters, by their names in the result.
COUNTS = {
    "from_cpu": "vllm:external_prefix_cache_hits",
    "preemptions": "vllm:num_preemptions",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def find(tokens: list[int], part: list[int]) -> int:
    """Returns the index where a part first begins."""
    starts = range(len(tokens) - len(part) + 1)
    return next(i for i in starts if tokens[i : i + len(part)] == part)


class Swap:
    """Lets each of two decoding requests read one page of the other's cache.

    Attributes:
        page: The index of the page in each request's table; None swaps nothing.

    """

    def __init__(self) -> None:
        self.page: int | None = None

    @contextmanager
    def installed(self) -> Iterator["Swap"]:
        builds = {builder: builder.build for builder in BUILDERS}
        for builder, build in builds.items():
            builder.build = self._swapped(build)  # type: ignore[method-assign]
        try:
            yield self
        finally:
            for builder, build in builds.items():
                builder.build = build  # type: ignore[method-assign]

    def _swapped(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """A builder's method that swaps the page, if two requests decode."""

        def swapped(
            builder: AttentionMetadataBuilder,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            common = common_attn_metadata
            metadata = build(builder, common_prefix_len, common, fast_build)
            if self.page is None or metadata.num_decodes != 2:
                return metadata
            table = common.block_table_tensor.clone()
            table[:2, self.page] = table[:2, self.page].flip(0)
            # The second build repeats the plan, which has read the table.
            common = replace(common, block_table_tensor=table)
            return build(builder, common_prefix_len, common, fast_build)

        return swapped


@contextmanager
def zeroed_attention() -> Iterator[None]:
    """Lets every attention layer return zeros, after it has run."""
    layers = (Attention, MLAAttention)
    forwards = [layer.forward for layer in layers]

    def zeroed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: torch.zeros_like(forward(*args, **kwargs))

    for layer, forward in zip(layers, forwards):
        layer.forward = zeroed(forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards):
            layer.forward = forward  # type: ignore[method-assign]


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
    """Returns the most requests that ran at the same time."""
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


def count_replays(worker: Any) -> None:
    """Lets a worker count the CUDA graphs that it replays from now on."""
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        worker.num_replays += 1
        replay(graph)

    worker.num_replays = 0
    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]


def replays_and_block(worker: Any) -> tuple[int, int]:
    """Returns the graphs that a worker has replayed, and its cache's block size."""
    return worker.num_replays, worker.vllm_config.cache_config.block_size


def settings(config: VllmConfig, workers: list[tuple[int, int]]) -> dict[str, Any]:
    """Returns an engine's settings, by its own account after the start.

    Args:
        config: The engine's configuration.
        workers: `replays_and_block` of each worker.

    """
    parallel, scheduler = config.parallel_config, config.scheduler_config
    attention, cache = config.attention_config, config.cache_config
    speculative = config.speculative_config
    return {
        "ranks": len(workers),
        "replays": min(replays for replays, _ in workers),
        "block_size": min(block_size for _, block_size in workers),
        "kv_cache_dtype": cache.cache_dtype,
        "kv_cache_dtype_skip_layers": cache.kv_cache_dtype_skip_layers,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "kv_offloading_size": cache.kv_offloading_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "async_scheduling": bool(scheduler.async_scheduling),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "cp_kv_cache_interleave_size": parallel.cp_kv_cache_interleave_size,
        "dcp_comm_backend": parallel.dcp_comm_backend,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "turbo_prefill": attention.turbo_prefill,
        "turbo_window": attention.turbo_window,
        "enable_adaptive_verification": bool(
            speculative and speculative.enable_adaptive_verification
        ),
    }


def generate(llm: LLM, job: dict[str, Any], swap: Swap | None) -> list[RequestOutput]:
    """Generates greedily for all prompts, in batches of `batch` if the job has it."""
    prompts = job["prompts"]
    half = -(-len(prompts) // 2) if job["sleep"] else 0
    size = job["batch"] or half or len(prompts)
    outputs: list[RequestOutput] = []
    for first in range(0, len(prompts), size):
        if first and job["sleep"]:
            sleep_and_wake(llm, job["sleep"])
        if swap is not None:
            # The page where the first prompt's answer, or its first value, begins.
            value = bytes(job["answers"][first][:-1]).split(b",")[0]
            place = find(prompts[first], list(value))
            swap.page = place // llm.llm_engine.vllm_config.cache_config.block_size
        batch = as_inputs(prompts[first : first + size])
        outputs += llm.generate(batch, sampling_params(job), use_tqdm=False)
    return outputs


def sleep_and_wake(llm: LLM, level: int) -> None:
    """Takes all memory from an engine and gives it back, in vLLM's documented order."""
    llm.sleep(level=level)
    assert llm.llm_engine.is_sleeping()
    if level == 1:
        llm.wake_up()
        return
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])


def empty_prefix_cache(llm: LLM) -> None:
    """Empties the GPU's prefix cache, once no block is on its way to the CPU's memory.

    Raises:
        RuntimeError: If some blocks never arrive.

    """
    other = as_inputs([[0] * 8])
    for _ in range(ATTEMPTS):
        # Only a step notices that blocks have arrived.
        llm.generate(other, SamplingParams(max_tokens=4), use_tqdm=False)
        if llm.reset_prefix_cache():
            return
        time.sleep(0.1)
    raise RuntimeError("the prefix cache cannot be emptied")


def run(job: dict[str, Any]) -> tuple[list[RequestOutput], VllmConfig, list]:
    """Returns the compared outputs, the engine's configuration and
    `replays_and_block` of its workers.
    """
    llm = LLM(job["model"], disable_log_stats=False, **job["engine_args"])
    llm.collective_rpc(count_replays)
    swap = Swap() if job["defect"] == "swapped" else None
    broken = zeroed_attention() if job["defect"] == "zeroed" else nullcontext()
    with broken, swap.installed() if swap else nullcontext():
        outputs = generate(llm, job, swap)
        if job["from_cpu"]:
            empty_prefix_cache(llm)
        if job["repeat"]:
            outputs = generate(llm, job, swap)
    workers = llm.collective_rpc(replays_and_block)
    return outputs, llm.llm_engine.vllm_config, workers


async def run_ranks(
    job: dict[str, Any],
) -> tuple[list[RequestOutput], VllmConfig, list]:
    """Returns the same for engines that share the requests, which `LLM` cannot do."""
    args = AsyncEngineArgs(job["model"], **job["engine_args"])
    engine = AsyncLLM.from_engine_args(args)

    async def answer(number: int, prompt: TokensPrompt) -> RequestOutput:
        stream = engine.generate(prompt, sampling_params(job), str(number))
        outputs = [output async for output in stream]
        return outputs[-1]

    prompts = as_inputs(job["prompts"])
    try:
        await engine.collective_rpc(count_replays)
        outputs = await asyncio.gather(*map(answer, range(len(prompts)), prompts))
        workers = await engine.collective_rpc(replays_and_block)
        return outputs, engine.vllm_config, workers
    finally:
        engine.shutdown()


def main() -> None:
    job_path, result_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    if job["engine_args"].get("data_parallel_size", 1) > 1:
        outputs, config, workers = asyncio.run(run_ranks(job))
    else:
        outputs, config, workers = run(job)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    pairs = zip(tokens, job["answers"], strict=True)
    np.savez(
        result_path,
        tokens=np.array(tokens),
        logprobs=np.array([logprobs_of(output) for output in outputs], np.float32),
        right=np.array([own[: len(answer)] == answer for own, answer in pairs]),
        cached_tokens=np.array([output.num_cached_tokens or 0 for output in outputs]),
        most_at_once=np.array(most_at_once(outputs)),
        capacity=np.array(config.cache_config.kv_cache_size_tokens or 0),
        ran=np.array(json.dumps(settings(config, workers))),
        **{name: np.array(counted(metric)) for name, metric in COUNTS.items()},
    )


if __name__ == "__main__":
    main()
