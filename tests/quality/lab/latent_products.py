#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The loss of products in 8 bits of MLA's queries, latents and weights.

Writes latent_products.json and latent_products.md. Tensor cores multiply FP8 and int8
twice as fast as 16 bits. Latents are turbo4's, less their means, and are rounded again
to 8 bits with a scale a token. Queries are absorbed and rotated, with a scale a head.
Weights have the latents' scales in them. In FP8 they are parts of a row's largest, and
in int8 of the largest of 64 tokens. Sums are exact. Predictions are compared with those
on latents in bf16.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from latent_formats import LatentVariant, latent_variants
from latent_means import LatentMeansLab, build_parser
from latents import REFERENCE
from measure import Comparison
from report import kl_cell, page, setting, write_results
from windows import SEPARATOR, Vocabulary, cut

from vllm.v1.attention.ops.turbo.formats.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.reference import inverse_rotate

PRESET = "turbo4"
STEP = 64
MAX_E4M3, MAX_INT8, MAX_UINT8 = 448.0, 127.0, 255.0

# Numbers of 8 bits, and the scales of rows, whose last dimension is 1.
Rounded = tuple[torch.Tensor, torch.Tensor]


def keep(x: torch.Tensor) -> Rounded:
    return x, torch.ones_like(x[..., :1])


def to_e4m3(x: torch.Tensor) -> Rounded:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-20) / MAX_E4M3
    return (x / scale).to(torch.float8_e4m3fn).float(), scale


def to_int8(x: torch.Tensor) -> Rounded:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-20) / MAX_INT8
    return (x / scale).round(), scale


def weights_to_e4m3(weights: torch.Tensor) -> torch.Tensor:
    """Rounds rows of weights, (..., T)."""
    codes, scale = to_e4m3(weights)
    return codes * scale


def weights_to_uint8(weights: torch.Tensor, spread: bool = False) -> torch.Tensor:
    """Rounds rows of weights, (..., T), in steps of tokens.

    With `spread` a number of the token's place in its step, and not a half, is added
    before what is behind the point is cut off. Small weights are then not all lost.
    """
    length = weights.shape[-1]
    padded = torch.nn.functional.pad(weights, (0, -length % STEP))
    steps = padded.unflatten(-1, (-1, STEP))
    scale = steps.amax(-1, keepdim=True).clamp(min=1e-30) / MAX_UINT8
    # Multiples of the golden ratio are evenly spread, also those of some places alone.
    places = spread * torch.arange(STEP, device=weights.device)
    added = (0.5 + places * 0.6180339887) % 1
    codes = (steps / scale + added).floor().clamp(max=MAX_UINT8)
    return (codes * scale).flatten(-2)[..., :length]


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotates vectors, (..., D), without the store's rounding."""
    size = x.shape[-1]
    return x @ rotation_matrix(size, x.device, torch.float32) * inverse_sqrt(size)


@dataclass(frozen=True)
class Products:
    """The numbers that are multiplied.

    Attributes:
        name: Their name in tables.
        scores: Rounds queries, (B, H, T, L), and latents, (B, T, L).
        values: Rounds latents.
        weights: Rounds weights, (B, H, T, T).

    """

    name: str
    scores: Callable[[torch.Tensor], Rounded] = keep
    values: Callable[[torch.Tensor], Rounded] = keep
    weights: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone


FP8_VALUES: dict[str, Any] = {"values": to_e4m3, "weights": weights_to_e4m3}
INT8_VALUES: dict[str, Any] = {"values": to_int8, "weights": weights_to_uint8}
SPREAD: dict[str, Any] = {"weights": partial(weights_to_uint8, spread=True)}
EXACT = Products("exact")
PRODUCTS = (
    EXACT,
    Products("FP8: scores", to_e4m3),
    Products("FP8: values", **FP8_VALUES),
    Products("FP8: both", to_e4m3, **FP8_VALUES),
    Products("int8: scores", to_int8),
    Products("int8: values", **INT8_VALUES),
    Products("int8: both", to_int8, **INT8_VALUES),
    Products("int8: both, weights exact", to_int8, to_int8),
    Products("int8: both, weights spread", to_int8, **(INT8_VALUES | SPREAD)),
)


