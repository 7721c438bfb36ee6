# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The cases that `quality.py` gives to every engine, as token ids.

Vocabularies are small (`vocabulary.Vocabulary`), and consist mostly of bytes. So whole
distributions can be kept.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "quality"))

from tasks import (  # noqa: E402
    HELD_OUT_TEXT,
    SEPARATOR,
    Case,
    key_value_case,
    multi_needle_case,
    needle_case,
    rival_case,
)
from vocabulary import Vocabulary  # noqa: E402

MODEL = ROOT / "models" / "needle-qwen3"
HELD_OUT = HELD_OUT_TEXT
# Neighbouring logits in bf16 are up to 1/16 apart, which hides small divergences and
# makes ties.
HEAD = {"head_dtype": "float32"}
KINDS = ("needle", "multi_needle", "key_value")
# Facts in a multi-needle case, and how many of them are asked for at once.
NEEDLES = 8
ASKED = 3
# Tokens at the end of a text with rivals that are decoded one at a time.
RIVAL_STEPS = 8
# Seeds are far apart, so that two seeds of the lab share no case.
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
        depths: Places of the needle, from 0 (first line) to 1 (last line).
        cases: Tasks of each kind and length; needles: of each length and depth.
        rivals: Texts of each length that give one name several codes.
        kinds: The kinds of tasks.

    """

    texts: int
    context: int
    decode_steps: int
    continuation_steps: int
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cases: int
    rivals: int = 0
    kinds: tuple[str, ...] = KINDS

    def changed(self, **values: Any) -> "Plan":
        """Returns the plan with other values, where they are not None."""
        given = {name: x for name, x in values.items() if x is not None}
        return replace(self, **given)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Cases:
    """The cases of every engine.

    Attributes:
        plan: How much is measured.
        texts: Token ids of held-out text.
        tasks: `kind`, `length`, `depth` (of needles), `prompt` and `answer`, which
            ends with the token that ends a turn.
        rivals: Token ids of texts that give one name several codes. A question for the
            code and the first digit of an answer follow. All the codes together decide
            that digit.

    """

    plan: Plan
    texts: list[list[int]]
    tasks: list[dict[str, Any]]
    rivals: list[list[int]]

    def longest(self) -> int:
        """Returns the tokens of the longest sequence at its end."""
        tasks = (len(task["prompt"]) + len(task["answer"]) for task in self.tasks)
        return max(self.plan.context + 1, *tasks, *map(len, self.rivals))

    def disk_bytes(self, vocab_size: int) -> int:
        """Returns the bytes of an arm's distributions, of the whole vocabulary."""
        positions = sum(len(x) - 1 + self.plan.decode_steps for x in self.texts)
        return 4 * vocab_size * (positions + len(self.rivals))

    def for_child(self) -> dict[str, Any]:
        return {
            "texts": self.texts,
            "decode_steps": self.plan.decode_steps,
            "continued": [text[: len(text) // 2] for text in self.texts],
            "continuation_steps": self.plan.continuation_steps,
            "tasks": self.tasks,
            "rivals": self.rivals,
            "rival_steps": RIVAL_STEPS,
        }


def cut(tokens: list[int], count: int, length: int) -> list[list[int]]:
    """Returns stretches without common tokens, spread over the whole text."""
    if len(tokens) < count * length:
        raise ValueError(f"{len(tokens)} tokens are not {count} texts of {length}")
    step = len(tokens) // count
    return [tokens[i * step : i * step + length] for i in range(count)]


def build_tasks(
    text: str, plan: Plan, seed: int, vocabulary: Vocabulary
) -> list[dict[str, Any]]:
    """Returns the retrieval tasks: needles, several needles, and look-ups in lists."""
    tasks: list[dict[str, Any]] = []

    def add(
        kind: str, length: int, depth: float | None, make: Callable[[int], Case]
    ) -> None:
        if kind not in plan.kinds:
            return
        case = vocabulary.fitting(make, length)
        task = {"kind": kind, "length": length, "depth": depth}
        task["prompt"] = case.prompt_tokens(vocabulary.encode)
        tasks.append(task | {"answer": case.answer_tokens(vocabulary.encode)})

    for length in plan.lengths:
        for index in range(plan.cases):
            number = seed * SEEDS_PER_CELL + index
            for depth in plan.depths:
                make = partial(needle_case, depth=depth, seed=number, text=text)
                add("needle", length, depth, make)
            make = partial(
                multi_needle_case, needles=NEEDLES, seed=number, text=text, asked=ASKED
            )
            add("multi_needle", length, None, make)
            add("key_value", length, None, partial(key_value_case, seed=number))
    return tasks


def build_rivals(
    text: str, plan: Plan, seed: int, vocabulary: Vocabulary
) -> list[list[int]]:
    """Returns texts with rivals, up to the answer's first digit."""
    rivals = []
    for length in plan.lengths:
        for index in range(plan.rivals):
            number = seed * SEEDS_PER_CELL + index
            make = partial(rival_case, seed=number, text=text)
            case = vocabulary.fitting(make, length)
            first = case.answer_tokens(vocabulary.encode)[0]
            rivals.append([*case.prompt_tokens(vocabulary.encode), first])
    return rivals


def build_cases(path: Path, plan: Plan, seed: int, model: Path) -> Cases:
    """Returns all cases on a held-out text, in the tokens of a model's folder."""
    text = path.read_text(encoding="utf-8")
    vocabulary = Vocabulary(model)
    tokens = vocabulary.documents(text.split(SEPARATOR))
    texts = cut(tokens, plan.texts, plan.context)
    given = text, plan, seed, vocabulary
    return Cases(plan, texts, build_tasks(*given), build_rivals(*given))
