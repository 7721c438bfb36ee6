#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Facts that caches of few bits find again, values of two bits among them.

Writes retrieval.json, with all figures, and retrieval.md. No server has values of two
bits, so a trained model reads each task's text from the cache in the lab. An answer is
right if each of its tokens is the most likely one after those before it. Rivals have no
right answer: the first digit that exact K and V give counts. The divergence is that of
the answer's tokens. Caches are as served: turbo dtypes see the 24 newest tokens as they
are and store K without its mean, and vLLM's presets keep four layers in bf16.

    retrieval.py --model models/needle-llama --output FOLDER
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from attention import Cache, LabModel, Reading
from mean_arms import SERVED, served
from means import (
    PRESETS,
    Texts,
    add_across,
    build_text_parser,
    caches_of,
    means_of,
    write,
)
from measure import kl_divergence
from report import kl_cell, page
from two_bits import KEYS, UPSTREAM, shipped, two_bits
from variants import Variant, as_fp8, preset
from windows import QUALITY

sys.path.insert(0, str(QUALITY))

from tasks import (  # noqa: E402
    HELD_OUT_TEXT,
    Case,
    key_value_case,
    multi_needle_case,
    needle_case,
    rival_case,
)
from vocabulary import Vocabulary  # noqa: E402

DEPTHS = (0.1, 0.5, 0.9)
RIVALS = "rivals"
WINDOW = 24


def makers(text: str) -> dict[str, Callable[[int, int], Case]]:
    """By task, what makes a case of so many tokens from a seed."""
    return {
        "needle": lambda size, seed: needle_case(size, DEPTHS[seed % 3], seed, text),
        "3 of 8 codes": lambda size, seed: multi_needle_case(size, 8, seed, text, 3),
        "look-up": key_value_case,
        RIVALS: lambda size, seed: rival_case(size, seed, text),
    }


class Prompt(NamedTuple):
    """A case as tokens.

    Attributes:
        tokens: (1, T), the prompt and, unless it has rivals, the answer.
        answer: The answer's number of tokens.

    """

    tokens: torch.Tensor
    answer: int


def prompts(
    vocabulary: Vocabulary, make: Callable[[int, int], Case], length: int, count: int
) -> Iterator[Prompt]:
    """So many cases of at most ``length`` tokens, with their answers."""
    for seed in range(count):
        case = vocabulary.fitting(partial(make, seed=seed), length)
        answer = case.answer_tokens(vocabulary.encode)
        tokens = [*case.prompt_tokens(vocabulary.encode), *answer]
        yield Prompt(torch.tensor([tokens]), len(answer))


@dataclass
class Score:
    """The answers from one cache to the cases of a task."""

    right: list[bool] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)

    def add(
        self, exact: torch.Tensor, found: torch.Tensor, answer: torch.Tensor
    ) -> None:
        """Take log-probabilities (tokens, vocabulary) of an answer's tokens."""
        self.right.append(bool((found.argmax(-1) == answer).all()))
        self.divergences.append(kl_divergence(exact, found).mean().item())

    def figures(self) -> dict[str, float]:
        kl = torch.tensor(self.divergences)
        error = kl.std().item() / math.sqrt(len(kl)) if len(kl) > 1 else 0.0
        right = sum(self.right) / len(self.right)
        return {"kl": kl.mean().item(), "kl_error": error, "right": right}


def with_shares(
    lab: LabModel, texts: Texts, args: argparse.Namespace
) -> dict[str, Cache]:
    """The caches by name that have so much of K's mean taken off."""
    means = {"text": means_of(lab, [x.to(lab.device) for x in texts.others])}
    arms = served(args.shares, args.across, args.segments)
    found = {}
    for name in args.presets:
        own = preset(name, lab.head_size, subtracts_mean=True)
        caches = caches_of(lab, own, arms, means, args.length)
        found |= {f"{name}, {x.name}": caches[x.name, WINDOW] for x in arms}
    return found


