# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Errors of keys across the direction in which queries look, by the store kernels."""

from itertools import accumulate

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    DIRECTION_SEGMENT,
    KeyOffset,
    QueryDirection,
    StoreCall,
)
from vllm.v1.attention.ops.turbo.triton import store as triton_store

from ..sequences import directions, ints
from ..utils import (
    BF16,
    CUDA_HEAD_SIZES,
    FP16,
    SEGMENT,
    UNEVEN,
    by_kernel,
    gaussian,
    layer_caches,
    random_slots,
    requires_triton,
    vectors,
)
from .store_checks import CUDA, TRITON, tuned

NUM_KV_HEADS = 2
NUM_ROWS = 3
# The ends of sequences, and their numbers of new tokens.
SEQUENCES = [
    (DIRECTION_SEGMENT + 3, 7),  # at a border of segments
    (7, 0),
    (2 * DIRECTION_SEGMENT + 1, 2),  # at the border of the last row
    (20 * SEGMENT + 1, 3),  # beyond the table
    (1, 1),
    (40 * DIRECTION_SEGMENT, -1),  # the rest
    (0, 0),  # padding to a CUDA graph's size
]
NUM_PADDED = 3


def layout_of(name: str, head_size: int) -> TurboFormat:
    return TurboFormat.from_cache_dtype(name, head_size)


LAYOUT = layout_of("turbo4", 128)
CUDA_LAYOUTS = [
    layout_of(name, size) for name in TURBO_PRESETS for size in CUDA_HEAD_SIZES
]
SIZES = {64: BF16, 80: FP16, 96: BF16, 128: FP16, 256: BF16}
STORED = [(TRITON, layout_of("turbo4", size), SIZES[size]) for size in SIZES]
STORED += [(TRITON, layout_of("turbo3", size), SIZES[size]) for size in (64, 80, 128)]
STORED += [(TRITON, layout_of("k4v3", 64), FP16)]
STORED += [(TRITON, layout, BF16) for layout in UNEVEN]
STORED += [
    (kernel, layout, dtype)
    for kernel in tuned(64)
    for layout in CUDA_LAYOUTS
    for dtype in (BF16, FP16)
]


def make_table(head_size: int) -> torch.Tensor:
    """Directions as long as the root of the head size; that of one row is zero."""
    table = head_size**0.5 * directions(NUM_ROWS, NUM_KV_HEADS, head_size, seed=5)
    # A few large elements.
    table[2, 0] = 0
    table[2, 0, [1, 17, head_size - 1]] = (head_size / 3) ** 0.5
    table[1, 1] = 0
    return table.to(FP16)


