#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The loss that is left when K's means come from random tokens in place of text.

Writes random_means.json, with all figures, and random_means.md. The means of K are of
one sequence of random tokens, of several lengths and seeds. They are taken off as
means.py does, and the first token has its own mean. Each arm stands beside the means of
text and beside nothing, on the same texts.

    random_means.py --model models/needle-llama --output FOLDER
    random_means.py --model build/smollm2 --text manuals.txt --output FOLDER
"""

import argparse
import sys
from dataclasses import replace
from itertools import product

import torch
from attention import LabModel
from mean_arms import KEY, Arm
from means import (
    RANDOM,
    WINDOWS,
    Texts,
    build_text_parser,
    caches_of,
    means_of,
    until,
    write,
)
from measure import comparisons, paired
from report import kl_cell, page
from variants import preset

CACHE = "turbo4"
# The arm that a server has.
BASE = replace(KEY, first=1, own_first="K")
NOTHING = Arm()


def random_tokens(vocabulary: int, count: int, seed: int) -> torch.Tensor:
    """(1, count) tokens, all of the vocabulary alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (1, count), generator=generator)


def measure(args: argparse.Namespace) -> list[dict]:
    lab = LabModel(args.model, args.device)
    texts = Texts(args.model, args.text, args.texts, args.others, args.length)
    means = {"text": means_of(lab, [x.to(lab.device) for x in texts.others])}
    vocabulary = lab.model.config.vocab_size
    for count, seed in product(RANDOM, range(args.seeds)):
        tokens = random_tokens(vocabulary, count, seed).to(lab.device)
        means[f"{count} random tokens, seed {seed}"] = means_of(lab, [tokens])
    arms = {"nothing": NOTHING} | {x: replace(BASE, source=x) for x in means}
    own = preset(CACHE, lab.head_size, subtracts_mean=True)
    caches = caches_of(lab, own, list(arms.values()), means, args.length)
    held_out = [x.to(lab.device) for x in texts.held_out]
    found = comparisons(lab, until(held_out, args.seconds), caches)
    positions = slice(args.first, args.length - 1)
    rows = []
    for source, arm in arms.items():
        row: dict = {"source": source}
        for window in WINDOWS:
            comparison = found[arm.name, window]
            row[str(window)] = comparison.figures(positions)
            for other in (NOTHING, arms["text"]):
                gain = paired(comparison, found[other.name, window], positions)
                row[f"{window} beside {other.name}"] = gain
        rows.append(row)
    return rows


def markdown(args: argparse.Namespace, rows: list[dict]) -> str:
    longest = str(WINDOWS[-1])
    about = (
        f"{args.model.name}, {CACHE}, {rows[0][longest]['texts']} texts of "
        f"{args.length} tokens of {args.text.name}, the first {args.first} positions "
        f"not counted; fp32 on {args.device}; KL in millinats a token with the "
        "standard error of the mean, by how many of the newest tokens are seen as "
        "they are. K loses its mean from token 1 on, averaged over segments of 2048, "
        f"and the first token its own. Differences are with the {longest} newest "
        "tokens, text by text. Written by `tests/quality/lab/random_means.py`."
    )
    beside = [f"{longest} beside {NOTHING.name}", f"{longest} beside {BASE.name}"]
    head = ["means of", *WINDOWS, "less nothing", "less means of text"]
    cells = [
        [row["source"], *(kl_cell(row[str(w)]) for w in WINDOWS)]
        + [kl_cell(row[key]) for key in beside]
        for row in rows
    ]
    return page("Means of K from random tokens", about, [head, *cells])


def main() -> None:
    parser = build_text_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=4, help="seeds of each length")
    args = parser.parse_args()
    write("random_means", args, measure(args), markdown)


if __name__ == "__main__":
    sys.exit(main())
