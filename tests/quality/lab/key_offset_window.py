# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the offset of K leaves, beside a recent window and beside an offset of V.

Writes key_offset_window.json and key_offset_window.md: KL divergence of needle-qwen2's
predictions from those on exact K and V, under turbo4. The rotated bias is taken off K
by its mean over segments of several lengths, or exactly at each position; everything
else is read from the cache, or all but the newest tokens; and V's bias is taken off,
too, before V is stored.
"""

from dataclasses import replace

import torch
from attention import Cache, LabModel, Reading
from key_offset_model import DEVICE, MODEL, QUALITY, rotated_biases, segment_means
from measure import Comparison
from report import run_programme
from variants import Variant, preset

from vllm.v1.attention.ops.turbo.interface import OFFSET_SEGMENT

PRESET = "turbo4"
SEGMENTS = (OFFSET_SEGMENT, 512, 128)
# None, and as many as a recent window of turbo4 has rows.
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
    text = (QUALITY / "heldout.txt").read_bytes()
    step = len(text) // TEXTS
    texts = [list(text[i * step : i * step + LENGTH]) for i in range(TEXTS)]
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
    all_tokens = [torch.tensor([tokens], device=DEVICE) for tokens in texts]
    nothing = Cache([None] * lab.num_layers)
    exact = [lab.log_probs(tokens, nothing) for tokens in all_tokens]
    rows = []
    for kind, (variants, means) in kinds.items():
        row: dict = {"offset": kind}
        for window in WINDOWS:
            comparison = Comparison()
            for tokens, expected in zip(all_tokens, exact, strict=True):
                cache = Cache(variants, Reading(window=window), means=means)
                comparison.add(expected, lab.log_probs(tokens, cache), tokens)
            row[str(window)] = comparison.figures(slice(FIRST, LENGTH - 1))
        rows.append(row)
        print(kind, flush=True)
    return rows


def markdown(rows: list[dict]) -> str:
    lines = [
        "# What the offset of K leaves, beside a window and an offset of V",
        "",
        f"needle-qwen2 under {PRESET}, {TEXTS} texts of {LENGTH} bytes, the first "
        f"{FIRST} positions not counted; fp32; KL in millinats a token with the "
        "standard error of the mean, and in proportion to the exact offset's, by how "
        "many of the newest tokens are seen as they are. Segments of "
        f"{OFFSET_SEGMENT} are served. Written by "
        "`tests/quality/lab/key_offset_window.py`.",
        "",
        "| taken off | " + " | ".join(map(str, WINDOWS)) + " |",
        "|---" * (len(WINDOWS) + 1) + "|",
    ]
    for row in rows:
        cells = [
            f"{1e3 * row[str(w)]['kl']:.2f} ± {1e3 * row[str(w)]['kl_error']:.2f}, "
            f"{row[str(w)]['kl'] / rows[0][str(w)]['kl']:.2f}"
            for w in WINDOWS
        ]
        lines.append(f"| {row['offset']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_programme("key_offset_window", __doc__, measure, markdown)