def make_call(
    layout: TurboFormat,
    dtype: torch.dtype,
    num_tokens: int,
    with_offset: bool = False,
    with_direction: bool = True,
) -> StoreCall:
    """Tokens of several sequences, from tiny to huge, into a new cache."""
    used = sum(count for _, count in SEQUENCES) + 1
    lens = [num_tokens - used if n < 0 else n for _, n in SEQUENCES]
    places = ints([end for end, _ in SEQUENCES]), ints([0, *accumulate(lens)])
    shape = (num_tokens + NUM_PADDED, NUM_KV_HEADS)
    key = vectors((*shape, layout.head_size), dtype, seed=1)
    # A column of outliers.
    key[12:, :, 9] *= 20
    value = vectors((*shape, layout.head_size_v), dtype, seed=2).flip(0)
    slots = random_slots(len(key), 2 * len(key))
    slots[num_tokens:] = -1
    slots[13] = -1
    cache = layer_caches(layout, len(key) // 8 + 3, NUM_KV_HEADS, 16)[1][1]
    call = StoreCall(cache, slots, key, value, layout)
    if with_offset:
        table = 4 * directions(3, NUM_KV_HEADS, layout.head_size, seed=6)
        call = call._replace(key_offset=KeyOffset(table, *places))
    if with_direction:
        direction = QueryDirection(make_table(layout.head_size), *places)
        call = call._replace(query_direction=direction)
    return call


def stored_by(launch, call: StoreCall, *tuning: int) -> torch.Tensor:
    """The bytes of a cache of 0xFF after a launch."""
    call = call._replace(kv_cache=torch.full_like(call.kv_cache, 0xFF))
    launch(call, *tuning)
    return call.kv_cache


@by_kernel("kernel, layout, dtype", STORED)
@pytest.mark.parametrize("with_offset", [False, True], ids=["alone", "offset"])
def test_bytes_equal_the_reference(kernel, layout, dtype, with_offset):
    """Tokens of all rows, beside an empty sequence and padding."""
    call = make_call(layout, dtype, kernel.num_tokens, with_offset)
    expected = stored_by(reference.store, call)
    # The direction matters.
    without = stored_by(reference.store, call._replace(query_direction=None))
    assert not torch.equal(expected, without)
    assert torch.equal(stored_by(kernel.launch, call), expected)


@requires_triton
@pytest.mark.parametrize(
    "name, tuning",
    [("turbo4", tuning) for tuning in ((64, 1, 4), (16, 4, 4), (32, 2, 4))]
    + [("turbo3", (32, 1, 4))],
)
def test_triton_with_any_tuning(name, tuning):
    call = make_call(layout_of(name, 80), BF16, 24)
    expected = stored_by(reference.store, call)
    tuning = triton_store.StoreTuning(*tuning)
    assert torch.equal(stored_by(triton_store.store, call, tuning), expected)


@by_kernel("kernel", [(TRITON,), (CUDA,)])
def test_values_and_other_calls_are_left_alone(kernel):
    """No byte of V changes, and none of a call without a table, before or after."""
    before = make_call(LAYOUT, BF16, kernel.num_tokens, with_direction=False)
    first = stored_by(kernel.launch, before)
    call = make_call(LAYOUT, BF16, kernel.num_tokens)
    found = stored_by(kernel.launch, call)
    assert torch.equal(stored_by(kernel.launch, before), first)
    assert torch.equal(first, stored_by(reference.store, before))
    slots = call.slot_mapping[call.slot_mapping >= 0]
    loaded = [reference.load(cache, slots, LAYOUT) for cache in (first, found)]
    (key, value), (directed_key, directed_value) = loaded
    assert torch.equal(value, directed_value) and not torch.equal(key, directed_key)


@by_kernel("kernel", [(TRITON,), (CUDA,)])
def test_zero_vectors_and_zero_directions(kernel):
    """A zero key stays zero. A zero direction leaves no part of an error to lower."""
    call = make_call(LAYOUT, BF16, kernel.num_tokens)
    key = gaussian(*call.key.shape, dtype=BF16, seed=3)
    key[:8] = 0
    call = call._replace(key=key)
    for direction in (1.0, 0.0):
        table = call.query_direction.table * direction
        call = call._replace(query_direction=call.query_direction._replace(table=table))
        expected = stored_by(reference.store, call)
        assert torch.equal(stored_by(kernel.launch, call), expected)


@by_kernel(
    "kernel, layout",
    [
        (TRITON, LAYOUT),
        (TRITON, layout_of("turbo4", 64)),
        (TRITON, layout_of("turbo3", 80)),
    ]
    + [(CUDA, layout) for layout in CUDA_LAYOUTS],
)
def test_errors_are_across_the_direction(kernel, layout):
    """The part of a key's error along the direction falls to a third at most.

    With three bits, no code moves beside those of the search, and it falls to 0.7.
    """
    num_tokens, head_size = kernel.num_tokens, layout.head_size
    shape = (num_tokens, NUM_KV_HEADS, head_size)
    table = head_size**0.5 * directions(1, NUM_KV_HEADS, head_size, seed=5)
    across = QueryDirection(table.to(FP16), ints([num_tokens]), ints([0, num_tokens]))
    key = gaussian(*shape, dtype=BF16, seed=3)
    slots = random_slots(num_tokens, num_tokens)
    cache = layer_caches(layout, num_tokens // 16 + 1, NUM_KV_HEADS, 16)[1][1]
    value = key[..., : layout.head_size_v]
    call = StoreCall(cache, slots, key, value, layout)
    parts = []
    for direction in (None, across):
        stored = stored_by(kernel.launch, call._replace(query_direction=direction))
        decoded = reference.load(stored, slots, layout)[0] * layout.key_codebook.gain
        error = reference.rotate(key) - decoded
        cosine = torch.cosine_similarity(error, across.table.float(), -1)
        parts.append(cosine.abs().mean())
    assert parts[1] <= parts[0] * (0.7 if layout.key_bits == 3 else 1 / 3), parts


@requires_triton
@pytest.mark.parametrize("field", ["heads", "size", "dtype", "strides", "rows", "lens"])
def test_tables_that_triton_refuses(field):
    call = make_call(LAYOUT, BF16, 24)
    table, seq_lens, starts = call.query_direction
    if field == "lens":
        seq_lens = seq_lens[1:]
    else:
        table = {
            "heads": table[:, :1].contiguous(),
            "size": table[..., :64].contiguous(),
            "dtype": table.float(),
            "strides": table.transpose(0, 1).contiguous().transpose(0, 1),
            "rows": table[:0],
        }[field]
    call = call._replace(query_direction=QueryDirection(table, seq_lens, starts))
    with pytest.raises(AssertionError):
        triton_store.store(call)
