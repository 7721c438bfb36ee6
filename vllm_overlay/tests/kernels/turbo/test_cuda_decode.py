# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA decode kernel, compared to attention over the stored K and V."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES
from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.cuda.decode import DECODE
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    DecodeBatch,
    NewestTokens,
    Partials,
    RotatedQuery,
)

from .utils import (
    BF16,
    DEVICE,
    FP16,
    all_pages,
    assert_by_2x_rule,
    assert_within,
    attend_by,
    fill_cache,
    gaussian,
    load_context,
    make_block_table,
    model_dtypes,
    new_cache,
    num_blocks_for,
    random_pages,
    requires_cuda,
    rotate_query,
)

LAYOUTS = [
    layout
    for name in TURBO_PRESETS
    for size in SUPPORTED_HEAD_SIZES
    if not DECODE.refusal(layout := TurboFormat.from_cache_dtype(name, size))
]
all_layouts = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=[f"{layout.name}-{layout.head_size}" for layout in LAYOUTS]
)
LAYOUT = TurboFormat.from_cache_dtype("turbo4", 128)
NUM_KV_HEADS = 2
# Lengths around one token, a tile, the two tiles that a warp takes at once, and many.
SEQ_LENS = [1, 15, 16, 17, 31, 32, 33, 0, 63, 64, 65, 1000, 2049, 4097, 5000]


