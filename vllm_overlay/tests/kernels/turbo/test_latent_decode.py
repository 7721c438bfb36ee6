# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The decode kernel of MLA: exact probes, and attention over the stored latents."""

import inspect
import math
from typing import Any

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.interface import DecodeBatch, Partials
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import LATENT_MAX_SPLITS, LatentCall
from vllm.v1.attention.ops.turbo.reference import latent as latent_reference

from .attention_utils import assert_within
from .latent_utils import (
    fill_latent_cache,
    latent_cache,
    latent_presets,
    random_latent_pages,
)
from .utils import (
    BF16,
    DEVICE,
    FP16,
    ON_GPU,
    gaussian,
    make_block_table,
    model_dtypes,
    num_blocks_for,
    requires_triton,
    slots_of,
    spread_pages,
)

pytestmark = requires_triton

SCALE = 192**-0.5


def attend(
    query: torch.Tensor,
    query_rope: torch.Tensor | None,
    cache: torch.Tensor,
    layout: LatentFormat,
    table: torch.Tensor,
    seq_lens: list[int],
    query_lens: list[int] | None = None,
    num_splits: int = 2,
    dtype: torch.dtype | None = None,
    scale: float = SCALE,
    tuning: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (T, Hq, L) and LSE (T, Hq) of a batch, with scratch of NaN."""
    from vllm.v1.attention.ops.turbo.triton.latent_decode import decode_attention

    num_seqs = len(seq_lens)
    query_len, start_loc = 1, None
    if query_lens is not None:
        query_len = max(query_lens)
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        start_loc = starts.to(DEVICE, torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    count = num_seqs * num_splits * query_len
    shape = (count, *query.shape[1:])
    partial = torch.full(shape, math.nan, device=DEVICE)
    partials = Partials(partial, torch.full(shape[:2], math.nan, device=DEVICE))
    output = torch.full_like(query, math.nan, dtype=dtype or query.dtype)
    lse = torch.full(query.shape[:2], math.nan, device=DEVICE)
    batch = DecodeBatch(num_seqs, table, lens, query_len, start_loc)
    pages = cache, layout, batch
    call = LatentCall(*pages, scale, output, lse, query, query_rope)
    decode_attention(call, partials, tuning)
    return output, lse


def queries(
    layout: LatentFormat, num_tokens: int, num_heads: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Latent and rotary parts, views with gaps between heads."""
    latent = gaussian(num_heads, num_tokens, layout.rank + 8, dtype=dtype, seed=7)
    latent = latent.transpose(0, 1)[..., : layout.rank]
    if layout.rope == 0:
        return latent, None
    rope = gaussian(num_tokens, num_heads, 192, dtype=dtype, seed=8)
    return latent, rope[..., -layout.rope :]


def check_by_2x_rule(
    output: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    query_rope: torch.Tensor | None,
    latent: torch.Tensor,
    rope: torch.Tensor,
) -> None:
    """Compare the last tokens of a sequence to attention in fp32: see
    ``utils.assert_by_2x_rule``.
    """
    parts = [query] if query_rope is None else [query, query_rope]
    whole, keys = torch.cat(parts, -1), torch.cat([latent, rope], -1)[:, None]
    values = latent[:, None]
    expected, expected_lse = reference.attention(whole.float(), keys, values, SCALE)
    dtype = query.dtype
    plain, _ = reference.attention(whole, keys.to(dtype), values.to(dtype), SCALE)
    allowed = 2 * (plain.float() - expected).abs().max().item()
    allowed += 2**-11 * expected.abs().max().item()
    assert_within(output, expected, allowed, "(query, head, coordinate)")
    # Scores have operands that are rounded to fp16.
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-3)


def check_attention(
    layout: LatentFormat,
    seq_lens: list[int],
    query_lens: list[int],
    dtype: torch.dtype,
    num_heads: int = 4,
    block_size: int = 32,
    num_splits: int = 2,
    tuning: Any = None,
) -> None:
    cache = latent_cache(layout, num_blocks_for(seq_lens, block_size), block_size)
    table = make_block_table(seq_lens, block_size)
    fill_latent_cache(cache, table, seq_lens, layout, dtype)
    query, query_rope = queries(layout, sum(query_lens), num_heads, dtype)
    output, lse = attend(
        query,
        query_rope,
        cache,
        layout,
        table,
        seq_lens,
        query_lens,
        num_splits,
        tuning=tuning,
    )
    first = 0
    for row, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens)):
        slots = slots_of(table[row], 0, seq_len, block_size)
        latent, rope = latent_reference.load(cache, slots, layout)
        part = slice(first, first + query_len)
        check_by_2x_rule(
            output[part],
            lse[part],
            query[part],
            None if query_rope is None else query_rope[part],
            latent,
            rope,
        )
        first += query_len


