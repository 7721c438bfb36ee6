# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The decode step that ``benchmark_turbo_decode.py`` times, and turbo's arm.

``turbo_decode_peers.py`` has the other arms. Functions import vLLM, so that a missing
import ends only the arm that needs it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail

DTYPE = torch.bfloat16
# The block size of a tail: vLLM's default where there is a tail.
TAIL_BLOCK_SIZE = 64
# The number of layers whose pages lie side by side.
LAYERS_BESIDE = 8


@dataclass(frozen=True)
class Shape:
    """One decode batch, of sequences of the same or of several lengths.

    Attributes:
        groups: Pairs of a number of sequences and their length in tokens.

    """

    groups: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_size: int

    @staticmethod
    def parse(text: str) -> "Shape":
        """Read ``32x32768x32x8x128`` or ``1x131072+63x2048x32x8x128``."""
        *groups, last = [list(map(int, part.split("x"))) for part in text.split("+")]
        pairs = [(count, length) for count, length in (*groups, last[:2])]
        return Shape(tuple(pairs), *last[2:])

    def __str__(self) -> str:
        groups = "+".join(f"{count}x{length}" for count, length in self.groups)
        return f"{groups}x{self.num_heads}x{self.num_kv_heads}x{self.head_size}"

    @property
    def seq_lens(self) -> list[int]:
        return [length for count, length in self.groups for _ in range(count)]


