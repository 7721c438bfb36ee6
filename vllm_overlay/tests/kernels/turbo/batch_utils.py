# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Batches as the model runner hands them over, and checks of their outputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.turbo_attn import TurboAttentionImpl, TurboMetadata
from vllm.v1.attention.ops.turbo import interface

from .attention_utils import check_request
from .backend_utils import BLOCK_SIZE, make_builder, rounds_queries
from .utils import (
    DEVICE,
    fill_cache,
    gaussian,
    load_context,
    make_block_table,
    new_cache,
    num_blocks_for,
    slots_of,
)

# Rows of padding after the batch's tokens.
PADDING = 3

# (query length, context length) of each request, decodes first.
BATCHES = {
    "decodes": [(1, 31), (1, 32), (1, 0), (1, 95)],
    "first chunks": [(33, 0), (2, 0)],
    "prefix hits": [(5, 64), (2, 33)],
    "mixed": [(1, 40), (1, 64), (20, 0), (3, 65), (4, 31)],
    # A first chunk as long as the longest sequence, beside requests with context.
    "long first chunk": [(1, 9), (66, 0), (2, 64), (3, 33)],
    "context of several pieces": [(1, 5), (2, 150), (10, 140)],
}
# Decodes, and prefills after several pieces of context, after few tokens, and alone.
VARIED = [(1, 0), (1, 40), (1, 130), (20, 150), (5, 14), (33, 0)]
# Requests with up to two drafts.
RAGGED_DRAFTS = [(3, 31), (1, 130), (2, 15), (3, 0), (7, 64)]
all_batches = pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)


def make_common(
    query_lens: list[int],
    seq_lens: list[int],
    block_table: torch.Tensor,
    slots: torch.Tensor,
) -> CommonAttentionMetadata:
    """The model runner's metadata of a batch.

    Args:
        query_lens: Query length of each request, R of them.
        seq_lens: Length of each sequence, query included; the host's bounds are exact.
        block_table: (R, max_blocks) int32.
        slots: (T,) int64, of all query tokens and of padding.

    """
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(DEVICE, copy=True),
        num_reqs=len(query_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=block_table,
        slot_mapping=slots,
        seq_lens_cpu_upper_bound=lens,
    )


def pad_to_graph(
    common: CommonAttentionMetadata, num_reqs: int, num_tokens: int, query_len: int = 0
) -> CommonAttentionMetadata:
    """Pad a batch as for a CUDA graph of more requests and tokens.

    Padded requests have ``query_len`` query tokens, no sequence, and zeros as blocks.
    Slots stay as they are.
    """
    count = num_reqs - common.num_reqs
    starts = common.query_start_loc_cpu
    padding = starts[-1] + query_len * torch.arange(1, count + 1)
    starts = torch.cat([starts, padding]).int()
    lens = nn.functional.pad(common.seq_lens_cpu_upper_bound, (0, count))
    return common.replace(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=nn.functional.pad(common.seq_lens, (0, count)),
        seq_lens_cpu_upper_bound=lens,
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        block_table_tensor=nn.functional.pad(
            common.block_table_tensor, (0, 0, 0, count)
        ),
    )


# By request: first and last positions of ranges whose tokens see each other.
Ranges: TypeAlias = dict[int, list[tuple[int, int]]]


