# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""NaN and infinity in a request's q, K and V must not reach another request."""

import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from vllm.config import VllmConfig
from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.interface import StoreCall
from vllm.v1.attention.ops.turbo.layer import runner as layer_runner

from ..backend_utils import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_KV_HEADS,
    kernel_paths,
    make_builder,
    make_impl,
    make_vllm_config,
    prefill_modes,
)
from ..batch_utils import Batch
from ..utils import DEVICE, FP16, requires_triton, slots_of

# Two requests of each kind: decodes, extends, first chunks and later chunks. Either one
# of the two is broken.
REQUESTS = [(1, 31), (1, 64), (3, 65), (4, 31), (9, 0), (10, 0), (11, 33), (9, 10)]
# The longest extend; longer requests with context are chunks.
EXTEND_LEN = 8
BROKEN = [(0, 2, 4, 6), (1, 3, 5, 7)]

pytestmark = requires_triton


class Layer(NamedTuple):
    """A layer that has kernels for all kinds of requests."""

    config: VllmConfig
    impl: TurboAttentionImpl
    path: str

    def run(self, batch: Batch) -> list[torch.Tensor]:
        """Each request's output, (query length, Hq, D)."""
        builder = make_builder(self.config, self.impl)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_runner, "max_extend_len", lambda *_: EXTEND_LEN)
            metadata = builder.build(0, batch.common)
        assert metadata.num_decodes == 2 and metadata.prefill is not None
        assert sum(each.num_requests for each in metadata.extends) == 2
        output = batch.run(self.impl, metadata, self.path)
        return list(output.split([query_len for query_len, _ in REQUESTS]))


@cache
def sound(folder: Path, path: str, mode: str) -> tuple[Layer, Batch, list]:
    """A layer, a batch without broken numbers, and its outputs."""
    config = make_vllm_config(folder, "turbo4", FP16, mode)
    impl = make_impl(config, path=path)
    if path == "triton":
        impl.runner.kernels = impl.runner.kernels._replace(
            extend_attention=impl.runner.kernels.decode_attention,
        )
    layer, batch = Layer(config, impl, path), Batch.make(impl, REQUESTS)
    return layer, batch, layer.run(batch)


def fill(x: torch.Tensor) -> None:
    """Set every other token to NaN, and the rest to infinity."""
    x[0::2] = math.nan
    x[1::2] = math.inf


def store_broken(layer: Layer, batch: Batch, slots: torch.Tensor) -> None:
    shape = (slots.numel(), NUM_KV_HEADS, HEAD_SIZE)
    broken = torch.empty(shape, dtype=FP16, device=DEVICE)
    fill(broken)
    reference.store(
        StoreCall(batch.cache, slots, broken, broken, layer.impl.runner.layout)
    )


def pages(batch: Batch, row: int) -> torch.Tensor:
    """The pages of a request, (num_blocks, H, N, C)."""
    length = sum(REQUESTS[row])
    table = batch.common.block_table_tensor[row, : -(-length // BLOCK_SIZE)]
    return batch.cache[table.long()]


@pytest.mark.parametrize("broken", BROKEN, ids=["first", "second"])
@prefill_modes
@kernel_paths
def test_others_in_the_batch(folder, path, mode, broken):
    layer, other, expected = sound(folder, path, mode)
    batch = Batch.make(layer.impl, REQUESTS)
    start = 0
    for row, (query_len, context) in enumerate(REQUESTS):
        tokens = slice(start, start + query_len)
        start = tokens.stop
        if row in broken:
            for x in (batch.query, batch.key, batch.value):
                fill(x[tokens])
            table = batch.common.block_table_tensor[row]
            store_broken(layer, batch, slots_of(table, 0, context, BLOCK_SIZE))
    found = layer.run(batch)
    for row in set(range(len(REQUESTS))) - set(broken):
        assert torch.equal(found[row], expected[row]), f"request {row}"
        assert torch.equal(pages(batch, row), pages(other, row)), f"request {row}"


@kernel_paths
def test_two_prefills(folder, path):
    """The smallest batch with neighbours has two prefills and nothing else."""
    config = make_vllm_config(folder, "turbo4", FP16)
    impl = make_impl(config, path=path)
    first, outputs = slice(0, 3), []
    for is_broken in (False, True):
        batch = Batch.make(impl, [(3, 0), (4, 0)])
        if is_broken:
            for x in (batch.query, batch.key, batch.value):
                fill(x[first.stop :])
        metadata = batch.build(config, impl)
        assert metadata.prefill is not None and metadata.num_packed_tokens == 0
        outputs.append(batch.run(impl, metadata))
    assert outputs[0].isfinite().all() and outputs[1][first.stop :].isnan().all()
    assert torch.equal(outputs[1][first], outputs[0][first])


@prefill_modes
@kernel_paths
def test_next_owners_of_the_blocks(folder, path, mode):
    """Slots after a sequence's end in its last block have no effect."""
    layer, _, expected = sound(folder, path, mode)
    batch = Batch.make(layer.impl, REQUESTS)
    slots = torch.arange(batch.cache.shape[0] * BLOCK_SIZE, device=DEVICE)
    owned = [
        slots_of(table, 0, context, BLOCK_SIZE)
        for table, (_, context) in zip(batch.common.block_table_tensor, REQUESTS)
    ]
    store_broken(layer, batch, slots[~torch.isin(slots, torch.cat(owned))])
    for row, (own, other) in enumerate(zip(layer.run(batch), expected)):
        assert torch.equal(own, other), f"request {row}"