@latent_presets
@model_dtypes
@pytest.mark.parametrize("head_size", [576, 320, 256])
def test_lengths(name, dtype, head_size):
    """Lengths around one token, a tile, a step of the kernel and a block."""
    layout = LatentFormat.from_cache_dtype(name, head_size)
    seq_lens = [1, 16, 33, 48, 49]
    if ON_GPU:
        seq_lens += [31, 32, 63, 1000, 4097]
    check_attention(layout, seq_lens, [1] * len(seq_lens), dtype, block_size=48)


@latent_presets
@pytest.mark.parametrize("query_lens", [[3, 3], [1, 5, 2]])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_several_query_tokens(name, query_lens, num_splits):
    """Query tokens are causal among each other, across splits and steps of rows."""
    layout = LatentFormat.from_cache_dtype(name, 576)
    seq_lens = [35, 5, 66][: len(query_lens)]
    check_attention(
        layout, seq_lens, query_lens, BF16, 5, block_size=16, num_splits=num_splits
    )


@pytest.mark.parametrize("head_size", [576, 256])
@pytest.mark.parametrize(
    "name, tile",
    [("turbo4", "SMALL_TILE"), ("turbo3", "SMALL_TILE"), ("turbo4", "LARGE_TILE")],
)
def test_tiles(name, head_size, tile):
    """Tiles for any GPU attend from any number of rows to any number of tokens."""
    from vllm.v1.attention.ops.turbo.triton import latent_decode

    layout = LatentFormat.from_cache_dtype(name, head_size)
    lens = [70, 5, 64], [1, 4, 2]
    check_attention(layout, *lens, BF16, 20, tuning=getattr(latent_decode, tile))


def test_magnitudes_of_a_query():
    """Rows far outside fp16's range, with parts of very different magnitudes."""
    layout = LatentFormat.from_cache_dtype("turbo4", 320)
    cache = latent_cache(layout, num_blocks_for([40], 32), 32)
    table = make_block_table([40], 32)
    fill_latent_cache(cache, table, [40], layout)
    latent, rope = latent_reference.load(cache, slots_of(table[0], 0, 40, 32), layout)
    query, query_rope = queries(layout, 1, 6, BF16)
    assert query_rope is not None
    powers = torch.tensor([0, 100, -100, 0, 12, -100], device=DEVICE)
    rope_powers = torch.tensor([0, 100, -100, 12, 0, 0], device=DEVICE)
    query = query * 2.0 ** powers[:, None].to(BF16)
    query_rope = query_rope * 2.0 ** rope_powers[:, None].to(BF16)
    # The LSE keeps the largest score, even if one token has all weight.
    whole = torch.cat([query, query_rope], -1)[0].float()
    scores = whole @ torch.cat([latent, rope], -1).T * SCALE
    _, lse = attend(query, query_rope, cache, layout, table, [40])
    expected = scores.logsumexp(-1)
    torch.testing.assert_close(lse[0], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("num_heads", [1, 16, 20])
def test_numbers_of_heads(num_heads):
    layout = LatentFormat.from_cache_dtype("turbo4", 320)
    check_attention(layout, [40], [2], FP16, num_heads)


@pytest.mark.parametrize("num_splits", [1, 64, LATENT_MAX_SPLITS])
def test_splits(num_splits):
    layout = LatentFormat.from_cache_dtype("turbo4", 320)
    check_attention(layout, [1, 80], [1, 1], FP16, num_splits=num_splits)


def test_padding():
    """Sequences of length 0, and query tokens before a sequence, see no tokens."""
    layout = LatentFormat.from_cache_dtype("turbo4", 320)
    seq_lens, query_lens = [0, 20, 1, 0], [2, 2, 2, 2]
    cache = latent_cache(layout, num_blocks_for(seq_lens, 16), 16)
    table = make_block_table(seq_lens, 16)
    fill_latent_cache(cache, table, seq_lens, layout)
    query, query_rope = queries(layout, 8, 4, BF16)
    output, lse = attend(query, query_rope, cache, layout, table, seq_lens, query_lens)
    unseen = [0, 1, 4, 6, 7]
    assert (output[unseen] == 0).all() and (lse[unseen] == -math.inf).all()
    expected, expected_lse = torch.empty_like(output), torch.empty_like(lse)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    batch = DecodeBatch(4, table, lens, 2)
    pages = cache, layout, batch
    call = LatentCall(*pages, SCALE, expected, expected_lse, query, query_rope)
    latent_reference.decode_attention(call)
    assert (expected[unseen] == 0).all() and (expected_lse[unseen] == -math.inf).all()
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-3)


@latent_presets
def test_recycled_bytes_do_not_leak(name):
    """Bytes past a sequence's end in its last page change no bit of the output."""
    layout = LatentFormat.from_cache_dtype(name, 320)
    seq_lens = [1, 17, 33]
    table = make_block_table(seq_lens, 48)
    query = queries(layout, 3, 4, FP16)
    found = []
    for byte in (0xFF, 0x00, 0xF7):
        cache = latent_cache(layout, num_blocks_for(seq_lens, 48), 48)
        cache.fill_(byte)
        fill_latent_cache(cache, table, seq_lens, layout)
        found.append(attend(*query, cache, layout, table, seq_lens))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))
    assert found[0][0].isfinite().all()


