# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode steps that run the CUDA kernels as the backend does, and expected results.

The CUDA store kernel fills the caches. Other tests check its bytes.
"""

import math
from typing import NamedTuple

import torch

from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.cuda import decode as cuda_decode
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import (
    DecodeBatch,
    Partials,
    RawTokens,
    RotatedQuery,
    StoreCall,
)

from .attention_utils import assert_within, attend_by
from .kernel_under_test import rounded_to_int8
from .sequences import NUM_KV_HEADS
from .utils import BF16, DEVICE, make_block_table, num_blocks_for, slots_of

BLOCK_SIZE = 32
# Tokens that the references dequantise at a time.
PIECE = 32768


class Scratch(NamedTuple):
    """The tensors that a step writes, filled with NaN before."""

    rotated_query: torch.Tensor
    query_scale: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor
    output: torch.Tensor

    @staticmethod
    def of(
        query: torch.Tensor, num_splits: int, dtype: torch.dtype = BF16
    ) -> "Scratch":
        num_seqs, num_heads, head_size = query.shape

        def rows(count: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
            return torch.full((count, *shape), math.nan, dtype=dtype, device=DEVICE)

        return Scratch(
            rows(num_seqs, num_heads, head_size, dtype=torch.float16),
            rows(num_seqs, num_heads),
            rows(num_seqs * num_splits, num_heads, head_size),
            rows(num_seqs * num_splits, num_heads),
            rows(num_seqs, num_heads, head_size, dtype=dtype),
        )

    @property
    def rotated(self) -> RotatedQuery:
        return RotatedQuery(self.rotated_query, self.query_scale)

    @property
    def partials(self) -> Partials:
        return Partials(self.partial, self.partial_lse)


class Step(NamedTuple):
    """The inputs of a layer's decode step.

    Attributes:
        query: (B, Hq, D).
        key: (B, H, D), K of the query tokens.
        value: (B, H, D), V of the query tokens.
        slots: (B,) int64, slots of the query tokens; -1: not stored.
        block_table: (B, max_blocks) int32.
        seq_lens: (B,) int32, the query tokens included.

    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def batch(self) -> DecodeBatch:
        """The batch of one query token a sequence, for attention."""
        return DecodeBatch(len(self.query), self.block_table, self.seq_lens)

    def store(
        self,
        cache: torch.Tensor,
        layout: TurboFormat,
        scratch: Scratch,
        enable_pdl: bool = True,
    ) -> None:
        """Store the query tokens, and rotate the queries."""
        cuda_store.store(
            StoreCall(
                cache,
                self.slots,
                self.key,
                self.value,
                layout,
                self.query,
                scratch.rotated,
                layout.head_size**-0.5,
            ),
            enable_pdl=enable_pdl,
        )

    def run(
        self,
        cache: torch.Tensor,
        layout: TurboFormat,
        scratch: Scratch,
        with_raw: bool = False,
        sliding_window: int | None = None,
        enable_pdl: bool = True,
    ) -> torch.Tensor:
        """Store, attend and merge, as the backend does."""
        self.store(cache, layout, scratch, enable_pdl)
        scale = layout.head_size**-0.5
        raw = RawTokens(self.query, self.key, self.value, scale)
        attend_by(
            cuda_decode.decode_attention,
            scratch.rotated,
            cache,
            layout,
            self.batch,
            scratch.partials,
            scratch.output,
            raw if with_raw else None,
            sliding_window=sliding_window,
            enable_pdl=enable_pdl,
        )
        return scratch.output

    def output(
        self,
        cache: torch.Tensor,
        layout: TurboFormat,
        num_splits: int,
        with_raw: bool = False,
        dtype: torch.dtype = BF16,
    ) -> torch.Tensor:
        """The output of ``run`` in scratch of its own."""
        scratch = Scratch.of(self.query, num_splits, dtype)
        return self.run(cache, layout, scratch, with_raw)


def normal(*shape: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Standard normal numbers, made on the device because there are many."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


def served_splits(num_seqs: int) -> int:
    num_sms = num_compute_units(torch.accelerator.current_device_index())
    return cuda_decode.num_kv_splits(num_seqs, NUM_KV_HEADS, num_sms)


def new_cache(layout: TurboFormat, num_blocks: int) -> torch.Tensor:
    """Pages full of 0xFF, as if something else had used them before."""
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, layout.slot_size)
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)


def fill(
    cache: torch.Tensor,
    block_table_row: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TurboFormat,
) -> None:
    """Store K and V of a sequence, each (T, H, D), with the kernel."""
    slots = slots_of(block_table_row, 0, key.shape[0], BLOCK_SIZE)
    cuda_store.store(StoreCall(cache, slots, key, value, layout))


