# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA decode kernel, compared to attention over the stored K and V."""

from typing import Any

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda.constants import layout_header
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix

from .attention_utils import assert_within
from .sequences import (
    DECODE_KERNEL,
    IN_BF16,
    LAYOUT,
    LAYOUTS,
    NUM_KV_HEADS,
    Features,
    Sequences,
    layout_id,
)
from .utils import (
    BF16,
    DEVICE,
    FP16,
    all_pages,
    gaussian,
    model_dtypes,
    random_pages,
    requires_cuda,
)

all_layouts = pytest.mark.parametrize(
    "layout", [x for x in LAYOUTS if not DECODE_KERNEL.refusal(x)], ids=layout_id
)
# Lengths around one token, a tile, the two tiles that a warp takes at once, and many.
SEQ_LENS = [1, 15, 16, 17, 31, 32, 33, 0, 63, 64, 65, 1000, 2049, 4097, 5000]


def check_decode(
    layout: TurboFormat,
    seq_lens: list[int],
    block_size: int = 16,
    dtype: torch.dtype = BF16,
    group: int = 4,
    num_splits: int = 8,
    **options: Any,
) -> None:
    """Decode one query token a sequence, and compare each by the 2x rule."""
    features, options["block_size"] = Features(dtype=dtype), block_size
    batch = Sequences(layout, seq_lens, 1, group, features, **options)
    batch.check(DECODE_KERNEL, False, num_splits)


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
    Sequences(layout, [0, 40, 0, 1700, 0], 1, 2, IN_BF16).check_alone(DECODE_KERNEL)


@requires_cuda
@all_layouts
def test_recycled_bytes_do_not_leak(layout):
    Sequences(layout, [1, 17, 33], 1, 2).check_recycled_bytes(DECODE_KERNEL)


@requires_cuda
@all_layouts
def test_one_key_gives_its_value(layout):
    """The softmax of one score is 1, so that the output is the stored value."""
    cache = random_pages(layout, 3, NUM_KV_HEADS, 16)
    blocks = torch.arange(3, device=DEVICE).flip(0)
    _, values = reference.load(cache, blocks * 16, layout)
    batch = Sequences(layout, [1, 1, 1], 1, 2, Features(dtype=torch.float32))
    batch.seen = cache, blocks[:, None].int()
    output = batch.attend(DECODE_KERNEL, False, 1)
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
    batch = Sequences(layout, [1] * 64, 1, group, IN_BF16, block_size=16)
    keys, _ = reference.load(batch.cache, batch.table[:, 0].long() * 16, layout)
    keys = keys.double().repeat_interleave(group, 1)
    query = gaussian(64, group * NUM_KV_HEADS, layout.head_size).to(FP16)
    _, lse = batch.partials(DECODE_KERNEL, query, 1.0)
    queries = reference.round_query(query.float()).double()
    expected = (queries * keys).sum(-1)
    error = (lse.double() - expected).abs() / (queries.norm(dim=-1) * keys.norm(dim=-1))
    assert error.max() <= 2.0**-15


@requires_cuda
def test_raw_token_is_attended_to_as_it_is():
    """The last token comes from the arguments, and all others from the cache.

    Its score is from q without rounding, the others' from q in int8.
    """
    batch = Sequences(LAYOUT, [1, 17, 2000], 1, features=IN_BF16, block_size=16)
    batch.check(DECODE_KERNEL, True, 4)


def test_constants_are_those_of_the_format():
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
