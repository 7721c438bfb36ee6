# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The token ids that `quality.py` puts every engine through.

Models are byte-level (`seeded_model.write_tokenizer`): a text's tokens are its bytes,
and all of a distribution over so few tokens can be kept.
"""

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "quality"))

from tasks import (  # noqa: E402
    END_OF_TEXT,
    HELD_OUT_TEXT,
    SEPARATOR,
    Case,
    key_value_case,
    multi_needle_case,
    needle_case,
)

MODEL = ROOT / "models" / "needle-qwen3"
HELD_OUT = HELD_OUT_TEXT
# In bf16 logits are up to 1/16 apart: that hides small divergences, and makes ties.
HEAD = {"head_dtype": "float32"}
# Facts in a multi-needle case, and how many of them are asked for at once.
NEEDLES = 8
ASKED = 3
# Far apart, so that two seeds of the lab share no case.
SEEDS_PER_CELL = 100_000


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        texts: Stretches of held-out text.
        context: Tokens of each.
        decode_steps: Tokens at its end that are decoded one at a time.
        continuation_steps: Greedy tokens after the first half of each text.
        lengths: Tokens of a task's prompt and answer.
        depths: Where the needle is, from 0 (first line) to 1 (last line).
        cases: Tasks of each kind a length (needles: a length and depth).

    """

    texts: int
    context: int
    decode_steps: int
    continuation_steps: int
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cases: int

    def with_cases(self, cases: int) -> "Plan":
        return replace(self, cases=cases)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Cases:
    """What every engine gets.

    Attributes:
        plan: How much.
        texts: Token ids of held-out text.
        tasks: `kind`, `length`, `depth` (of needles), `prompt` and `answer`, which
            ends with the token that ends a turn.

    """

    plan: Plan
    texts: list[list[int]]
    tasks: list[dict[str, Any]]

    def longest(self) -> int:
        """Returns the tokens that the longest sequence has at its end."""
        tasks = (len(task["prompt"]) + len(task["answer"]) for task in self.tasks)
        return max(self.plan.context + 1, *tasks)

    def for_child(self) -> dict[str, Any]:
        return {
            "texts": self.texts,
            "decode_steps": self.plan.decode_steps,
            "continued": [text[: len(text) // 2] for text in self.texts],
            "continuation_steps": self.plan.continuation_steps,
            "tasks": self.tasks,
        }


def text_tokens(text: str) -> list[int]:
    """Returns a text's tokens; its documents are ended as in training."""
    tokens: list[int] = []
    for document in text.split(SEPARATOR):
        tokens += [*document.encode(), END_OF_TEXT]
    return tokens


def cut(tokens: list[int], count: int, length: int) -> list[list[int]]:
    """Returns stretches that share no token, spread over all of the text."""
    if len(tokens) < count * length:
        raise ValueError(f"{len(tokens)} tokens are not {count} texts of {length}")
    step = len(tokens) // count
    return [tokens[i * step : i * step + length] for i in range(count)]


def as_task(kind: str, length: int, depth: float | None, case: Case) -> dict[str, Any]:
    return {
        "kind": kind,
        "length": length,
        "depth": depth,
        "prompt": case.prompt_token_ids,
        "answer": case.answer_token_ids,
    }


def build_tasks(text: str, plan: Plan, seed: int) -> list[dict[str, Any]]:
    """Returns the retrieval tasks: needles, several needles, and look-ups in lists."""
    tasks = []
    for length in plan.lengths:
        for index in range(plan.cases):
            number = seed * SEEDS_PER_CELL + index
            for depth in plan.depths:
                case = needle_case(length, depth, number, text)
                tasks.append(as_task("needle", length, depth, case))
            case = multi_needle_case(length, NEEDLES, number, text, ASKED)
            tasks.append(as_task("multi_needle", length, None, case))
            case = key_value_case(length, number)
            tasks.append(as_task("key_value", length, None, case))
    return tasks


def build_cases(path: Path, plan: Plan, seed: int) -> Cases:
    """Returns all cases on a held-out text."""
    text = path.read_text(encoding="utf-8")
    texts = cut(text_tokens(text), plan.texts, plan.context)
    return Cases(plan, texts, build_tasks(text, plan, seed))