@pytest.fixture(autouse=True)
def its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``decode`` serve every number of queries: test_cuda_multi.py tests
    decode_columns.
    """
    monkeypatch.setattr(cuda_decode, "capability_of", lambda device: None)


def rounded(query: torch.Tensor) -> torch.Tensor:
    """Queries, fp32, with the rounding that the kernel does in rotated space."""
    rotated = reference.rotate(query.float())
    return reference.inverse_rotate(reference.round_query(rotated))


def decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    seq_lens: list[int],
    layout: TurboFormat,
    num_splits: int,
    newest: NewestTokens | None = None,
) -> torch.Tensor:
    """Rotate q and decode, with NaN in scratch and output before."""
    num_seqs, num_heads, head_size = query.shape
    partial = torch.full(
        (num_seqs * num_splits, num_heads, head_size), math.nan, device=DEVICE
    )
    output = torch.full_like(query, math.nan)
    attend_by(
        cuda_decode.decode_attention,
        rotate_query(query, layout),
        cache,
        layout,
        DecodeBatch(
            num_seqs,
            table,
            torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        ),
        Partials(partial, partial[:, :, 0].contiguous()),
        output,
        newest,
    )
    return output


def check_decode(
    layout: TurboFormat,
    seq_lens: list[int],
    block_size: int = 16,
    dtype: torch.dtype = BF16,
    group: int = 4,
    num_splits: int = 8,
    num_kv_heads: int = NUM_KV_HEADS,
    **cache_options,
) -> None:
    """Decode one query token a sequence, and compare each by the 2x rule."""
    num_blocks = num_blocks_for(seq_lens, block_size)
    cache = new_cache(layout, num_blocks, num_kv_heads, block_size, **cache_options)
    cache.fill_(0xFF)
    table = make_block_table(seq_lens, block_size)
    fill_cache(cache, table, seq_lens, layout, dtype)
    shape = (len(seq_lens), group * num_kv_heads, layout.head_size)
    query = gaussian(*shape, dtype=dtype, seed=7)
    output = decode(query, cache, table, seq_lens, layout, num_splits)
    again = decode(query, cache, table, seq_lens, layout, num_splits)
    assert torch.equal(output, again)
    for row, length in enumerate(seq_lens):
        part = slice(row, row + 1)
        if length == 0:
            assert (output[part] == 0).all()
            continue
        key, value = load_context(cache, table[row], length, layout)
        scale = layout.head_size**-0.5
        target, _ = reference.attention(rounded(query[part]), key, value, scale)
        assert_by_2x_rule(
            output[part], query[part], key, value, scale, dtype, target=target
        )


@requires_cuda
@all_layouts
@model_dtypes
@pytest.mark.parametrize("group", [4, 8, 16])
def test_lengths(layout, dtype, group):
    check_decode(layout, SEQ_LENS, 48, dtype, group)


@requires_cuda
@all_layouts
@pytest.mark.parametrize("group", [1, 3, 5, 9, 12, 17, 24])
def test_query_heads_per_kv_head(layout, group):
    check_decode(layout, [50, 700], 16, group=group)


@requires_cuda
@all_pages
def test_strides_and_block_sizes(cache_layout, block_size):
    seq_lens = [block_size - 1, block_size + 1]
    check_decode(LAYOUT, seq_lens, block_size, cache_layout=cache_layout)


@requires_cuda
@pytest.mark.parametrize("num_splits", [1, 2, 3, 64])
@pytest.mark.parametrize(
    "seq_lens",
    [[5000], [512] * 400, [4097] + [40] * 63],
    ids=["one", "many", "ragged"],
)
def test_splits(seq_lens, num_splits):
    """Ranges of warps and teams begin anywhere, and a team has several."""
    check_decode(LAYOUT, seq_lens, 16, num_splits=num_splits)


@requires_cuda
@all_layouts
def test_one_split_does_not_depend_on_the_batch(layout):
    seq_lens = [0, 40, 0, 1700, 0]
    cache = new_cache(layout, num_blocks_for(seq_lens, 16), NUM_KV_HEADS, 16)
    table = make_block_table(seq_lens, 16)
    fill_cache(cache, table, seq_lens, layout)
    query = gaussian(5, 4, layout.head_size, dtype=BF16)
    output = decode(query, cache, table, seq_lens, layout, 1)
    assert (output[[0, 2, 4]] == 0).all()
    for row in (1, 3):
        part = slice(row, row + 1)
        alone = decode(query[part], cache, table[part], [seq_lens[row]], layout, 1)
        assert torch.equal(output[part], alone)


@requires_cuda
@all_layouts
def test_recycled_bytes_do_not_leak(layout):
    """Bytes past a sequence's end in its last page change no bit of the output."""
    seq_lens = [1, 17, 33]
    table = make_block_table(seq_lens, 48)
    query = gaussian(3, 4, layout.head_size, dtype=FP16)
    outputs = []
    for byte in (0xFF, 0x00, 0xF7):
        cache = new_cache(layout, num_blocks_for(seq_lens, 48), NUM_KV_HEADS, 48)
        cache.fill_(byte)
        fill_cache(cache, table, seq_lens, layout)
        outputs.append(decode(query, cache, table, seq_lens, layout, 4))
    assert outputs[0].isfinite().all()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@requires_cuda
@all_layouts
def test_one_key_gives_its_value(layout):
    """The softmax of one score is 1, so that the output is the stored value."""
    cache = random_pages(layout, 3, NUM_KV_HEADS, 16)
    blocks = torch.arange(3, device=DEVICE).flip(0)
    _, values = reference.load(cache, blocks * 16, layout)
    query = gaussian(3, 2 * NUM_KV_HEADS, layout.head_size, dtype=torch.float32)
    output = decode(query, cache, blocks[:, None].int(), [1, 1, 1], layout, 1)
    matrix = rotation_matrix(layout.head_size, DEVICE, torch.float64)
    rotated = output.double() @ matrix * layout.head_size**-0.5
    expected = values.repeat_interleave(2, 1).double()
    largest = expected.abs().amax(-1, keepdim=True)
    allowed = 2.0**-9 * expected.abs() + 2.0**-18 * largest + 2.0**-25 * 8
    assert_within(rotated, expected, allowed)


