# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A trained model that is asked for facts, and texts that others go on with."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from turbo_quality.cases import HELD_OUT, MODEL, Plan, Vocabulary, build_tasks

# The model's biases of K are as long as those of Qwen2.5-7B: without an offset most
# facts are lost, and answers diverge by half a nat and more.
TRAINED = MODEL.with_name("needle-qwen2")
# Tokens that hold every answer.
MAX_TOKENS = 24


@cache
def tasks() -> list[dict[str, Any]]:
    """Returns texts of over 400 tokens, with a fact to find: `prompt` and `answer`."""
    plan = Plan(0, 0, 0, 0, (480,), (0.2, 0.8), 1)
    text = HELD_OUT.read_text(encoding="utf-8")
    return build_tasks(text, plan, 7, Vocabulary(TRAINED))


def prompts() -> list[list[int]]:
    return [task["prompt"] for task in tasks()]


def right(requests: list[dict[str, Any]]) -> list[bool]:
    """Returns by prompt whether its fact was found."""
    return [
        request["tokens"][: len(task["answer"])] == task["answer"]
        for request, task in zip(requests, tasks(), strict=True)
    ]


def texts(lengths: Sequence[int], first: int = 0) -> list[list[int]]:
    """Returns held-out texts of some lengths, a token a byte, from a byte on."""
    text = HELD_OUT.read_bytes()
    starts = range(first, first + 1000 * len(lengths), 1000)
    return [list(text[i : i + n]) for i, n in zip(starts, lengths)]
