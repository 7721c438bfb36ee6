# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The cases that `check_model.py` gives to every engine, in any model's tokens."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "quality"))

from tasks import SEPARATOR, Case, needle_case, passkey_case  # noqa: E402
from turbo_quality.cases import cut  # noqa: E402
from vocabulary import fitting  # noqa: E402

# Lengths of context; those up to the longest that is asked for are measured.
CONTEXTS = (512, 2048, 8192, 32768, 131072)
# Facts about other names need room.
MIN_CONTEXT = 512
# The tokenizer would take minutes for a larger text of a user.
MAX_CHARACTERS = 4 << 20
# Tokens of the prompt whose K is measured: enough for means over positions.
KEY_TOKENS = 2048
# The text that a model without a chat template continues.
CUE = "\nAnswer: The code is"


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        max_context: Tokens of the longest sequences.
        texts: The most stretches of text per context.
        decode_steps: Tokens at the end of each that are decoded one at a time.
        top: Likeliest tokens of the reference that are told apart.
        greedy_steps: Greedy tokens after the beginning of each text.
        cases: Needles per context and depth.
        depths: Places of the needle, from 0 (first line) to 1 (last line).
        answer_tokens: Tokens of an answer.
        passkeys: Whether the needles are pass keys in sentences that repeat.
        chunk: Tokens of a prompt that a step prefills: longer prompts read the cache.

    """

    max_context: int
    texts: int = 8
    decode_steps: int = 128
    top: int = 64
    greedy_steps: int = 64
    cases: int = 4
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    answer_tokens: int = 48
    passkeys: bool = False
    chunk: int = 2048

    @property
    def contexts(self) -> list[int]:
        shorter = [length for length in CONTEXTS if length < self.max_context]
        return [*shorter, self.max_context]


@dataclass(frozen=True)
class Cases:
    """The cases of every engine.

    Attributes:
        plan: How much is measured.
        texts: `context` and `tokens` of each stretch.
        needles: `context`, `depth`, `prompt` (tokens) and `answer` (text).
        keys: Tokens of the prompt whose K is measured.

    """

    plan: Plan
    texts: list[dict[str, Any]]
    needles: list[dict[str, Any]]
    keys: list[int]

    @property
    def prefilled(self) -> list[int]:
        """Indices of the texts of the longest context, if it has several chunks."""
        longest = self.plan.max_context
        if longest <= self.plan.chunk + 1:
            return []
        return [i for i, x in enumerate(self.texts) if x["context"] == longest]

    def for_child(self) -> dict[str, Any]:
        plan = self.plan
        # Texts of one length: the second context's, if there is one.
        length = plan.contexts[:2][-1]
        of_length = [t["tokens"] for t in self.texts if t["context"] == length]
        return {
            "texts": self.texts,
            "decode_steps": plan.decode_steps,
            "prefilled": self.prefilled,
            "prefill_from": plan.chunk,
            "top": plan.top,
            "continued": [text[: -plan.greedy_steps] for text in of_length],
            "greedy_steps": plan.greedy_steps,
            "needles": self.needles,
            "answer_tokens": plan.answer_tokens,
            "keys": self.keys,
        }


def prompt_tokens(tokenizer: Any, case: Case) -> list[int]:
    """Returns the tokens of a question, in the model's chat template if it has one."""
    if getattr(tokenizer, "chat_template", None):
        # Templates without thinking ignore the flag.
        text = tokenizer.apply_chat_template(
            case.messages,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(case.prompt + CUE)


def build_cases(text: str, plan: Plan, tokenizer: Any, seed: int) -> Cases:
    """Returns all cases on a text.

    Args:
        text: The text that is decoded, and that surrounds the facts.
        plan: How much is measured.
        tokenizer: The model's.
        seed: Seed of names and codes.

    Raises:
        ValueError: If the text is too short.

    """
    text = text[:MAX_CHARACTERS].replace(SEPARATOR, "\n")
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) < plan.max_context:
        raise ValueError(
            f"the text has {len(tokens)} tokens, too few for a context of "
            f"{plan.max_context}: --max-context or a longer --text"
        )
    # The tokens that begin every sequence, if any.
    start = tokenizer.encode("")
    texts = []
    for context in plan.contexts:
        length = context - len(start)
        for stretch in cut(tokens, min(plan.texts, len(tokens) // context), length):
            texts.append({"context": context, "tokens": [*start, *stretch]})
    needles = []
    bytes_a_token = len(text.encode()) / len(tokens)
    for context in plan.contexts:
        room = context - plan.answer_tokens
        for number in range(plan.cases):
            for depth in plan.depths:
                place = {"depth": depth, "seed": seed + number}
                case = fitting(
                    partial(passkey_case, **place)
                    if plan.passkeys
                    else partial(needle_case, **place, text=text),
                    room,
                    int(room * bytes_a_token),
                    lambda case: len(prompt_tokens(tokenizer, case)),
                )
                needle = {"context": context, "depth": depth, "answer": case.answer}
                needles.append(needle | {"prompt": prompt_tokens(tokenizer, case)})
    keys = [*start, *tokens[: min(KEY_TOKENS, plan.max_context) - len(start) - 1]]
    return Cases(plan, texts, needles, keys)
