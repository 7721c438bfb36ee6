# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decodes with several query tokens a sequence, as speculative decoding verifies.

CUDA's kernels and Triton's are compared to causal attention over the stored K and V.
"""

import math
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import decode_columns, extend_rows
from vllm.v1.attention.ops.turbo.cuda import extend as cuda_extend
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES
from vllm.v1.attention.ops.turbo.cuda.decode_columns import COLUMNS as COLUMNS_FAMILY
from vllm.v1.attention.ops.turbo.cuda.extend import EXTEND
from vllm.v1.attention.ops.turbo.cuda.extend_rows import OUTPUTS as OUTPUTS_FAMILY
from vllm.v1.attention.ops.turbo.cuda.extend_rows import ROWS as ROWS_FAMILY
from vllm.v1.attention.ops.turbo.format import TILE_TOKENS, TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.formats.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    DecodeBatch,
    NewestTokens,
    OffsetScores,
    OutputScratch,
    Partials,
    RotatedQuery,
    StoreCall,
    num_own_tiles,
)
from vllm.v1.attention.ops.turbo.reference.codec import power_of_two
from vllm.v1.attention.ops.turbo.triton import decode as triton_decode

from .utils import (
    BF16,
    CAN_RUN_KERNELS,
    DEVICE,
    FP16,
    INVALID_BLOCK,
    ON_GPU,
    PACKINGS,
    assert_by_2x_rule,
    assert_within,
    attend_by,
    attention_of_rounded,
    call_of,
    fill_cache,
    gaussian,
    load_context,
    make_block_table,
    new_cache,
    num_blocks_for,
    requires_cuda,
    requires_hopper,
    requires_nvidia,
    rotate_query,
    slots_of,
)


def decode_on(
    capability: int | None,
    query: RotatedQuery,
    kv_cache: torch.Tensor,
    layout: TurboFormat,
    *args: Any,
    **options: Any,
) -> None:
    """Decode with the kernel of a compute capability, even if another would serve.

    None stands for the kernel of every GPU.
    """
    reason = COLUMNS_FAMILY.unsupported_reason(layout, capability)
    if capability is not None and reason is not None:
        pytest.skip(reason)
    with mock.patch.object(decode_columns, "serves", lambda *_: reason is None):
        attend = cuda_decode.decode_attention
        attend_by(attend, query, kv_cache, layout, *args, **options)


def extend_on(
    capability: int | None,
    query: RotatedQuery,
    kv_cache: torch.Tensor,
    layout: TurboFormat,
    *args: Any,
    **options: Any,
) -> None:
    """Extend with the kernel of a compute capability; None: the kernel of every GPU."""
    family = EXTEND if capability is None else ROWS_FAMILY
    reason = family.unsupported_reason(layout, capability)
    if reason is not None:
        pytest.skip(reason)
    with mock.patch.object(cuda_extend, "capability_of", lambda device: capability):
        attend = cuda_extend.extend_attention
        attend_by(attend, query, kv_cache, layout, *args, **options)


class OriginalQuery(NamedTuple):
    """Queries (T, Hq, D) before their rotation, and the softmax scale."""

    vectors: torch.Tensor
    scale: float


def extend_to_outputs(
    query: OriginalQuery,
    kv_cache: torch.Tensor,
    layout: TurboFormat,
    batch: DecodeBatch,
    partials: Partials,
    *call: Any,
    **options: Any,
) -> None:
    """Extend with the kernel that needs no merge; scratch and output have NaN before.

    With one split, blocks have whole passes.
    """
    reason = OUTPUTS_FAMILY.refusal(layout)
    if reason is not None:
        pytest.skip(reason)
    own_tiles = num_own_tiles(query.vectors.shape[0], batch.num_seqs)
    specs = extend_rows.output_scratch(
        layout, kv_cache.shape[1], 4 if not ON_GPU else 132, own_tiles
    )
    scratch = OutputScratch(
        *(torch.full(size, math.nan, dtype=x, device=DEVICE) for size, x in specs)
    )
    if batch.num_splits(partials.lse.shape[0]) == 1:
        scratch = scratch._replace(
            partial=scratch.partial[:0], partial_lse=scratch.partial_lse[:0]
        )
    extended = call_of(kv_cache, layout, batch, *call, **options)
    scoring = extended.scoring._replace(scale=query.scale)
    extended = extended._replace(query=query.vectors, scoring=scoring)
    extend_rows.extend_outputs(extended, scratch)


KERNELS = {"cuda": cuda_decode, "triton": triton_decode, "extend": cuda_extend}
ATTENTION = {
    "cuda": partial(decode_on, None),
    "columns": partial(decode_on, decode_columns.CAPABILITY),
    "triton": partial(attend_by, triton_decode.decode_attention),
    "extend": partial(extend_on, None),
    "rows": partial(extend_on, extend_rows.CAPABILITY),
    "outputs": extend_to_outputs,
}
COLUMNS = pytest.param("columns", marks=requires_hopper)
ROWS = pytest.param("rows", marks=requires_hopper)
OUTPUTS = pytest.param("outputs", marks=requires_hopper)
# Kernels that take queries in fp16.
extends_or_columns = pytest.mark.parametrize(
    "kernel", ["extend", ROWS, OUTPUTS, COLUMNS]
)
decodes = pytest.mark.parametrize("kernel", ["cuda", COLUMNS])
extends = pytest.mark.parametrize("kernel", ["extend", ROWS, OUTPUTS])
# Extend kernels whose results the merge joins.
merged_extends = pytest.mark.parametrize("kernel", ["extend", ROWS])
# The rounding of rotated queries by kernels that do not keep the model's dtype.
ROUNDING = {"cuda": reference.round_query}
ROUNDING |= dict.fromkeys(("columns", "extend", "rows"), lambda q: q.to(FP16).float())
all_kernels = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param("cuda", marks=requires_cuda),
        COLUMNS,
        pytest.param(
            "triton",
            marks=pytest.mark.skipif(
                not CAN_RUN_KERNELS, reason="needs a GPU, or TRITON_INTERPRET=1"
            ),
        ),
    ],
)
LAYOUTS = [
    TurboFormat.from_cache_dtype(name, size)
    for name in TURBO_PRESETS
    for size in SUPPORTED_HEAD_SIZES
]
EXTEND_LAYOUTS = [x for x in LAYOUTS if not EXTEND.refusal(x)]
# Triton compiles an instance for each layout. k4v3 packs K and V as the others do.
TRITON_LAYOUTS = [
    layout for layout in LAYOUTS if layout.head_size == 64 and layout.name in PACKINGS
]
all_layouts = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=[f"{layout.name}-{layout.head_size}" for layout in LAYOUTS]
)
# Layouts of the kernels that only Hopper has.
HOPPER_LAYOUTS = [
    pytest.param(
        kernel,
        layout,
        marks=requires_hopper,
        id=f"{kernel}-{layout.name}-{layout.head_size}",
    )
    for kernel, family in (
        ("rows", ROWS_FAMILY),
        ("outputs", OUTPUTS_FAMILY),
        ("columns", COLUMNS_FAMILY),
    )
    for layout in EXTEND_LAYOUTS
    if not family.refusal(layout)
]
FP16_LAYOUTS = [
    pytest.param("extend", layout, id=f"{layout.name}-{layout.head_size}")
    for layout in EXTEND_LAYOUTS
] + HOPPER_LAYOUTS
fp16_layouts = pytest.mark.parametrize("kernel, layout", FP16_LAYOUTS)
merged_layouts = pytest.mark.parametrize(
    "kernel, layout", [x for x in FP16_LAYOUTS if x.values[0] != "outputs"]
)
all_query_lens = pytest.mark.parametrize("query_len", [1, 2, 3, 4, 8])
newest_or_stored = pytest.mark.parametrize(
    "with_newest", [True, False], ids=["newest", "stored"]
)
LAYOUT = TurboFormat.from_cache_dtype("turbo4", 128)
NUM_KV_HEADS = 2
BLOCK_SIZE = 48
# Rows of padding after the last sequence's tokens.
PADDING = 2


def rounded_keys(key: torch.Tensor) -> torch.Tensor:
    """Newest keys, fp32, with the rounding of ``extend_outputs``: to fp16, in rotated
    space.
    """
    size = key.shape[-1]
    matrix = rotation_matrix(size, key.device, torch.float32)
    rotated = key @ matrix * inverse_sqrt(size)
    return reference.inverse_rotate(rotated.to(FP16))


def rounded_queries(query: torch.Tensor) -> torch.Tensor:
    """Queries, fp32, with the rounding of ``extend_outputs``, which rotates them.

    It rounds to fp16 relative to a power of two, before the division by sqrt(D).
    """
    size = query.shape[-1]
    matrix = rotation_matrix(size, query.device, torch.float32)
    rotated = query.float() @ matrix
    unit = power_of_two(torch.frexp(rotated.abs().amax(-1, True)).exponent)
    return (rotated / unit).to(FP16).float() @ matrix.T * (unit / size)


def lengths(query_len: int) -> list[int]:
    """Lengths around the query's, so that its tokens lie around ends of tiles."""
    short = {0, 1, query_len - 1, query_len, query_len + 1, 16 + query_len // 2, 33}
    if not ON_GPU:
        return sorted(short)
    longer = {31, 32, 32 + query_len - 1, 48, 63 + query_len, 1000, 2049, 4096 + 2}
    return sorted(short | longer)


class Batch:
    """Sequences in a cache, queries of their last tokens, and other K and V of these.

    Args:
        layout: The cache's format.
        seq_lens: Lengths of the sequences, which may be below their query lengths.
        query_lens: Query tokens of each sequence; an int: of every one.
        group: Query heads a KV head.
        dtype: The model's dtype.

    Attributes:
        block_size: Tokens of a block.
        sliding_window: The most tokens that a query token sees; None: all before it.
        sinks: (Hq,), a logit without a value for each query head; None for none.
        logits_soft_cap: The cap that bounds scores by a tanh; None for none.
        seen: The cache and block table that kernels get; None: ``cache`` and ``table``.

    """

    block_size: int = BLOCK_SIZE
    sliding_window: int | None = None
    sinks: torch.Tensor | None = None
    logits_soft_cap: float | None = None
    seen: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(
        self,
        layout: TurboFormat,
        seq_lens: list[int],
        query_lens: list[int] | int,
        group: int,
        dtype: torch.dtype = FP16,
    ) -> None:
        self.layout, self.seq_lens = layout, seq_lens
        self.is_uniform = isinstance(query_lens, int)
        if isinstance(query_lens, int):
            query_lens = [query_lens] * len(seq_lens)
        self.query_len = max(query_lens)
        self.starts = [0, *accumulate(query_lens)]
        num_blocks = num_blocks_for(seq_lens, self.block_size)
        self.cache = new_cache(layout, num_blocks, NUM_KV_HEADS, self.block_size)
        self.table = make_block_table(seq_lens, self.block_size)
        self.fill(dtype)
        self.num_heads = group * NUM_KV_HEADS
        self.scale = layout.head_size**-0.5
        heads = [self.num_heads, NUM_KV_HEADS, NUM_KV_HEADS]
        num_tokens = self.starts[-1] + (0 if self.is_uniform else PADDING)
        qkv = gaussian(num_tokens, sum(heads), layout.head_size, dtype=dtype, seed=7)
        self.query, self.key, self.value = qkv.split(heads, 1)
        for start, query_len, length in zip(self.starts, query_lens, seq_lens):
            # Rows of tokens that do not exist hold NaN, as padding may.
            qkv[start : start + max(query_len - length, 0)] = math.nan

    def fill(self, dtype: torch.dtype) -> None:
        fill_cache(self.cache, self.table, self.seq_lens, self.layout, dtype)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``reference.attention``."""
        return {
            "sliding_window": self.sliding_window,
            "sinks": self.sinks,
            "logits_soft_cap": self.logits_soft_cap,
        }

    def slide(self, window: int) -> None:
        """Have kernels see a window only.

        Tiles before the first one that a query token sees hold bytes that no encoder
        writes, and blocks before it do not exist.
        """
        self.sliding_window = window
        cache, table = self.cache.clone(), self.table.clone()
        pages = cache.flatten(2).view(*cache.shape[:2], -1, self.layout.tile_bytes)
        for row, length in enumerate(self.seq_lens):
            query_len = self.starts[row + 1] - self.starts[row]
            tile = max(length - query_len + 1 - window, 0) // TILE_TOKENS
            block, rest = divmod(tile, self.block_size // TILE_TOKENS)
            if rest:
                pages[table[row, block], :, :rest] = 0xFF
            table[row, :block] = INVALID_BLOCK
        self.seen = cache, table

    def decode(
        self,
        kernel: str,
        with_newest: bool,
        num_splits: int = 8,
        offset: OffsetScores | None = None,
    ) -> torch.Tensor:
        """The output, (T, Hq, D), with NaN in scratch and output before."""
        num_partials = len(self.seq_lens) * self.query_len * num_splits
        shape = (num_partials, self.num_heads, self.layout.head_size)
        partial = torch.full(shape, math.nan, device=DEVICE)
        output = torch.full(self.query.shape, math.nan, device=DEVICE).to(self.query)
        starts = torch.tensor(self.starts, dtype=torch.int32, device=DEVICE)
        newest = NewestTokens(self.query, self.key, self.value, self.scale)
        cache, table = self.seen or (self.cache, self.table)
        is_original = kernel == "outputs"
        query = rotate_query(self.query, self.layout)
        ATTENTION[kernel](
            OriginalQuery(self.query, self.scale) if is_original else query,
            cache,
            self.layout,
            DecodeBatch(
                len(self.seq_lens),
                table,
                torch.tensor(self.seq_lens, dtype=torch.int32, device=DEVICE),
                self.query_len,
                None if self.is_uniform else starts,
            ),
            Partials(partial, partial[:, :, 0].contiguous()),
            output,
            newest if with_newest else None,
            offset,
            **self.options,
        )
        return output

    def check(self, kernel: str, with_newest: bool, output: torch.Tensor) -> None:
        """Compare each sequence by the 2x rule, and rows that see no tokens to zero."""
        assert output[self.starts[-1] :].isnan().all()
        for row, length in enumerate(self.seq_lens):
            start, end = self.starts[row : row + 2]
            seen = min(length, end - start)
            assert (output[start : end - seen] == 0).all()
            if seen == 0:
                continue
            part = slice(end - seen, end)
            query = self.query[part]
            key, value = load_context(self.cache, self.table[row], length, self.layout)
            if with_newest:
                key[-seen:], value[-seen:] = self.key[part], self.value[part]
            target = None
            if kernel == "outputs":
                keys = key
                if with_newest:
                    # The kernel attends to them with all others.
                    keys = torch.cat([key[:-seen], rounded_keys(key[-seen:])])
                target, _ = reference.attention(
                    rounded_queries(query), keys, value, self.scale, **self.options
                )
            elif kernel in ROUNDING:
                num_newest = seen if with_newest else 0
                target = self.target(kernel, query, key, value, num_newest)
            assert_by_2x_rule(
                output[part],
                query,
                key,
                value,
                self.scale,
                query.dtype,
                kernel == "triton",
                target,
                **self.options,
            )

    def target(
        self,
        kernel: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        num_newest: int,
    ) -> torch.Tensor:
        """Attention to cached tokens from q as the kernel rounds it, and to the newest
        tokens from q without rounding.
        """
        rotated = reference.rotate(query.float())
        rounded = reference.inverse_rotate(ROUNDING[kernel](rotated))
        return attention_of_rounded(
            rounded, query, key, value, num_newest, self.scale, **self.options
        )


@all_kernels
@all_layouts
@all_query_lens
@pytest.mark.parametrize("group", [1, 2, 4, 5, 8, 16])
@newest_or_stored
def test_against_reference(kernel, layout, query_len, group, with_newest):
    if kernel == "triton" and (layout not in TRITON_LAYOUTS or group not in (1, 5)):
        pytest.skip("an instance each would take long to compile")
    batch = Batch(layout, lengths(query_len), query_len, group)
    output = batch.decode(kernel, with_newest)
    batch.check(kernel, with_newest, output)
    if kernel != "triton":
        again = batch.decode(kernel, with_newest)
        assert torch.equal(output, again)


@all_kernels
@all_layouts
@pytest.mark.parametrize("group", [1, 4])
@newest_or_stored
def test_queries_of_different_lengths(kernel, layout, group, with_newest):
    if kernel == "triton" and layout not in TRITON_LAYOUTS:
        pytest.skip("an instance each would take long to compile")
    query_lens = [1, 4, 3, 1, 2, 4, 0, 0]
    seq_lens = [1, 70, 2, 17, 33, 4, 5, 0]
    if ON_GPU:
        seq_lens[:2] = [1001, 4098]
    batch = Batch(layout, seq_lens, query_lens, group)
    batch.check(kernel, with_newest, batch.decode(kernel, with_newest))


@all_kernels
@newest_or_stored
@pytest.mark.parametrize("num_splits", [1, 2, 64])
@pytest.mark.parametrize("query_len, group", [(4, 1), (2, 4), (3, 8)])
def test_splits(kernel, with_newest, num_splits, query_len, group):
    """Splits may end anywhere among a sequence's last tokens."""
    seq_lens = [70 + i for i in range(40)] if ON_GPU else [70, 63]
    batch = Batch(LAYOUT, seq_lens, query_len, group, BF16)
    output = batch.decode(kernel, with_newest, num_splits)
    batch.check(kernel, with_newest, output)


@all_kernels
@pytest.mark.parametrize("query_len, group", [(2, 1), (3, 4), (8, 5)])
def test_as_one_token_after_the_other(kernel, query_len, group):
    seq_lens = [query_len, 16 + query_len // 2, 64]
    batch = Batch(LAYOUT, seq_lens, query_len, group)
    together, queries = batch.decode(kernel, False), batch.query
    batch.query_len = 1
    for i in range(query_len):
        batch.query = queries[i::query_len]
        batch.seq_lens = [length - query_len + i + 1 for length in seq_lens]
        alone = batch.decode(kernel, False)
        allowed = 2**-9 * alone.abs().max()
        assert_within(together[i::query_len], alone, allowed)


@all_kernels
@newest_or_stored
def test_later_tokens_change_no_bit(kernel, with_newest):
    seq_lens, query_len = [4, 18, 33, 66], 4
    batch = Batch(LAYOUT, seq_lens, query_len, 4)
    before = batch.decode(kernel, with_newest)
    for row, length in enumerate(seq_lens):
        slots = slots_of(batch.table[row], length - 1, length, BLOCK_SIZE)
        large = 100 * gaussian(1, NUM_KV_HEADS, 128, seed=row)
        reference.store(StoreCall(batch.cache, slots, large, large, LAYOUT))
        batch.key[batch.starts[row + 1] - 1] *= 100
        batch.value[batch.starts[row + 1] - 1] *= 100
    after = batch.decode(kernel, with_newest)
    is_equal = (before == after).flatten(1).all(1).view(-1, query_len)
    assert is_equal[:, :-1].all() and not is_equal[:, -1].any()


@requires_cuda
@pytest.mark.parametrize("kernel", ["cuda", COLUMNS, "extend", ROWS, OUTPUTS])
@pytest.mark.parametrize("group", [1, 4])
def test_hidden_tokens_of_whole_tiles_change_no_bit(kernel, group):
    """A sequence's last tokens, which some queries do not see, may fill the tiles that
    a warp takes at once, or begin in them. A warp that has had tiles before masks
    scores only because of these queries.
    """
    query_len = 4
    # A warp takes 32 tokens, and its next 32 are 128 further on; an extend takes 128.
    ends = [9 * 32, 10 * 32, 11 * 32, 3 * 128, 5 * 128]
    seq_lens = [end + more for end in ends for more in range(query_len)]
    batch = Batch(LAYOUT, seq_lens, query_len, group)
    before = batch.decode(kernel, False, num_splits=1)
    for place in reversed(range(1, query_len)):
        for row, length in enumerate(seq_lens):
            token = length - query_len + place
            slots = slots_of(batch.table[row], token, token + 1, BLOCK_SIZE)
            # K stays that of fill_cache: a larger score would hide the other tokens.
            key = gaussian(length, NUM_KV_HEADS, 128, dtype=FP16, seed=2 * row + 100)
            value = 100 * gaussian(1, NUM_KV_HEADS, 128, seed=row)
            key = key[token : token + 1]
            reference.store(StoreCall(batch.cache, slots, key, value.to(FP16), LAYOUT))
        after = batch.decode(kernel, False, num_splits=1)
        is_equal = (before == after).flatten(1).all(1).view(-1, query_len)
        assert is_equal[:, :place].all() and not is_equal[:, place:].any()


@requires_nvidia
@newest_or_stored
@pytest.mark.parametrize(
    "kernel, query_lens",
    [
        pytest.param("cuda", 3, id="uniform"),
        pytest.param("cuda", [3, 1, 2, 3], id="ragged"),
        pytest.param("columns", 6, id="uniform columns", marks=requires_hopper),
        pytest.param(
            "columns", [9, 1, 2, 6], id="ragged columns", marks=requires_hopper
        ),
        pytest.param("extend", 16, id="uniform extends"),
        pytest.param("extend", [16, 1, 2, 9], id="ragged extends"),
        pytest.param("rows", 16, id="uniform rows", marks=requires_hopper),
        pytest.param("rows", [33, 1, 2, 9], id="ragged rows", marks=requires_hopper),
        pytest.param("outputs", 16, id="uniform outputs", marks=requires_hopper),
        pytest.param(
            "outputs", [70, 1, 2, 9], id="ragged outputs", marks=requires_hopper
        ),
    ],
)
def test_a_graph_takes_other_lengths(with_newest, kernel, query_lens):
    """The grid is constant, and kernels read lengths from the device alone."""
    batch = Batch(LAYOUT, [300, 35, 1000, 0], query_lens, 4)
    expected = batch.decode(kernel, with_newest)
    starts = torch.tensor(batch.starts, dtype=torch.int32, device=DEVICE)
    seq_lens = torch.tensor(batch.seq_lens, dtype=torch.int32, device=DEVICE)
    lens = torch.ones_like(seq_lens)
    shape = (4 * batch.query_len * 8, batch.num_heads, 128)
    partial = torch.empty(shape, device=DEVICE)
    newest = NewestTokens(batch.query, batch.key, batch.value, batch.scale)
    query = rotate_query(batch.query, LAYOUT)
    arguments = (
        OriginalQuery(batch.query, batch.scale) if kernel == "outputs" else query,
        batch.cache,
        LAYOUT,
        DecodeBatch(
            len(lens),
            batch.table.clamp(max=batch.cache.shape[0] - 1),
            lens,
            batch.query_len,
            None if batch.is_uniform else starts,
        ),
        Partials(partial, partial[:, :, 0].contiguous()),
        output := torch.full_like(expected, math.nan),
        newest if with_newest else None,
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ATTENTION[kernel](*arguments)
    lens.copy_(seq_lens)
    graph.replay()
    end = batch.starts[-1]
    assert torch.equal(output[:end], expected[:end])


@pytest.mark.parametrize("kernel", KERNELS)
def test_room_for_partial_results(kernel):
    """More query tokens have fewer splits each, down to one or two."""
    splits = KERNELS[kernel].num_kv_splits
    for num_seqs in (1, 32, 128, 1024):
        counts = [splits(num_seqs, 8, 132, query_len) for query_len in (1, 2, 4, 8)]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] == splits(num_seqs, 8, 132) and counts[-1] >= 1
