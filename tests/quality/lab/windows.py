# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The share of a cache's loss that lies in the newest tokens, model by model.

Writes windows.json and windows.md: KL divergence of each model's predictions from those
on exact K and V. Each token sees the newest ones, itself first, as they are, and the
others as they are stored. Turbo dtypes decode with a window of one token, and fp8 with
none. The loss that remains with a long window is that of far tokens.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from attention import Cache, LabModel, Reading
from key_offset_model import DEVICE, rotated_biases, segment_means
from measure import compare
from report import kl_cell, page, run_programme
from variants import Variant, as_fp8, preset, upstream_preset

QUALITY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(QUALITY.parents[1] / "scripts"), str(QUALITY)]

from turbo_quality.cases import (  # noqa: E402
    HELD_OUT,
    MODEL,
    SEPARATOR,
    Vocabulary,
    cut,
)

MODELS = ("needle-qwen3", "needle-llama", "needle-qwen2")
WINDOWS = (0, 1, 16, 64, 128, 512)
TEXTS = 2
LENGTH = 4096
# Positions before are not counted.
FIRST = 1024


def variants(head_size: int, has_bias: bool) -> list[Variant]:
    """The caches that are measured.

    fp8 has a scale of one, as vLLM serves it if it is given none. Codes of three bits
    would take a CPU an hour.
    """
    turbo4 = preset("turbo4", head_size, subtracts_mean=has_bias)
    fp8 = Variant("fp8", as_fp8, as_fp8, 2 * head_size)
    return [turbo4, fp8, upstream_preset("turboquant_4bit_nc", head_size)]


class Subject(NamedTuple):
    """A model and its texts.

    Attributes:
        lab: The model.
        texts: (1, T) each.
        means: (H, T, D) a layer, the offset of its K; empty without a bias.

    """

    lab: LabModel
    texts: list[torch.Tensor]
    means: list[torch.Tensor]


def load_subject(name: str, num_texts: int, length: int) -> Subject:
    """Loads a model and held-out texts of so many tokens."""
    folder = MODEL.with_name(name)
    lab = LabModel(folder, DEVICE)
    documents = HELD_OUT.read_text(encoding="utf-8").split(SEPARATOR)
    texts = cut(Vocabulary(folder).documents(documents), num_texts, length)
    has_bias = lab.model.config.model_type == "qwen2"
    means = segment_means(rotated_biases(lab, length)) if has_bias else []
    return Subject(lab, [torch.tensor([x], device=DEVICE) for x in texts], means)


def measure_model(name: str) -> list[dict]:
    lab, texts, means = load_subject(name, TEXTS, LENGTH)
    rows = []
    for variant in variants(lab.head_size, bool(means)):
        layers = [variant] * lab.num_layers
        caches = {
            str(window): Cache(layers, Reading(window=window), means=means)
            for window in WINDOWS
        }
        figures = compare(lab, texts, caches, slice(FIRST, LENGTH - 1))
        rows.append({"model": name, "cache": variant.name} | figures)
        print(f"{name}: {variant.name}", flush=True)
    return rows


def measure() -> list[dict]:
    return [row for name in MODELS for row in measure_model(name)]


def markdown(rows: list[dict]) -> str:
    about = (
        f"{TEXTS} texts of {LENGTH} tokens, the first {FIRST} positions not counted; "
        f"fp32 on {DEVICE}; KL in millinats a token with the standard error of the "
        "mean, by how many of the newest tokens are seen as they are. Tokens of "
        "needle-llama are words, of the others bytes. Written by "
        "`tests/quality/lab/windows.py`."
    )
    head = ["model", "cache", *WINDOWS]
    cells = [
        [row["model"], row["cache"], *(kl_cell(row[str(w)]) for w in WINDOWS)]
        for row in rows
    ]
    return page("What is lost in the newest tokens", about, [head, *cells])


if __name__ == "__main__":
    run_programme("windows", __doc__, measure, markdown)
