# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The decode kernels of MLA: exact probes, and attention over the stored latents. The
module test_cuda_latent_decode.py has the plans and builds of CUDA's.
"""

import inspect
import math
from functools import partial

import pytest
import torch

from vllm.v1.attention.ops.turbo.cuda.latent_plans import ROWS, Plan
from vllm.v1.attention.ops.turbo.latent.format import (
    LATENT_PRESETS,
    LATENT_SIZES,
    LatentFormat,
)
from vllm.v1.attention.ops.turbo.latent.interface import (
    LATENT_MAX_SPLITS,
    LatentStoreCall,
)
from vllm.v1.attention.ops.turbo.reference import latent as latent_reference
from vllm.v1.attention.ops.turbo.triton import latent_decode as triton_decode
from vllm.v1.attention.ops.turbo.triton.latent_kernels import TritonLatentKernels

from ..attention_utils import assert_within
from ..kernel_under_test import Kernel
from ..sequences import layout_id
from ..utils import (
    BF16,
    DEVICE,
    FP16,
    ON_GPU,
    model_dtypes,
    requires_triton,
    slots_of,
    spread_pages,
)
from .latent_sequences import (
    ALL_PLANS,
    COLUMNS,
    CUDA,
    FP32,
    LISTED_PLANS,
    SCALE,
    SOME_PLANS,
    TRITON,
    Latents,
    by_plan,
    is_cuda,
    kernels,
    kernels_and_layouts,
)
from .latent_utils import (
    fill_latent_cache,
    latent_cache,
    latent_presets,
    latent_vectors,
    long_mean,
    random_latent_pages,
)

REFERENCE = Kernel("reference", latent_reference.decode_attention, None, marks=())
# A plan whose teams take tiles in pairs.
PAIRS = by_plan(Plan(8, 0, teams=2, stages=2, tiles=2, held=1, is_bulk=False))
# Query tokens of each sequence.
MANY = [4, 1, 3, 2, 4, 1, 1, 1]
SMALL = LatentFormat.from_cache_dtype("turbo4", 320)
LARGE = LatentFormat.from_cache_dtype("turbo4", 576)
THREE_BITS = [LatentFormat.from_cache_dtype("turbo3", 576)]


@kernels_and_layouts(*LATENT_SIZES)
@model_dtypes
def test_lengths(kernel, layout, dtype):
    """Lengths around one token, a tile, a step of the kernel and a block."""
    seq_lens = [1, 16, 33, 48, 49]
    if is_cuda(kernel):
        seq_lens += [70, 513, 64]
    if ON_GPU:
        seq_lens += [31, 32, 63, 1000, 4097]
    num_heads, block_size = COLUMNS.get(kernel.name, 4), 16 if is_cuda(kernel) else 48
    query_lens = [1] * len(seq_lens)
    batch = Latents(layout, seq_lens, query_lens, num_heads, dtype, block_size)
    batch.check(kernel, 3 if is_cuda(kernel) else 2)


@pytest.mark.parametrize(
    "kernel, layout, num_heads, num_splits, query_lens",
    [
        *(
            TRITON.case(layout, 5, num_splits, lens, name=f"{name}-{num_splits}-{lens}")
            for name in LATENT_PRESETS
            for layout in [LatentFormat.from_cache_dtype(name, 576)]
            for num_splits in (1, 3)
            for lens in ([3, 3], [1, 5, 2])
        ),
        *(
            x.case(LARGE, plan.columns // 2 + 1, 5, MANY)
            for plan, x in ALL_PLANS.items()
        ),
        *(CUDA.case(LARGE, n, 5, MANY, name=str(n)) for n in (5, 12, 16)),
    ],
)
def test_several_query_tokens(kernel, layout, num_heads, num_splits, query_lens):
    """Query tokens are causal among each other, across splits and steps of rows.

    CUDA's rows need up to three passes, and belong to tokens that see different
    lengths.
    """
    seq_lens, block_size = [35, 5, 66][: len(query_lens)], 16
    if is_cuda(kernel):
        seq_lens, block_size = [4, 63, 66, 700, 33, 0, 1, 17], 64
    batch = Latents(layout, seq_lens, query_lens, num_heads, block_size=block_size)
    batch.check(kernel, num_splits)


@pytest.mark.parametrize("head_size", [576, 256])
@pytest.mark.parametrize(
    "name, tile",
    [("turbo4", "SMALL_TILE"), ("turbo3", "SMALL_TILE"), ("turbo4", "LARGE_TILE")],
)
@requires_triton
def test_tiles(name, head_size, tile):
    """Tiles for any GPU attend from any number of rows to any number of tokens."""
    layout = LatentFormat.from_cache_dtype(name, head_size)
    attend = partial(TRITON.attend, tuning=getattr(triton_decode, tile))
    Latents(layout, [70, 5, 64], [1, 4, 2], 20).check(TRITON._replace(attend=attend))


@pytest.mark.parametrize(
    "kernel, num_heads",
    [
        *(TRITON.case(n, name=str(n)) for n in (1, 16, 20)),
        *(CUDA.case(n, name=str(n)) for n in (1, 8, 16, 20, 32, 64, 80)),
        # Every column but the last has a row.
        *(x.case(plan.columns - 1) for plan, x in ALL_PLANS.items()),
        PAIRS.case(5, name="pairs"),
    ],
)
def test_numbers_of_heads(kernel, num_heads):
    batch = Latents(SMALL, [40], [2], num_heads, FP16)
    if is_cuda(kernel):
        seq_lens = [1, 64, 65, 400, 0, 15, 16, 17, 63, 129]
        seq_lens += [1000, 4099] if kernel is CUDA else []
        batch = Latents(LARGE, seq_lens, None, num_heads, block_size=64)
    batch.check(kernel, 4 if kernel is CUDA else 3 if is_cuda(kernel) else 2)


@pytest.mark.parametrize(
    "kernel, num_splits",
    [
        *(TRITON.case(n, name=str(n)) for n in (1, 64, LATENT_MAX_SPLITS)),
        *(x.case(n, name=str(n)) for x in SOME_PLANS for n in (1, 2, 133)),
    ],
)
def test_splits(kernel, num_splits):
    if is_cuda(kernel):
        batch = Latents(LARGE, [9001], [1], 16, block_size=64)
    else:
        batch = Latents(SMALL, [1, 80], [1, 1], 4, FP16)
    batch.check(kernel, num_splits)


@pytest.mark.parametrize(
    "kernel", [x.case() for x in (TRITON, *SOME_PLANS, *map(by_plan, ROWS))]
)
def test_hidden_tokens_of_whole_steps_change_no_bit(kernel):
    """Query tokens do not see the last token, which ends a step of the kernels."""
    batch = Latents(LARGE, [128], [3], 16)
    whole = batch.attend(kernel, 1)
    last = slots_of(batch.table[0], 127, 128, batch.block_size)
    vectors = latent_vectors(LARGE, 1, BF16, seed=9)
    latent_reference.store(LatentStoreCall(batch.cache, last, *vectors, LARGE))
    for found, before in zip(batch.attend(kernel, 1), whole):
        assert torch.equal(found[:2], before[:2])
        assert not torch.equal(found[2], before[2])


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    "kernel, layout",
    [
        *(TRITON.case(x, name=layout_id(x)) for x in (SMALL, LARGE, *THREE_BITS)),
        *(kernel.case(LARGE) for kernel in LISTED_PLANS),
    ],
)
def test_tokens_of_a_list(kernel, layout, num_splits, block_size):
    """Each query token attends to tokens of its own list."""
    seq_lens, counts = [1, 70, 64, 40, 9], [3, 33, 70, 0, 1]
    if is_cuda(kernel) and ON_GPU:
        seq_lens, counts = [*seq_lens, 9000, 4097], [*counts, 2048, 1999]
    batch = Latents(layout, seq_lens, None, 20, block_size=block_size)
    batch.choose(counts)
    output, lse = batch.check(kernel, num_splits)
    assert (output[3] == 0).all() and (lse[3] == -math.inf).all()


@requires_triton
def test_a_list_of_all_tokens_is_the_sequence():
    batch = Latents(LARGE, [70, 33], None, 4, FP16)
    whole = batch.attend(TRITON)
    slots = [
        slots_of(table, 0, 70, batch.block_size)
        for table in (batch.table[0], batch.table[0])
    ]
    batch.table = torch.stack(slots).int()
    batch.is_sparse, batch.seq_lens = True, [70, 33]
    for one, other in zip(batch.attend(TRITON), whole):
        assert torch.equal(one[0], other[0])


@kernels
def test_padding(kernel):
    """Sequences of length 0, and query tokens before a sequence, see no tokens."""
    batch = Latents(SMALL, [0, 20, 1, 0], [2, 2, 2, 2], block_size=16)
    output, lse = batch.check(kernel)
    unseen = [0, 1, 4, 6, 7]
    assert (output[unseen] == 0).all() and (lse[unseen] == -math.inf).all()


@pytest.mark.parametrize("kernel", [x.case() for x in (REFERENCE, TRITON, *SOME_PLANS)])
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_mean_is_added_to_outputs(kernel, dtype):
    """Outputs get a mean that is much longer than the latents, unless they see none.
    The LSE has nothing of it.
    """
    batch = Latents(SMALL, [0, 20, 300, 1, 0], [2, 1, 3, 2, 2], dtype=FP16)
    plain, plain_lse = batch.attend(kernel, 3, FP32)
    mean = batch.rotated_mean = long_mean(SMALL)
    output, lse = batch.attend(kernel, 3, dtype)
    assert torch.equal(lse, plain_lse)
    unseen = (lse == -math.inf)[:, 0]
    assert unseen.tolist() == [True] * 2 + [False] * 4 + [True, False] + [True] * 2
    assert (output[unseen] == 0).all()
    rounding = 2.0**-11 if dtype == FP16 else 2.0**-22
    expected = (plain + mean)[~unseen]
    allowed = rounding * (expected.abs() + mean.abs())
    assert_within(output[~unseen].float(), expected, allowed)


@kernels
def test_a_split_alone_does_not_depend_on_the_batch(kernel):
    lens = [300, 4000, 65] if is_cuda(kernel) or ON_GPU else [30, 0, 65]
    batch = Latents(LARGE, lens, [1, 1, 1], 16, block_size=64)
    together = batch.attend(kernel, 1)
    query, rope, table = batch.query, batch.query_rope, batch.table
    batch.starts = [0, 1]
    for row, length in enumerate(lens):
        own = slice(row, row + 1)
        batch.seq_lens, batch.table = [length], table[own]
        batch.query, batch.query_rope = query[own], rope[own]
        for alone, all_rows in zip(batch.attend(kernel, 1), together):
            assert torch.equal(alone, all_rows[own])


@kernels_and_layouts(320)
def test_recycled_bytes_do_not_leak(kernel, layout):
    """Bytes past a sequence's end in its last page change no bit of the output."""
    seq_lens = [1, 17, 33]
    batch = Latents(layout, seq_lens, None, 4, FP16, 48)
    found = []
    for byte in (0xFF, 0x00, 0xF7):
        batch.cache.fill_(byte)
        fill_latent_cache(batch.cache, batch.table, seq_lens, layout)
        found.append(batch.attend(kernel))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))
    assert found[0][0].isfinite().all()


