# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sequences that grow, each with a page for its newest tokens, and stores of them."""

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Self

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.choose import triton_kernels
from vllm.v1.attention.ops.turbo.cuda.build import SUPPORTED_HEAD_SIZES
from vllm.v1.attention.ops.turbo.format import SCALE_GROUP, TurboFormat
from vllm.v1.attention.ops.turbo.formats.tail import MAX_CODE, MAX_ROWS, TailFormat
from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail, TailUpdate
from vllm.v1.attention.ops.turbo.interface import (
    KeyOffset,
    StoreCall,
)
from vllm.v1.attention.ops.turbo.reference.tail import load_tail, planes, update_tail
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..sequences import ints
from ..utils import (
    BF16,
    DEVICE,
    INVALID_BLOCK,
    ON_GPU,
    PACKINGS,
    SEGMENT,
    KernelUnderTest,
    by_kernel,
    gaussian,
    new_cache,
    requires_triton,
    slots_of,
)
from .store_checks import CUDA

NUM_KV_HEADS = 2
# Lengths around borders of segments, blocks and tails. The last but one sequence has no
# page of a tail.
CONTEXTS = [0, 1, 63, 64, 65, SEGMENT - 8, SEGMENT + 5, 40, 300]
WITHOUT_PAGE = 7
BORDER_BLOCK_SIZE = 64
AT_BORDERS = {
    "num_seqs": len(CONTEXTS),
    "block_size": BORDER_BLOCK_SIZE,
    "max_blocks": max(CONTEXTS) // BORDER_BLOCK_SIZE + 6,
    "group": 4,
}
DECODES = [1] * len(CONTEXTS)
RAGGED = [2, 1, 3, 1, 2, 1, 3, 1, 1]


def store_by_torch(call: StoreCall) -> None:
    reference.store(call._replace(tail=None))
    update_tail(call.tail, *call[:5], call.key_offset)


def store_by_triton(call: StoreCall) -> None:
    """Store with Triton on a GPU. In the interpreter, which takes seconds for a store,
    the reference stores and Triton updates the tail alone.
    """
    if ON_GPU:
        triton_kernels().store(call)
        return
    from vllm.v1.attention.ops.turbo.triton import tail as triton_tail

    reference.store(call._replace(tail=None))
    triton_tail.update_tail(call.tail, *call[:5], call.key_offset)


def small(name: str = "turbo4", *sizes: int) -> TurboFormat:
    """A layout of heads of 64, or of one or two other sizes."""
    return TurboFormat.from_cache_dtype(name, *(sizes or (64,)))


TORCH = KernelUnderTest("torch", store_by_torch, ())
TRITON = KernelUnderTest("triton", store_by_triton, (requires_triton,))
STORES = [TORCH, TRITON, CUDA]
SMALL_LAYOUTS = [small(name) for name in PACKINGS]
stores = by_kernel("store", [(store,) for store in STORES])


def stores_and_layouts(
    layouts: Iterable[TurboFormat] = SMALL_LAYOUTS,
    for_cuda: Iterable[TurboFormat] | None = None,
) -> pytest.MarkDecorator:
    """Parametrise a test by ``store, layout``; CUDA's store may have other layouts."""
    cases = [(store, layout) for store in (TORCH, TRITON) for layout in layouts]
    cases += [
        (CUDA, layout)
        for layout in for_cuda or layouts
        if layout.is_even and layout.head_size in SUPPORTED_HEAD_SIZES
    ]
    return by_kernel("store, layout", cases)


def error_bound(x: torch.Tensor) -> torch.Tensor:
    """The bound of a coordinate's error: half a step of a scale rounded to bf16."""
    largest = x.float().abs().unflatten(-1, (-1, SCALE_GROUP)).amax(-1, keepdim=True)
    step = largest / MAX_CODE * (1 + 2**-8)
    return (step * 0.501).expand(*step.shape[:-1], SCALE_GROUP).flatten(-2)


def make_offset(
    num_rows: int, head_size: int, num_kv_heads: int = NUM_KV_HEADS
) -> torch.Tensor:
    """An offset, (G, H, D) fp32, larger than the keys and different by row."""
    return 10 * gaussian(num_rows, num_kv_heads, head_size, seed=5)


