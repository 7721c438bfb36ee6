# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The decode kernels: exact probes, and attention over the stored K and V."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    DecodeBatch,
    Partials,
    RotatedQuery,
    StoreCall,
)

from .attention_utils import assert_by_2x_rule, assert_within, attend_by, decode
from .utils import (
    BF16,
    DEVICE,
    FP16,
    ON_GPU,
    all_pages,
    all_presets,
    fill_cache,
    gaussian,
    kernel_cases,
    kernel_head_sizes,
    load_context,
    make_block_table,
    new_cache,
    num_blocks_for,
    one_packing,
    packings,
    random_pages,
    requires_triton,
    spread_pages,
)

pytestmark = requires_triton

NUM_KV_HEADS = 2


def check_decode(
    layout: TurboFormat,
    seq_lens: list[int],
    block_size: int,
    dtype: torch.dtype = BF16,
    group: int = 4,
    num_splits: int = 2,
    query_factor: float = 1.0,
    **cache_options,
) -> None:
    """Decode one query token a sequence, and compare each by the 2x rule."""
    num_blocks = num_blocks_for(seq_lens, block_size)
    cache = new_cache(layout, num_blocks, NUM_KV_HEADS, block_size, **cache_options)
    table = make_block_table(seq_lens, block_size)
    fill_cache(cache, table, seq_lens, layout, dtype)
    shape = (len(seq_lens), group * NUM_KV_HEADS, layout.head_size)
    query = gaussian(*shape, dtype=dtype, seed=7) * query_factor
    output = decode(query, cache, table, seq_lens, layout, num_splits)
    for row, length in enumerate(seq_lens):
        key, value = load_context(cache, table[row], length, layout)
        part = slice(row, row + 1)
        scale = layout.head_size**-0.5
        assert_by_2x_rule(output[part], query[part], key, value, scale, dtype)


