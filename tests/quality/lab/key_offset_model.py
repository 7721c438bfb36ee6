# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The cost of biases of K for a trained model, by the offset taken off stored keys.

Writes key_offset_model.json and key_offset_model.md: KL divergence of needle-qwen2's
predictions from those on exact K and V, where all tokens are read from the cache. The
offset is none, the mean of the rotated bias over segments as they are served, or the
rotated bias of each position.
"""

from pathlib import Path

import torch
from attention import Cache, LabModel
from measure import compare
from report import kl_cell, page, run_programme
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
    """The mean over each segment of `length` positions, at each position."""
    return [
        torch.cat(
            [x.mean(1, keepdim=True).expand_as(x) for x in each.split(length, 1)], 1
        )
        for each in biases
    ]


def held_out_bytes(num_texts: int, length: int) -> list[torch.Tensor]:
    """Held-out texts of `length` bytes, (1, T) each."""
    text = (QUALITY / "heldout.txt").read_bytes()
    step = len(text) // num_texts
    starts = [i * step for i in range(num_texts)]
    return [torch.tensor([list(text[i : i + length])], device=DEVICE) for i in starts]


def measure() -> list[dict]:
    lab = LabModel(MODEL, DEVICE)
    texts = held_out_bytes(TEXTS, LENGTH)
    biases = rotated_biases(lab, LENGTH)
    offsets = {"nothing": [], "segments": segment_means(biases), "exact": biases}
    rows = []
    for name in PRESETS:
        caches = {}
        for kind, means in offsets.items():
            variant = preset(name, lab.head_size, subtracts_mean=bool(means))
            caches[kind] = Cache([variant] * lab.num_layers, means=means)
        figures = compare(lab, texts, caches, slice(FIRST, LENGTH - 1))
        rows.append({"preset": name} | figures)
        print(name, flush=True)
    return rows


def markdown(rows: list[dict]) -> str:
    kinds = [kind for kind in rows[0] if kind != "preset"]
    title = "What biases of K cost a trained model, by what is taken off"
    about = (
        f"needle-qwen2, {TEXTS} texts of {LENGTH} bytes, the first {FIRST} positions "
        f"not counted; fp32 on {DEVICE}; KL in millinats a token with the standard "
        f"error of the mean. Segments are of {OFFSET_SEGMENT}. Written by "
        "`tests/quality/lab/key_offset_model.py`."
    )
    cells = [
        [row["preset"], *(kl_cell(row[kind], 1) for kind in kinds)] for row in rows
    ]
    return page(title, about, [["preset", *kinds], *cells])


if __name__ == "__main__":
    run_programme("key_offset_model", __doc__, measure, markdown)
