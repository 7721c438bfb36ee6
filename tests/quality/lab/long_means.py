#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The cost of a mean of K in long contexts, with simulated keys.

Writes long_means.json and long_means.md. Keys are K = R(p) (m + s x) in bfloat16 at
positions p. R is the RoPE of a model, m the mean of K of one of its heads before RoPE,
s the deviation of each of its coordinates, and x Gaussian. Queries give the x logits a
deviation of 2. Figures are the KL divergence of the attention weights in millinats. The
offset that is taken off stored keys is none, the mean of R(p) m over segments of
positions, or R(p) m itself. Segments of 2048 are served.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from attention import Cache, LabModel
from key_offset_model import segment_means
from key_offsets import NUM_QUERIES, divergence
from means import Texts, build_text_parser, means_of, write
from report import page
from rotary import rope, turn
from variants import preset

CONTEXTS = (8192, 131072)
SEGMENTS = (2048, 512)
CACHE = "turbo4"
DEVIATION = 2.0


@dataclass(frozen=True)
class Head:
    """K of one head before RoPE.

    Attributes:
        layer: Its layer.
        head: Its KV head.
        mean: (D,).
        spread: (D,), the deviation of each coordinate.

    """

    layer: int
    head: int
    mean: torch.Tensor
    spread: torch.Tensor

    @property
    def length(self) -> float:
        """The mean's length as a multiple of the deviation's."""
        return (self.mean.norm() / self.spread.norm()).item()


def heads_of(lab: LabModel, text: torch.Tensor, first: int = 16) -> Iterator[Head]:
    """All heads of a model on a text, (1, T), without its first tokens."""
    means = means_of(lab, [text], first)
    cache = Cache([None] * lab.num_layers, recorded=[])
    lab.log_probs(text, cache)
    assert cache.recorded is not None
    cos, sin = rope(lab, text.shape[1])
    for layer, (key, _) in enumerate(cache.recorded):
        spread = turn(key, cos, -sin)[0, :, first:].std(1)
        for head, pair in enumerate(zip(means.key[layer], spread)):
            yield Head(layer, head, *pair)


def spaced(heads: list[Head], count: int) -> list[Head]:
    """Heads from the shortest mean to the longest, evenly by rank."""
    ranked = sorted(heads, key=lambda head: head.length)
    step = (len(ranked) - 1) / max(count - 1, 1)
    return [ranked[round(i * step)] for i in range(count)]


def offsets(mean: torch.Tensor) -> dict[str, torch.Tensor]:
    """The offset of each key by name, (T, D), of a mean at each position."""
    tables = {"nothing": torch.zeros_like(mean)}
    for length in SEGMENTS:
        (tables[f"segments of {length}"],) = segment_means([mean[None]], length)
    tables = {name: table.view_as(mean) for name, table in tables.items()}
    return tables | {"exact": mean}


def share_left(mean: torch.Tensor, table: torch.Tensor) -> float:
    """The share of the mean's square that a table leaves in stored keys."""
    return ((mean - table).square().sum() / mean.square().sum()).item()


def measure_head(
    head: Head, cos: torch.Tensor, sin: torch.Tensor, seed: int
) -> dict[str, dict[str, float]]:
    """Millinats, and the share of the mean that is stored, by offset."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(cos.shape, generator=generator) * head.spread
    query = torch.randn(NUM_QUERIES, cos.shape[1], generator=generator).double()
    logits = query @ turn(own, cos, sin).double().T
    query *= DEVIATION / logits.std(1, keepdim=True)
    key = turn(own + head.mean, cos, sin).bfloat16().float()
    round_trip = preset(CACHE, cos.shape[1]).key
    mean, found = turn(head.mean[None], cos, sin), {}
    for name, table in offsets(mean).items():
        read = round_trip((key - table).bfloat16().float()).double() + table.double()
        kl = 1e3 * divergence(query, key, read)
        found[name] = {"kl": kl, "stored": share_left(mean, table)}
    return found


def measure(args: argparse.Namespace) -> list[dict]:
    lab = LabModel(args.model, args.device)
    texts = Texts(args.model, args.text, 1, 0, args.length)
    chosen = spaced(list(heads_of(lab, texts.held_out[0])), args.heads)
    rows = []
    for context in args.contexts:
        tables = rope(lab, context)
        for seed, head in enumerate(chosen):
            where = {"context": context, "layer": head.layer, "head": head.head}
            row: dict = where | {"length": head.length}
            rows.append(row | measure_head(head, *tables, seed))
            print(f"{context} tokens, layer {head.layer}", flush=True)
    return rows


def markdown(args: argparse.Namespace, rows: list[dict]) -> str:
    about = (
        f"{CACHE}; means and deviations of {args.heads} heads of {args.model.name}, "
        f"from {args.length} tokens of {args.text.name}, and its RoPE; KL divergence "
        "of attention's weights in millinats, logits of deviation "
        f"{DEVIATION:g}, beside the share of the mean's square that is stored. A mean "
        "is so many times as long as K's deviation. Written by "
        "`tests/quality/lab/long_means.py`."
    )
    kinds = [f"segments of {length}" for length in SEGMENTS]
    head = ["tokens", "layer", "head", "mean", "nothing", *kinds, "exact", "ratio"]
    cells = [
        [row["context"], row["layer"], row["head"], f"{row['length']:.2f}"]
        + [f"{row['nothing']['kl']:.2f}"]
        + [f"{row[x]['kl']:.2f}, {100 * row[x]['stored']:.0f} %" for x in kinds]
        + [f"{row['exact']['kl']:.2f}"]
        + [f"{row[kinds[0]]['kl'] / row['exact']['kl']:.2f}"]
        for row in rows
    ]
    return page("The loss by means of K in long contexts", about, [head, *cells])


def main() -> None:
    parser = build_text_parser(__doc__)
    parser.add_argument("--heads", type=int, default=8, help="heads of the model")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    args = parser.parse_args()
    write("long_means", args, measure(args), markdown)


if __name__ == "__main__":
    sys.exit(main())
