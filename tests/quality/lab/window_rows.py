# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compares forms in which a page may hold a request's newest tokens, model by model.

Writes window_rows.json and window_rows.md: KL divergence of each model's predictions
from those on exact K and V. Each token sees the newest ones, itself first, as a page's
rows hold them, and the others as turbo4 stores them. There are as many rows as a page
of 64 tokens has room for.
"""

from collections.abc import Callable

import torch
from attention import Cache, Reading
from key_offset_model import DEVICE
from measure import compare
from report import kl_cell, page, run_programme
from variants import Variant, as_bfloat16, identity, preset
from windows import MODELS, load_subject

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.tail import TailFormat
from vllm.v1.attention.ops.turbo.reference.tail import (
    dequantize_rows,
    quantize_rows,
)

TEXTS = 2
LENGTH = 2048
# Positions before are not counted.
FIRST = 512
BLOCK_SIZE = 64


def plain(x: torch.Tensor) -> torch.Tensor:
    return dequantize_rows(*quantize_rows(x))


def rotated(x: torch.Tensor) -> torch.Tensor:
    return reference.inverse_rotate(plain(reference.rotate(x)))


# The round trip of a vector in a row, and the bits that count the rows of a page.
ROWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "none": (identity, 0),
    "16 bits": (as_bfloat16, 16),
    "16 bits, as many as of 8": (as_bfloat16, 8),
    "8 bits": (plain, 8),
    "8 bits, rotated": (rotated, 8),
}


def num_rows(head_size: int, bits: int) -> int:
    """Rows of a page, with their tags; without bits one row, a token's own."""
    layout = TailFormat(TurboFormat.from_cache_dtype("turbo4", head_size), BLOCK_SIZE)
    if bits == 8:
        return layout.num_rows
    tag = sum(layout.row_widths[4:])
    return layout.page_bytes // (4 * head_size + tag) if bits == 16 else 1


def measure_model(name: str) -> list[dict]:
    lab, texts, means = load_subject(name, TEXTS, LENGTH)
    has_bias = bool(means)
    layers = [preset("turbo4", lab.head_size, subtracts_mean=has_bias)] * lab.num_layers
    counts = {rows: num_rows(lab.head_size, bits) for rows, (_, bits) in ROWS.items()}
    caches = {}
    for rows, (hold, _) in ROWS.items():
        window = Variant(rows, hold, hold, 0, subtracts_mean=has_bias)
        reading = Reading(window=counts[rows])
        caches[rows] = Cache(layers, reading, means=means, window=window)
    by_rows = compare(lab, texts, caches, slice(FIRST, LENGTH - 1))
    print(name, flush=True)
    return [
        {"model": name, "rows": rows, "count": counts[rows]} | figures
        for rows, figures in by_rows.items()
    ]


def measure() -> list[dict]:
    return [row for name in MODELS for row in measure_model(name)]


def markdown(rows: list[dict]) -> str:
    about = (
        f"{TEXTS} texts of {LENGTH} tokens, the first {FIRST} positions not counted; "
        f"fp32 on {DEVICE}; KL in millinats a token with the standard error of the "
        "mean, and how many rows there are; other tokens are as turbo4 stores them. "
        "Written by `tests/quality/lab/window_rows.py`."
    )
    cells = [
        [name, *(f"{kl_cell(x)} ({x['count']})" for x in rows if x["model"] == name)]
        for name in MODELS
    ]
    title = "In which form a page should hold the newest tokens"
    return page(title, about, [["model", *ROWS], *cells])


if __name__ == "__main__":
    run_programme("window_rows", __doc__, measure, markdown)