def stored(
    cache: torch.Tensor,
    block_table_row: torch.Tensor,
    first: int,
    last: int,
    layout: TurboFormat,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, each (last - first, H, D) fp32 in rotated space, of a sequence."""
    slots = slots_of(block_table_row, first, last, BLOCK_SIZE)
    return reference.load(cache, slots, layout)


def random_sequences(
    layout: TurboFormat, seq_lens: list[int], group: int = 4
) -> tuple[torch.Tensor, Step]:
    """A cache with Gaussian K and V of every sequence, and a step that stores none."""
    size = layout.head_size
    table = make_block_table(seq_lens, BLOCK_SIZE)
    cache = new_cache(layout, num_blocks_for(seq_lens, BLOCK_SIZE))
    for row, length in enumerate(seq_lens):
        shape = (length, NUM_KV_HEADS, size)
        key, value = (normal(*shape, seed=2 * row + side) for side in (0, 1))
        fill(cache, table[row], key, value, layout)
    return cache, step_of(layout, table, seq_lens, group)


def step_of(
    layout: TurboFormat, table: torch.Tensor, seq_lens: list[int], group: int = 4
) -> Step:
    """A step with Gaussian queries, whose query tokens are stored already."""
    num_seqs = len(seq_lens)
    kv_shape = (num_seqs, NUM_KV_HEADS, layout.head_size)
    return Step(
        normal(num_seqs, group * NUM_KV_HEADS, layout.head_size, seed=1000),
        normal(*kv_shape, seed=1001),
        normal(*kv_shape, seed=1002),
        torch.full((num_seqs,), -1, device=DEVICE),
        table,
        torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
    )


def rows_of(step: Step, rows: list[int]) -> Step:
    return Step(*(x[rows] for x in step))


def attend_in_pieces(
    queries: torch.Tensor,
    cache: torch.Tensor,
    block_table_row: torch.Tensor,
    length: int,
    layout: TurboFormat,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of queries (Q, Hq, D) to all tokens of a sequence, (Q, Hq, D) fp32.

    Scores, weights and sums of a piece of ``PIECE`` tokens are in ``dtype``.
    """
    outputs, lses = [], []
    for first in range(0, length, PIECE):
        last = min(first + PIECE, length)
        keys, values = stored(cache, block_table_row, first, last, layout)
        keys = reference.inverse_rotate(keys) * layout.key_codebook.gain
        values = reference.inverse_rotate(values)
        output, lse = reference.attention(
            queries.to(dtype),
            keys.to(dtype),
            values.to(dtype),
            layout.head_size**-0.5,
            causal=False,
        )
        outputs.append(output.float())
        lses.append(lse)
    weights = torch.stack(lses).softmax(0)[..., None]
    return (weights * torch.stack(outputs)).sum(0)


def check_row(
    output: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table_row: torch.Tensor,
    length: int,
    layout: TurboFormat,
) -> None:
    """Apply the 2x rule of ``utils`` to a sequence of any length.

    Args:
        output: (Hq, D).
        query: (Hq, D).
        cache: (num_blocks, H, N, C).
        block_table_row: (max_blocks,).
        length: Length of the sequence in tokens.
        layout: The cache's format.

    """
    where = cache, block_table_row, length, layout
    both = torch.stack([query.float(), rounded_to_int8(query)])
    exact, target = attend_in_pieces(both, *where)
    plain = attend_in_pieces(query[None], *where, dtype=query.dtype)[0].to(query.dtype)
    allowed = 2 * (plain.float() - exact).abs().max() + 2**-11 * exact.abs().max()
    assert_within(output, target, allowed, f"length {length}")


def rotated_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table_row: torch.Tensor,
    length: int,
    layout: TurboFormat,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention in rotated space, from queries (Hq, D) rounded as the kernel does.

    Returns:
        Scores (Hq, T), stored values (Hq, T, D) and outputs (Hq, D), all fp32 and
        rotated.

    """
    sides = stored(cache, block_table_row, 0, length, layout)
    group = query.shape[0] // NUM_KV_HEADS
    keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in sides)
    factor = layout.key_codebook.gain * layout.head_size**-0.5
    queries = reference.round_query(reference.rotate(query)) * factor
    scores = (keys @ queries[..., None])[..., 0]
    return scores, values, (scores.softmax(-1)[:, None] @ values)[:, 0]


def assert_close_in_rotated_space(
    output: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor
) -> None:
    """Compare fp32 outputs in rotated space, where a value's error stays in its
    coordinate.

    Args:
        output: (..., D) fp32, rotated back.
        expected: (..., D), in rotated space.
        magnitude: Weighted mean of the values' magnitudes. The rounding of fp16 weights
            and products is relative to it, except for denormal numbers.

    """
    size = output.shape[-1]
    matrix = rotation_matrix(size, output.device, torch.float64)
    rotated = output.double() @ matrix * size**-0.5
    # Rotating fp32 numbers back rounds them once more.
    largest = expected.abs().amax(-1, keepdim=True)
    allowed = 2.0**-9 * magnitude + 2.0**-18 * largest + 2.0**-22
    assert_within(rotated, expected, allowed)
