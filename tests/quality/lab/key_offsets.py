# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The cost of a bias of K, with offsets of several kinds taken off stored keys.

Writes key_offsets.json and key_offsets.md. Keys are K = R(p) (x + b) in bfloat16 at
positions p, where R is RoPE with a theta of 1e6 and x Gaussian; queries give the x
logits a deviation of 2. Figures are the KL divergence of the attention weights, in
millinats. The offset is none, the mean of R(p) b over the first positions, its mean
over each segment, or R(p) b itself. Segments of 2048 are served.
"""

import math
from collections.abc import Callable

import torch
from report import run_programme, table
from variants import preset

HEAD_SIZE = 128
THETA = 1e6
NUM_QUERIES = 64
# A CPU takes an hour or more, most of it in the trellis' encoder.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Heads, each with its own x and queries.
NUM_HEADS = 2
# Presets by context: the trellis of three bits is slow.
PRESETS = {4096: ("turbo4", "turbo3"), 32768: ("turbo4",), 131072: ("turbo4",)}
FIRST = (2048, 8192)
SEGMENTS = (4096, 2048, 1024)
# Signs of coordinates, by which neighbouring pairs point in different directions.
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0, 1.0])


def on_slowest(pairs: int, magnitude: float) -> torch.Tensor:
    """A bias of one magnitude in the slowest pairs, (D / 2, 2)."""
    bias = torch.zeros(HEAD_SIZE // 2, 2)
    bias[-pairs:] = magnitude * SIGNS.repeat(pairs // 4 + 1)[: 2 * pairs].view(-1, 2)
    return bias


def published_curve(scale: float) -> torch.Tensor:
    """Qwen2.5-7B's mean magnitudes by pair, as published for some of them."""
    known = {0: 0.03, 15: 0.05, 24: 0.5, 47: 1.2, 48: 1.6, 56: 2.9, 60: 5.9, 63: 8.1}
    pairs = sorted(known)
    magnitude = torch.zeros(HEAD_SIZE // 2)
    for low, high in zip(pairs, pairs[1:]):
        share = torch.linspace(0, 1, high - low + 1)
        magnitude[low : high + 1] = known[low] + share * (known[high] - known[low])
    return scale * magnitude[:, None] * SIGNS.repeat(16).view(-1, 2)


BIASES: dict[str, Callable[[], torch.Tensor]] = {
    "none": lambda: on_slowest(2, 0.0),
    "2 pairs x 10": lambda: on_slowest(2, 10.0),
    "2 pairs x 50": lambda: on_slowest(2, 50.0),
    "2 pairs x 200": lambda: on_slowest(2, 200.0),
    "8 pairs x 10": lambda: on_slowest(8, 10.0),
    "8 pairs x 50": lambda: on_slowest(8, 50.0),
    "8 pairs x 200": lambda: on_slowest(8, 200.0),
    "8 pairs x 50 and Qwen2.5-7B's curve": lambda: (
        on_slowest(8, 50.0) + published_curve(1.0)
    ),
    "Qwen2.5-7B's curve": lambda: published_curve(1.0),
    "a third of it": lambda: published_curve(1 / 3),
}


def rotated(vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE of pairs.

    Args:
        vectors: (T, D / 2, 2) or (1, D / 2, 2).
        positions: (T,).

    Returns:
        (T, D) fp64, pairs side by side.

    """
    exponents = torch.arange(HEAD_SIZE // 2, dtype=torch.float64) / (HEAD_SIZE // 2)
    angles = positions.double()[:, None] * THETA**-exponents
    turned = torch.view_as_complex(vectors.double().contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(1)


def offsets(bias: torch.Tensor, num_tokens: int) -> dict[str, torch.Tensor]:
    """The offsets of each key, (T, D) or (1, D) fp32, by name."""
    turned = rotated(bias[None], torch.arange(max(num_tokens, *FIRST)))
    found = {"nothing": torch.zeros(1, HEAD_SIZE, dtype=torch.float64)}
    for count in FIRST:
        found[f"first {count}"] = turned[:count].mean(0, keepdim=True)
    for size in SEGMENTS:
        means = turned[:num_tokens].view(-1, size, HEAD_SIZE).mean(1)
        found[f"segments of {size}"] = means.repeat_interleave(size, 0)
    found["exact"] = turned[:num_tokens]
    return {name: offset.float() for name, offset in found.items()}


def divergence(query: torch.Tensor, key: torch.Tensor, read: torch.Tensor) -> float:
    """Mean KL divergence of the weights by read keys from those by keys, in nats."""
    exact = torch.log_softmax(query @ key.double().T, -1)
    found = torch.log_softmax(query @ read.double().T, -1)
    return (exact.exp() * (exact - found)).sum(-1).mean().item()


def measure_case(bias: torch.Tensor, num_tokens: int) -> dict[str, dict[str, float]]:
    """Millinats by preset and offset, the mean of some heads."""
    presets = PRESETS[num_tokens]
    totals = {name: dict.fromkeys(offsets(bias, num_tokens), 0.0) for name in presets}
    for head in range(NUM_HEADS):
        generator = torch.Generator().manual_seed(head)
        x = torch.randn(num_tokens, HEAD_SIZE // 2, 2, generator=generator)
        query = torch.randn(NUM_QUERIES, HEAD_SIZE, generator=generator)
        query = query.to(DEVICE).double() * 2 / math.sqrt(HEAD_SIZE)
        positions = torch.arange(num_tokens)
        key = rotated(x + bias, positions).bfloat16().float().to(DEVICE)
        for name in presets:
            round_trip = preset(name, HEAD_SIZE).key
            for kind, offset in offsets(bias, num_tokens).items():
                offset = offset.to(DEVICE)
                stored = (key - offset).bfloat16().float()
                read = round_trip(stored).double() + offset.double()
                found = divergence(query, key, read)
                totals[name][kind] += 1000 * found / NUM_HEADS
    return totals


def measure() -> list[dict]:
    rows = []
    for num_tokens in PRESETS:
        for name, make in BIASES.items():
            bias = make()
            row = {"context": num_tokens, "bias": name, "norm": bias.norm().item()}
            rows.append(row | measure_case(bias, num_tokens))
            print(f"{num_tokens} {name}", flush=True)
    return rows


def markdown(rows: list[dict]) -> str:
    kinds = list(rows[0]["turbo4"])
    lines = [
        "# What a bias of K costs, by what is taken off",
        "",
        "KL divergence of attention's weights in millinats; heads of "
        f"{HEAD_SIZE}, theta {THETA:.0e}, logits of deviation 2. Written by "
        "`tests/quality/lab/key_offsets.py`.",
    ]
    for context, presets in PRESETS.items():
        for name in presets:
            cells = [
                [row["bias"], f"{row['norm']:.0f}"]
                + [f"{row[name][kind]:.1f}" for kind in kinds]
                for row in rows
                if row["context"] == context
            ]
            lines += ["", f"## {name}, {context} tokens", ""]
            lines += table([["bias", "norm", *kinds], *cells])
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_programme("key_offsets", __doc__, measure, markdown)
