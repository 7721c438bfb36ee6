# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefill: its kernels, and attention as a whole."""

import math
from functools import partial
from itertools import product

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import Scoring, StoreCall
from vllm.v1.attention.ops.turbo.layer.flash import FlashAttn
from vllm.v1.attention.ops.turbo.layer.prefill import prefill_attention
from vllm.v1.attention.ops.turbo.layer.prefill_sources import PrefillCall
from vllm.v1.attention.ops.turbo.planning.prefill import (
    PrefillLimits,
    PrefillPlanner,
)
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape, PrefillScratch
from vllm.v1.attention.ops.turbo.planning.tokens import CachedPiece, SeqLens

from ..attention_utils import assert_by_2x_rule
from ..flash_utils import flash_attn_of_gpu, flash_attn_stand_in
from ..utils import (
    DEVICE,
    FP16,
    KERNEL_CASES,
    UNEVEN,
    all_pages,
    all_presets,
    fill_cache,
    gaussian,
    kernel_cases,
    kernel_head_sizes,
    layout_id,
    load_context,
    make_block_table,
    model_dtypes,
    new_cache,
    num_blocks_for,
    packings,
    random_pages,
    requires_triton,
    slots_of,
    spread_pages,
)


@requires_triton
@pytest.mark.parametrize("inverse", [False, True])
@kernel_cases
def test_rotate_rows(head_size, dtype, inverse):
    """Rotate views of a wider tensor, to another tensor and in place."""
    from vllm.v1.attention.ops.turbo.triton.prefill import rotate_rows

    qkv = gaussian(13, 5, head_size, dtype=dtype)
    x = qkv[:, 1:4]
    matrix = rotation_matrix(head_size, DEVICE, torch.float64)
    matrix = (matrix.T if inverse else matrix) * head_size**-0.5
    expected = x.double() @ matrix
    atol = 2.0**-20 * x.abs().amax().item() * head_size**0.5
    output = torch.empty(13, 3, head_size, device=DEVICE)
    rotate_rows(x, output, inverse)
    assert ((output - expected).abs() <= atol).all()
    rotate_rows(x, x, inverse)
    rounding = torch.finfo(dtype).eps / 2
    error = (x.float() - output).abs()
    assert (error <= rounding * output.abs() + 2.0**-24).all()
    untouched = gaussian(13, 5, head_size, dtype=dtype)[:, [0, 4]]
    assert torch.equal(qkv[:, [0, 4]], untouched)


@requires_triton
@kernel_cases
def test_isolate_broken_values(head_size, dtype):
    """Copy views of a wider tensor, which do not change. A broken row is NaN in the
    copied key and zero in the copied value.
    """
    from vllm.v1.attention.ops.turbo.triton.isolate import isolate_broken_values

    kv = gaussian(37, 6, head_size, dtype=dtype)
    kv[3, 4, -1] = math.nan
    kv[20, 3, 0] = -math.inf
    kv[36, 5] = math.inf
    before = kv.clone()
    key, value = (torch.full_like(kv[:, :3].contiguous(), 7.0) for _ in range(2))
    isolate_broken_values(kv[:, :3], kv[:, 3:], key, value)
    assert torch.equal(kv.nan_to_num(7.0), before.nan_to_num(7.0))
    for token, head in ((3, 1), (20, 0), (36, 2)):
        assert key[token, head].isnan().all() and (value[token, head] == 0).all()
        before[token, head], before[token, 3 + head] = math.nan, 0
    found = torch.cat([key, value], 1)
    assert torch.equal(found.nan_to_num(7.0), before.nan_to_num(7.0))