def as_served(lab: LabModel, texts: Texts, length: int) -> dict[str, Cache]:
    """The caches by name, for texts of at most ``length`` tokens."""
    means = {"text": means_of(lab, [x.to(lab.device) for x in texts.others])}
    fp8 = Variant("fp8", as_fp8, as_fp8, 2 * lab.head_size)
    found = {"fp8": Cache([fp8] * lab.num_layers)}
    found |= {x: Cache(shipped(x, lab), Reading(window=1)) for x in UPSTREAM}
    own = [preset(x, lab.head_size, subtracts_mean=True) for x in PRESETS]
    for each in own + [two_bits(x, lab.head_size) for x in KEYS]:
        caches = caches_of(lab, each, [SERVED], means, length)
        found[each.name] = caches[SERVED.name, WINDOW]
    return found


def answers(lab: LabModel, prompt: Prompt, cache: Cache, rival: bool) -> torch.Tensor:
    """Log-probabilities of an answer's tokens, of its first alone for rivals."""
    tokens = prompt.tokens.to(lab.device)
    if rival:
        tokens = tokens[:, : 1 - prompt.answer]
    count = 1 if rival else prompt.answer
    own = replace(cache, means=[mean[:, : tokens.shape[1]] for mean in cache.means])
    return lab.log_probs(tokens, own)[0, -1 - count : -1]


def measure(args: argparse.Namespace) -> list[dict]:
    lab = LabModel(args.model, args.device)
    texts = Texts(args.model, args.text, 0, args.others, args.length)
    caches = (
        with_shares(lab, texts, args)
        if args.shares
        else as_served(lab, texts, args.length)
    )
    vocabulary = Vocabulary(args.model)
    rows: dict[str, dict] = {name: {"cache": name} for name in caches}
    tasks = makers(HELD_OUT_TEXT.read_text(encoding="utf-8"))
    for task in args.tasks or tasks:
        make = tasks[task]
        scores = {name: Score() for name in caches}
        rival = task == RIVALS
        count = args.rivals if rival else args.texts
        for prompt in prompts(vocabulary, make, args.length, count):
            exact = answers(lab, prompt, Cache([None] * lab.num_layers), rival)
            answer = prompt.tokens[0, -prompt.answer :].to(lab.device)
            for name, cache in caches.items():
                expected = exact.argmax(-1) if rival else answer
                found = answers(lab, prompt, cache, rival)
                scores[name].add(exact, found, expected)
        for name, score in scores.items():
            rows[name][task] = score.figures()
        print(task, flush=True)
    return list(rows.values())


def markdown(args: argparse.Namespace, rows: list[dict]) -> str:
    about = (
        f"{args.model.name}, {args.texts} cases a task, {args.rivals} with rivals, of "
        f"at most {args.length} tokens; fp32 on {args.device}; how many per cent of "
        "the answers are right, and KL of their tokens in millinats with the standard "
        "error of the mean. For rivals it is the first digit that counts, and right "
        "is the one that exact K and V give. Written by "
        "`tests/quality/lab/retrieval.py`."
    )
    tasks = [key for key in rows[0] if key != "cache"]
    cells = [
        [row["cache"]]
        + [f"{100 * row[x]['right']:.0f} %, {kl_cell(row[x], 1)}" for x in tasks]
        for row in rows
    ]
    return page("Facts that are found in caches", about, [["cache", *tasks], *cells])


def main() -> None:
    parser = build_text_parser(__doc__)
    parser.add_argument("--rivals", type=int, default=16, help="cases with rivals")
    parser.add_argument("--tasks", nargs="+", choices=makers(""), help="all by default")
    parser.add_argument(
        "--shares", nargs="+", type=float, help="parts of K's mean, turbo dtypes alone"
    )
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    add_across(parser)
    args = parser.parse_args()
    write("retrieval", args, measure(args), markdown)


if __name__ == "__main__":
    sys.exit(main())
