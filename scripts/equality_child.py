# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs one mode of `equality.py`, in a process of its own.

Usage: python equality_child.py JOB RESULT. RESULT is a .npz: `tokens` (request,
position), `logprobs` (request, position, token), `right`, whether each answer is the
task's, `cached_tokens` of each request, and `preemptions`.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.model_executor.layers.attention import Attention
from vllm.outputs import RequestOutput
from vllm.v1.attention.backends.turbo_attn import TurboAttentionBackend


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


def count_preemptions(llm: LLM) -> int:
    return sum(
        int(metric.value)
        for metric in llm.get_metrics()
        if metric.name == "vllm:num_preemptions"
    )


def generate(llm: LLM, job: dict[str, Any], swap: Swap | None) -> list[RequestOutput]:
    """Generates greedily for all prompts, so many at a time."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=job["tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
    )
    prompts = job["prompts"]
    size = job["batch"] or len(prompts)
    outputs: list[RequestOutput] = []
    for first in range(0, len(prompts), size):
        if swap is not None:
            # The page where the first one's answer begins, or the first of its values.
            value = bytes(job["answers"][first][:-1]).split(b",")[0]
            place = find(prompts[first], list(value))
            swap.page = place // llm.llm_engine.vllm_config.cache_config.block_size
        batch = [
            TokensPrompt(prompt_token_ids=prompt)
            for prompt in prompts[first : first + size]
        ]
        outputs += llm.generate(batch, params, use_tqdm=False)
    return outputs


def main() -> None:
    job_path, result_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    llm = LLM(job["model"], disable_log_stats=False, **job["engine_args"])
    swap = Swap() if job["defect"] == "swapped" else None
    broken = zeroed_attention() if job["defect"] == "zeroed" else nullcontext()
    with broken, swap.installed() if swap else nullcontext():
        for _ in range(1 + job["repeat"]):
            outputs = generate(llm, job, swap)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    pairs = zip(tokens, job["answers"], strict=True)
    np.savez(
        result_path,
        tokens=np.array(tokens),
        logprobs=np.array([logprobs_of(output) for output in outputs], np.float32),
        right=np.array([own[: len(answer)] == answer for own, answer in pairs]),
        cached_tokens=np.array([output.num_cached_tokens or 0 for output in outputs]),
        preemptions=np.array(count_preemptions(llm)),
    )


if __name__ == "__main__":
    main()
