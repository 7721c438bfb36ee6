#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Counts the tokens of a chat that a hybrid's prefix cache holds at the next turn.

vLLM plans the cache of a model as on an H200, and its scheduler serves chats. Nothing
is computed, so it needs no GPU. It prints a row for each cache dtype and length of
turns, without and with ``--prefix-match-unit``.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from turbo_recipes import device  # noqa: E402
from turbo_recipes.shapes import Shape, load_shapes  # noqa: E402

DTYPES = ("auto", "fp8", "turbo4")
FIRST_PROMPT = 600
# Tokens that a turn adds, half of them the user's.
TURNS = (200, 500, 1000, 2000)
CHAT_LEN = 12_000
HEADER = (
    "model",
    "kv_cache_dtype",
    "prefix_match_unit",
    "block",
    "gib",
    "turn",
    "chats",
    "reused",
    "of",
    "percent",
    "steps",
)


@dataclass
class Plan:
    """vLLM's plan for a model.

    Attributes:
        config: The engine's configuration.
        cache: The KV cache's configuration.

    """

    config: Any
    cache: Any


def plan(shape: Shape, dtype: str, unit: int | None, memory: int) -> Plan:
    """Plan the cache of a model.

    Args:
        shape: The model's shape.
        dtype: The cache's dtype.
        unit: ``--prefix-match-unit``, if any.
        memory: Bytes of the cache.

    """
    from turbo_recipes.build import build

    from vllm.v1.core.kv_cache_planning import get_kv_cache_configs

    built = build(
        shape,
        dtype,
        enable_prefix_caching=True,
        mamba_cache_mode="align",
        prefix_match_unit=unit,
        max_model_len=CHAT_LEN + 288,
        async_scheduling=False,
        language_model_only=True,
    )
    if built.error is not None:
        raise built.error
    config = built.config
    assert config is not None
    (cache,) = get_kv_cache_configs(config, [built.specs], [memory], built.groups)
    config.cache_config.num_gpu_blocks = cache.num_blocks
    return Plan(config, cache)


class Server:
    """A scheduler, and a model whose answers are known."""

    def __init__(self, planned: Plan) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        config = planned.config
        init_none_hash(sha256)
        block_size, unit = resolve_kv_cache_block_sizes(planned.cache, config)
        self.hasher = get_request_block_hasher(unit, sha256)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=planned.cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=unit,
        )

    def answer(
        self, name: str, prompt: list[int], answer: list[int]
    ) -> tuple[int, int]:
        """Serve a request.

        Returns:
            The cached tokens of its prompt, and the steps to its first token.

        """
        from vllm.sampling_params import SamplingParams
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=len(answer), ignore_eos=True)
        params.update_from_generation_config({}, None)
        request = Request(name, prompt, params, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        cached = num_steps = 0
        while not request.is_finished():
            step = self.scheduler.schedule()
            assert step.num_scheduled_tokens.get(name), "no room for one request"
            if step.scheduled_new_reqs:
                cached = step.scheduled_new_reqs[0].num_computed_tokens
            num_steps += request.num_output_tokens == 0
            done = request.num_computed_tokens >= request.num_tokens
            sampled = [answer[request.num_output_tokens]] if done else []
            output = ModelRunnerOutput([name], {name: 0}, [sampled])
            self.scheduler.update_from_output(step, output)
        return cached, num_steps


def chat(index: int, turn: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the prompts and answers of a chat; a prompt begins with all before it."""
    tokens = [index * CHAT_LEN + i for i in range(CHAT_LEN)]
    length = FIRST_PROMPT
    while length + turn // 2 <= CHAT_LEN:
        yield tokens[:length], tokens[length : length + turn // 2]
        length += turn


def measure(planned: Plan, turn: int, num_chats: int) -> tuple[int, int, float]:
    """Serve a turn of every chat, then the next turn, and so on.

    Returns:
        The cached tokens of follow-up prompts, their tokens that had been computed, and
        the mean steps to an answer's first token.

    """
    server = Server(planned)
    reused = of = num_steps = num_answers = 0
    for number, turns in enumerate(zip(*(chat(i, turn) for i in range(num_chats)))):
        for index, (prompt, answer) in enumerate(turns):
            cached, steps = server.answer(f"{index}-{number}", prompt, answer)
            if number:
                reused += cached
                num_steps += steps
                num_answers += 1
                # The last token of an answer is not computed.
                of += len(prompt) - (turn - turn // 2) - 1
    return reused, of, num_steps / num_answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen3.5-35b-a3b"])
    parser.add_argument("--unit", type=int, default=16, help="the prefix match unit")
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    parser.add_argument("--chats", type=int, default=1, help="served in turns")
    parser.add_argument(
        "--gib", type=int, nargs="+", default=[40], help="sizes of the cache"
    )
    args = parser.parse_args()
    device.pretend()
    from turbo_recipes import build

    build.inspect_in_this_process()
    shapes = {shape.name: shape for shape in load_shapes()}
    print(*HEADER, sep=",")
    cases = product(args.models, args.gib, (None, args.unit), DTYPES)
    for model, gib, unit, dtype in cases:
        planned = plan(shapes[model], dtype, unit, gib * 2**30)
        block = planned.config.cache_config.block_size
        for turn in args.turns:
            reused, of, steps = measure(planned, turn, args.chats)
            row = (model, dtype, unit or "", block, gib, turn, args.chats)
            row += (reused, of, f"{100 * reused / of:.1f}", f"{steps:.2f}")
            print(*row, sep=",", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
