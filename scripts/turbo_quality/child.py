# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs the cases of `quality.py` on one engine, in a process of its own.

Usage: python child.py JOB FOLDER. The folder gets `prefill.npy`, `decode.npy`
and `rivals.npy`, log-probabilities of the whole vocabulary (text, position, token), and
`result.json`: the generated tokens, and facts of the engine.

All distributions come from vLLM's model runner V2, before any sampling parameter
applies. A prompt's come through `prompt_logprob_token_ids`. Decode steps replay the
text as if it had been sampled.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.engine import arg_utils
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.outputs import RequestOutput
from vllm.v1.attention.ops.turbo.format import is_turbo_cache_dtype
from vllm.v1.kv_cache_interface import CircularBufferSpec

# The packages beside this one.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from turbo_process.arm import write_result  # noqa: E402


def compress_all_layers() -> str:
    """Lets vLLM's turboquant presets compress the layers that they keep in bf16."""
    TurboQuantConfig.get_boundary_skip_layers = staticmethod(  # type: ignore[assignment, method-assign]
        lambda *_: []
    )
    return "every layer compressed: get_boundary_skip_layers overridden"


def unforce_flash_attention_2() -> str | None:
    """Undoes the turboquant presets' choice of a FlashAttention that is missing.

    Returns:
        The override, in words; None if FlashAttention 2 is installed.

    """
    from vllm.v1.attention.backends.fa_utils import (
        get_flash_attn_version,
        is_fa_version_supported,
    )

    if is_fa_version_supported(2):
        return None
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    version = get_flash_attn_version()

    def with_version(**configs: Any) -> VllmConfig:
        configs["attention_config"].flash_attn_version = version
        return VllmConfig(**configs)

    # The version is forced before the configuration is made, and read while it is.
    arg_utils.VllmConfig = with_version  # type: ignore[misc, assignment]
    # Version 2 has no schedule. Layers left in bf16 fail with one that was made for the
    # other layers' pages.
    FlashAttentionMetadataBuilder._get_scheduler_metadata = (  # type: ignore[assignment, method-assign]
        lambda *_, **__: None
    )
    return (
        f"FlashAttention 2 is missing: version {version} instead, as bf16 takes, "
        "without a schedule made ahead"
    )


def apply_overrides(job: dict[str, Any]) -> list[str]:
    """Changes this process's vLLM as an arm asks, and returns the changes in words."""
    changes = []
    if job["engine_args"]["kv_cache_dtype"].startswith("turboquant_"):
        changes.append(unforce_flash_attention_2())
    if job["compress_all_layers"]:
        changes.append(compress_all_layers())
    return [change for change in changes if change]


def as_array(output: RequestOutput, vocab_size: int) -> np.ndarray:
    """Returns (position, token) log-probabilities of a request's generated tokens."""
    logprobs = output.outputs[0].logprobs
    assert isinstance(logprobs, FlatLogprobs)
    starts = np.asarray(logprobs.start_indices)
    counts = np.asarray(logprobs.end_indices) - starts
    rows = np.repeat(np.arange(len(starts)), counts)
    array = np.full((len(starts), vocab_size), np.nan, dtype=np.float32)
    array[rows, logprobs.token_ids] = logprobs.logprobs
    assert not np.isnan(array).any()
    return array


