# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The common parts of `soak.py` and `soak_server.py`: arguments, prompts and faults."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from equality import TIE
from tasks import IM_END
from turbo_quality.cases import HELD_OUT, MODEL, Plan, Vocabulary, build_tasks


def build_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser of the common arguments, with some defaults of a soak's own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, default=MODEL)
    add("--kv-cache-dtype", default="turbo4")
    add("--window", action="store_true", help="have a recent window")
    add("--drafts", choices=["ngram"], help="verify drafts")
    add("--offload", type=float, default=0.0, help="GiB of the host's memory for pages")
    add("--lengths", nargs="+", type=int, help="tokens of prompts")
    add("--cases", type=int, help="per kind and length (%(default)s)")
    add("--tokens", type=int, default=48, help="generated per request")
    add("--max-num-seqs", type=int, help="(%(default)s)")
    add("--seed", type=int, default=0)
    add("--gpu-memory-utilization", type=float, default=0.5, help="free at the start")
    add("--output", type=Path, help="file that the row is added to")
    parser.set_defaults(**defaults)
    return parser


def make_prompts(args: argparse.Namespace, depths: tuple[float, ...]) -> list[Any]:
    """Returns the tokens of each prompt, which asks for facts in text."""
    plan = Plan(0, 0, 0, 0, tuple(args.lengths), depths, args.cases)
    text = HELD_OUT.read_text(encoding="utf-8")
    tasks = build_tasks(text, plan, args.seed, Vocabulary(args.model))
    return [task["prompt"] for task in tasks]


def decided_tokens(
    tokens: Sequence[int], likeliest: Iterable[Iterable[float]]
) -> list[int]:
    """Returns an answer's tokens before the first that rounding may decide.

    Args:
        tokens: The answer's tokens.
        likeliest: Log-probabilities of the likeliest tokens at each position.

    """
    decided: list[int] = []
    for token, logprobs in zip(tokens, likeliest, strict=True):
        # Two tokens with the same text are one entry of a server's answer.
        best, *others = sorted(logprobs, reverse=True)
        if not others or best - others[0] <= TIE:
            break
        decided.append(token)
        if token == IM_END:
            break
    return decided


def common_faults(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the faults that any soak may have, and whether a row has each."""
    return {
        f"{row['unequal']} answers are not the quiet run's": row["unequal"] > 0,
        "no request had a recent window": row["window"]
        and not any(row["recent_window"]),
    }