@requires_triton
@latent_presets
@pytest.mark.parametrize("head_size", [576, 320])
def test_one_token_gives_its_latent(name, head_size):
    """The softmax of one score is 1, so that the output is the stored latent, with any
    codes and scales. Each head's query is a unit vector, so that the LSE is that
    coordinate of the key.

    CUDA's kernels take no rotary keys beyond fp16's range, which random scales give.
    """
    layout = LatentFormat.from_cache_dtype(name, head_size)
    batch = Latents(layout, [1, 1, 1], None, 12, FP16, 16)
    batch.cache = random_latent_pages(layout, 3, 16)
    batch.table = torch.arange(3, device=DEVICE, dtype=torch.int32).flip(0)[:, None]
    latent, rope = latent_reference.load(batch.cache, batch.table[:, 0] * 16, layout)
    units = torch.eye(layout.head_size, dtype=FP16, device=DEVICE)
    coordinates = torch.tensor([0, 1, 7, 8, 15, 16, 130, 255, -64, -49, -33, -1])
    query = units[coordinates.to(DEVICE)].expand(3, -1, -1)
    batch.query, batch.query_rope = query.split([layout.rank, layout.rope], -1)
    output, lse = batch.attend(TRITON, 1, FP32, 1.0)
    keys = torch.cat([latent, rope], -1)
    for found, expected, numbers in (
        (output, latent[:, None].expand_as(output), latent[:, None]),
        (lse, keys[:, coordinates.to(DEVICE)], keys),
    ):
        largest = numbers.abs().amax(-1, keepdim=True)
        # The kernel evaluates levels in fp16, where a coefficient times a small scale
        # may be subnormal.
        allowed = 2.0**-9 * expected.abs() + 2.0**-18 * largest + 2.0**-25 * 8
        assert_within(found, expected, allowed)


