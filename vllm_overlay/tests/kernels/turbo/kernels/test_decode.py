# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decodes of one query token a sequence: exact probes, and attention over the stored K
and V. The module test_cuda_attention.py has decodes of several tokens.
"""

import math
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    MAX_KV_SPLITS,
    Partials,
    RotatedQuery,
    StoreCall,
)
from vllm.v1.attention.ops.turbo.triton.decode import num_kv_splits

from ..attention_kernels import IN_FP16, KERNELS, kernels_and_layouts, without
from ..attention_utils import assert_within
from ..kernel_under_test import DECODE_KERNEL
from ..sequences import (
    IN_BF16,
    LAYOUT,
    LAYOUTS,
    NUM_KV_HEADS,
    Features,
    Sequences,
    decode_layouts,
    layout_id,
)
from ..utils import (
    BF16,
    DEVICE,
    FP16,
    KERNEL_CASES,
    ON_GPU,
    PACKINGS,
    UNEVEN,
    all_pages,
    fill_cache,
    gaussian,
    random_pages,
    requires_cuda,
    requires_triton,
    spread_pages,
)

# Its errors are compared to those of attention that rounds without a rotation.
TRITON = KERNELS["triton"]._replace(rotates_rule=False)
DECODE = DECODE_KERNEL
FP32 = torch.float32
NUM_SPLITS = {"triton": 2, "decode": 8}
SIZES = sorted({size for size, _ in KERNEL_CASES})
# Lengths around one token, a tile, the two tiles that a warp takes at once, and many.
SEQ_LENS = [15, 16, 17, 31, 32, 33, 0, 64, 65, 1000, 2049, 4097, 5000]


def layouts_of(names: Iterable[str], sizes: Iterable[int]) -> list[TurboFormat]:
    return [TurboFormat.from_cache_dtype(*both) for both in product(names, sizes)]


# Heads of 64. A test that does not depend on the packing has one preset in the
# interpreter.
FEW = layouts_of(TURBO_PRESETS if ON_GPU else ["turbo4"], [64])
PACKED = layouts_of(PACKINGS, [64])


def cases(names: str, *rows: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Parametrise a test by ``kernel, layout`` and further names.

    Args:
        names: The names, separated by commas.
        rows: Kernel, layouts, and the values of each further name.

    """
    params = [
        kernel.case(layout, *own, name="-".join(map(str, (layout_id(layout), *own))))
        for kernel, *values in rows
        for layout, *own in product(*values)
    ]
    return pytest.mark.parametrize(f"kernel, layout{names and ', '}{names}", params)


@cases(
    "dtype, group",
    *((TRITON, layouts_of(TURBO_PRESETS, [n]), [x], [4]) for n, x in KERNEL_CASES),
    (TRITON, UNEVEN, [FP16], [4]),
    (DECODE, LAYOUTS, [BF16, FP16], [4, 8, 16]),
)
def test_lengths(kernel, layout, dtype, group):
    """Lengths around one token, one step of the kernel and one block."""
    seq_lens = [1, 63, 47, 48, 49]
    if ON_GPU or kernel is DECODE:
        seq_lens += SEQ_LENS
    features = Features(dtype=dtype)
    batch = Sequences(layout, seq_lens, 1, group, features)
    batch.check(kernel, False, NUM_SPLITS[kernel.name])


@cases(
    "group",
    (TRITON, FEW, [1, 4, 5, 8, 16]),
    (DECODE, LAYOUTS, [1, 3, 5, 9, 12, 17, 24]),
)
def test_query_heads_per_kv_head(kernel, layout, group):
    features = Features(dtype=BF16 if kernel is DECODE else FP16)
    seq_lens = [50, 700] if kernel is DECODE else [50]
    batch = Sequences(layout, seq_lens, 1, group, features, block_size=16)
    batch.check(kernel, False, NUM_SPLITS[kernel.name])


@cases("", (TRITON, PACKED), (DECODE, [LAYOUT]))
@all_pages
def test_strides_and_block_sizes(kernel, layout, cache_layout, block_size):
    pages = {"block_size": block_size, "cache_layout": cache_layout}
    seq_lens = [block_size - 1, block_size + 1]
    batch = Sequences(layout, seq_lens, 1, features=IN_BF16, **pages)
    batch.check(kernel, False, NUM_SPLITS[kernel.name])


