# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention's error on K and V with known pathologies, against vLLM's presets.

Writes pathologies.json and pathologies.md: for each case, the relative error of
attention's output (the root of squared error over squared length) with each cache, the
caches of about equal bytes side by side.
"""

import math
from collections.abc import Callable

import torch
from report import page, run_programme
from variants import Variant, preset, upstream_preset

HEAD_SIZE = 128
NUM_HEADS = 4
NUM_TOKENS = 1024
NUM_QUERIES = 64
# Our dtypes, each beside the preset of vLLM that it replaces.
PAIRS = (
    ("turbo4", "turboquant_4bit_nc"),
    ("k4v3", "turboquant_k3v4_nc"),
    ("turbo3", "turboquant_3bit_nc"),
)

KeyValue = tuple[torch.Tensor, torch.Tensor]


def gaussian(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_HEADS, NUM_TOKENS, HEAD_SIZE, generator=generator)


def plain() -> KeyValue:
    return gaussian(0), gaussian(1)


def key_channels(factor: float) -> Callable[[], KeyValue]:
    """Five channels of K have a mean of ``factor`` deviations, as in Qwen2.5."""

    def make() -> KeyValue:
        key, value = plain()
        signs = torch.tensor([1.0, -1, 1, 1, -1])
        key[..., [3, 27, 64, 90, 121]] += factor * signs
        return key, value

    return make


def sinks() -> KeyValue:
    """The first four tokens: K ten times the rest, V a hundredth."""
    key, value = plain()
    key[:, :4] *= 10
    value[:, :4] *= 0.01
    return key, value


def times(key_factor: float, value_factor: float) -> Callable[[], KeyValue]:
    def make() -> KeyValue:
        key, value = plain()
        return key * key_factor, value * value_factor

    return make


def mixed_norms() -> KeyValue:
    """Norms of V from 1e-6 to 1e4, a token each, in random order."""
    key, value = plain()
    order = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(2))
    norms = torch.logspace(-6, 4, NUM_TOKENS)[order] / math.sqrt(HEAD_SIZE)
    return key, value * norms[:, None]


def zeros() -> KeyValue:
    """Half of the vectors, and half of the channels of the others, are zero."""
    key, value = plain()
    for x in (key, value):
        x[:, ::2] = 0
        x[..., 1::2] = 0
    return key, value


def constants() -> KeyValue:
    """Every vector is constant; K's and V's constants differ by token."""
    key, value = plain()
    return tuple(x[..., :1].expand_as(x).contiguous() for x in (key, value))


def spikes() -> KeyValue:
    """One coordinate of each vector holds all of its length."""
    key, value = plain()
    generator = torch.Generator().manual_seed(3)
    shape = (NUM_HEADS, NUM_TOKENS, 1)
    made = []
    for x in (key, value):
        position = torch.randint(HEAD_SIZE, shape, generator=generator)
        spike = x[..., :1].sign() * math.sqrt(HEAD_SIZE)
        made.append(torch.zeros_like(x).scatter_(-1, position, spike))
    return made[0], made[1]


def value_channels() -> KeyValue:
    """Two channels of V are 50 times the others."""
    key, value = plain()
    value[..., [10, 77]] *= 50
    return key, value


CASES: dict[str, Callable[[], KeyValue]] = {
    "Gaussian": plain,
    "K channels with a mean of 10": key_channels(10),
    "K channels with a mean of 100": key_channels(100),
    "attention sinks": sinks,
    "K 6 times V": times(1, 1 / 6),
    "K 182 times V": times(1, 1 / 182),
    "norms 1e-6": times(1e-6 / math.sqrt(HEAD_SIZE), 1e-6 / math.sqrt(HEAD_SIZE)),
    "norms 1e-4": times(1e-4 / math.sqrt(HEAD_SIZE), 1e-4 / math.sqrt(HEAD_SIZE)),
    "norms 1e4": times(1e4 / math.sqrt(HEAD_SIZE), 1e4 / math.sqrt(HEAD_SIZE)),
    "norms of V from 1e-6 to 1e4": mixed_norms,
    "exact zeros": zeros,
    "constant vectors": constants,
    "one spike": spikes,
    "V channels 50 times the rest": value_channels,
}


def queries(key: torch.Tensor, deviation: float = 2.0) -> torch.Tensor:
    """Queries whose logits have a given deviation over a head's tokens.

    Without that, a large K would make every softmax a choice of one token, and a
    small one a plain mean.
    """
    query = gaussian(4)[:, :NUM_QUERIES]
    spread = (query @ key.mT).var(-1, keepdim=True).mean(-2, keepdim=True).sqrt()
    return deviation * query / spread


def attention_error(variant: Variant, key: torch.Tensor, value: torch.Tensor) -> float:
    """Relative error of the output, with fp32 attention on both sides."""
    query = queries(key).double()
    key, value = key.bfloat16().float(), value.bfloat16().float()
    mean = key.mean(-2, keepdim=True)
    read_key, read_value = variant.round_trip(key, value, mean)
    key, value = key.double(), value.double()
    exact = torch.softmax(query @ key.mT, -1) @ value
    read_key, read_value = read_key.double(), read_value.double()
    result = torch.softmax(query @ read_key.mT, -1) @ read_value
    return ((result - exact).norm() / exact.norm()).item()


def variants() -> list[Variant]:
    """The caches, in the order of the columns."""
    found = []
    for ours, theirs in PAIRS:
        found.append(preset(ours, HEAD_SIZE))
        name = f"{ours} without K's mean"
        found.append(preset(ours, HEAD_SIZE, subtracts_mean=True, name=name))
        found.append(upstream_preset(theirs, HEAD_SIZE))
    return found


def measure() -> list[dict]:
    rows = []
    for case, make in CASES.items():
        key, value = make()
        row: dict = {"case": case}
        for variant in variants():
            row[variant.name] = attention_error(variant, key, value)
        rows.append(row)
    return rows


def markdown(rows: list[dict]) -> str:
    sizes = {variant.name: variant.num_bytes for variant in variants()}
    about = (
        f"Relative error of attention's output, in per cent; {NUM_TOKENS} tokens, "
        f"{NUM_HEADS} heads of {HEAD_SIZE}, logits of deviation 2. Bytes of a token "
        "and KV head in the heading. Written by "
        "`tests/quality/lab/pathologies.py`."
    )
    head = ["case", *(f"{name} ({int(size)})" for name, size in sizes.items())]
    cells = [[row["case"], *(f"{100 * row[n]:.2f}" for n in sizes)] for row in rows]
    return page("Attention's error on awkward K and V", about, [head, *cells])


if __name__ == "__main__":
    run_programme("pathologies", __doc__, measure, markdown)
