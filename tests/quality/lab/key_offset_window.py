# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The error that the offset of K leaves, beside a recent window and an offset of V.

Writes key_offset_window.json and key_offset_window.md: KL divergence of needle-qwen2's
predictions from those on exact K and V, under turbo4. The offset of K is the rotated
bias of each position, or its mean over segments of several lengths. All tokens are read
from the cache, or all but the newest. One row also takes V's bias off stored values.
"""

from dataclasses import replace

from attention import Cache, LabModel, Reading
from key_offset_model import (
    DEVICE,
    MODEL,
    held_out_bytes,
    rotated_biases,
    segment_means,
)
from measure import compare
from report import kl_cell, page, run_programme
from variants import Variant, preset

from vllm.v1.attention.ops.turbo.interface import OFFSET_SEGMENT

PRESET = "turbo4"
SEGMENTS = (OFFSET_SEGMENT, 512, 128)
# No newest tokens, and as many as a recent window of turbo4 has rows.
WINDOWS = (0, 24)
TEXTS = 2
LENGTH = 4096
# Positions before are not counted.
FIRST = 1024


def without_value_bias(lab: LabModel, own: Variant) -> list[Variant]:
    """Each layer's cache, which V enters without its bias."""
    biases = [
        layer.self_attn.v_proj.bias.detach().view(-1, 1, lab.head_size)
        for layer in lab.model.model.layers
    ]
    return [
        replace(own, value=lambda value, bias=bias: own.value(value - bias) + bias)
        for bias in biases
    ]


def measure() -> list[dict]:
    lab = LabModel(MODEL, DEVICE)
    biases = rotated_biases(lab, LENGTH)
    own = preset(PRESET, lab.head_size, subtracts_mean=True)
    layers = [own] * lab.num_layers
    served = segment_means(biases)
    kinds = {
        "exact": (layers, biases),
        **{
            f"segments of {length}": (layers, segment_means(biases, length))
            for length in SEGMENTS
        },
        f"segments of {OFFSET_SEGMENT}, V's bias": (
            without_value_bias(lab, own),
            served,
        ),
    }
    caches = {
        (kind, window): Cache(variants, Reading(window=window), means=means)
        for kind, (variants, means) in kinds.items()
        for window in WINDOWS
    }
    texts = held_out_bytes(TEXTS, LENGTH)
    figures = compare(lab, texts, caches, slice(FIRST, LENGTH - 1))
    return [
        {"offset": kind} | {str(window): figures[kind, window] for window in WINDOWS}
        for kind in kinds
    ]


def markdown(rows: list[dict]) -> str:
    title = "What the offset of K leaves, beside a window and an offset of V"
    about = (
        f"needle-qwen2 under {PRESET}, {TEXTS} texts of {LENGTH} bytes, the first "
        f"{FIRST} positions not counted; fp32; KL in millinats a token with the "
        "standard error of the mean, and in proportion to the exact offset's, by how "
        "many of the newest tokens are seen as they are. Segments of "
        f"{OFFSET_SEGMENT} are served. Written by "
        "`tests/quality/lab/key_offset_window.py`."
    )

    def cell(figures: dict[str, float], exact: dict[str, float]) -> str:
        return f"{kl_cell(figures)}, {figures['kl'] / exact['kl']:.2f}"

    cells = [
        [row["offset"], *(cell(row[str(w)], rows[0][str(w)]) for w in WINDOWS)]
        for row in rows
    ]
    return page(title, about, [["taken off", *WINDOWS], *cells])


if __name__ == "__main__":
    run_programme("key_offset_window", __doc__, measure, markdown)