@kernels
def test_magnitudes_of_a_query(kernel):
    """Rows far outside fp16's range, with parts of very different magnitudes."""
    batch = Latents(SMALL, [40], None, 6)
    powers = torch.tensor([0, 100, -100, 0, 12, -100], device=DEVICE)
    rope_powers = torch.tensor([0, 100, -100, 12, 0, 0], device=DEVICE)
    batch.query = batch.query * 2.0 ** powers[:, None].to(BF16)
    batch.query_rope = batch.query_rope * 2.0 ** rope_powers[:, None].to(BF16)
    # The LSE keeps the largest score, even if one token has all weight.
    scores = batch.whole_query()[0].float() @ batch.load(0)[1].T * SCALE
    _, lse = batch.attend(kernel)
    torch.testing.assert_close(lse[0], scores.logsumexp(-1), rtol=2e-3, atol=2e-3)


@kernels
def test_nan_of_a_query_stays_its_own(kernel):
    batch = Latents(SMALL, [20, 20])
    whole, _ = batch.attend(kernel)
    batch.query[0, 1, 5] = batch.query_rope[1, 2, 3] = math.nan
    output, lse = batch.attend(kernel)
    assert output[0, 1].isnan().all() and output[1, 2].isnan().all()
    assert lse.isnan().sum() == 2
    kept = ~output.isnan()
    assert kept.sum() == 6 * SMALL.rank
    assert torch.equal(output[kept], whole[kept])