@all_presets
@kernel_cases
def test_lengths(name, head_size, dtype):
    """Lengths around one token, one step of the kernel and one block."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    seq_lens = [1, 63, 47, 48, 49]
    if ON_GPU:
        seq_lens += [31, 32, 33, 1000, 4097]
    check_decode(layout, seq_lens, 48, dtype)


@one_packing
@pytest.mark.parametrize("group", [1, 4, 5, 8, 16])
def test_query_heads_per_kv_head(name, group):
    layout = TurboFormat.from_cache_dtype(name, 64)
    check_decode(layout, [50], 16, FP16, group)


@packings
@all_pages
def test_strides_and_block_sizes(name, cache_layout, block_size):
    layout = TurboFormat.from_cache_dtype(name, 64)
    seq_lens = [block_size - 1, block_size + 1]
    check_decode(layout, seq_lens, block_size, cache_layout=cache_layout)


@one_packing
@pytest.mark.parametrize("num_splits", [1, 3, 64])
def test_splits(name, num_splits):
    """Scratch of splits without tokens holds NaN and must not be read."""
    layout = TurboFormat.from_cache_dtype(name, 64)
    seq_lens = [1, 130] if not ON_GPU else [1, 130, 5000]
    check_decode(layout, seq_lens, 32, FP16, num_splits=num_splits)


@one_packing
@pytest.mark.parametrize("query_factor", [1e-3, 100.0, 1e4])
def test_peaked_and_flat_softmax(name, query_factor):
    """With scores in the hundreds, exponentials overflow without a running maximum."""
    layout = TurboFormat.from_cache_dtype(name, 64)
    check_decode(layout, [70], 32, query_factor=query_factor)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_empty_and_padded_sequences(num_splits):
    """In a padded batch, length 0 gives zeros, and further rows are not read."""
    layout = TurboFormat.from_cache_dtype("turbo4", 64)
    seq_lens = [0, 40, 0, 17, 0]
    cache = new_cache(layout, num_blocks_for(seq_lens, 16), NUM_KV_HEADS, 16)
    table = make_block_table(seq_lens, 16)
    fill_cache(cache, table, seq_lens, layout)
    query = gaussian(5, 4, 64, dtype=BF16)
    output = decode(query, cache, table, seq_lens, layout, num_splits)
    assert (output[[0, 2, 4]] == 0).all()
    for row in (1, 3):
        alone = decode(
            query[row : row + 1],
            cache,
            table[row : row + 1],
            [seq_lens[row]],
            layout,
            num_splits,
        )
        assert torch.equal(output[row : row + 1], alone)
    fewer = decode(query[:2], cache, table, seq_lens, layout, num_splits)
    assert torch.equal(fewer, output[:2])


@packings
def test_recycled_bytes_do_not_leak(name):
    """Bytes past a sequence's end in its last page change no bit of the output."""
    layout = TurboFormat.from_cache_dtype(name, 64)
    seq_lens = [1, 17, 33]
    table = make_block_table(seq_lens, 48)
    outputs = []
    for byte in (0xFF, 0x00, 0xF7):
        cache = new_cache(layout, num_blocks_for(seq_lens, 48), NUM_KV_HEADS, 48)
        cache.fill_(byte)
        fill_cache(cache, table, seq_lens, layout)
        query = gaussian(3, 4, 64, dtype=FP16)
        outputs.append(decode(query, cache, table, seq_lens, layout))
    assert outputs[0].isfinite().all()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def first_tokens(
    layout: TurboFormat, num_seqs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences of one token, in pages of random bytes.

    Returns:
        Cache, block table, and each token's rotated K and V, (B, H, D) fp32.

    """
    cache = random_pages(layout, num_seqs, NUM_KV_HEADS, 16)
    blocks = torch.arange(num_seqs, device=DEVICE).flip(0)
    keys, values = reference.load(cache, blocks * 16, layout)
    return cache, blocks[:, None].int(), keys, values


@packings
@kernel_head_sizes
def test_one_key_gives_its_value(name, head_size):
    """The softmax of one score is 1, so that the output is the stored value.

    They are compared in rotated space, where a coordinate is a code times a scale. The
    kernel evaluates the level in fp16, where a coefficient times a small scale may be
    subnormal.
    """
    layout = TurboFormat.from_cache_dtype(name, head_size)
    cache, table, _, values = first_tokens(layout, 3)
    query = gaussian(3, 2 * NUM_KV_HEADS, head_size, dtype=FP16)
    output = decode(query, cache, table, [1, 1, 1], layout, 1, torch.float32)
    matrix = rotation_matrix(head_size, DEVICE, torch.float64)
    rotated = output.double() @ matrix * head_size**-0.5
    expected = values.repeat_interleave(2, 1).double()
    largest = expected.abs().amax(-1, keepdim=True)
    allowed = 2.0**-9 * expected.abs() + 2.0**-18 * largest + 2.0**-25 * 8
    assert_within(rotated, expected, allowed)


@packings
@kernel_head_sizes
def test_one_hot_query_reads_the_key(name, head_size):
    """With one key and q a unit vector, the LSE is that coordinate of K."""
    from vllm.v1.attention.ops.turbo.triton.decode import decode_attention

    layout = TurboFormat.from_cache_dtype(name, head_size)
    group = 16
    num_seqs = head_size // group
    cache, table, keys, _ = first_tokens(layout, num_seqs)
    units = torch.eye(head_size, dtype=FP16, device=DEVICE)
    query = units.view(num_seqs, 1, group, head_size)
    query = query.expand(-1, NUM_KV_HEADS, -1, -1).flatten(1, 2).contiguous()
    ones = torch.ones(query.shape[:2], device=DEVICE)
    lens = torch.ones(num_seqs, dtype=torch.int32, device=DEVICE)
    partial = torch.empty_like(query, dtype=torch.float32)
    lse = torch.full_like(ones, math.nan)
    attend_by(
        decode_attention,
        RotatedQuery(query, ones),
        cache,
        layout,
        DecodeBatch(num_seqs, table, lens),
        Partials(partial, lse),
        torch.empty_like(query),
    )
    # Sequence b's heads read coordinates [16 * b, 16 * b + 16) of each KV head.
    coordinates = torch.arange(head_size, device=DEVICE).view(num_seqs, 1, group)
    coordinates = coordinates.expand(-1, NUM_KV_HEADS, -1)
    expected = keys.gather(2, coordinates).half().float()
    assert torch.equal(lse.view_as(expected), expected)


@all_presets
@kernel_head_sizes
def test_raw_token_is_not_quantised(name, head_size):
    """The raw token's bytes are not read; alone in a sequence it gives its V."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    seq_lens = [1, 34, 0, 17]
    cache = new_cache(layout, num_blocks_for(seq_lens, 16), NUM_KV_HEADS, 16)
    table = make_block_table(seq_lens, 16)
    # Scales are NaN where nothing is stored.
    cached = [max(0, length - 1) for length in seq_lens]
    fill_cache(cache, table, cached, layout)
    shape = (len(seq_lens), NUM_KV_HEADS, head_size)
    key, value = (gaussian(*shape, dtype=BF16, seed=seed) for seed in (8, 9))
    query = gaussian(len(seq_lens), 4 * NUM_KV_HEADS, head_size, dtype=BF16)
    output = decode(query, cache, table, seq_lens, layout, raw=(key, value))
    assert torch.equal(output[0], value[0].repeat_interleave(4, 0))
    assert (output[2] == 0).all()
    for row in (1, 3):
        part = slice(row, row + 1)
        keys, values = load_context(cache, table[row], cached[row], layout)
        keys = torch.cat([keys, key[part].float()])
        values = torch.cat([values, value[part].float()])
        scale = head_size**-0.5
        assert_by_2x_rule(output[part], query[part], keys, values, scale, BF16)


@pytest.mark.parametrize("broken", ["query", "key", "value"])
def test_nan_of_a_sequence_stays_its_own(broken):
    layout = TurboFormat.from_cache_dtype("turbo4", 64)
    seq_lens = [20, 20]
    cache = new_cache(layout, num_blocks_for(seq_lens, 16), NUM_KV_HEADS, 16)
    table = make_block_table(seq_lens, 16)
    fill_cache(cache, table, seq_lens, layout)
    tensors = {
        "query": gaussian(2, 2 * NUM_KV_HEADS, 64, dtype=BF16, seed=1),
        "key": gaussian(2, NUM_KV_HEADS, 64, dtype=BF16, seed=2),
        "value": gaussian(2, NUM_KV_HEADS, 64, dtype=BF16, seed=3),
    }

    def run() -> torch.Tensor:
        query, *raw = tensors.values()
        return decode(query, cache, table, seq_lens, layout, raw=tuple(raw))

    whole = run()
    tensors[broken][0, 0, 5] = math.nan
    output = run()
    assert output[0, 0].isnan().any()
    assert torch.equal(output[1], whole[1])


@pytest.mark.parametrize("name", ["turbo4", "turbo3"])
def test_page_beyond_4_gib(name):
    """Decode from pages at byte offsets beyond 2**31 and 2**32."""
    layout = TurboFormat.from_cache_dtype(name, 128)
    near = random_pages(layout, 3, NUM_KV_HEADS, 16)
    # Small scales make scores that differ little.
    near[:, :, :, 2 * layout.key_code_bytes :] &= 0x77
    far, blocks = spread_pages(near)
    query = gaussian(1, 4, 128, dtype=FP16)
    near_table = torch.arange(3, dtype=torch.int32, device=DEVICE)[None]
    expected = decode(query, near, near_table, [41], layout)
    output = decode(query, far, blocks[None].int(), [41], layout)
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    "name, bound", [("turbo4", 0.13), ("k4v3", 0.2), ("turbo3", 0.25)]
)
def test_quality_against_unquantised(name, bound):
    """Relative error of attention's output against unquantised K and V.

    Vectors are Gaussian: no structure of K helps, and averaging reduces the errors of V
    no more than V itself.
    """
    layout = TurboFormat.from_cache_dtype(name, 128)
    key, value = gaussian(128, 1, 128, dtype=BF16), gaussian(128, 1, 128, seed=1)
    cache = new_cache(layout, 8, 1, 16)
    reference.store(
        StoreCall(cache, torch.arange(128, device=DEVICE), key, value, layout)
    )
    query = gaussian(8, 4, 128, dtype=BF16, seed=2)
    table = torch.arange(8, dtype=torch.int32, device=DEVICE)
    output = decode(query, cache, table.expand(8, 8).contiguous(), [128] * 8, layout, 1)
    expected, _ = reference.attention(
        query.float(), key.float(), value, 128**-0.5, causal=False
    )
    error = ((output.float() - expected).norm() / expected.norm()).item()
    assert error <= bound, f"relative error {error:.3f}"


@pytest.mark.parametrize("num_sms", [1, 80, 132])
def test_number_of_splits(num_sms):
    """There are enough programs for the GPU, and fewer splits for larger batches."""
    from vllm.v1.attention.ops.turbo.interface import MAX_KV_SPLITS
    from vllm.v1.attention.ops.turbo.triton.decode import num_kv_splits

    counts = [num_kv_splits(batch, 8, num_sms) for batch in range(1, 2000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1
    assert all(1 <= count <= MAX_KV_SPLITS for count in counts)
    for batch, count in enumerate(counts, 1):
        assert count == MAX_KV_SPLITS or batch * 8 * count >= num_sms