@requires_cuda
@all_layouts
@pytest.mark.parametrize("group", [4, 8, 16])
def test_scores_are_rounded_as_their_terms(layout, group):
    """The LSE of one key is its score, within 2**-15 of the bound |q| |k|.

    The kernel adds the terms to a number that is hundreds of times as large.
    """
    num_seqs, size = 64, layout.head_size
    seq_lens = [1] * num_seqs
    cache = new_cache(layout, num_blocks_for(seq_lens, 16), NUM_KV_HEADS, 16)
    table = make_block_table(seq_lens, 16)
    fill_cache(cache, table, seq_lens, layout)
    keys, _ = reference.load(cache, table[:, 0].long() * 16, layout)
    keys = keys.double().repeat_interleave(group, 1)
    query = gaussian(num_seqs, group * NUM_KV_HEADS, size).to(FP16)
    lse = torch.full((num_seqs, group * NUM_KV_HEADS), math.nan, device=DEVICE)
    attend_by(
        cuda_decode.decode_attention,
        RotatedQuery(query, torch.ones_like(lse)),
        cache,
        layout,
        DecodeBatch(num_seqs, table, torch.ones_like(table[:, 0])),
        Partials(torch.empty(*lse.shape, size, device=DEVICE), lse),
        torch.empty_like(query),
    )
    queries = reference.round_query(query.float()).double()
    expected = (queries * keys).sum(-1)
    error = (lse.double() - expected).abs() / (queries.norm(dim=-1) * keys.norm(dim=-1))
    assert error.max() <= 2.0**-15


@requires_cuda
def test_newest_token_is_attended_to_as_it_is():
    """The last token comes from the arguments, and all others from the cache.

    Its score is from q without rounding, the others' from q in int8. The reference
    concatenates both queries, so that each key meets its own.
    """
    seq_lens = [1, 17, 2000]
    cache = new_cache(LAYOUT, num_blocks_for(seq_lens, 16), NUM_KV_HEADS, 16)
    table = make_block_table(seq_lens, 16)
    fill_cache(cache, table, seq_lens, LAYOUT)
    query = gaussian(3, 8, 128, dtype=BF16, seed=1)
    newest_key = gaussian(3, NUM_KV_HEADS, 128, dtype=BF16, seed=2)
    newest_value = gaussian(3, NUM_KV_HEADS, 128, dtype=BF16, seed=3)
    newest = NewestTokens(query, newest_key, newest_value, 128**-0.5)
    output = decode(query, cache, table, seq_lens, LAYOUT, 4, newest)
    for row, length in enumerate(seq_lens):
        key, value = load_context(cache, table[row], length, LAYOUT)
        key[-1], value[-1] = newest_key[row].float(), newest_value[row].float()
        part = slice(row, row + 1)
        both = torch.cat([rounded(query[part]), query[part].float()], -1)
        keys = torch.cat([key, torch.zeros_like(key)], -1)
        keys[-1] = keys[-1].roll(128, -1)
        target, _ = reference.attention(both, keys, value, 128**-0.5)
        assert_by_2x_rule(
            output[part], query[part], key, value, 128**-0.5, BF16, target=target
        )


def test_constants_are_what_the_format_says():
    """K's two byte tables, looked up as prmt does, add up to the levels."""
    header = layout_header(LAYOUT)
    defined = dict(line.split(maxsplit=2)[1:] for line in header.splitlines()[2:])

    def table(side: str) -> list[int]:
        words = (int(defined[f"KEY_{side}_{half}"][:-1], 0) for half in ("LOW", "HIGH"))
        data = b"".join(word.to_bytes(4, "little") for word in words)
        return [byte - 256 if byte > 127 else byte for byte in data]

    def looked_up(entries: list[int], nibble: int) -> int:
        entry = entries[nibble & 7]
        return entry if nibble < 8 else -1 if entry < 0 else 0

    negative, positive = table("NEGATIVE"), table("POSITIVE")
    unit = float(defined["KEY_LEVEL_UNIT"][:-1])
    levels = [
        (looked_up(negative, code) + looked_up(positive, 15 - code)) / unit
        for code in range(16)
    ]
    assert levels == list(LAYOUT.key_codebook.levels)