@cases(
    "num_splits, lengths",
    (TRITON, FEW, [1, 3, 64], ["few"]),
    (DECODE, [LAYOUT], [1, 2, 3, 64], ["one", "many", "ragged"]),
)
def test_splits(kernel, layout, num_splits, lengths):
    """Ranges of warps and teams begin anywhere, and a team has several. Scratch of
    splits without tokens holds NaN and must not be read.
    """
    seq_lens = {
        "few": [1, 130, 5000] if ON_GPU else [1, 130],
        "one": [5000],
        "many": [512] * 400,
        "ragged": [4097] + [40] * 63,
    }[lengths]
    features = Features(dtype=BF16 if kernel is DECODE else FP16)
    block_size = 16 if kernel is DECODE else 32
    batch = Sequences(layout, seq_lens, 1, features=features, block_size=block_size)
    batch.check(kernel, False, num_splits)


@cases("", (TRITON, FEW), (DECODE, FEW))
@pytest.mark.parametrize("query_factor", [1e-3, 100.0, 1e4])
def test_peaked_and_flat_softmax(kernel, layout, query_factor):
    """With scores in the hundreds, exponentials overflow without a running maximum."""
    batch = Sequences(layout, [70], 1, features=IN_BF16, block_size=32)
    batch.query *= query_factor
    batch.check(kernel, False, 2)


@cases("num_splits", (TRITON, FEW[:1], [1, 4]), (DECODE, LAYOUTS, [1]))
def test_empty_and_padded_sequences(kernel, layout, num_splits):
    """Sequences of length 0 give zeros, others what they give alone, and further rows
    of a padded batch are not read.
    """
    seq_lens = [0, 40, 0, 1700 if kernel is DECODE else 17, 0]
    batch = Sequences(layout, seq_lens, 1, 2, IN_BF16, block_size=16)
    for with_raw in (False, True):
        batch.check_alone(kernel, with_raw, num_splits)
    query, call, partials = batch.launch(False, num_splits)
    call = call._replace(
        batch=call.batch._replace(num_seqs=2),
        output=call.output[:2],
        query=call.query[:2],
    )
    partials = Partials(*(x[: 2 * num_splits] for x in partials))
    kernel.attend(RotatedQuery(*(x[:2] for x in query)), call, partials)
    assert torch.equal(call.output, batch.attend(kernel, False, num_splits)[:2])


@cases("", (TRITON, layouts_of(TURBO_PRESETS, SIZES)), (DECODE, LAYOUTS))
def test_raw_token_is_not_quantised(kernel, layout):
    """The raw token's bytes are not read; alone in a sequence it gives its V.

    Its score is from q without rounding.
    """
    seq_lens = [1, 34, 0, 17] + ([2000] if kernel is DECODE else [])
    batch = Sequences(layout, seq_lens, 1, 4, IN_BF16, block_size=16)
    # Scales are NaN where nothing is stored.
    batch.cache.fill_(0xFF)
    stored = [max(0, length - 1) for length in seq_lens]
    fill_cache(batch.cache, batch.table, stored, layout)
    output = batch.check(kernel, True, 4 if kernel is DECODE else 2)
    assert torch.equal(output[0], batch.value[0].repeat_interleave(4, 0))


@cases("broken", *((x, FEW[:1], ["query", "key", "value"]) for x in (TRITON, DECODE)))
def test_nan_of_a_sequence_stays_its_own(kernel, layout, broken):
    batch = Sequences(layout, [20, 20], 1, 2, IN_BF16, block_size=16)
    whole = batch.attend(kernel, True, 2)
    getattr(batch, broken)[0, 0, 5] = math.nan
    output = batch.attend(kernel, True, 2)
    assert output[0, 0].isnan().any()
    assert torch.equal(output[1], whole[1])


@cases("", *((x, layouts_of(["turbo4", "turbo3"], [128])) for x in (TRITON, DECODE)))
def test_page_beyond_4_gib(kernel, layout):
    """Decode from pages at byte offsets beyond 2**31 and 2**32."""
    near = random_pages(layout, 3, NUM_KV_HEADS, 16)
    # Small scales make scores that differ little.
    near[:, :, :, 2 * layout.key_code_bytes :] &= 0x77
    far, blocks = spread_pages(near)
    batch = Sequences(layout, [41], 1, 2, block_size=16)
    batch.seen = near, torch.arange(3, dtype=torch.int32, device=DEVICE)[None]
    expected = batch.attend(kernel, False, 2)
    batch.seen = far, blocks[None].int()
    assert torch.equal(batch.attend(kernel, False, 2), expected)