@pytest.mark.parametrize(
    "kernel, head_size, length, block_size, num_heads",
    [TRITON.case(256, 41, 16, 4), *(x.case(576, 180, 64, 16) for x in SOME_PLANS)],
)
def test_page_beyond_4_gib(kernel, head_size, length, block_size, num_heads):
    """Decode from pages at byte offsets beyond 2**31 and 2**32."""
    layout = LatentFormat.from_cache_dtype("turbo4", head_size)
    dtype = BF16 if is_cuda(kernel) else FP16
    batch = Latents(layout, [length], None, num_heads, dtype, block_size)
    near = latent_cache(layout, 3, block_size)
    batch.table = torch.arange(3, dtype=torch.int32, device=DEVICE)[None]
    fill_latent_cache(near, batch.table, [length], layout)
    batch.cache = near
    expected = batch.attend(kernel)
    far, blocks = spread_pages(near[:, None].contiguous())
    batch.cache, batch.table = far[:, 0], blocks[None].int()
    found = batch.attend(kernel)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("query_len", [1, 4])
def test_number_of_splits(query_len):
    """Triton has enough programs for the GPU, and fewer splits for larger batches."""
    splits = triton_decode.num_decode_splits
    counts = [splits(batch, 16, 132, query_len) for batch in range(1, 999)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 1
    assert all(1 <= count <= LATENT_MAX_SPLITS for count in counts)


def test_entry_points_are_the_interfaces():
    """Triton's and the reference's functions have the interface's parameters.

    Any further parameter has a default.
    """
    of_triton = TritonLatentKernels()
    functions = {
        "store": ["call"],
        "decode_attention": ["call", "partials"],
        "gather": ["call"],
    }
    for name, expected in functions.items():
        for owner in (of_triton, latent_reference):
            found = list(inspect.signature(getattr(owner, name)).parameters.values())
            assert [p.name for p in found[: len(expected)]] == expected
            assert all(p.default is not p.empty for p in found[len(expected) :])
    assert of_triton.store_sizes(LARGE)[0] == 1
    of_triton.make_matrices(LARGE.rank, DEVICE)