class ProductsLab(LatentMeansLab):
    """An MLA model that multiplies by packed latents in the absorbed way.

    Attributes:
        products: The numbers that are multiplied.
        centred: (B, T, L), a layer's latents less their mean, rotated.

    """

    products = EXACT
    centred: torch.Tensor
    mean: torch.Tensor

    def _round_latent(
        self, module: torch.nn.Module, arguments: tuple, latent: torch.Tensor
    ) -> torch.Tensor:
        stored = super()._round_latent(module, arguments, latent)
        if self.first is not None:
            self.mean = self.means[module]
            self.centred = rotate(stored - self.mean)
        return stored

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **more: object,
    ) -> tuple[torch.Tensor, None]:
        """Causal attention of one layer, to latents if they are packed."""
        if self.first is None:
            return super()._attend(
                module, query, key, value, attention_mask, scaling, **more
            )
        nope = key.shape[-1] - self.rope
        up = module.kv_b_proj.weight.view(query.shape[1], -1, self.rank)
        absorbed = rotate(query[..., :nope] @ up[:, :nope])
        rope = self._round_rope(key[:, :1, :, nope:])
        # A query's product with the mean is the same for all tokens, and is left out.
        own, own_scale = self.products.scores(absorbed)
        latents, scale = self.products.scores(self.centred.unsqueeze(1))
        scores = (own @ latents.mT) * own_scale * scale.mT
        scores = scaling * (scores + query[..., nope:] @ rope.mT)
        is_later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(is_later, float("-inf"))
        weights = (weights - weights.amax(-1, keepdim=True)).exp()
        latents, scale = self.products.values(self.centred.unsqueeze(1))
        sums = self.products.weights(weights * scale.mT) @ latents
        output = inverse_rotate(sums / weights.sum(-1, keepdim=True)) + self.mean
        output = output @ up[:, nope:].mT
        return output.transpose(1, 2).contiguous(), None


def measure(
    lab: ProductsLab,
    texts: list[torch.Tensor],
    variant: LatentVariant,
    positions: slice,
) -> list[dict]:
    """The figures of each of `PRODUCTS`."""
    reference = latent_variants(lab.rank, lab.rope)[REFERENCE]
    found = {products: Comparison() for products in PRODUCTS}
    for number, tokens in enumerate(texts):
        print(f"text {number + 1} of {len(texts)}", flush=True)
        lab.first = None
        exact = lab.log_probs(tokens, reference)
        lab.first = 0
        for lab.products, comparison in found.items():
            comparison.add(exact, lab.log_probs(tokens, variant), tokens)
    return [
        {"products": products.name} | comparison.figures(positions)
        for products, comparison in found.items()
    ]


def markdown(folder: Path, about: str, rows: Iterable[dict]) -> str:
    head = ["products", "KL"]
    cells = [[row["products"], kl_cell(row)] for row in rows]
    return page(f"Products in 8 bits of {folder.name}", about, [head, *cells])


def main() -> None:
    args = build_parser().parse_args()
    lab = ProductsLab(args.model, args.device)
    documents = args.text.read_text(encoding="utf-8").split(SEPARATOR)
    tokens = Vocabulary(args.model).documents(documents)
    cuts = cut(tokens, args.texts + args.others, args.length)
    texts = [torch.tensor([x], device=args.device) for x in cuts]
    lab.measure_means(texts[args.texts :])
    variant = latent_variants(lab.rank, lab.rope)[PRESET]
    positions = slice(args.first, args.length - 1)
    rows = measure(lab, texts[: args.texts], variant, positions)
    about = (
        f"{PRESET}'s latents less their mean; {args.texts} texts of {args.length} "
        f"tokens, the first {args.first} positions not counted; fp32 on {args.device}; "
        "KL in millinats a token from latents in bf16, with the standard error of the "
        "mean. Written by `tests/quality/lab/latent_products.py`."
    )
    figures = {"setting": setting(args), "rows": rows}
    tables = markdown(args.model, about, rows)
    write_results(args.output, "latent_products", figures, tables)


if __name__ == "__main__":
    main()
