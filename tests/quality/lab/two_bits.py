#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The loss of values of two bits, beside the caches of about the same bytes.

Writes two_bits.json, with all figures, and two_bits.md. A value has the format's
trellis of four states with eight levels, and a scale for each 16 coordinates. k3v2 then
takes 88 bytes a token and KV head of 128 coordinates, and k4v2 takes turbo3's 104. They
are measured like the means of K (means.py), as they are and without K's mean, averaged
over segments of 256 positions, with the first token's own mean. The presets of vLLM
keep four layers in bf16, as shipped, and their tokens are all seen as stored.

    two_bits.py --model models/needle-llama --output FOLDER
    two_bits.py --model build/smollm2 --text manuals.txt --output FOLDER
"""

import argparse
import sys
from dataclasses import replace
from functools import cache, partial

import torch
from attention import Cache, LabModel, Reading
from blockcodes import codebook_round_trip, trellis_codebook
from mean_arms import Arm
from means import (
    PRESETS,
    WINDOWS,
    Texts,
    build_text_parser,
    caches_of,
    means_of,
    until,
    write,
)
from measure import compare
from report import kl_cell, page
from upstream import boundary_layers
from variants import Variant, as_bfloat16, as_fp8, preset, upstream_preset

from vllm.v1.attention.ops.turbo import reference

VALUE_BITS = 2
# The preset that a cache with values of two bits has its keys and their bytes from.
KEYS = {"k4v2": "k4v3", "k3v2": "turbo3"}
UPSTREAM = ("turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
ARMS = (Arm(), Arm("256", first=1, own_first="K"))


def value_round_trip(x: torch.Tensor) -> torch.Tensor:
    """Values (..., D) through codes of two bits, in rotated space."""
    codebook = trellis_codebook(VALUE_BITS, x.shape[-1])
    return reference.inverse_rotate(codebook_round_trip(reference.rotate(x), codebook))


@cache
def two_bits(name: str, head_size: int) -> Variant:
    """A cache of ``KEYS``, without K's mean where one is given."""
    base = preset(KEYS[name], head_size, subtracts_mean=True)
    # Three bits of each coordinate become two.
    num_bytes = base.num_bytes - head_size // 8
    return replace(base, name=name, value=value_round_trip, num_bytes=num_bytes)


def shipped(name: str, lab: LabModel) -> list[Variant | None]:
    """The caches of the layers of a preset of vLLM."""
    kept = boundary_layers(lab.num_layers)
    own = upstream_preset(name, lab.head_size)
    plain = Variant("bf16", as_bfloat16, as_bfloat16, 4 * lab.head_size)
    return [plain if i in kept else own for i in range(lab.num_layers)]


def measure(args: argparse.Namespace) -> list[dict]:
    lab = LabModel(args.model, args.device)
    texts = Texts(args.model, args.text, args.texts, args.others, args.length)
    means = {"text": means_of(lab, [x.to(lab.device) for x in texts.others])}
    fp8 = Variant("fp8", as_fp8, as_fp8, 2 * lab.head_size)
    layers: dict[str, list[Variant | None]] = {"fp8": [fp8] * lab.num_layers}
    layers |= {name: shipped(name, lab) for name in UPSTREAM}
    caches = {
        (name, ARMS[0].name, window): Cache(own, Reading(window=window))
        for name, own in layers.items()
        for window in WINDOWS
    }
    num_bytes = {
        name: sum(x.num_bytes for x in own if x) / lab.num_layers
        for name, own in layers.items()
    }
    own_presets = partial(preset, head_size=lab.head_size, subtracts_mean=True)
    chosen = [own_presets(name) for name in PRESETS]
    chosen += [two_bits(name, lab.head_size) for name in KEYS]
    for own in chosen:
        found = caches_of(lab, own, list(ARMS), means, args.length)
        caches |= {(own.name, *key): cache for key, cache in found.items()}
        num_bytes[own.name] = own.num_bytes
    positions = slice(args.first, args.length - 1)
    held_out = [x.to(lab.device) for x in texts.held_out]
    figures = compare(lab, until(held_out, args.seconds), caches, positions)
    return [
        {"cache": name, "bytes": num_bytes[name], "arm": arm}
        | {str(w): figures[name, arm, w] for w in WINDOWS}
        for name, arm in dict.fromkeys(key[:2] for key in caches)
    ]


def markdown(args: argparse.Namespace, rows: list[dict]) -> str:
    about = (
        f"{args.model.name}, {rows[0][str(WINDOWS[0])]['texts']} texts of "
        f"{args.length} tokens of {args.text.name}, the first {args.first} positions "
        f"not counted; fp32 on {args.device}; KL in millinats a token with the "
        "standard error of the mean, by how many of the newest tokens are seen as "
        "they are. Bytes of a token and KV head, averaged over layers. Written by "
        "`tests/quality/lab/two_bits.py`."
    )
    head = ["cache", "bytes", "taken off", *WINDOWS]
    cells = [
        [x["cache"], f"{x['bytes']:g}", x["arm"]]
        + [kl_cell(x[str(window)]) for window in WINDOWS]
        for x in rows
    ]
    return page("Loss of values of two bits", about, [head, *cells])


def main() -> None:
    args = build_text_parser(__doc__).parse_args()
    write("two_bits", args, measure(args), markdown)


if __name__ == "__main__":
    sys.exit(main())
