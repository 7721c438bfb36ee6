# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The layouts and the numbers of queries that ``extend_outputs`` is planned for."""

import pytest

from vllm.v1.attention.ops.turbo import choose
from vllm.v1.attention.ops.turbo.cuda import extend_wgmma
from vllm.v1.attention.ops.turbo.format import TurboFormat

from ..utils import requires_hopper

pytestmark = requires_hopper


@pytest.mark.parametrize(
    "cache_dtype, head_size, capability, is_served",
    [
        ("turbo4", 128, 90, True),
        ("turbo4", 128, 100, False),
        ("turbo4", 64, 90, True),
        ("turbo4", 256, 90, False),
        ("turbo4", 512, 90, False),
        ("k4v3", 128, 90, False),
        ("turbo3", 128, 90, False),
    ],
)
def test_served_layouts(cache_dtype, head_size, capability, is_served):
    layout = TurboFormat.from_cache_dtype(cache_dtype, head_size)
    kernels = choose.cuda_kernels(layout, capability=capability)
    assert (kernels.extend_outputs is not None) == is_served
    assert (kernels.extend_attention is not None) == (head_size <= 256)


# Numbers of queries by the rows of their plan.
ROWS = {64: [1, 64], 128: [65, 192, 384, 513], 256: [193, 256, 512, 768]}


@pytest.mark.parametrize(
    "num_queries, rows", [(n, rows) for rows, counts in ROWS.items() for n in counts]
)
def test_plans(num_queries, rows):
    """A plan has as few rows without a query as possible, in products of 64 rows."""
    for head_size in (64, 128):
        layout = TurboFormat.from_cache_dtype("turbo4", head_size)
        plan = extend_wgmma.plan_for(layout, num_queries, with_outputs=True)
        assert plan.rows == rows


@pytest.mark.parametrize(
    "num_queries, rows", [(1, 64), (64, 64), (65, 128), (130, 128)]
)
def test_plans_without_several_products(num_queries, rows):
    """A warpgroup without queries takes no time."""
    layout = TurboFormat.from_cache_dtype("turbo4", 256)
    assert extend_wgmma.plan_for(layout, num_queries).rows == rows
