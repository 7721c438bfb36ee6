# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What kernels and builders are given is checked where it enters."""

from pathlib import Path

import pytest
import torch

from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.interface import check_pages

from .backend_utils import Batch, make_builder, make_impl, make_vllm_config
from .utils import CACHE_LAYOUTS, DEVICE, FP16, new_cache

LAYOUT = TurboFormat.from_cache_dtype("turbo4", 64)
SLOT = LAYOUT.slot_size


@pytest.mark.parametrize("cache_layout", CACHE_LAYOUTS, ids=lambda x: x.name)
def test_pages_of_every_layout(cache_layout):
    check_pages(new_cache(LAYOUT, 3, 2, 48, cache_layout), LAYOUT)


@pytest.mark.parametrize(
    "shape, stride, offset",
    [
        ((3, 2, 24, SLOT), (48 * SLOT, 24 * SLOT, SLOT, 1), 0),
        ((3, 2, 16, SLOT), (32 * SLOT + 8, 16 * SLOT, SLOT, 1), 0),
        ((3, 2, 16, SLOT), (32 * SLOT + 16, 16 * SLOT + 8, SLOT, 1), 0),
        ((3, 2, 16, SLOT), (64 * SLOT, 32 * SLOT, 2 * SLOT, 1), 0),
        ((3, 2, 16, SLOT - 8), (32 * SLOT, 16 * SLOT, SLOT - 8, 1), 0),
        ((3, 2, 16, SLOT), (32 * SLOT, 16 * SLOT, SLOT, 1), 4),
    ],
    ids=["tokens", "blocks", "heads", "slots apart", "slot", "address"],
)
def test_other_pages(shape, stride, offset):
    memory = torch.zeros(1 << 16, dtype=torch.uint8, device=DEVICE)
    pages = torch.as_strided(memory, shape, stride, offset)
    with pytest.raises(ValueError, match="pages of turbo4 have slots of"):
        check_pages(pages, LAYOUT)


def test_lengths_on_the_host(tmp_path: Path):
    """Decodes need none."""
    config = make_vllm_config(tmp_path, dtype=FP16)
    impl = make_impl(config)
    builder = make_builder(config, impl)
    decodes, prefills = ([(1, 9), (1, 40)], [(1, 9), (5, 0)])
    without = [
        Batch.make(impl, requests).common.replace(seq_lens_cpu_upper_bound=None)
        for requests in (decodes, prefills)
    ]
    assert builder.build(0, without[0]).num_decodes == 2
    with pytest.raises(
        ValueError, match="turbo4 plans prefills by lengths on the host"
    ):
        builder.build(0, without[1])
