#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where the loss comes from that K's mean by segments of positions leaves.

Writes mean_rest.json, with all figures, and mean_rest.md, by layer. Each layer is given
exact K and V. Its output is compared with the exact one for some queries, where one
side alone is rounded: K with a part of its mean taken off, or V. K's first token loses
its own mean, as served, and the newest 24 tokens are seen as they are. An error is the
squared length of the layer's error, as a share of the residual stream's. Beside it
stand the mean's length, as a multiple of K's deviation, and the share of its square
that segments leave in stored keys.

    mean_rest.py --model build/smollm2 --text manuals.txt --output FOLDER
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch
from attention import Cache, LabModel, Reading
from long_means import heads_of, offsets, share_left
from mean_arms import SERVED, Arm
from means import Texts, build_text_parser, caches_of, means_of, write
from report import page, table
from rotary import rope, turn
from variants import Variant, identity, preset

WINDOW = 24
EXACT = replace(SERVED, key="exact")
KEPT = {"kept": 1, "own_first": ""}
KEY_ARMS = {
    "K, nothing taken off": Arm(),
    "K, segments of 2048": SERVED,
    "the same of 1024": replace(SERVED, key="1024"),
    "the same of 512": replace(SERVED, key="512"),
    "K, exact": EXACT,
    "K, segments of 2048, first token exact": replace(SERVED, **KEPT),
    "K, exact, first token exact": replace(EXACT, **KEPT),
}
VALUE_ARMS = {
    "V in 4 bits": ("turbo4", Arm()),
    "V in 4 bits, first token exact": ("turbo4", Arm(kept=1)),
    "V in 3 bits": ("k4v3", Arm()),
}
# Every so many queries are compared.
STEP = 16