class Lab:
    """One engine, and its cases."""

    def __init__(self, job: dict[str, Any]) -> None:
        start = time.perf_counter()
        self.overrides = apply_overrides(job)
        self.llm = LLM(job["model"], **job["engine_args"])
        self.config = self.llm.llm_engine.vllm_config
        self.vocab_size = self.config.model_config.get_vocab_size()
        self.seconds = {"start": time.perf_counter() - start}

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[RequestOutput]:
        batch = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return self.llm.generate(batch, params, use_tqdm=False)

    def prefill(self, texts: list[list[int]]) -> np.ndarray:
        """Returns each prompt position's distribution of the next token."""
        vocabulary = np.arange(self.vocab_size, dtype=np.int32)
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=1,
                detokenize=False,
                prompt_logprob_token_ids=np.tile(vocabulary, (len(text) - 1, 1)),
            )
            for text in texts
        ]
        arrays = [o.prompt_token_id_logprobs for o in self.generate(texts, params)]
        return np.stack([array for array in arrays if array is not None])

    def decode(self, texts: list[list[int]], steps: int) -> np.ndarray:
        """Returns the distributions of the last `steps` tokens, decoded one by one."""
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=steps,
                ignore_eos=True,
                detokenize=False,
                logprobs=-1,
                flat_logprobs=True,
                trace_decode_token_ids=text[-steps:],
            )
            for text in texts
        ]
        outputs = self.generate([text[:-steps] for text in texts], params)
        for output, text in zip(outputs, texts, strict=True):
            assert list(output.outputs[0].token_ids) == text[-steps:]
        return np.stack([as_array(output, self.vocab_size) for output in outputs])

    def continue_greedily(
        self, prompts: list[list[int]], lengths: list[int], ignore_eos: bool
    ) -> list[list[int]]:
        """Returns the greedy tokens after each prompt."""
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=length,
                ignore_eos=ignore_eos,
                detokenize=False,
            )
            for length in lengths
        ]
        outputs = self.generate(prompts, params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def facts(self) -> dict[str, Any]:
        """Returns the engine's account of its cache, which ranks may share."""
        ranks = self.llm.collective_rpc("get_kv_cache_spec")
        layer_specs = [item for rank in ranks for item in rank.items()]
        # A recent window has one block per request, whatever the length.
        windows = [x for x in layer_specs if isinstance(x[1], CircularBufferSpec)]
        layer_specs = [item for item in layer_specs if item not in windows]
        specs = [spec for _, spec in layer_specs]
        layers = self.config.compilation_config.static_forward_context.values()
        backends = {
            layer.get_attn_backend().get_name()
            for layer in layers
            if isinstance(layer, (Attention, MLAAttention))
        }
        return {
            "bytes_per_token": sum(s.page_size_bytes / s.block_size for s in specs),
            "layers": len({name for name, _ in layer_specs}),
            "window_layers": len({name for name, _ in windows}),
            # Whether layers' caches differ in dtype.
            "mixed_layers": len({s.page_size_bytes / s.block_size for s in specs}) > 1,
            "backends": sorted(backends),
            "overrides": self.overrides,
            "seconds": self.seconds,
        }

    def timed(self, part: str, start: float) -> None:
        self.seconds[part] = time.perf_counter() - start


def main() -> None:
    job_path, folder = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    lab = Lab(job)

    texts, steps = job["texts"], job["decode_steps"]
    start = time.perf_counter()
    np.save(folder / "prefill.npy", lab.prefill(texts))
    lab.timed("prefill", start)

    start = time.perf_counter()
    np.save(folder / "decode.npy", lab.decode(texts, steps))
    lab.timed("decode", start)

    start = time.perf_counter()
    rivals = lab.decode(job["rivals"], job["rival_steps"])
    # The tokens before the answer are only decoded to be read from the cache.
    np.save(folder / "rivals.npy", rivals[:, -1:])
    lab.timed("rivals", start)

    start = time.perf_counter()
    prompts, length = job["continued"], job["continuation_steps"]
    continuations = lab.continue_greedily(prompts, [length] * len(prompts), True)
    lab.timed("greedy", start)

    start = time.perf_counter()
    tasks = job["tasks"]
    answers = lab.continue_greedily(
        [task["prompt"] for task in tasks],
        [len(task["answer"]) for task in tasks],
        False,
    )
    lab.timed("tasks", start)
    facts = lab.facts()
    is_turbo = is_turbo_cache_dtype(lab.config.cache_config.cache_dtype)
    wanted = is_turbo and lab.config.attention_config.turbo_window
    if wanted and not facts["window_layers"]:
        raise RuntimeError("there is no recent window: the log says why")
    write_result(folder, {"continuations": continuations, "answers": answers} | facts)


if __name__ == "__main__":
    main()