class GrowingSequences:
    """Sequences in a cache, each with a page for its newest tokens.

    Args:
        layout: The format of packed pages.
        num_seqs: Number of sequences.
        num_tokens: The most tokens that are read from a tail.
        block_size: Tokens of a block.
        max_blocks: The most packed blocks of a sequence.
        dtype: The model's dtype.
        store: The kernel that stores; its bytes must equal the reference's.
        offset: (G, H, D) fp32, the offset of K; None for none.
        sliding_window: See ``TailFormat``.
        num_kv_heads: H.
        group: Query heads a KV head.
        cache_layout: The order of layers, blocks and heads in memory.

    Attributes:
        lengths: Lengths of the sequences in tokens. Tests may change them.
        keys: K last stored at each position of each sequence, (T, H, D).
        values: V likewise.
        query_lens: Query tokens of each sequence in the last step.
        starts: First tokens of the sequences in the last step, and the end.
        query: (T, Hq, D), queries of the last step; ``key`` and ``value`` likewise.
        tails: The tails after the last step, with their packed lengths: the store's,
            and the reference's in a copy of the cache.
        is_ragged: Whether kernels get ``starts`` even if all query lengths are equal.

    """

    def __init__(
        self,
        layout: TurboFormat,
        num_seqs: int = 1,
        num_tokens: int = MAX_ROWS - 1,
        block_size: int = 16,
        max_blocks: int = 6,
        dtype: torch.dtype = BF16,
        *,
        store: KernelUnderTest = TORCH,
        offset: torch.Tensor | None = None,
        sliding_window: int | None = None,
        num_kv_heads: int = NUM_KV_HEADS,
        group: int = 2,
        cache_layout: KVCacheLayout = KVCacheLayout.LBHNC,
    ) -> None:
        self.layout, self.block_size, self.dtype = layout, block_size, dtype
        self.format = TailFormat(layout, block_size, sliding_window)
        self.num_tokens, self.store, self.offset = num_tokens, store, offset
        self.heads = [group * num_kv_heads, num_kv_heads, num_kv_heads]
        self.scale, self.is_ragged = layout.head_size**-0.5, False
        # The first block is the null block.
        num_blocks = 1 + num_seqs * (max_blocks + 1)
        self.cache = new_cache(
            layout, num_blocks, num_kv_heads, block_size, cache_layout
        )
        generator = torch.Generator().manual_seed(num_blocks)
        order = 1 + torch.randperm(num_blocks - 1, generator=generator)
        order = order.view(num_seqs, -1).int().to(DEVICE)
        self.blocks = order[:, 0].clone()
        self.block_table = torch.nn.functional.pad(
            order[:, 1:], (0, 1), value=INVALID_BLOCK
        )
        self.lengths = [0] * num_seqs
        tokens = (max_blocks * block_size, num_kv_heads)
        self.keys, self.values = (
            [torch.zeros(*tokens, size, dtype=dtype, device=DEVICE) for _ in order]
            for size in (layout.head_size, layout.head_size_v)
        )
        self.num_steps = 0

    @classmethod
    def at_borders(cls, *subject: Any, **options: Any) -> Self:
        """Sequences of lengths ``CONTEXTS``; the arguments are those of the class."""
        scene = cls(*subject, **(AT_BORDERS | options))
        scene.is_ragged = True
        scene.blocks[WITHOUT_PAGE] = 0
        scene.step(CONTEXTS)
        return scene

    def part(self, row: int) -> slice:
        """The sequence's tokens in the last step."""
        return slice(*self.starts[row : row + 2])

    def advance(
        self,
        query_lens: list[int],
        skipped: Iterable[int] = (),
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        lengths: list[int] | None = None,
    ) -> None:
        """Store tokens after those that the sequences have, and with the reference in a
        copy of the cache.

        Args:
            query_lens: Number of new tokens of each sequence.
            skipped: The step's tokens that have slot -1.
            key: K, (T, H, D); None for random numbers, as views of one tensor.
            value: V, likewise.
            lengths: Lengths of the sequences after the step; None: the old lengths
                plus the new tokens. Without a length, queries, K and V become NaN.

        """
        self.num_steps += 1
        self.query_lens, self.starts = query_lens, [0, *accumulate(query_lens)]
        # Two rows of padding, of which one has a slot.
        sizes = self.layout.head_size, self.layout.head_size_v
        shape = (self.starts[-1] + 2, sum(self.heads), max(sizes))
        qkv = gaussian(*shape, dtype=self.dtype, seed=self.num_steps)
        split = zip(qkv.split(self.heads, 1), (sizes[0], *sizes))
        self.query, self.key, self.value = (x[..., :size] for x, size in split)
        if key is not None:
            self.key, self.value = key, value
        slots = []
        for row, count in enumerate(query_lens):
            ends = self.lengths[row], self.lengths[row] + count
            slots.append(slots_of(self.block_table[row], *ends, self.block_size))
            self.keys[row][slice(*ends)] = self.key[self.part(row)]
            self.values[row][slice(*ends)] = self.value[self.part(row)]
            self.lengths[row] = ends[1]
        slot_mapping = torch.cat([*slots, torch.full((1,), -1, device=DEVICE)])
        slot_mapping[list(skipped)] = -1
        self.lengths = lengths or self.lengths
        seq_lens, starts = ints(self.lengths), ints(self.starts)
        offset = None
        if self.offset is not None:
            offset = KeyOffset(self.offset, seq_lens, starts)
        copy, self.tails = self.cache.clone(), []
        for cache, store in ((self.cache, self.store), (copy, TORCH)):
            packed_lens = ints([-7] * (len(self.lengths) + 1))
            tail = Tail(cache, self.blocks, packed_lens, self.format, self.num_tokens)
            self.tails.append(tail)
            update = TailUpdate(tail, self.block_table, seq_lens, starts)
            call = StoreCall(cache, slot_mapping, self.key, self.value, self.layout)
            store.launch(call._replace(key_offset=offset, tail=update))
        for row, length in enumerate(self.lengths):
            if length <= 0:
                qkv[self.part(row)] = math.nan

    def step(self, *tokens: Any, **options: Any) -> list[int]:
        """``advance``, and compare all bytes and lengths to the reference's.

        Returns:
            Number of tokens of each sequence's tail that count.

        """
        self.advance(*tokens, **options)
        own, expected = (tail.packed_lens.tolist() for tail in self.tails)
        assert torch.equal(*(tail.pages for tail in self.tails))
        assert own == expected
        assert own[-1] == -7
        return [a - b for a, b in zip(self.lengths, own)]

    def rows(self, row: int) -> list[torch.Tensor]:
        """The planes of a sequence's page."""
        return planes(self.cache[int(self.blocks[row])], self.format)

    def tail_rows(self, row: int, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """K without its offset, and V, of a sequence's rows in the tail."""
        positions = torch.arange(first, last, device=DEVICE)
        return load_tail(self.tails[0], row, positions)
