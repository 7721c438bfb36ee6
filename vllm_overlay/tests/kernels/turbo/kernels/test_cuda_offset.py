# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Offsets of K, one for each segment of a sequence, in CUDA's store, and the tables,
queries and lengths that kernels refuse. test_cuda_features.py has the attention.
"""

from itertools import accumulate

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.cuda.store import StoreTuning
from vllm.v1.attention.ops.turbo.interface import KeyOffset, StoreCall, offset_rows

from ..attention_kernels import KERNELS, kernels, without
from ..sequences import (
    LAYOUT,
    NUM_KV_HEADS,
    SOME_LAYOUTS,
    Features,
    Sequences,
    directions,
    ints,
    layout_id,
)
from ..utils import (
    BF16,
    DEVICE,
    SEGMENT,
    gaussian,
    layer_caches,
    model_dtypes,
    random_slots,
    requires_cuda,
)

pytestmark = requires_cuda

FEATURES = Features(offset="near", dtype=BF16)


def repeated(values: list[int], count: int) -> list[int]:
    return (values * -(-count // len(values)))[:count]


@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=layout_id)
@model_dtypes
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("num_seqs", [1, 2, 7, 8, 9, 65, 300])
def test_store(layout, dtype, parts, num_seqs):
    """The store writes the bytes of keys less their offsets, beside empty sequences."""
    lens = repeated([1, 0, 3, 0, 0, 40, 1, 2], num_seqs)
    ends = [SEGMENT + 1, 5, 2 * SEGMENT + 2, 0, 3 * SEGMENT + 856, 3 * SEGMENT + 26]
    ends = repeated([*ends, SEGMENT, 1], num_seqs)
    # Padding to a CUDA graph's size: sequences here, tokens below.
    lens += [0, 0]
    ends += [0, 3]
    seq_lens = [max(end, count) for end, count in zip(ends, lens)]
    starts = [0, *accumulate(lens)]
    num_tokens = starts[-1] + 3
    offsets = 400 * directions(3, NUM_KV_HEADS, layout.head_size, seed=5)
    parts_of_index = [
        torch.arange(end - count, end) for end, count in zip(seq_lens, lens)
    ]
    indices = torch.cat([*parts_of_index, torch.zeros(3, dtype=torch.long)]).to(DEVICE)
    of_tokens = offsets[offset_rows(indices, offsets)]
    shape = (num_tokens, NUM_KV_HEADS, layout.head_size)
    key = (gaussian(*shape, seed=6) + of_tokens).to(dtype)
    value = gaussian(*shape, dtype=dtype, seed=7)
    slots = random_slots(num_tokens, 2 * num_tokens)
    slots[starts[-1] :] = -1
    if num_tokens > 20:
        slots[[1, 12]] = -1
    caches = [
        layer_caches(layout, num_tokens // 8 + 3, NUM_KV_HEADS, 16)[1][1]
        for _ in range(2)
    ]
    stored = (key.float() - of_tokens).to(dtype)
    reference.store(StoreCall(caches[0], slots, stored, value, layout))
    cuda_store.store(
        StoreCall(
            caches[1],
            slots,
            key,
            value,
            layout,
            key_offset=KeyOffset(offsets, ints(seq_lens), ints(starts)),
        ),
        tuning=StoreTuning(parts, 64),
    )
    assert torch.equal(*caches)


TABLE = (3, NUM_KV_HEADS, LAYOUT.head_size)
BAD_TABLES = {
    "axes": (TABLE[1:], torch.float32, "2 axes, not 3"),
    "none": ((0, *TABLE[1:]), torch.float32, "0 along axis 0, not 1 or more"),
    "heads": ((3, 3, 128), torch.float32, "3 along axis 1, not 2"),
    "size": ((3, 2, 64), torch.float32, "64 along axis 2, not 128"),
    "dtype": (TABLE, BF16, "dtype bfloat16, not float32"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_tables_that_are_not_taken(name):
    shape, dtype, message = BAD_TABLES[name]
    table = torch.zeros(shape, dtype=dtype, device=DEVICE)
    batch = Sequences(LAYOUT, [40], 1, features=FEATURES)
    batch.scoring = batch.scoring._replace(key_offset=table)
    error = TypeError if name == "dtype" else ValueError
    for kernel in ("decode", "extend_mma", "outputs"):
        with pytest.raises(error, match=f"key_offset: {message}"):
            batch.attend(KERNELS[kernel], False)
    with pytest.raises(error, match=f"key_offset: {message}"):
        cuda_store.store(
            StoreCall(
                batch.cache,
                torch.full((1,), -1, device=DEVICE),
                batch.key,
                batch.value,
                LAYOUT,
                key_offset=KeyOffset(table, ints([40]), ints([0, 1])),
            )
        )


@kernels(without("partials"))
def test_queries_that_are_not_taken(kernel):
    batch = Sequences(LAYOUT, [40], 2, features=FEATURES)
    launch = batch.launch(False)
    for query, error, message in (
        (batch.query.float(), TypeError, "dtype float32, not float16"),
        (batch.query[:1], ValueError, "1 along axis 0, not 2"),
        (batch.query[:, :4], ValueError, "4 along axis 1, not 8"),
        (batch.query.repeat(1, 1, 2)[..., ::2], ValueError, "last axis is not"),
    ):
        bad = launch._replace(call=launch.call._replace(query=query))
        with pytest.raises(error, match=f"original_query: .*{message}"):
            kernel.attend(*bad)


def test_lengths_that_are_not_taken():
    batch = Sequences(LAYOUT, [40], 1, features=FEATURES)
    offsets = batch.scoring.key_offset
    for seq_lens, starts, message in (
        ([40], [0], "query_start_loc: of 1, not 2"),
        ([], [0], "seq_lens: of 0, not 1"),
    ):
        with pytest.raises(ValueError, match=message):
            cuda_store.store(
                StoreCall(
                    batch.cache,
                    torch.full((1,), -1, device=DEVICE),
                    batch.key,
                    batch.value,
                    LAYOUT,
                    key_offset=KeyOffset(offsets, ints(seq_lens), ints(starts)),
                )
            )