class Sequences(ABC):
    """The pages of a step's B sequences, whose last Q tokens are new.

    Attributes:
        query_len: Q.
        block_table: (B, max_blocks) int32, blocks in random order, then zeros.
        seq_lens: (B,) int32, the last tokens included.
        slot_mapping: (B * Q,) int64, slots of the last tokens.

    """

    def __init__(
        self, seq_lens: list[int], block_size: int, device: str, query_len: int
    ) -> None:
        self.block_size, self.device, self.query_len = block_size, device, query_len
        self.max_seq_len = max(seq_lens)
        blocks = [-(-length // block_size) for length in seq_lens]
        self.num_blocks = sum(blocks)
        order = torch.randperm(self.num_blocks, device=device).int()
        self.block_table = torch.nn.utils.rnn.pad_sequence(
            order.split(blocks), batch_first=True
        )
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        last = [self.slots(i)[-query_len:] for i in range(len(seq_lens))]
        self.slot_mapping = torch.cat(last)

    @abstractmethod
    def tokens(self, count: int) -> tuple[torch.Tensor, ...]:
        """Random tokens, as an arm's ``write`` takes them."""

    def chunk(self, count: int) -> tuple[torch.Tensor, ...] | None:
        """Tokens and slots of a prompt's chunk; None if the cache is too small."""
        if not 0 < count <= self.num_blocks * self.block_size:
            return None
        return *self.tokens(count), torch.arange(count, device=self.device)

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, dtype=DTYPE, device=self.device)

    def query_start_loc(self) -> torch.Tensor:
        """The first query token of each sequence, (B + 1,) int32."""
        step, ends = self.query_len, len(self.seq_lens) * self.query_len + 1
        return torch.arange(0, ends, step, dtype=torch.int32, device=self.device)

    def slots(self, sequence: int) -> torch.Tensor:
        """Slots of a sequence's tokens, in order."""
        position = torch.arange(int(self.seq_lens[sequence]), device=self.device)
        block = self.block_table[sequence, position // self.block_size]
        return block.long() * self.block_size + position % self.block_size


class Batch(Sequences):
    """The tensors of a step, of B sequences' last Q tokens, that every arm gets.

    Attributes:
        query: (B * Q, Hq, D); ``key`` and ``value`` (B * Q, H, D).
        output: (B * Q, Hq, D).

    """

    def __init__(
        self,
        shape: Shape,
        seq_lens: list[int],
        block_size: int,
        device: str,
        query_len: int = 1,
    ) -> None:
        super().__init__(seq_lens, block_size, device, query_len)
        self.shape = shape
        num_tokens = len(seq_lens) * query_len
        self.query = self.random(num_tokens, shape.num_heads, shape.head_size)
        self.key, self.value = self.tokens(num_tokens)
        self.output = torch.full_like(self.query, float("nan"))

    def tokens(self, count: int) -> tuple[torch.Tensor, ...]:
        """Random keys and values, (count, H, D) each."""
        size = count, self.shape.num_kv_heads, self.shape.head_size
        return self.random(*size), self.random(*size)


class Arm(ABC):
    """One way to keep and read the KV cache.

    Attributes:
        cache: uint8 or bf16, (num_blocks, ...).
        token_bytes: Bytes of a token and KV head.
        relative_error: The gate's bound against unquantised K and V; None: the arm must
            attend exactly to its cache's dequantised content.
        sliding_window: The most tokens that a query token sees; None for all.

    """

    cache: torch.Tensor
    token_bytes: int
    relative_error: float | None = None
    sliding_window: int | None = None

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.scale = batch.shape.head_size**-0.5

    @abstractmethod
    def write(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store (T, H, D) keys and values."""

    def store(self) -> None:
        """Store the newest tokens."""
        batch = self.batch
        self.write(batch.key, batch.value, batch.slot_mapping)

    @abstractmethod
    def attention(self) -> None:
        """Attend, into ``batch.output``."""

    def held(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The dequantised ``key`` and ``value`` of the cache: fp32, on the host."""
        return key.cpu().float(), value.cpu().float()

    def exact(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attention from (1, Hq, D) queries to held K and V: fp32, on the host."""
        from vllm.v1.attention.ops.turbo.reference import attention

        return attention(
            query.float(), key, value, self.scale, sliding_window=self.sliding_window
        )[0]


def decode_in_passes(*args: Any, **options: Any) -> None:
    """Call ``cuda.decode.decode_attention`` with the kernel that all GPUs have."""
    from vllm.v1.attention.ops.turbo.cuda import decode, decode_wgmma

    with mock.patch.object(decode_wgmma, "SERVED", range(0)):
        decode.decode_attention(*args, **options)


def decode_by_extend(*args: Any, **options: Any) -> None:
    """Decode by the kernel that extends contexts on this GPU."""
    from vllm.v1.attention.ops.turbo.cuda import extend_mma

    extend_mma.extend_attention(*args, **options)


# Kernels of CUDA's that may decode in place of the one that serves.
OTHER_KERNELS = {"passes": decode_in_passes, "extend": decode_by_extend}


class TurboArm(Arm):
    """The turbo presets.

    Args:
        batch: The decode step.
        cache_dtype: The preset.
        kernels: A value of ``attention_config.turbo_kernel``.
        variant: Block of tokens, warps, stages and registers of Triton's kernel, and
            splits a sequence (0: as served); None: as served.
        cache: The cache of another arm, to share; None for a new one.
        has_key_offset: Whether an offset is taken off K. The cache then holds keys
            without it.
        has_direction: Whether errors of K are orthogonal to directions; only with an
            offset.
        has_tail: Whether there is a tail.
        sliding_window: The most tokens that a query token sees; None for all.
        cache_layout: vLLM's name of the layout of layers' pages. Pages of other layers
            may lie between this layer's pages, or between their heads.
        enable_pdl: Whether CUDA's kernels may begin before the previous one has ended.
        other_kernel: A name of ``OTHER_KERNELS``, which decodes in place of the kernel
            that serves; None for that one.

    """

    def __init__(
        self,
        batch: Batch,
        cache_dtype: str,
        kernels: str = "auto",
        variant: tuple[int, int, int, int, int] | None = None,
        cache: torch.Tensor | None = None,
        has_key_offset: bool = False,
        has_direction: bool = False,
        has_tail: bool = False,
        sliding_window: int | None = None,
        enable_pdl: bool = True,
        cache_layout: str = "LBHNC",
        other_kernel: str | None = None,
    ) -> None:
        from vllm.utils.platform_utils import num_compute_units
        from vllm.v1.attention.ops.turbo.choose import TurboSource, choose_kernels
        from vllm.v1.attention.ops.turbo.format import TurboFormat
        from vllm.v1.attention.ops.turbo.formats.tail_pages import TailUpdate
        from vllm.v1.attention.ops.turbo.interface import (
            DIRECTION_SEGMENT,
            OFFSET_SEGMENT,
            KeyOffset,
            Partials,
            QueryDirection,
            RotatedQuery,
            Variant,
        )

        super().__init__(batch)
        shape, device = batch.shape, batch.device
        self.layout = TurboFormat.from_cache_dtype(cache_dtype, shape.head_size)
        self.token_bytes = self.layout.slot_size
        self.cache = cache if cache is not None else self.make_pages(cache_layout)
        num_seqs, heads = len(batch.seq_lens), shape.num_heads
        group = heads // shape.num_kv_heads
        variant_of_layer = Variant(
            has_key_offset, has_tail, query_direction=has_direction
        )
        source = TurboSource(self.layout, group, variant=variant_of_layer)
        self.kernels = choose_kernels(kernels, source)
        self.offsets = self.step_offset = None
        self.directions = self.step_direction = None
        # By a sequence's number of tokens. Made before, as a graph cannot make them.
        self.chunk_tables: dict[int, dict[str, Any]] = {}
        if has_key_offset:
            num_offsets = 1 + -(-batch.max_seq_len // OFFSET_SEGMENT)
            heads_and_size = (shape.num_kv_heads, shape.head_size)
            # All arms have the same, so that they can be compared.
            generator = torch.Generator(device).manual_seed(0)
            self.offsets = torch.randn(
                num_offsets, *heads_and_size, device=device, generator=generator
            )
            starts = batch.query_start_loc()
            self.step_offset = KeyOffset(self.offsets, batch.seq_lens, starts)
        if has_direction:
            assert self.offsets is not None, "a direction without an offset"
            num_directions = -(-batch.max_seq_len // DIRECTION_SEGMENT)
            # Noise is about as long as the root of the head size.
            self.directions = torch.randn(
                num_directions, *heads_and_size, device=device, generator=generator
            ).half()
            self.step_direction = QueryDirection(
                self.directions, batch.seq_lens, starts
            )
        self.sliding_window = sliding_window
        self.tail = self.tail_update = None
        if has_tail:
            self.tail = self.make_tail()
            self.tail_update = TailUpdate(
                self.tail,
                batch.block_table,
                batch.seq_lens,
                batch.query_start_loc(),
            )
        self.other_kernel = other_kernel
        self.attend = self.kernels.decode_attention
        if other_kernel is not None:
            self.attend = OTHER_KERNELS[other_kernel]
        self.query_len = 1
        self.options: dict[str, Any] = {}
        self.store_options: dict[str, Any] = {}
        if not enable_pdl:
            self.options["enable_pdl"] = self.store_options["enable_pdl"] = False
        if variant:
            from vllm.v1.attention.ops.turbo.triton.decode import DecodeTuning

            self.options["tuning"] = DecodeTuning(*variant[:4])
        self.num_splits = variant[4] if variant else 0
        if self.num_splits == 0:
            units = 1 if device == "cpu" else num_compute_units()
            self.num_splits = self.kernels.num_decode_splits(
                num_seqs, shape.num_kv_heads, units, 1
            )
        self.rotated_query = RotatedQuery(
            torch.empty_like(batch.query, dtype=torch.float16),
            torch.empty(batch.query.shape[:2], device=device),
        )
        num_partials = num_seqs * self.num_splits
        self.partials = Partials(
            torch.empty(num_partials, heads, shape.head_size, device=device),
            torch.empty(num_partials, heads, device=device),
        )

    def make_pages(self, cache_layout: str) -> torch.Tensor:
        """The pages of one layer, (num_blocks, H, N, C)."""
        batch = self.batch
        heads, page = batch.shape.num_kv_heads, (batch.block_size, self.token_bytes)
        layers, blocks = LAYERS_BESIDE, batch.num_blocks
        sizes, layer_dim = {
            "LBHNC": ((1, blocks, heads), 0),
            "BLHNC": ((blocks, layers, heads), 1),
            "BHLNC": ((blocks, heads, layers), 2),
        }[cache_layout]
        # A recycled page may hold any bytes.
        pages = torch.full(
            (*sizes, *page), 0xFF, dtype=torch.uint8, device=batch.device
        )
        return pages.select(layer_dim, sizes[layer_dim] // 2)

    def make_tail(self) -> "Tail":
        """A tail of as many tokens as its pages have room for."""
        from vllm.v1.attention.ops.turbo.formats.tail import TailFormat
        from vllm.v1.attention.ops.turbo.formats.tail_pages import Tail

        batch, num_seqs = self.batch, len(self.batch.seq_lens)
        shape = num_seqs + 1, batch.shape.num_kv_heads, TAIL_BLOCK_SIZE
        tail_format = TailFormat(self.layout, TAIL_BLOCK_SIZE)
        blocks = torch.arange(1, num_seqs + 1, dtype=torch.int32, device=batch.device)
        return Tail(
            torch.zeros(
                *shape, self.token_bytes, dtype=torch.uint8, device=batch.device
            ),
            blocks,
            torch.zeros_like(blocks),
            tail_format,
            tail_format.num_rows - 1,
        )

    def fill_tail(self) -> None:
        """Store the tokens before the newest once more, to fill the tail."""
        if self.tail is None:
            return
        from vllm.v1.attention.ops.turbo.formats.tail_pages import TailUpdate
        from vllm.v1.attention.ops.turbo.interface import StoreCall

        batch, count = self.batch, self.tail.format.num_rows
        slots = [batch.slots(i)[-1 - count : -1] for i in range(len(batch.seq_lens))]
        bounds = [0, *accumulate(map(len, slots))]
        starts = torch.tensor(bounds, dtype=torch.int32).to(batch.device)
        heads = batch.shape.num_kv_heads, batch.shape.head_size
        key, value = batch.random(bounds[-1], *heads), batch.random(bounds[-1], *heads)
        lens = batch.seq_lens - 1
        update = TailUpdate(self.tail, batch.block_table, lens, starts)
        tokens = torch.cat(slots), key, value, self.layout
        self.kernels.store(StoreCall(self.cache, *tokens, tail=update))

    def write(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        from vllm.v1.attention.ops.turbo.interface import (
            KeyOffset,
            QueryDirection,
            StoreCall,
        )

        num_tokens = len(slots)
        if self.offsets is not None and num_tokens not in self.chunk_tables:
            bounds = torch.tensor([0, num_tokens], dtype=torch.int32).to(slots.device)
            places = bounds[1:], bounds
            tables: dict[str, Any] = {"key_offset": KeyOffset(self.offsets, *places)}
            if self.directions is not None:
                direction = QueryDirection(self.directions, *places)
                tables["query_direction"] = direction
            self.chunk_tables[num_tokens] = tables
        tokens = slots, key, value, self.layout
        tables = self.chunk_tables.get(num_tokens, {})
        self.kernels.store(StoreCall(self.cache, *tokens, **tables))

    def store(self) -> None:
        from vllm.v1.attention.ops.turbo.interface import StoreCall

        batch = self.batch
        call = StoreCall(
            self.cache,
            batch.slot_mapping,
            batch.key,
            batch.value,
            self.layout,
            batch.query,
            self.rotated_query,
            self.scale,
            self.step_offset,
            self.tail_update,
            self.step_direction,
        )
        self.kernels.store(call, **self.store_options)

    def attention(self) -> None:
        from vllm.v1.attention.ops.turbo.interface import (
            AttentionCall,
            DecodeBatch,
            RawTokens,
            Scoring,
        )

        batch = self.batch
        call = AttentionCall(
            self.cache,
            self.layout,
            DecodeBatch(
                len(batch.seq_lens),
                batch.block_table,
                batch.seq_lens,
                self.query_len,
            ),
            Scoring(self.scale, self.sliding_window, key_offset=self.offsets),
            batch.output,
            batch.query,
            RawTokens(batch.query, batch.key, batch.value, self.scale),
            self.tail,
        )
        self.attend(self.rotated_query, call, self.partials, **self.options)

    def held(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm.v1.attention.ops.turbo import reference
        from vllm.v1.attention.ops.turbo.interface import offset_rows

        pages = self.cache.cpu()
        rotated = reference.load(pages, slots.cpu(), self.layout)
        held_key, held_value = map(reference.inverse_rotate, rotated)
        held_key *= self.layout.key_codebook.gain
        if self.offsets is not None:
            rows = offset_rows(torch.arange(len(slots)), self.offsets)
            held_key += self.offsets.cpu()[rows]
        held_key[-1], held_value[-1] = key[-1].cpu(), value[-1].cpu()
        return held_key, held_value

    def rounds_queries(self) -> bool:
        from vllm.v1.attention.ops.turbo.cuda import decode
        from vllm.v1.attention.ops.turbo.interface import CUDA, Variant

        if self.kernels.name != CUDA or self.other_kernel is not None:
            return self.other_kernel == "passes"
        group = self.batch.shape.num_heads // self.batch.shape.num_kv_heads
        return decode.rounds_queries(
            self.layout,
            group,
            torch.device(self.batch.device),
            Variant(self.offsets is not None),
        )

    def exact(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attend from q in int8 if the kernel does, but from q to the newest token."""
        from vllm.v1.attention.ops.turbo import reference

        query = query.float()
        rounded = query
        if self.rounds_queries():
            rounded = reference.round_query(reference.rotate(query))
            rounded = reference.inverse_rotate(rounded)
        # Concatenated along D, so that each query meets its own keys.
        keys = torch.cat([key, torch.zeros_like(key)], -1)
        keys[-1] = keys[-1].roll(key.shape[-1], -1)
        queries = torch.cat([rounded, query], -1)
        return reference.attention(
            queries, keys, value, self.scale, sliding_window=self.sliding_window
        )[0]