def gather(
    cache: torch.Tensor,
    table: torch.Tensor,
    starts: list[int],
    lens: list[int],
    layout: TurboFormat,
    dtype: torch.dtype = FP16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather K and V, (T + 2, H, D), into buffers of NaN with two rows to spare."""
    from vllm.v1.attention.ops.turbo.triton.prefill import gather_context

    key, value = (
        torch.full((sum(lens) + 2, cache.shape[1], size), math.nan, dtype=dtype)
        for size in (layout.head_size, layout.head_size_v)
    )
    key, value = key.to(DEVICE), value.to(DEVICE)
    bounds = torch.tensor([0, *lens], device=DEVICE).cumsum(0).int()
    piece = CachedPiece(
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        SeqLens(bounds, max(lens), sum(lens)),
    )
    gather_context(cache, table, piece, layout, key, value)
    return key, value


@requires_triton
def test_isolate_broken_values_of_two_sizes():
    from vllm.v1.attention.ops.turbo.triton.isolate import isolate_broken_values

    key, value = gaussian(20, 2, 96, dtype=FP16), gaussian(20, 2, 64, dtype=FP16)
    value[7, 1, 63] = math.inf
    expected = key.clone(), value.clone()
    expected[0][7, 1], expected[1][7, 1] = math.nan, 0
    found = torch.zeros_like(key), torch.ones_like(value)
    isolate_broken_values(key, value, *found)
    for x, wanted in zip(found, expected):
        assert torch.equal(x.nan_to_num(7.0), wanted.nan_to_num(7.0))


GATHERED = [
    TurboFormat.from_cache_dtype(name, size)
    for name, size in product(TURBO_PRESETS, sorted({x for x, _ in KERNEL_CASES}))
]


@requires_triton
@pytest.mark.parametrize("layout", GATHERED + UNEVEN, ids=layout_id)
def test_gather_decodes_every_token(layout):
    """K is exact in fp16, and V has the error of its evaluation in fp16."""
    cache = random_pages(layout, 4, 2, 32)
    table = torch.tensor([[2, 0, 7], [3, 7, 7], [1, 7, 7]], device=DEVICE).int()
    starts, lens = [5, 0, 31], [59, 0, 1]
    key, value = gather(cache, table, starts, lens, layout)
    slots = torch.cat(
        [
            slots_of(table[row], start, start + length, 32)
            for row, (start, length) in enumerate(zip(starts, lens))
        ]
    )
    expected_key, expected_value = reference.load(cache, slots, layout)
    assert torch.equal(key[:60].float(), expected_key.half().float())
    allowed = 2.0**-9 * expected_value.abs() + 2.0**-25 * 8
    assert ((value[:60].float() - expected_value).abs() <= allowed).all()
    assert key[60:].isnan().all() and value[60:].isnan().all()


@requires_triton
@all_presets
@all_pages
def test_gather_strides(name, cache_layout, block_size):
    layout = TurboFormat.from_cache_dtype(name, 64)
    seq_lens = [block_size + 5, block_size]
    num_blocks = num_blocks_for(seq_lens, block_size)
    cache = new_cache(layout, num_blocks, 2, block_size, cache_layout)
    table = make_block_table(seq_lens, block_size)
    fill_cache(cache, table, seq_lens, layout)
    key, _ = gather(cache, table, [block_size - 2, 3], [7, 4], layout)
    slots = torch.cat(
        [
            slots_of(table[0], block_size - 2, block_size + 5, block_size),
            slots_of(table[1], 3, 7, block_size),
        ]
    )
    expected, _ = reference.load(cache, slots, layout)
    assert torch.equal(key[:11].float(), expected.half().float())


@requires_triton
@pytest.mark.parametrize("name", ["turbo4", "turbo3"])
def test_gather_from_pages_beyond_4_gib(name):
    """Gather from pages at byte offsets beyond 2**31 and 2**32."""
    layout = TurboFormat.from_cache_dtype(name, 64)
    near = random_pages(layout, 3, 2, 16)
    far, blocks = spread_pages(near)
    near_table = torch.arange(3, dtype=torch.int32, device=DEVICE)[None]
    expected = gather(near, near_table, [5], [41], layout)
    found = gather(far, blocks[None].int(), [5], [41], layout)
    for output, wanted in zip(found, expected):
        assert torch.equal(output[:41], wanted[:41])


@requires_triton
def test_gather_ends_with_the_table():
    """Rows past the block table are finite: vLLM's dummy batches may be longer."""
    layout = TurboFormat.from_cache_dtype("turbo4", 64)
    cache = random_pages(layout, 4, 2, 32)
    # Entries past the table are no blocks.
    table = torch.tensor([[2, 1, 2**30, 2**30]], device=DEVICE).int()[:, :2]
    key, _ = gather(cache, table, [16], [100], layout)
    expected, _ = reference.load(cache, slots_of(table[0], 16, 64, 32), layout)
    assert torch.equal(key[:48].float(), expected.half().float())
    assert not key[48:100].isnan().any()


def flash_attns(head_size: int) -> list[FlashAttn]:
    """Stand-ins for FlashAttention, and FlashAttention where there is a GPU.

    For a request without keys, its versions return an LSE of plus or minus infinity.
    """
    found = [
        FlashAttn(partial(flash_attn_stand_in, lse_of_none=lse))
        for lse in (math.inf, -math.inf)
    ]
    real = flash_attn_of_gpu(head_size)
    return found if real is None else [*found, real]


def check_prefill(
    layout: TurboFormat,
    query_lens: list[int],
    context_lens: list[int],
    limits: PrefillLimits,
    stored: bool,
    dtype: torch.dtype,
    group: int = 2,
) -> None:
    """Prefill a batch whose tokens are stored, and compare each request."""
    block_size, num_kv_heads = 32, 2
    size, size_v = layout.head_size, layout.head_size_v
    seq_lens = [q + c for q, c in zip(query_lens, context_lens)]
    cache = new_cache(
        layout, num_blocks_for(seq_lens, block_size), num_kv_heads, block_size
    )
    table = make_block_table(seq_lens, block_size)
    fill_cache(cache, table, context_lens, layout, dtype)
    num_tokens = sum(query_lens)
    query = gaussian(num_tokens, num_kv_heads * group, size, dtype=dtype, seed=1)
    key = gaussian(num_tokens, num_kv_heads, size, dtype=dtype, seed=2)
    value = gaussian(num_tokens, num_kv_heads, size_v, dtype=dtype, seed=3)
    rows = [
        slots_of(table[row], context, length, block_size)
        for row, (context, length) in enumerate(zip(context_lens, seq_lens))
    ]
    reference.store(StoreCall(cache, torch.cat(rows), key, value, layout))

    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    plan = PrefillPlanner(stored, limits, DEVICE).plan(starts, lens, table)
    buffered = plan.max_buffered_tokens()
    num_buffered = buffered or 0
    assert (num_buffered > 0) == (stored or any(context_lens))
    assert num_buffered <= limits.slice_tokens
    heads = num_kv_heads * group
    shape = LayerShape.of_sizes(heads, num_kv_heads, size, size_v, dtype)
    specs = PrefillScratch.specs(shape, num_buffered, limits.piece_tokens)
    for flash_attn in flash_attns(size):
        buffers = [
            torch.full(each, math.nan, dtype=dtype, device=DEVICE) for each, _ in specs
        ]
        output = query.new_full((num_tokens, heads, size_v), math.nan)
        call = PrefillCall(
            query,
            key,
            value,
            cache,
            layout,
            Scoring(size**-0.5),
            None if buffered is None else PrefillScratch(*buffers),
            output,
            flash_attn,
        )
        prefill_attention(call, plan)
        for row, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
            length = seq_lens[row] if stored else context_lens[row]
            keys, values = load_context(cache, table[row], length, layout)
            if not stored:
                keys = torch.cat([keys, key[begin:end].float()])
                values = torch.cat([values, value[begin:end].float()])
            part = slice(begin, end)
            assert_by_2x_rule(
                output[part], query[part], keys, values, size**-0.5, dtype, True
            )


# Query lengths, context lengths, and tokens of a slice and of a piece.
PREFILLS = {
    "first chunks": ([20, 3], [0, 0], 32, 32),
    "prefix hits": ([5, 9], [40, 17], 128, 128),
    "pieces": ([4, 20, 2, 6], [70, 0, 100, 1], 48, 48),
    "groups": ([4, 20, 2, 6, 1], [0, 20, 30, 17, 0], 48, 48),
    "more than a piece each": ([3, 2], [65, 130], 32, 32),
    "slices": ([4, 20, 2, 6], [70, 0, 100, 1], 7, 64),
    "slices of one request": ([20], [33], 7, 32),
}


@requires_triton
@packings
@pytest.mark.parametrize("stored", [False, True], ids=["raw", "stored"])
@pytest.mark.parametrize("case", PREFILLS)
def test_prefill(name, stored, case):
    query_lens, context_lens, *limits = PREFILLS[case]
    layout = TurboFormat.from_cache_dtype(name, 64)
    limits = PrefillLimits(*limits)
    check_prefill(layout, query_lens, context_lens, limits, stored, FP16)


@requires_triton
@pytest.mark.parametrize("layout", UNEVEN[:3], ids=layout_id)
@pytest.mark.parametrize("stored", [False, True], ids=["raw", "stored"])
def test_prefill_of_two_sizes(layout, stored):
    """Prefix hits, a context of several pieces, and a first chunk beside them."""
    limits = PrefillLimits(48, 48)
    check_prefill(layout, [4, 9, 6], [70, 20, 0], limits, stored, FP16)


@requires_triton
@kernel_head_sizes
@model_dtypes
@pytest.mark.parametrize("stored", [False, True], ids=["raw", "stored"])
def test_prefill_head_sizes(head_size, dtype, stored):
    layout = TurboFormat.from_cache_dtype("turbo4", head_size)
    check_prefill(layout, [5, 4], [33, 0], PrefillLimits(32, 32), stored, dtype)
