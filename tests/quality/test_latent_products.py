# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The lab's products in 8 bits: exact ones are attention, and others are rounded."""

from pathlib import Path

import latent_products
import pytest
import torch
from latent_formats import latent_variants
from latent_products import (
    EXACT,
    PRESET,
    PRODUCTS,
    ProductsLab,
    measure,
    rotate,
    to_int8,
    weights_to_e4m3,
    weights_to_uint8,
)
from needle_model import needle_config, new_model, save_model

from vllm.v1.attention.ops.turbo.reference import inverse_rotate

LENGTH = 96
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture
def lab(tmp_path: Path) -> ProductsLab:
    config = needle_config("deepseek_v3", **SHAPE, initializer_range=0.2)
    save_model(new_model(config, 0), tmp_path)
    return ProductsLab(tmp_path, "cpu")


@pytest.fixture
def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(256, (1, LENGTH), generator=generator) for _ in range(3)]


def test_exact_products_are_those_of_projected_latents(lab, texts, monkeypatch):
    lab.measure_means(texts[:2])
    variant = latent_variants(lab.rank, lab.rope)[PRESET]
    lab.first, lab.products = 0, EXACT
    absorbed = lab.log_probs(texts[2], variant)
    base = latent_products.LatentMeansLab
    monkeypatch.setattr(ProductsLab, "_attend", base.__mro__[1]._attend)
    projected = base.log_probs(lab, texts[2], variant)
    torch.testing.assert_close(absorbed, projected, atol=1e-4, rtol=0)


def test_rounding_costs_something_and_int8_less(lab, texts):
    lab.measure_means(texts[:2])
    variant = latent_variants(lab.rank, lab.rope)[PRESET]
    rows = measure(lab, texts[2:], variant, slice(8, LENGTH - 1))
    found = {row["products"]: row["kl"] for row in rows}
    assert len({*found.values()}) == len(PRODUCTS)
    assert found["FP8: both"] > found["int8: both"]
    assert found["int8: both"] == pytest.approx(found["exact"], rel=0.1)


def test_rotation_is_exact():
    x = torch.randn(3, 256)
    torch.testing.assert_close(inverse_rotate(rotate(x)), x, atol=1e-5, rtol=0)


def test_int8_is_a_scale_and_whole_numbers():
    x = torch.randn(4, 96)
    codes, scale = to_int8(x)
    assert (codes == codes.round()).all() and codes.abs().max() == 127
    assert ((codes * scale - x).abs() <= scale / 2 + 1e-7).all()


def test_small_weights_are_kept_in_the_mean():
    """A quarter of a number is rounded up for a quarter of the places."""
    weights = torch.full((1, 64 * 100), 0.25 / 255)
    weights[:, ::64] = 1.0
    rounded = weights_to_uint8(weights, spread=True)
    small = torch.ones(64 * 100, dtype=torch.bool)
    small[::64] = False
    share = rounded[:, small].sum() / weights[:, small].sum()
    assert share == pytest.approx(1, abs=0.05)
    # Each step has a largest weight of its own, which is exact.
    assert torch.equal(rounded[:, ::64], weights[:, ::64])
    # To the nearest, they are lost.
    assert not weights_to_uint8(weights)[:, small].any()
    assert weights_to_uint8(torch.rand(2, 3, 70)).shape == (2, 3, 70)


def test_fp8_has_three_bits_behind_the_point():
    weights = torch.rand(5, 200) + 0.01
    error = (weights_to_e4m3(weights) - weights).abs() / weights
    assert 0.03 < error.max() <= 2**-4
