# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keys with errors across a direction of queries, in CUDA's store, and the tables that
it refuses.
"""

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda import constants
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES
from vllm.v1.attention.ops.turbo.format import (
    TURBO_PRESETS,
    TurboFormat,
    direction_pull,
)
from vllm.v1.attention.ops.turbo.interface import (
    DIRECTION_SEGMENT,
    KeyOffset,
    QueryDirection,
    StoreCall,
    Variant,
)

from ..sequences import LAYOUT, NUM_KV_HEADS, directions, ints, layout_id
from ..utils import (
    BF16,
    DEVICE,
    FP16,
    KernelUnderTest,
    gaussian,
    new_cache,
    random_slots,
    requires_cuda,
    vectors,
)
from . import tails
from .store_checks import CUDA, store_by_cuda

pytestmark = requires_cuda

LAYOUTS = [
    TurboFormat.from_cache_dtype(name, size)
    for name in TURBO_PRESETS
    for size in SUPPORTED_HEAD_SIZES
]
# Lengths of sequences, some of them empty, and of their tokens in the step.
ENDS = [60, 0, DIRECTION_SEGMENT + 9, 5, 2 * DIRECTION_SEGMENT + 2, 9000]
COUNTS = [60, 0, 17, 0, 3, 40]
STARTS = [0, 60, 60, 77, 77, 80, 120]
NUM_TOKENS = 123  # with padding


def make_table(head_size: int, num_rows: int = 3) -> torch.Tensor:
    """Directions, of which the first has one coordinate alone."""
    table = directions(num_rows, NUM_KV_HEADS, head_size, seed=8) * head_size**0.5
    table[0] = 0
    table[0, :, 5] = head_size**0.5
    return table.half()


def key_bytes(cache: torch.Tensor, layout: TurboFormat) -> torch.Tensor:
    """The codes of K in each tile."""
    tiles = cache.reshape(*cache.shape[:2], -1, layout.tile_bytes)
    return tiles[..., : layout.value_codes_offset]


parts = pytest.mark.parametrize("parts", [1, 2, 4])
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)


@layouts
@parts
@pytest.mark.parametrize("is_tiny", [False, True])
def test_bytes_equal_the_reference(layout, parts, is_tiny):
    """Sequences with keys in several segments and past the last row."""
    shape = (NUM_TOKENS, NUM_KV_HEADS, layout.head_size)
    dtype = BF16 if is_tiny else FP16
    key, value = (vectors(shape, dtype, seed=seed) for seed in (1, 2))
    if is_tiny:
        magnitude = torch.logspace(-20, -8, NUM_TOKENS, 2.0, device=DEVICE)
        key = (gaussian(*shape, seed=1) * magnitude[:, None, None]).to(dtype)
    slots = random_slots(NUM_TOKENS, 2 * NUM_TOKENS)
    slots[[0, 13]] = -1
    slots[STARTS[-1] :] = -1
    table = make_table(layout.head_size)
    direction = QueryDirection(table, ints(ENDS), ints(STARTS))
    plain, expected, found = (
        new_cache(layout, NUM_TOKENS // 8 + 3, NUM_KV_HEADS, 16) for _ in range(3)
    )
    call = StoreCall(plain, slots, key, value, layout)
    reference.store(call)
    call = call._replace(query_direction=direction)
    reference.store(call._replace(kv_cache=expected))
    store_by_cuda(call._replace(kv_cache=found), parts, 64)
    assert torch.equal(found, expected)
    differ = [key_bytes(x, layout) != key_bytes(plain, layout) for x in (found, plain)]
    assert differ[0].any() and not differ[1].any()


@pytest.mark.parametrize("layout", [LAYOUT, LAYOUTS[8]], ids=layout_id)
@parts
def test_directions_beside_offsets(layout, parts):
    shape = (NUM_TOKENS, NUM_KV_HEADS, layout.head_size)
    offsets = tails.make_offset(3, layout.head_size)
    key = (gaussian(*shape, seed=1) + offsets[1]).to(BF16)
    value = gaussian(*shape, dtype=BF16, seed=2)
    slots = random_slots(NUM_TOKENS, 2 * NUM_TOKENS)
    slots[STARTS[-1] :] = -1
    step = ints(ENDS), ints(STARTS)
    expected, found = (
        new_cache(layout, NUM_TOKENS // 8 + 3, NUM_KV_HEADS, 16) for _ in range(2)
    )
    call = StoreCall(
        expected,
        slots,
        key,
        value,
        layout,
        key_offset=KeyOffset(offsets, *step),
        query_direction=QueryDirection(make_table(layout.head_size), *step),
    )
    reference.store(call)
    store_by_cuda(call._replace(kv_cache=found), parts, 64)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[9]], ids=layout_id)
@pytest.mark.parametrize("has_offset", [False, True])
@parts
def test_directions_beside_tails(monkeypatch, layout, has_offset, parts):
    """Tags of the tail have the codes that the direction led to."""
    table = make_table(layout.head_size)

    def directed(store: KernelUnderTest, *tuning: int) -> KernelUnderTest:
        def launch(call: StoreCall) -> None:
            direction = QueryDirection(table, *call.tail[2:4])
            store.launch(call._replace(query_direction=direction), *tuning)

        return store._replace(launch=launch)

    monkeypatch.setattr(tails, "TORCH", directed(tails.TORCH))
    scene = tails.GrowingSequences.at_borders(
        layout,
        store=directed(CUDA, parts, 64),
        offset=tails.make_offset(3, layout.head_size) if has_offset else None,
    )
    assert max(scene.step(tails.RAGGED)) > 0


TABLE = (3, NUM_KV_HEADS, LAYOUT.head_size)
BAD_TABLES = {
    "axes": (TABLE[1:], FP16, "2 axes, not 3"),
    "none": ((0, *TABLE[1:]), FP16, "0 along axis 0, not 1 or more"),
    "heads": ((3, 3, 128), FP16, "3 along axis 1, not 2"),
    "size": ((3, 2, 64), FP16, "64 along axis 2, not 128"),
    "dtype": (TABLE, torch.float32, "dtype float32, not float16"),
    "strides": ((*TABLE[:2], 2 * TABLE[2]), FP16, "not contiguous"),
    "address": ((6 * 128 + 1,), FP16, "its address is no multiple of 16 bytes"),
}


def store_one(table: torch.Tensor, seq_lens: list[int], starts: list[int]) -> None:
    cache = new_cache(LAYOUT, 2, NUM_KV_HEADS, 16)
    key = gaussian(1, *TABLE[1:], dtype=BF16)
    store_by_cuda(
        StoreCall(
            cache,
            torch.full((1,), -1, device=DEVICE),
            key,
            key,
            LAYOUT,
            query_direction=QueryDirection(table, ints(seq_lens), ints(starts)),
        )
    )


@pytest.mark.parametrize("name", BAD_TABLES)
def test_tables_that_are_not_taken(name):
    shape, dtype, message = BAD_TABLES[name]
    table = torch.zeros(shape, dtype=dtype, device=DEVICE)
    if name == "strides":
        table = table[..., ::2]
    if name == "address":
        table = table[1:].view(TABLE)
    error = TypeError if name == "dtype" else ValueError
    with pytest.raises(error, match=f"query_direction: {message}"):
        store_one(table, [40], [0, 1])


def test_lengths_that_are_not_taken():
    table = make_table(LAYOUT.head_size)
    for seq_lens, starts, message in (
        ([40], [0], "query_start_loc: of 1, not 2"),
        ([], [0], "seq_lens: of 0, not 1"),
    ):
        with pytest.raises(ValueError, match=message):
            store_one(table, seq_lens, starts)


@layouts
def test_constants_are_those_of_the_reference(layout):
    header = constants.layout_header(layout, Variant(query_direction=True))
    pull = direction_pull(layout.head_size)
    assert f"#define DIRECTION_PULL {pull.hex()}f\n" in header
    assert "#define QUERY_DIRECTION 1\n" in header