@cases("", *((x, layouts_of(TURBO_PRESETS, [128])) for x in (TRITON, DECODE)))
def test_quality_against_unquantised(kernel, layout):
    """Relative error of attention's output against unquantised K and V.

    Vectors are Gaussian: no structure of K helps, and averaging reduces the errors of V
    no more than V itself.
    """
    bound = {"turbo4": 0.13, "k4v3": 0.2, "turbo3": 0.25}[layout.name]
    batch = Sequences(layout, [128], 1, 32, IN_BF16, block_size=16)
    key, value = (
        gaussian(128, NUM_KV_HEADS, 128, dtype=BF16, seed=seed) for seed in (100, 101)
    )
    output = batch.attend(kernel, False, 1)
    expected, _ = reference.attention(
        batch.query.float(), key.float(), value.float(), 128**-0.5
    )
    error = ((output.float() - expected).norm() / expected.norm()).item()
    assert error <= bound, f"relative error {error:.3f}"


@cases("", (TRITON, layouts_of(PACKINGS, SIZES)), (DECODE, LAYOUTS))
def test_one_key_gives_its_value(kernel, layout):
    """The softmax of one score is 1, so that the output is the stored value.

    They are compared in rotated space, where a coordinate is a code times a scale. The
    kernel evaluates the level in fp16, where a coefficient times a small scale may be
    subnormal.
    """
    batch, _, values = first_tokens(layout, 3, 2)
    matrix = rotation_matrix(layout.head_size, DEVICE, torch.float64)
    output = batch.attend(kernel, False, 1).double()
    assert_values(output @ matrix * layout.head_size**-0.5, values)


def first_tokens(
    layout: TurboFormat, num_seqs: int, group: int
) -> tuple[Sequences, torch.Tensor, torch.Tensor]:
    """Sequences of one token, in pages of random bytes, with any finite scales.

    Returns:
        The sequences, in fp32, and each token's rotated K and V, (B, H, D) fp32.

    """
    batch = Sequences(layout, [1] * num_seqs, 1, group, Features(dtype=FP32))
    cache = random_pages(layout, num_seqs, NUM_KV_HEADS, 16)
    blocks = torch.arange(num_seqs, device=DEVICE).flip(0)
    batch.seen = cache, blocks[:, None].int()
    return batch, *reference.load(cache, blocks * 16, layout)


def assert_values(output: torch.Tensor, values: torch.Tensor) -> None:
    """Compare outputs in rotated space, (B, 2 * H, D) fp64, to values, (B, H, D)."""
    expected = values.repeat_interleave(2, 1).double()
    largest = expected.abs().amax(-1, keepdim=True)
    allowed = 2.0**-9 * expected.abs() + 2.0**-18 * largest + 2.0**-25 * 8
    assert_within(output, expected, allowed)


@cases("", (TRITON, layouts_of(PACKINGS, SIZES)))
def test_one_hot_query_reads_the_key(kernel, layout):
    """With one key and q a unit vector, the LSE is that coordinate of K."""
    head_size, group = layout.head_size, 16
    num_seqs = head_size // group
    batch, keys, _ = first_tokens(layout, num_seqs, group)
    # Sequence b's heads read coordinates [16 * b, 16 * b + 16) of each KV head.
    coordinates = torch.arange(head_size, device=DEVICE).view(num_seqs, 1, group)
    coordinates = coordinates.expand(-1, NUM_KV_HEADS, -1)
    units = torch.eye(head_size, device=DEVICE)
    lse = batch.partials(kernel, units[coordinates.flatten(1)], 1.0).lse
    expected = keys.gather(2, coordinates).half().float()
    assert torch.equal(lse.view_as(expected), expected)


@requires_cuda
@decode_layouts
@pytest.mark.parametrize("group", [4, 8, 16])
def test_scores_are_rounded_as_their_terms(layout, group):
    """The LSE of one key is its score, within 2**-15 of the bound |q| |k|.

    The kernel adds the terms to a number that is hundreds of times as large.
    """
    batch = Sequences(layout, [1] * 64, 1, group, IN_BF16, block_size=16)
    keys, _ = reference.load(batch.cache, batch.table[:, 0].long() * 16, layout)
    keys = keys.double().repeat_interleave(group, 1)
    query = gaussian(64, group * NUM_KV_HEADS, layout.head_size).to(FP16)
    _, lse = batch.partials(DECODE, query, 1.0)
    queries = reference.round_query(query.float()).double()
    expected = (queries * keys).sum(-1)
    error = (lse.double() - expected).abs() / (queries.norm(dim=-1) * keys.norm(dim=-1))
    assert error.max() <= 2.0**-15


