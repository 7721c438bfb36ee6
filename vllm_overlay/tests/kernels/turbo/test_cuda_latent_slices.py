# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA decode kernel of MLA whose warps have slices of the coordinates."""

import pytest

from vllm.v1.attention.ops.turbo.cuda import latent_decode
from vllm.v1.attention.ops.turbo.cuda.latent_decode import Plan
from vllm.v1.attention.ops.turbo.latent_format import LATENT_SIZES, LatentFormat

from .test_cuda_latent_decode import LAYOUT, check_against_reference, requires_hopper

PLANS = {
    "8-tiles": Plan(8, 3, False, False, 1, 3, 2, 1),
    "8": Plan(8, 3, False, False, 1, 4, 1, 1),
    "16": Plan(16, 3, False, False, 1, 3, 1, 2),
    "16-copies": Plan(16, 3, False, False, 1, 3, 1, 2, False),
    "24": Plan(24, 3, False, False, 1, 2, 1, 3),
    "32": Plan(32, 3, False, False, 1, 2, 1, 2),
}


@requires_hopper
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_lengths_and_query_tokens(plan, monkeypatch):
    monkeypatch.setattr(latent_decode, "PLANS", (plan,))
    lens, query_lens = [4, 63, 66, 700, 33, 0, 1, 17], [4, 1, 3, 2, 4, 1, 1, 1]
    check_against_reference(LAYOUT, lens, query_lens, 5, 5)


@requires_hopper
@pytest.mark.parametrize("head_size", LATENT_SIZES)
def test_layouts(head_size, monkeypatch):
    monkeypatch.setattr(latent_decode, "PLANS", (PLANS["16"],))
    layout = LatentFormat.from_cache_dtype("turbo4", head_size)
    check_against_reference(layout, [70, 513, 64], [1, 1, 1], 16, 3, block_size=16)


@requires_hopper
@pytest.mark.parametrize("plan", ["16", "16-copies"])
def test_one_long_sequence(plan, monkeypatch):
    monkeypatch.setattr(latent_decode, "PLANS", (PLANS[plan],))
    check_against_reference(LAYOUT, [4001], [1], 16, 133)
