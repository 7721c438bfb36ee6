#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The loss of the first turbo4, beside the caches that vLLM has.

Writes first_turbo4.json, with all figures, and first_turbo4.md. The first turbo4 reads
all tokens from its pages, the newest too, and takes no mean off. The column for 24 has
a recent window, which is a later step. A model runs held-out text in fp32 on K and V as
the cache gives them back.

    first_turbo4.py --model build/smollm2 --text manuals.txt --output FOLDER
"""

import argparse
import sys

from attention import Cache, LabModel, Reading
from means import Texts, build_text_parser, until, write
from measure import compare
from report import kl_cell, page
from two_bits import shipped
from variants import Variant, as_fp8, preset, upstream_preset

UPSTREAM = "turboquant_4bit_nc"
WINDOWS = (0, 24)


def measure(args: argparse.Namespace) -> list[dict]:
    lab = LabModel(args.model, args.device)
    texts = Texts(args.model, args.text, args.texts, 0, args.length)
    alike = {
        "fp8": Variant("fp8", as_fp8, as_fp8, 2 * lab.head_size),
        "turbo4": preset("turbo4", lab.head_size),
        f"{UPSTREAM}, all layers": upstream_preset(UPSTREAM, lab.head_size),
    }
    layers = {name: [own] * lab.num_layers for name, own in alike.items()}
    layers[f"{UPSTREAM}, as shipped"] = shipped(UPSTREAM, lab)
    caches = {
        (name, window): Cache(own, Reading(window=window))
        for name, own in layers.items()
        for window in WINDOWS
    }
    positions = slice(args.first, args.length - 1)
    held_out = [x.to(lab.device) for x in texts.held_out]
    figures = compare(lab, until(held_out, args.seconds), caches, positions)
    return [
        {"cache": name, "bytes": sum(x.num_bytes for x in own if x) / lab.num_layers}
        | {str(w): figures[name, w] for w in WINDOWS}
        for name, own in layers.items()
    ]


def markdown(args: argparse.Namespace, rows: list[dict]) -> str:
    about = (
        f"{args.model.name}, {rows[0]['0']['texts']} texts of {args.length} tokens of "
        f"{args.text.name}, the first {args.first} positions not counted; fp32 on "
        f"{args.device}; KL in millinats a token with the standard error of the mean, "
        "by how many of the newest tokens are seen as they are. Bytes of a token and "
        "KV head, averaged over layers. Written by `tests/quality/lab/first_turbo4.py`."
    )
    cells = [
        [row["cache"], f"{row['bytes']:g}", *(kl_cell(row[str(w)]) for w in WINDOWS)]
        for row in rows
    ]
    head = ["cache", "bytes", *WINDOWS]
    return page("Loss of the first turbo4", about, [head, *cells])


def main() -> None:
    args = build_text_parser(__doc__).parse_args()
    write("first_turbo4", args, measure(args), markdown)


if __name__ == "__main__":
    sys.exit(main())
