# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""In which form a page should hold a request's newest tokens, model by model.

Writes window_rows.json and window_rows.md: KL divergence of each model's predictions
from those on exact K and V, where each token sees so many of the newest, itself first,
as rows of a page hold them, and the others as turbo4 stores them. A page of 64 tokens
has as many rows of 16 bits as ``SIXTEEN_BITS`` says, or of 8 as ``EIGHT_BITS``.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from attention import Cache, LabModel, Reading
from key_offset_model import DEVICE, rotated_biases, segment_means
from measure import Comparison
from report import run_programme
from variants import Variant, as_bfloat16, identity, preset

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.reference.window import (
    dequantize_rows,
    quantize_rows,
)

QUALITY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(QUALITY.parents[1] / "scripts"), str(QUALITY)]

from quality_cases import HELD_OUT, MODEL, SEPARATOR, Vocabulary, cut  # noqa: E402

MODELS = ("needle-qwen3", "needle-llama", "needle-qwen2")
TEXTS = 2
LENGTH = 2048
# Positions before are not counted.
FIRST = 512
SIXTEEN_BITS, EIGHT_BITS = 15, 24


def plain(x: torch.Tensor) -> torch.Tensor:
    return dequantize_rows(*quantize_rows(x))


def rotated(x: torch.Tensor) -> torch.Tensor:
    return reference.inverse_rotate(plain(reference.rotate(x)))


# By name: how a row holds a vector, and how many rows there are.
ROWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "none": (identity, 1),
    "16 bits": (as_bfloat16, SIXTEEN_BITS),
    "16 bits, as many": (as_bfloat16, EIGHT_BITS),
    "8 bits": (plain, EIGHT_BITS),
    "8 bits, rotated": (rotated, EIGHT_BITS),
}


def measure_model(name: str) -> list[dict]:
    folder = MODEL.with_name(name)
    lab = LabModel(folder, DEVICE)
    vocabulary = Vocabulary(folder)
    documents = HELD_OUT.read_text(encoding="utf-8").split(SEPARATOR)
    texts = cut(vocabulary.documents(documents), TEXTS, LENGTH)
    has_bias = lab.model.config.model_type == "qwen2"
    means = segment_means(rotated_biases(lab, LENGTH)) if has_bias else []
    turbo4 = preset("turbo4", lab.head_size, subtracts_mean=has_bias)
    comparisons = {rows: Comparison() for rows in ROWS}
    for tokens in (torch.tensor([text], device=DEVICE) for text in texts):
        exact = lab.log_probs(tokens, Cache([None] * lab.num_layers))
        for rows, (hold, count) in ROWS.items():
            window = Variant(rows, hold, hold, 0, subtracts_mean=has_bias)
            cache = Cache(
                [turbo4] * lab.num_layers,
                Reading(window=count),
                means=means,
                window=window,
            )
            found = lab.log_probs(tokens, cache)
            comparisons[rows].add(exact, found, tokens)
    print(name, flush=True)
    return [
        {"model": name, "rows": rows, "count": ROWS[rows][1]}
        | comparison.figures(slice(FIRST, LENGTH - 1))
        for rows, comparison in comparisons.items()
    ]


def measure() -> list[dict]:
    return [row for name in MODELS for row in measure_model(name)]


def markdown(rows: list[dict]) -> str:
    lines = [
        "# In which form a page should hold the newest tokens",
        "",
        f"{TEXTS} texts of {LENGTH} tokens, the first {FIRST} positions not counted; "
        f"fp32 on {DEVICE}; KL in millinats a token with the standard error of the "
        "mean; other tokens are as turbo4 stores them. Written by "
        "`tests/quality/lab/window_rows.py`.",
        "",
        "| model | " + " | ".join(f"{n}: {count}" for n, (_, count) in ROWS.items()),
        "|---" * (len(ROWS) + 1) + "|",
    ]
    for name in MODELS:
        cells = [
            f"{1e3 * row['kl']:.2f} ± {1e3 * row['kl_error']:.2f}"
            for row in rows
            if row["model"] == name
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines[4] += " |"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_programme("window_rows", __doc__, measure, markdown)