def attend(
    query: torch.Tensor,
    raw: tuple[torch.Tensor, torch.Tensor],
    stored: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of some queries, which see the newest tokens as they are.

    Args:
        query: (1, Hq, S, D), at ``positions``.
        raw: K and V, each (1, H, T, D).
        stored: Likewise.
        positions: (S,).
        scale: The factor of the scores.

    Returns:
        (1, S, Hq, D).

    """
    groups = query.shape[1] // raw[0].shape[1]
    theirs = torch.arange(raw[0].shape[2], device=query.device)
    mine = positions[:, None]
    is_raw = Reading(window=WINDOW).raw(mine, theirs)
    (raw_key, raw_value), (key, value) = [
        [x.repeat_interleave(groups, 1) for x in pair] for pair in (raw, stored)
    ]
    scores = torch.where(is_raw, query @ raw_key.mT, query @ key.mT) * scale
    weights = torch.softmax(scores.masked_fill_(theirs > mine, float("-inf")), -1)
    output = weights.masked_fill(is_raw, 0) @ value
    output += weights.masked_fill_(~is_raw, 0) @ raw_value
    return output.transpose(1, 2)


class LayerLab(LabModel):
    """A model that measures what each layer's output loses, on exact K and V.

    Attributes:
        caches: The caches by name, of which a layer's errors are measured.
        positions: (S,), of the compared queries.
        errors: By layer, the errors by name, (H, S), each head's rows of the output
            projection alone.

    """

    caches: Mapping[str, Cache] = {}
    positions = torch.zeros(0, dtype=torch.long)

    def __init__(self, *args):
        super().__init__(*args)
        self.errors: list[dict[str, torch.Tensor]] = []
        for layer in self.model.model.layers:
            layer.input_layernorm.register_forward_pre_hook(self._see_residual)

    def _see_residual(self, module: torch.nn.Module, given: tuple) -> None:
        self._residual = given[0][0, self.positions].square().sum(-1)

    def _attend(self, module, query, key, value, attention_mask, scaling, **options):
        """Attention of one layer, whose errors are noted."""
        exact = super()._attend(
            module, query, key, value, attention_mask, scaling, **options
        )
        if self.caches:
            some = query[:, :, self.positions]
            found = {}
            for name, cache in self.caches.items():
                variant, mean = cache.layers[module.layer_idx], cache.means
                pair = variant.round_trip(key, value, mean[module.layer_idx])
                own = attend(some, (key, value), pair, self.positions, scaling)
                error = own - exact[0][:, self.positions]
                found[name] = self._by_head(module, error, key.shape[1])
            self.errors.append(found)
        return exact

    def _by_head(
        self, module: torch.nn.Module, error: torch.Tensor, num_kv_heads: int
    ) -> torch.Tensor:
        """The shares by KV head, (H, S), of an error of (1, S, Hq, D)."""
        weight = module.o_proj.weight.unflatten(1, (num_kv_heads, -1))
        heads = error[0].flatten(1).unflatten(1, (num_kv_heads, -1))
        outputs = torch.einsum("shi,ohi->sho", heads, weight)
        return (outputs.square().sum(-1) / self._residual[:, None]).T.cpu()


def caches_by_name(lab: LabModel, texts: Texts, length: int) -> dict[str, Cache]:
    """The caches that round one side alone."""
    means = {"text": means_of(lab, [x.to(lab.device) for x in texts.others])}
    own = preset("turbo4", lab.head_size, subtracts_mean=True)
    key = replace(own, value=identity)
    pairs: dict[str, tuple[Variant, Arm]] = {x: (key, y) for x, y in KEY_ARMS.items()}
    for name, (dtype, arm) in VALUE_ARMS.items():
        value = preset(dtype, lab.head_size, subtracts_mean=True)
        pairs[name] = (replace(value, key=identity), arm)
    return {
        name: caches_of(lab, each, [arm], means, length)[arm.name, WINDOW]
        for name, (each, arm) in pairs.items()
    }


def totals(errors: list[dict[str, torch.Tensor]]) -> dict[str, dict[str, float]]:
    """The sum over layers and heads by name, its standard error, and its median.

    Queries are the samples. ``less`` is the sum less that of K as served, and
    ``less_error`` the standard error of it.
    """
    names = list(errors[0])
    sums = {x: torch.stack([own[x].sum(0) for own in errors]).sum(0) for x in names}
    base, found = sums["K, segments of 2048"], {}
    for name, own in sums.items():
        less, root = own - base, len(own) ** 0.5
        found[name] = {
            "mean": own.mean().item(),
            "error": own.std().item() / root,
            "median": own.median().item(),
            "less": less.mean().item(),
            "less_error": less.std().item() / root,
        }
    return found


def measure(args: argparse.Namespace) -> list[dict]:
    lab = LayerLab(args.model, args.device)
    texts = Texts(args.model, args.text, 1, args.others, args.length)
    caches = caches_by_name(lab, texts, args.length)
    text = texts.others[0].to(lab.device)
    heads, tables = list(heads_of(lab, text)), rope(lab, 2048)
    lab.caches = caches
    lab.positions = torch.arange(args.first, args.length, STEP, device=lab.device)
    exact = Cache([None] * lab.num_layers)
    lab.log_probs(texts.held_out[0].to(lab.device), exact)
    rows = []
    for head in heads:
        mean = turn(head.mean[None], *tables)
        stored = {x: share_left(mean, y) for x, y in offsets(mean).items()}
        own = {x: y[head.head].mean() for x, y in lab.errors[head.layer].items()}
        errors = {x: y.item() for x, y in own.items()}
        where = {"layer": head.layer, "head": head.head, "length": head.length}
        rows.append(where | {"stored": stored, "errors": errors})
    return rows + [{"queries": totals(lab.errors)}]


def markdown(args: argparse.Namespace, rows: list[dict]) -> str:
    about = (
        f"{args.model.name}, a text of {args.length} tokens of {args.text.name}, "
        f"every {STEP}th query from {args.first} on; fp32 on {args.device}. Squared "
        "errors of layers' outputs, in millionths of the residual stream's square, "
        "where one side alone is rounded and the newest "
        f"{WINDOW} tokens are seen as they are. They are sums over KV heads; a mean's "
        "length and the shares are means over heads. Below are the sums over layers, "
        "with the standard error over queries, their medians, and how much they are "
        "above K's with segments of 2048. Written by `tests/quality/lab/mean_rest.py`."
    )
    *heads, last = rows
    sums = last["queries"]
    shares = [x for x in heads[0]["stored"] if x.startswith("segments")]

    def line(layer: int) -> list[object]:
        of = [row for row in heads if row["layer"] == layer]
        cells = [f"{sum(row['length'] for row in of) / len(of):.2f}"]
        for name in shares:
            cells.append(f"{100 * sum(x['stored'][name] for x in of) / len(of):.0f} %")
        found = [sum(row["errors"][name] for row in of) for name in sums]
        return [layer, *cells, *(f"{1e6 * x:.0f}" for x in found)]

    def cell(each: dict[str, float], key: str) -> str:
        return f"{1e6 * each[key]:.0f}"

    layers = sorted({row["layer"] for row in heads})
    head = ["layer", "mean", *(f"stored, {name}" for name in shares), *sums]
    title = "The loss of layers with K's mean by segments"
    lines = page(title, about, [head, *map(line, layers)])
    names = ["rounded", "sum", "median", "above"]
    below = [
        [name, f"{cell(x, 'mean')} ± {cell(x, 'error')}", cell(x, "median")]
        + [f"{cell(x, 'less')} ± {cell(x, 'less_error')}"]
        for name, x in sums.items()
    ]
    return lines + "\n" + "\n".join(table([names, *below])) + "\n"


def main() -> None:
    args = build_text_parser(__doc__).parse_args()
    write("mean_rest", args, measure(args), markdown)


if __name__ == "__main__":
    sys.exit(main())
