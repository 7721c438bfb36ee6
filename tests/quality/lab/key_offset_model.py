# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What biases of K cost a trained model, by what is taken off what is stored.

Writes key_offset_model.json and key_offset_model.md: KL divergence of needle-qwen2's
predictions from those on exact K and V, everything read from the cache, with nothing
taken off, with the mean of the rotated bias over segments as they are served, and with
the rotated bias of each position.
"""

from pathlib import Path

import torch
from attention import Cache, LabModel
from measure import Comparison
from report import run_programme
from variants import preset

from vllm.v1.attention.ops.turbo.interface import OFFSET_SEGMENT

QUALITY = Path(__file__).resolve().parents[1]
MODEL = QUALITY.parents[1] / "models" / "needle-qwen2"
PRESETS = ("turbo4", "k4v3", "turbo3")
TEXTS = 3
LENGTH = 6144
# Positions before are not counted.
FIRST = 1024
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.inference_mode()
def rotated_biases(lab: LabModel, num_tokens: int) -> list[torch.Tensor]:
    """Each layer's bias of K at each position, (H, T, D) fp32."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    model = lab.model.model
    positions = torch.arange(num_tokens, device=lab.device)[None]
    biases = []
    for layer in model.layers:
        bias = layer.self_attn.k_proj.bias.view(1, -1, 1, lab.head_size)
        cos, sin = model.rotary_emb(bias, positions)
        key = bias.expand(-1, -1, num_tokens, -1)
        biases.append(apply_rotary_pos_emb(key, key, cos, sin)[1][0])
    return biases


def segment_means(
    biases: list[torch.Tensor], length: int = OFFSET_SEGMENT
) -> list[torch.Tensor]:
    """The mean of each segment of so many positions, at all of them."""
    return [
        torch.cat(
            [x.mean(1, keepdim=True).expand_as(x) for x in each.split(length, 1)], 1
        )
        for each in biases
    ]


def measure() -> list[dict]:
    lab = LabModel(MODEL, DEVICE)
    text = (QUALITY / "heldout.txt").read_bytes()
    step = len(text) // TEXTS
    texts = [list(text[i * step : i * step + LENGTH]) for i in range(TEXTS)]
    biases = rotated_biases(lab, LENGTH)
    offsets = {"nothing": [], "segments": segment_means(biases), "exact": biases}
    rows = []
    for name in PRESETS:
        row: dict = {"preset": name}
        comparisons = {kind: Comparison() for kind in offsets}
        for tokens in (torch.tensor([text], device=DEVICE) for text in texts):
            exact = lab.log_probs(tokens, Cache([None] * lab.num_layers))
            for kind, means in offsets.items():
                variant = preset(name, lab.head_size, subtracts_mean=bool(means))
                cache = Cache([variant] * lab.num_layers, means=means)
                comparisons[kind].add(exact, lab.log_probs(tokens, cache), tokens)
            print(f"{name}: a text", flush=True)
        for kind, comparison in comparisons.items():
            row[kind] = comparison.figures(slice(FIRST, LENGTH - 1))
        rows.append(row)
    return rows


def markdown(rows: list[dict]) -> str:
    kinds = [kind for kind in rows[0] if kind != "preset"]
    lines = [
        "# What biases of K cost a trained model, by what is taken off",
        "",
        f"needle-qwen2, {TEXTS} texts of {LENGTH} bytes, the first {FIRST} positions "
        f"not counted; fp32 on {DEVICE}; KL in millinats a token with the standard "
        f"error of the mean. Segments are of {OFFSET_SEGMENT}. Written by "
        "`tests/quality/lab/key_offset_model.py`.",
        "",
        "| preset | " + " | ".join(kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for row in rows:
        cells = [
            f"{1e3 * row[kind]['kl']:.1f} ± {1e3 * row[kind]['kl_error']:.1f}"
            for kind in kinds
        ]
        lines.append(f"| {row['preset']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_programme("key_offset_model", __doc__, measure, markdown)
