#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The loss that is left when the mean of MLA's latents is not stored.

Writes latent_means.json and latent_means.md. A latent has no RoPE, so its mean is one
vector a layer. It is taken off before a latent is rounded, and added again, so that it
changes the rounding alone. Every token is read from the cache, in fp32, and predictions
are compared with those on latents in bf16.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from latent_formats import LatentVariant, latent_variants
from latents import MODEL, REFERENCE, LatentLab
from measure import Comparison
from report import add_text_arguments, kl_cell, page, setting, write_results
from windows import HELD_OUT, SEPARATOR, Vocabulary, cut

PRESETS = ("turbo4", "turbo3")
# Means leave out so many tokens at the start of a text.
FIRST = 16


@dataclass(frozen=True)
class Arm:
    """The tokens whose latents have the mean taken off.

    Attributes:
        name: Its name in tables.
        first: The first of these tokens; None: there is none.

    """

    name: str
    first: int | None


ARMS = (Arm("nothing", None), Arm("all", 0), Arm("all but the first", 1))


class LatentMeansLab(LatentLab):
    """An MLA model whose latents may lose their mean before they are rounded.

    Attributes:
        means: (L,) by the module whose output a layer's latents are.
        first: The first token whose latent has its mean taken off; None: no token has.

    """

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__(folder, device)
        self.means: dict[torch.nn.Module, torch.Tensor] = {}
        self.first: int | None = None
        self._sums: dict[torch.nn.Module, torch.Tensor] | None = None

    def measure_means(self, texts: Iterable[torch.Tensor]) -> None:
        """Sets the means of each layer's latents over texts, (1, T) each."""
        self._sums, self.first, count = {}, None, 0
        reference = latent_variants(self.rank, self.rope)[REFERENCE]
        for tokens in texts:
            self.log_probs(tokens, reference)
            count += tokens.shape[1] - FIRST
        self.means = {x: (y / count).float() for x, y in self._sums.items()}
        self._sums = None

    def _round_latent(
        self, module: torch.nn.Module, arguments: tuple, latent: torch.Tensor
    ) -> torch.Tensor:
        if self._sums is not None:
            own = latent[0, FIRST:].double().sum(0)
            self._sums[module] = self._sums.get(module, 0) + own
        if self.first is None:
            return super()._round_latent(module, arguments, latent)
        table = self.means[module].repeat(latent.shape[-2], 1)
        table[: self.first] = 0
        exact = latent.bfloat16().float()
        return self.variant.latent(exact - table) + table


def measure(
    lab: LatentMeansLab,
    texts: list[torch.Tensor],
    variants: Iterable[LatentVariant],
    positions: slice,
) -> list[dict]:
    """The figures of each variant and arm."""
    reference = latent_variants(lab.rank, lab.rope)[REFERENCE]
    found = {(x, arm): Comparison() for x in variants for arm in ARMS}
    for number, tokens in enumerate(texts):
        print(f"text {number + 1} of {len(texts)}", flush=True)
        lab.first = None
        exact = lab.log_probs(tokens, reference)
        for (variant, arm), comparison in found.items():
            lab.first = arm.first
            comparison.add(exact, lab.log_probs(tokens, variant), tokens)
    return [
        {"cache": variant.name, "arm": arm.name} | comparison.figures(positions)
        for (variant, arm), comparison in found.items()
    ]


def markdown(args: argparse.Namespace, rows: list[dict]) -> str:
    about = (
        f"{args.model.name}, {args.texts} texts of {args.length} tokens, the first "
        f"{args.first} positions not counted; fp32 on {args.device}; KL in millinats "
        "a token from latents in bf16, with the standard error of the mean. The means "
        f"are of {args.others} other texts. Written by "
        "`tests/quality/lab/latent_means.py`."
    )
    head = ["cache", "latents that lose their mean", "KL"]
    cells = [[row["cache"], row["arm"], kl_cell(row)] for row in rows]
    return page("Loss without the mean of MLA's latents", about, [head, *cells])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="its folder")
    parser.add_argument("--text", type=Path, default=HELD_OUT, help="held-out text")
    add_text_arguments(parser, first=512)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    lab = LatentMeansLab(args.model, args.device)
    documents = args.text.read_text(encoding="utf-8").split(SEPARATOR)
    tokens = Vocabulary(args.model).documents(documents)
    count = args.texts + args.others
    cuts = [torch.tensor([x]) for x in cut(tokens, count, args.length)]
    texts = [x.to(args.device) for x in cuts]
    lab.measure_means(texts[args.texts :])
    formats = latent_variants(lab.rank, lab.rope)
    positions = slice(args.first, args.length - 1)
    variants = [formats[x] for x in PRESETS]
    rows = measure(lab, texts[: args.texts], variants, positions)
    lengths = [x.norm().item() for x in lab.means.values()]
    figures = {"setting": setting(args), "lengths": lengths, "rows": rows}
    write_results(args.output, "latent_means", figures, markdown(args, rows))


if __name__ == "__main__":
    main()
