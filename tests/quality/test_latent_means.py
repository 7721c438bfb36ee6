# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The lab's means of MLA's latents: what they are of, and that taking them off is
exact but for the rounding.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from latent_formats import latent_variants
from latent_means import ARMS, FIRST, LatentMeansLab, measure
from needle_model import needle_config, new_model, save_model

RANK, ROPE = 256, 64
LENGTH = 96
FORMATS = latent_variants(RANK, ROPE)
# Nats between two runs in fp32.
ROUNDING = 1e-6


@pytest.fixture
def lab(tmp_path: Path) -> LatentMeansLab:
    """A model of random weights whose latents are mostly their mean."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = new_model(needle_config("deepseek_v3", **shape, initializer_range=0.2), 0)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding += 0.5 * torch.randn(64, generator=torch.manual_seed(1))
    save_model(model, tmp_path)
    return LatentMeansLab(tmp_path, "cpu")


@pytest.fixture
def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(256, (1, LENGTH), generator=generator) for _ in range(3)]


def test_means_are_of_latents(lab: LatentMeansLab, texts: list[torch.Tensor]):
    seen = []
    norm = lab.model.model.layers[0].self_attn.kv_a_layernorm
    norm.register_forward_hook(lambda module, given, output: seen.append(output))
    lab.measure_means(texts[:2])
    # The lab's own hook rounds what the first layer hands on, and comes first.
    wanted = torch.cat([x[0, FIRST:] for x in seen]).mean(0)
    assert torch.allclose(lab.means[norm], wanted, rtol=0.02, atol=0.02)
    assert len(lab.means) == 2


def test_what_is_taken_off_is_added_again(
    lab: LatentMeansLab, texts: list[torch.Tensor]
):
    lab.measure_means(texts[:2])
    exact = replace(FORMATS["bf16"], latent=lambda x: x, rope=lambda x: x)
    for row in measure(lab, texts[2:], [exact], slice(0, LENGTH - 1)):
        assert row["kl"] < ROUNDING


def test_a_mean_takes_codes_away(lab: LatentMeansLab, texts: list[torch.Tensor]):
    """Without it predictions move less, and the first token may keep it."""
    lab.measure_means(texts[:2])
    rows = measure(lab, texts[2:], [FORMATS["turbo4"]], slice(0, LENGTH - 1))
    nothing, everything, but_first = (row["kl"] for row in rows)
    assert [row["arm"] for row in rows] == [arm.name for arm in ARMS]
    assert everything < nothing / 2 and but_first < nothing / 2
    assert everything != but_first