@latent_presets
@pytest.mark.parametrize("head_size", [576, 320])
def test_one_token_gives_its_latent(name, head_size):
    """The softmax of one score is 1, so that the output is the stored latent, with any
    codes and scales. Each head's query is a unit vector, so that the LSE is that
    coordinate of the key.
    """
    layout = LatentFormat.from_cache_dtype(name, head_size)
    cache = random_latent_pages(layout, 3, 16)
    table = torch.arange(3, device=DEVICE, dtype=torch.int32).flip(0)[:, None]
    latent, rope = latent_reference.load(cache, table[:, 0] * 16, layout)
    units = torch.eye(layout.head_size, dtype=FP16, device=DEVICE)
    coordinates = torch.tensor([0, 1, 7, 8, 15, 16, 130, 255, -64, -49, -33, -1])
    query = units[coordinates.to(DEVICE)].expand(3, -1, -1)
    query, query_rope = query.split([layout.rank, layout.rope], -1)
    output, lse = attend(
        query, query_rope, cache, layout, table, [1] * 3, None, 1, torch.float32, 1.0
    )
    expected = latent[:, None].expand_as(output)
    largest = expected.abs().amax(-1, keepdim=True)
    # The kernel evaluates levels in fp16, where a coefficient times a small scale may
    # be subnormal.
    allowed = 2.0**-9 * expected.abs() + 2.0**-18 * largest + 2.0**-25 * 8
    assert_within(output, expected, allowed)
    keys = torch.cat([latent, rope], -1)
    expected = keys[:, coordinates.to(DEVICE)]
    largest = keys.abs().amax(-1, keepdim=True)
    allowed = 2.0**-9 * expected.abs() + 2.0**-18 * largest + 2.0**-25 * 8
    assert_within(lse, expected, allowed)


def test_nan_of_a_query_stays_its_own():
    layout = LatentFormat.from_cache_dtype("turbo4", 320)
    cache = latent_cache(layout, num_blocks_for([20, 20], 32), 32)
    table = make_block_table([20, 20], 32)
    fill_latent_cache(cache, table, [20, 20], layout)
    query, query_rope = queries(layout, 2, 4, BF16)
    assert query_rope is not None
    whole, _ = attend(query, query_rope, cache, layout, table, [20, 20])
    query[0, 1, 5] = query_rope[1, 2, 3] = math.nan
    output, lse = attend(query, query_rope, cache, layout, table, [20, 20])
    assert output[0, 1].isnan().all() and output[1, 2].isnan().all()
    assert lse.isnan().sum() == 2
    kept = ~output.isnan()
    assert kept.sum() == 6 * layout.rank
    assert torch.equal(output[kept], whole[kept])


def test_page_beyond_4_gib():
    """Decode from pages at byte offsets beyond 2**31 and 2**32."""
    layout = LatentFormat.from_cache_dtype("turbo4", 256)
    near = latent_cache(layout, 3, 16)
    table = torch.arange(3, dtype=torch.int32, device=DEVICE)[None]
    fill_latent_cache(near, table, [41], layout)
    far, blocks = spread_pages(near[:, None].contiguous())
    query, _ = queries(layout, 1, 4, FP16)
    expected = attend(query, None, near, layout, table, [41])
    found = attend(query, None, far[:, 0], layout, blocks[None].int(), [41])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("query_len", [1, 4])
def test_number_of_splits(query_len):
    """There are enough programs for the GPU, and fewer splits for larger batches."""
    from vllm.v1.attention.ops.turbo.triton.latent_decode import num_decode_splits

    counts = [num_decode_splits(batch, 16, 132, query_len) for batch in range(1, 999)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 1
    assert all(1 <= count <= LATENT_MAX_SPLITS for count in counts)


def test_entry_points_are_the_interfaces():
    """Triton's and the reference's functions have the interface's parameters.

    Any further parameter has a default.
    """
    from vllm.v1.attention.ops.turbo.triton.latent_kernels import TritonLatentKernels

    kernels = TritonLatentKernels()
    functions = {
        "store": ["call"],
        "decode_attention": ["call", "partials"],
        "gather": ["call"],
    }
    for name, expected in functions.items():
        for owner in (kernels, latent_reference):
            found = list(inspect.signature(getattr(owner, name)).parameters.values())
            assert [p.name for p in found[: len(expected)]] == expected
            assert all(p.default is not p.empty for p in found[len(expected) :])
    layout = LatentFormat.from_cache_dtype("turbo4", 576)
    assert kernels.store_sizes(layout)[0] == 1
    kernels.make_matrices(layout.rank, DEVICE)
