# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Arguments of kernels and builders are checked at the entry points."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import extend_mma
from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.pages import check_pages
from vllm.v1.attention.ops.turbo.interface import (
    DecodeBatch,
    Partials,
    RotatedQuery,
    StoreCall,
)
from vllm.v1.attention.ops.turbo.planning.tokens import CachedPiece, SeqLens
from vllm.v1.attention.ops.turbo.triton import decode as triton_decode
from vllm.v1.attention.ops.turbo.triton import prefill as triton_prefill
from vllm.v1.attention.ops.turbo.triton import store as triton_store

from ..attention_utils import attend_by, merge_call
from ..backend_utils import make_builder, make_impl, make_vllm_config
from ..batch_utils import Batch
from ..utils import (
    CACHE_LAYOUTS,
    DEVICE,
    FP16,
    new_cache,
    requires_cuda,
    requires_triton,
)

LAYOUT = TurboFormat.from_cache_dtype("turbo4", 64)
SLOT = LAYOUT.slot_size
NUM_HEADS, NUM_KV_HEADS = 4, 2


@pytest.mark.parametrize("cache_layout", CACHE_LAYOUTS, ids=lambda x: x.name)
def test_pages_of_every_layout(cache_layout):
    check_pages(new_cache(LAYOUT, 3, 2, 48, cache_layout), LAYOUT)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def zeros(*shape: int, dtype: torch.dtype = FP16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def call_store(store: Callable[..., None], pages: torch.Tensor) -> None:
    """Store one token of slot -1."""
    vectors = zeros(1, NUM_KV_HEADS, LAYOUT.head_size)
    store(
        StoreCall(pages, torch.full((1,), -1, device=DEVICE), vectors, vectors, LAYOUT)
    )


def call_attention(attend: Callable[..., None], pages: torch.Tensor) -> None:
    """Attend from a token to the first block."""
    query = zeros(1, NUM_HEADS, LAYOUT.head_size)
    partial_output = zeros(1, NUM_HEADS, LAYOUT.head_size, dtype=torch.float32)
    attend_by(
        attend,
        RotatedQuery(query, partial_output[..., 0].clone()),
        pages,
        LAYOUT,
        DecodeBatch(1, ints(0)[None], ints(16)),
        Partials(partial_output, partial_output[..., 0].clone()),
        torch.empty_like(query),
    )


def call_gather(pages: torch.Tensor) -> None:
    """Dequantise the first block."""
    key, value = (zeros(16, NUM_KV_HEADS, LAYOUT.head_size) for _ in range(2))
    piece = CachedPiece(ints(0), SeqLens(ints(0, 16), 16, 16))
    triton_prefill.gather_context(pages, ints(0)[None], piece, LAYOUT, key, value)


# All entry points that take pages, by name.
ENTRY_POINTS = {
    "check_pages": partial(check_pages, layout=LAYOUT),
    "triton store": partial(call_store, triton_store.store),
    "triton decode_attention": partial(call_attention, triton_decode.decode_attention),
    "triton gather_context": call_gather,
    "cuda store": partial(call_store, cuda_store.store),
    "cuda decode_attention": partial(call_attention, cuda_decode.decode_attention),
    "cuda extend_attention": partial(call_attention, extend_mma.extend_attention),
}
MARKS = {"triton": requires_triton, "cuda": requires_cuda}
all_entry_points = pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=name, marks=MARKS.get(name.split()[0], ()))
        for name, call in ENTRY_POINTS.items()
    ],
)


@all_entry_points
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
def test_other_pages(call, shape, stride, offset):
    """Pages with other shapes, strides or addresses are refused.

    The functions that launch CUDA's kernels check theirs.
    """
    memory = torch.zeros(1 << 16, dtype=torch.uint8, device=DEVICE)
    pages = torch.as_strided(memory, shape, stride, offset)
    with pytest.raises(ValueError, match="pages of turbo4 have slots of|kv_cache: "):
        call(pages)


@all_entry_points
def test_pages_are_taken(call):
    """Correct pages are taken, so that other pages are refused for nothing else."""
    call(zeros(3, NUM_KV_HEADS, 16, SLOT, dtype=torch.uint8))


@requires_cuda
def test_merge_takes_whole_partial_results():
    """Partial results must be contiguous."""
    partial_output = zeros(1, NUM_HEADS, 2 * LAYOUT.head_size, dtype=torch.float32)
    with pytest.raises(ValueError, match="partial: not contiguous"):
        call = merge_call(
            DecodeBatch(1, ints(0)[None], ints(16)),
            zeros(1, NUM_HEADS, LAYOUT.head_size),
            NUM_KV_HEADS,
        )
        cuda_merge.merge_splits(
            Partials(partial_output[..., ::2], partial_output[..., 0].clone()), call
        )


def test_lengths_on_the_host(folder):
    """Prefills need lengths on the host; decodes do not."""
    config = make_vllm_config(folder, dtype=FP16)
    impl = make_impl(config)
    builder = make_builder(config, impl)
    decodes, prefills = ([(1, 9), (1, 40)], [(1, 9), (5, 0)])
    without = [
        Batch.make(impl, requests).common.replace(seq_lens_cpu_upper_bound=None)
        for requests in (decodes, prefills)
    ]
    assert builder.build(0, without[0]).num_decodes == 2
    words = "turbo4 plans prefills by lengths on the host"
    with pytest.raises(ValueError, match=words):
        builder.build(0, without[1])