@dataclass
class Batch:
    """A batch as the model runner hands it over, its context in the cache.

    Attributes:
        cache: (num_blocks, H, N, C) uint8.
        table: (R, max_blocks) int32, the blocks of all tokens.
        common: The runner's metadata of the batch.
        query: (T, Hq, D), with ``PADDING`` rows of padding at the end.
        key: (T, H, D), padded likewise.
        value: (T, H, D), padded likewise.
        requests: Query length and context length of each request.

    """

    cache: torch.Tensor
    table: torch.Tensor
    common: CommonAttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    requests: list[tuple[int, int]]

    @staticmethod
    def make(
        impl: TurboAttentionImpl,
        requests: list[tuple[int, int]],
        block_size: int = BLOCK_SIZE,
    ) -> "Batch":
        dtype = impl.runner.shape.dtype
        contexts = [context for _, context in requests]
        seq_lens = [query + context for query, context in requests]
        num_blocks = num_blocks_for(seq_lens, block_size)
        cache = new_cache(impl.runner.layout, num_blocks, impl.num_kv_heads, block_size)
        table = make_block_table(seq_lens, block_size)
        fill_cache(cache, table, contexts, impl.runner.layout, dtype)
        slots = [
            slots_of(table[row], context, seq_lens[row], block_size)
            for row, context in enumerate(contexts)
        ]
        slots.append(torch.full((PADDING,), -1, device=DEVICE))
        query_lens = [query for query, _ in requests]
        common = make_common(query_lens, seq_lens, table, torch.cat(slots))
        size, size_v = impl.head_size, impl.runner.layout.head_size_v
        rows = (
            (impl.num_heads, size),
            (impl.num_kv_heads, size),
            (impl.num_kv_heads, size_v),
        )
        vectors = [
            gaussian(len(common.slot_mapping), *row, dtype=dtype, seed=i)
            for i, row in enumerate(rows, 1)
        ]
        return Batch(cache, table, common, *vectors, requests)

    def free_hidden_blocks(self, sliding_window: int) -> None:
        """Replace blocks that no query token sees in the runner's table by another one.

        vLLM replaces them by block 0, which may hold any bytes; this block holds 0xFF.
        """
        block_size = self.cache.shape[2]
        (unused, *_) = set(range(len(self.cache))) - set(self.table.flatten().tolist())
        self.cache[unused] = 0xFF
        seen = self.table.clone()
        for row, (_, context) in enumerate(self.requests):
            first = max(context + 1 - sliding_window, 0)
            seen[row, : first // block_size] = unused
        self.common.block_table_tensor = seen

    def build(self, config: VllmConfig, impl: TurboAttentionImpl) -> TurboMetadata:
        """The metadata that a new builder of the layer makes of the batch."""
        return make_builder(config, impl).build(0, self.common)

    def run(
        self,
        impl: TurboAttentionImpl,
        metadata: TurboMetadata,
        path: str | None = None,
    ) -> torch.Tensor:
        """The output of a forward pass, (T, Hq, D); path "torch" takes no kernels.

        Padded rows must stay as they were.
        """
        num_tokens = self.common.num_actual_tokens
        q, k, v = (x[:num_tokens] for x in (self.query, self.key, self.value))
        if impl.runner.shares_cache:
            k = v = None
        size_v = impl.runner.layout.head_size_v
        output = self.query.new_full((*self.query.shape[:2], size_v), 7)
        kernels = impl.runner.kernels
        if path == "torch":
            impl.runner.kernels = None
        impl.forward(None, q, k, v, self.cache, metadata, output)
        impl.runner.kernels = kernels
        assert (output[num_tokens:] == 7).all()
        return output[:num_tokens]

    def serve(self, impl: TurboAttentionImpl, metadata: TurboMetadata) -> torch.Tensor:
        """Run a forward pass and check its output, which is returned."""
        output = self.run(impl, metadata)
        self.check(impl, output, self.common.mm_req_doc_ranges)
        return output

    def check_padded(self, impl: TurboAttentionImpl, metadata: TurboMetadata) -> None:
        """Run a forward pass of all rows; the rows of padding must be zero."""
        output = torch.full_like(self.query, 7)
        impl.forward(
            None, self.query, self.key, self.value, self.cache, metadata, output
        )
        num_tokens = self.common.num_actual_tokens
        assert (output[num_tokens:] == 0).all()
        self.check(impl, output[:num_tokens])

    def hide_drafts(self, num_decodes: int) -> CommonAttentionMetadata:
        """The metadata of a host that knows only upper bounds of decodes' lengths."""
        upper_bound = self.common.seq_lens_cpu_upper_bound.clone()
        upper_bound[:num_decodes] += 7
        return self.common.replace(seq_lens_cpu_upper_bound=upper_bound)

    def check_fails_without(
        self, impl: TurboAttentionImpl, output: torch.Tensor, rule: str
    ) -> None:
        """Check that the check tells a rule, a field of ``Scoring``, or the ranges."""
        with pytest.MonkeyPatch.context() as patch:
            ranges = self.common.mm_req_doc_ranges
            if rule == "ranges":
                ranges = None
            else:
                without = impl.runner.scoring._replace(**{rule: None})
                patch.setattr(impl.runner, "scoring", without)
            with pytest.raises(AssertionError, match="allowed"):
                self.check(impl, output, ranges)

    def check(
        self,
        impl: TurboAttentionImpl,
        output: torch.Tensor,
        ranges: Ranges | None = None,
    ) -> None:
        """Compare each request to attention over the tokens that it should see, later
        tokens of the ranges included.

        Decode kernels rotate q in block fixed point, and CUDA's round it to int8 where
        ``rounds_queries`` says so. The target is attention from q rounded like this.
        The last offset is taken off all keys, so that the reference has no large
        scores: a softmax does not depend on it. With sinks it does, and the offset
        stays.
        """
        scoring = impl.runner.scoring
        offset = scoring.key_offset
        without = torch.zeros(1) if offset is None else offset[-1]
        lens = [num_queries for num_queries, _ in self.requests]
        longer = (i for i, n in enumerate(lens) if n > impl.runner.max_query_len)
        num_decodes = next(longer, len(lens))
        is_rounded = rounds_queries(impl.runner, lens[:num_decodes])
        num_rotated = 0 if impl.runner.kernels is None else num_decodes
        begin = 0
        options: dict[str, Any] = {
            "sliding_window": scoring.sliding_window,
            "logits_soft_cap": scoring.soft_cap,
        }
        if scoring.sinks is not None:
            options["sinks"] = scoring.sinks
            without = torch.zeros_like(without)
        for row, (num_queries, context) in enumerate(self.requests):
            part = slice(begin, begin + num_queries)
            begin = part.stop
            raw = not impl.runner.stored
            length = context if raw else context + num_queries
            table = self.table[row]
            key, value = load_context(self.cache, table, length, impl.runner.layout)
            part_of_key = None
            if offset is not None:
                rows = interface.offset_rows(torch.arange(length), offset)
                shift = (offset - without)[rows]
                part_of_key = nn.functional.pad(
                    shift, (0, 0, 0, 0, 0, context + num_queries - length)
                )
                key += shift
            if raw:
                own = self.key[part].float()
                key = torch.cat([key, own - without.to(own.device)])
                value = torch.cat([value, self.value[part].float()])
            own_ranges = (ranges or {}).get(row, [])
            options["spans"] = [(first, last + 1) for first, last in own_ranges]
            # A range with one token of the step has no later token for a query.
            newest = context + num_queries - 1
            is_prefilled = row >= num_rotated or any(
                min(last, newest) > max(first, context) for first, last in own_ranges
            )
            num_raw = num_queries if raw else 0
            check_request(
                output[part],
                self.query[part],
                key,
                value,
                impl.scale,
                impl.runner.shape.dtype,
                None if is_prefilled else num_raw,
                is_rounded,
                part_of_key,
                **options,
            )


def check_requests(
    config: VllmConfig,
    impl: TurboAttentionImpl,
    requests: list[tuple[int, int]],
    ranges: Ranges | None = None,
    rule: str | None = None,
) -> TurboMetadata:
    """Serve requests in a new cache and check each one's output.

    Args:
        config: The engine's configuration.
        impl: The layer's implementation.
        requests: Query length and context length of each request.
        ranges: Ranges of tokens that see each other.
        rule: A rule without which the check must fail.

    Returns:
        The metadata that the builder made.

    """
    batch = Batch.make(impl, requests)
    batch.common.mm_req_doc_ranges = ranges
    window = impl.runner.scoring.sliding_window
    if window is not None:
        batch.free_hidden_blocks(window)
    metadata = batch.build(config, impl)
    output = batch.serve(impl, metadata)
    if rule is not None:
        batch.check_fails_without(impl, output, rule)
    return metadata


def requests_of_a_step(
    generator: torch.Generator, longest: int
) -> Iterator[tuple[int, int]]:
    """Query and context lengths of up to 8 extends, with 2048 query tokens at most."""
    left = 2048
    for _ in range(8):
        most = (longest, 40)[int(torch.randint(2, (), generator=generator))]
        length = int(torch.randint(2, most + 1, (), generator=generator))
        left -= length
        if left < 0:
            return
        yield length, 40
