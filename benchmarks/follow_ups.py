# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measures a chat's tokens in the prefix cache, and the time to the next answer."""

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

from turbo_engine import Engine, random_prompt

# Tokens that a chat's turns after the first add, without the answers.
TURNS = (200, 500, 2000)
# Chats at once, and the tokens of their first turns.
SHAPES = ((1, 4096), (16, 4096))
# Distance of the seeds of one turn's texts from the next one's.
SEEDS = 1_000_000


class ChatEngine(Engine):
    """An engine with a prefix cache. Its chats have answers of `args.steps` tokens."""

    def __init__(self, arm: str, args: argparse.Namespace) -> None:
        self.turns = args.turns
        first = max(context for _, context in args.shapes)
        added = sum(self.turns) + args.steps * (len(self.turns) + 1)
        chats = {"max_model_len": first + added, "disable_log_stats": False}
        if args.prefix_match_unit is not None:
            chats["prefix_match_unit"] = args.prefix_match_unit
        args.engine_args = chats | args.engine_args
        super().__init__(arm, args)

    def answer(self, prompts: list[list[int]]) -> tuple[list[list[int]], int, float]:
        """Answers a turn of each chat.

        Returns:
            The chats with their answers, the number of cached tokens of the prompts,
            and the seconds until all chats had a token.

        """
        _, outputs = self.generate(prompts, self.args.steps)
        chats, reused, seconds = [], 0, 0.0
        for prompt, output in zip(prompts, outputs):
            assert output.metrics is not None and output.num_cached_tokens is not None
            chats.append([*prompt, *output.outputs[0].token_ids])
            reused += output.num_cached_tokens
            seconds = max(seconds, output.metrics.first_token_latency)
        return chats, reused, seconds

    def chat(self, batch: int, context: int, seed: int) -> list[tuple[int, float]]:
        """Returns the reused tokens and the seconds to a token, for each later turn."""
        assert self.llm.reset_prefix_cache()
        chats, reused, _ = self.answer(self.prompts(batch, context, seed))
        assert not reused
        found = []
        for number, tokens in enumerate(self.turns, 1):
            first = number * SEEDS + seed
            texts = (
                random_prompt(first + i, tokens, self.vocab_size) for i in range(batch)
            )
            prompts = [chat + text for chat, text in zip(chats, texts)]
            chats, reused, seconds = self.answer(prompts)
            found.append((reused, seconds))
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields a row for each shape and later turn."""
        for batch, context in self.args.shapes:
            runs = [
                self.chat(batch, context, seed=run * batch)
                for run in range(1 + self.args.repeats)
            ]
            length = context
            # The first run compiles.
            for tokens, *found in zip(self.turns, *runs[1:]):
                reused, seconds = zip(*found)
                # The last token of an answer is not computed.
                computed = length + self.args.steps - 1
                length = computed + 1 + tokens
                yield {
                    "shape": f"{batch}x{context}",
                    "part": "follow_up",
                    "turn_tokens": tokens,
                    "prompt_tokens": batch * length,
                    "computed_tokens": batch * computed,
                    "reused_tokens": min(reused),
                    "all_reused_tokens": list(reused),
                    "seconds": statistics.median(seconds),
                    "all_seconds": list(seconds),
                }
