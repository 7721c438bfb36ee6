# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Claims of the TurboQuant paper (arXiv:2504.19874), measured."""

import math

import pytest
import torch
from turboquant import TurboQuantMse, TurboQuantProd, lloyd_max

HEAD_SIZE = 128
# The exact distortions of the paper's quantiser, which its section 1 has rounded.
DISTORTIONS = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
all_bits = pytest.mark.parametrize("bits", DISTORTIONS)


def unit_vectors(count: int, seed: int = 0, decay: float = 0.0) -> torch.Tensor:
    """Random directions; with ``decay``, later coordinates are smaller."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HEAD_SIZE, generator=generator)
    x *= torch.exp(-decay * torch.arange(HEAD_SIZE) / HEAD_SIZE)
    return x / x.norm(dim=-1, keepdim=True)


@all_bits
def test_distortion_in_theory(bits):
    """Equation (4) solved for many dimensions, where a coordinate is Gaussian."""
    assert lloyd_max(bits, 8192)[1] == pytest.approx(DISTORTIONS[bits], rel=1e-3)


@all_bits
def test_distortion_within_its_bounds(bits):
    """It is below Theorem 1's bound, and above the one that any quantiser has."""
    measured = measured_distortion(bits)
    assert measured == pytest.approx(lloyd_max(bits, HEAD_SIZE)[1], rel=0.01)
    assert measured == pytest.approx(DISTORTIONS[bits], rel=0.03)
    assert 4.0**-bits < measured < math.sqrt(3) * math.pi / 2 * 4.0**-bits


def measured_distortion(bits: int) -> float:
    x = unit_vectors(4000, seed=1)
    decoded = TurboQuantMse(HEAD_SIZE, bits).round_trip(x)
    return (decoded - x).square().sum(-1).mean().item()


@all_bits
def test_worst_case_inputs(bits):
    """The rotation makes one vector as good as another, however it looks."""
    spike = torch.zeros(HEAD_SIZE)
    spike[5] = 1
    constant = torch.full((HEAD_SIZE,), HEAD_SIZE**-0.5)
    two = torch.zeros(HEAD_SIZE)
    two[:2] = 0.5**0.5
    x = torch.stack([spike, constant, two])
    errors = []
    for seed in range(100):
        decoded = TurboQuantMse(HEAD_SIZE, bits, seed).round_trip(x)
        errors.append((decoded - x).square().sum(-1))
    expected = [lloyd_max(bits, HEAD_SIZE)[1]] * 3
    assert torch.stack(errors).mean(0).tolist() == pytest.approx(expected, rel=0.05)


@all_bits
def test_prod_is_unbiased_and_mse_is_not(bits):
    """Slope of decoded against true products, over ten sketches."""
    x, y = unit_vectors(2000, seed=2), unit_vectors(2000, seed=3)
    y = (x + y) / 2  # so that products are not about zero
    slopes = {}
    for kind in (TurboQuantMse, TurboQuantProd):
        true, decoded = [], []
        for seed in range(10):
            x_hat = kind(HEAD_SIZE, bits, seed).round_trip(x)
            true.append((x * y).sum(-1))
            decoded.append((x_hat * y).sum(-1))
        t, d = torch.cat(true), torch.cat(decoded)
        slopes[kind] = ((t * d).sum() / (t * t).sum()).item()
    assert slopes[TurboQuantProd] == pytest.approx(1, abs=0.004)
    shrunk = 1 - lloyd_max(bits, HEAD_SIZE)[1]
    assert slopes[TurboQuantMse] == pytest.approx(shrunk, abs=0.004)


@all_bits
def test_inner_product_distortion(bits):
    """Theorem 2: the distortion is at most sqrt(3) pi^2 / d 4^-b.

    It is exactly pi / 2d times Algorithm 1's error with one bit fewer, because the
    sketch is Gaussian.
    """
    x, y = unit_vectors(4000, seed=4), unit_vectors(4000, seed=5)
    squares = []
    for seed in range(5):
        x_hat = TurboQuantProd(HEAD_SIZE, bits, seed).round_trip(x)
        squares.append(((x_hat - x) * y).sum(-1).square())
    measured = torch.cat(squares).mean().item()
    left = 1.0 if bits == 1 else lloyd_max(bits - 1, HEAD_SIZE)[1]
    assert measured == pytest.approx(math.pi / 2 * left / HEAD_SIZE, rel=0.05)
    assert 4.0**-bits / HEAD_SIZE < measured
    assert measured < math.sqrt(3) * math.pi**2 / HEAD_SIZE * 4.0**-bits


def recall(bits: int, kind: type, neighbours: tuple[int, ...]) -> list[float]:
    """Share of queries whose true nearest vector is among the k nearest decoded."""
    base, queries = unit_vectors(5000, 6, decay=3), unit_vectors(200, 7, decay=3)
    nearest = (queries @ base.T).argmax(-1, keepdim=True)
    scores = queries @ kind(HEAD_SIZE, bits).round_trip(base).T
    ranks = (scores > scores.gather(1, nearest)).sum(-1)
    return [(ranks < k).float().mean().item() for k in neighbours]


def test_recall_grows_with_bits_and_neighbours():
    table = [recall(bits, TurboQuantMse, (1, 4, 16)) for bits in DISTORTIONS]
    for few, more in zip(table, table[1:]):
        assert all(a < b or b == 1 for a, b in zip(few, more))
    assert all(row == sorted(row) for row in table)
    assert table[3][0] > 0.8 and table[3][1] > 0.98
    assert recall(3, TurboQuantProd, (1,)) < recall(3, TurboQuantMse, (1,))


def attention_error(key_decoder, sharpness: float) -> float:
    """Relative squared error of attention's output when K is decoded.

    Keys are random, logits have the given standard deviation.
    """
    keys, values = unit_vectors(1024, seed=8), unit_vectors(1024, seed=9)
    queries = unit_vectors(64, seed=10) * sharpness * math.sqrt(HEAD_SIZE)
    exact = torch.softmax(queries @ keys.T, -1) @ values
    decoded = torch.softmax(queries @ key_decoder(keys).T, -1) @ values
    return ((decoded - exact).square().sum() / exact.square().sum()).item()


@pytest.mark.parametrize("sharpness", [1.0, 3.0])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_qjl_hurts_attention(bits, sharpness):
    """At equal bits the sketch's variance costs more than its lack of bias gains.

    Therefore no preset has the residual sketch.
    """
    errors = {}
    for kind in (TurboQuantMse, TurboQuantProd):
        runs = [
            attention_error(kind(HEAD_SIZE, bits, seed).round_trip, sharpness)
            for seed in range(5)
        ]
        errors[kind] = sum(runs) / len(runs)
    assert errors[TurboQuantProd] > 1.5 * errors[TurboQuantMse]