# Kernels that take queries in fp16, whose results the merge joins.
PARTIAL_RESULTS = [x for x in IN_FP16 if x in without("partials")]


@kernels_and_layouts(PARTIAL_RESULTS)
def test_one_key_gives_its_score_and_value(kernel, layout):
    """With one key the LSE is its score, up to rounding of fp32 sums, and the output is
    its value. Pages hold random bytes, with scales from the least to the largest.
    """
    batch, keys, values = first_tokens(layout, 256, 2)
    query = gaussian(256, 2 * NUM_KV_HEADS, layout.head_size).to(FP16)
    output, lse = batch.partials(kernel, query, 0.125)
    products = query.double() * keys.repeat_interleave(2, 1).double() * 0.125
    allowed = 2.0**-18 * products.abs().sum(-1)
    assert_within(lse.double(), products.sum(-1), allowed)
    assert_values(output.double(), values)


@kernels_and_layouts(PARTIAL_RESULTS)
@pytest.mark.parametrize("score", [1e4, -1e4])
def test_large_scores(kernel, layout, score):
    """Equal keys have equal weights, however large their scores."""
    seq_lens = [1, 128, 3 * 128 + 17]
    batch = Sequences(layout, seq_lens, 1)
    key = gaussian(1, NUM_KV_HEADS, layout.head_size, seed=3)
    expected = []
    for row, length in enumerate(seq_lens):
        slots = batch.slots(row, 0, length)
        value = gaussian(length, NUM_KV_HEADS, layout.head_size, seed=row)
        repeated = key.expand(length, -1, -1).contiguous()
        reference.store(StoreCall(batch.cache, slots, repeated, value, layout))
        expected.append(reference.load(batch.cache, slots, layout)[1].mean(0))
    query = reference.rotate(key).expand(len(seq_lens), -1, -1)
    query = query.repeat_interleave(4, 1)
    scale = score / query.square().sum(-1).min().item()
    output, lse = batch.partials(kernel, query, scale)
    assert (lse.sign() == math.copysign(1, score)).all() and lse.isfinite().all()
    values = torch.stack(expected).repeat_interleave(4, 1)
    assert (output - values).abs().max() <= 2e-3 * values.abs().max()


@kernels_and_layouts(PARTIAL_RESULTS)
def test_keys_of_very_different_lengths(kernel, layout):
    """Keys of a tile differ by powers of two, and all their scores are as exact."""
    length = 16
    batch = Sequences(layout, [length], 1, 2)
    key = gaussian(length, NUM_KV_HEADS, layout.head_size, seed=5)
    key *= 2.0 ** torch.arange(8, -8, -1, device=DEVICE)[:, None, None]
    slots = batch.slots(0, 0, length)
    reference.store(StoreCall(batch.cache, slots, key, key, layout))
    keys, values = (x.double() for x in reference.load(batch.cache, slots, layout))
    query = 0.1 * gaussian(1, 2 * NUM_KV_HEADS, layout.head_size).to(FP16)
    output, lse = batch.partials(kernel, query, 0.125)
    repeated = keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1)
    scores = torch.einsum("hd,thd->ht", query[0].double(), repeated[0]) * 0.125
    weights = torch.softmax(scores * math.log(2), -1)
    expected = torch.einsum("ht,thd->hd", weights, repeated[1])
    total = torch.logsumexp(scores * math.log(2), -1) / math.log(2)
    assert (lse[0].double() - total).abs().max() <= 2e-3
    assert (output[0] - expected).abs().max() <= 2e-3 * expected.abs().max()


@requires_triton
@pytest.mark.parametrize("num_sms", [1, 80, 132])
def test_number_of_splits(num_sms):
    """Triton has enough programs for the GPU, and fewer splits for larger batches."""
    counts = [num_kv_splits(batch, 8, num_sms) for batch in range(1, 2000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1
    assert all(1 <= count <= MAX_KV_SPLITS for count in counts)
    for batch, count in enumerate(counts, 1):
        assert count == MAX_KV_SPLITS or batch * 8 * count >= num_sms
