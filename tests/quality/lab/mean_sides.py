#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The divergence that a better table of K's mean, or an exact side, would leave.

Writes mean_sides.json, with all figures, and mean_sides.md. K's mean is taken off as it
is served: from token 1 on, averaged over segments of 2048 positions, and the first
token by its own. Beside it stand shorter segments, each position's own mean for the
first 2048 positions or all, V's mean of the first token, and caches of which one side
is exact. The newest 24 tokens are seen as they are. Stretches of texts are the samples
of errors, and each arm is compared with the served one stretch by stretch.

    mean_sides.py --model build/smollm2 --text manuals.txt --output FOLDER
"""

import argparse
import math
import sys
from dataclasses import replace

import torch
from attention import Cache, LabModel
from mean_arms import SERVED
from mean_rest import EXACT, WINDOW
from means import Texts, build_text_parser, caches_of, means_of, until, write
from measure import Comparison, comparisons, paired
from report import kl_cell, page
from variants import identity, preset

CACHES = ("turbo4", "k4v3")
STRETCH = 512
EXACT_POSITIONS = 2048
TABLES = {
    "segments of 512": replace(SERVED, key="512"),
    "each position's own mean": EXACT,
    "as served, and V's first token by its own": replace(SERVED, own_first="KV"),
}
FIRST_EXACT = f"each position's own mean for the first {EXACT_POSITIONS}"


def caches_by_name(
    lab: LabModel, texts: Texts, length: int, names: list[str]
) -> dict[tuple[str, str], Cache]:
    """The caches by cache dtype and arm; the first dtype alone has all tables."""
    means = {"text": means_of(lab, [x.to(lab.device) for x in texts.others])}
    found = {}
    for name in names:
        own = preset(name, lab.head_size, subtracts_mean=True)
        sides = {"as served": own, "K exact": replace(own, key=identity)}
        if name == CACHES[0]:
            sides["as served, V exact"] = replace(own, value=identity)
        for arm, variant in sides.items():
            caches = caches_of(lab, variant, [SERVED], means, length)
            found[name, arm] = caches[SERVED.name, WINDOW]
        if name != CACHES[0]:
            continue
        for arm, each in TABLES.items():
            caches = caches_of(lab, own, [each], means, length)
            found[name, arm] = caches[each.name, WINDOW]
        exact = found[name, "each position's own mean"].means
        served = found[name, "as served"]
        pairs = zip(exact, served.means)
        joined = [
            torch.cat([x[:, :EXACT_POSITIONS], y[:, EXACT_POSITIONS:]], 1)
            for x, y in pairs
        ]
        found[name, FIRST_EXACT] = replace(served, means=joined)
    return found


def by_stretch(comparison: Comparison, first: int) -> Comparison:
    """The same divergences, with stretches of texts in place of texts."""
    kl = torch.cat(comparison.divergences)[:, first:-1]
    count = kl.shape[1] // STRETCH
    return Comparison([kl[:, : count * STRETCH].reshape(-1, STRETCH)])


def measure(args: argparse.Namespace) -> list[dict]:
    lab = LabModel(args.model, args.device)
    texts = Texts(args.model, args.text, args.texts, args.others, args.length)
    caches = caches_by_name(lab, texts, args.length, args.caches)
    held_out = [x.to(lab.device) for x in texts.held_out]
    found = comparisons(lab, until(held_out, args.seconds), caches)
    stretches = {key: by_stretch(each, args.first) for key, each in found.items()}
    everything, rows = slice(None), []
    for (name, arm), each in stretches.items():
        kl = each.by_text(everything)
        error = kl.std().item() / math.sqrt(len(kl))
        row = {"cache": name, "arm": arm, "kl": kl.mean().item(), "kl_error": error}
        less = paired(each, stretches[name, "as served"], everything)
        rows.append(row | {"stretches": len(kl), "less": less})
    return rows


def markdown(args: argparse.Namespace, rows: list[dict]) -> str:
    about = (
        f"{args.model.name}, {rows[0]['stretches']} stretches of {STRETCH} tokens in "
        f"texts of {args.length} of {args.text.name}, the first {args.first} positions "
        f"not counted; fp32 on {args.device}; the {WINDOW} newest tokens are seen as "
        "they are; KL in millinats a token with the standard error over stretches, and "
        "how much it is above the served one's. Written by "
        "`tests/quality/lab/mean_sides.py`."
    )
    cells = [[x["cache"], x["arm"], kl_cell(x), kl_cell(x["less"])] for x in rows]
    head = ["cache", "K's mean", "KL", "above"]
    return page("Better tables of K's mean, and exact sides", about, [head, *cells])


def main() -> None:
    parser = build_text_parser(__doc__)
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES)
    args = parser.parse_args()
    write("mean_sides", args, measure(args), markdown)


if __name__ == "__main__":
    sys.exit(main())
