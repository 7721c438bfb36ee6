# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ranks that share sequences, in one process. They are threads that run one at a time,
and wait for each other where ranks communicate.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.turbo_attn import TurboMetadata
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.interface import StoreCall
from vllm.v1.attention.ops.turbo.layer.kernels import KernelSet

from .attention_utils import check_request
from .backend_utils import (
    BLOCK_SIZE,
    make_builder,
    make_impl,
    make_vllm_config,
    rounds_queries,
    set_path,
    with_drafts,
)
from .batch_utils import make_common, pad_to_graph
from .utils import (
    DEVICE,
    FP16,
    gaussian,
    load_context,
    make_block_table,
    new_cache,
    num_blocks_for,
)

Result = TypeVar("Result")
# Query heads of a rank.
NUM_HEADS = 2


class Ranks:
    """A few ranks, and the tensors that each has brought to a collective.

    Attributes:
        size: Number of ranks.

    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Triton's interpreter is not safe for threads.
        self._turn = threading.Lock()
        self._all_are_here = threading.Barrier(size)
        self._brought: list[torch.Tensor | None] = [None] * size

    def run(self, function: Callable[[int], Result]) -> list[Result]:
        """Run a function on all ranks, given the rank's number; results by rank."""
        results: list[Result] = []
        errors: list[Exception] = []

        def work(rank: int) -> None:
            with self._turn:
                try:
                    found[rank] = function(rank)
                except Exception as error:  # noqa: BLE001
                    errors.append(error)
                    self._all_are_here.abort()

        found: dict[int, Result] = {}
        threads = [
            threading.Thread(target=work, args=(rank,)) for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = [x for x in errors if not isinstance(x, threading.BrokenBarrierError)]
        for error in first or errors:
            raise error
        results += (found[rank] for rank in range(self.size))
        return results

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Bring a tensor as one of the ranks; return the tensors of all.

        All ranks must bring the same shape and dtype. On GPUs they would otherwise
        wait for ever, or read memory that was not written.
        """
        self._brought[rank] = tensor.clone()
        with self._waiting():
            self._all_are_here.wait()
        found = [x for x in self._brought if x is not None]
        assert {(x.shape, x.dtype) for x in found} == {(tensor.shape, tensor.dtype)}
        with self._waiting():
            self._all_are_here.wait()
        return found

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()


class RankGroup:
    """The part of a ``GroupCoordinator`` that turbo uses, as one rank sees it.

    Attributes:
        world_size: Number of ranks.
        rank: This rank's number.
        rank_in_group: The same number.
        is_first_rank: Whether the number is 0.
        num_collectives: Number of collectives so far.

    """

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks = ranks
        self.world_size = ranks.size
        self.rank = self.rank_in_group = rank
        self.is_first_rank = rank == 0
        self.device_group = self
        self.num_collectives = 0

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.num_collectives += 1
        return self.ranks.exchange(self.rank_in_group, x)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [y.chunk(self.world_size, dim) for y in self._exchange(x)]
        return sum(part[self.rank_in_group] for part in parts).to(x.dtype)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """As ``torch.distributed.all_to_all_single``, for tensors with one axis."""
        parts = [y.chunk(self.world_size) for y in self._exchange(sent)]
        received.copy_(torch.cat([part[self.rank_in_group] for part in parts]))


class Rank:
    """One of the ranks: its layer, and its share of the requests.

    Attributes:
        impl: The layer's implementation.
        cache: (num_blocks, 1, N, C) uint8.
        table: (R, max_blocks) int32, blocks of its share.

    """

    def __init__(
        self,
        config: VllmConfig,
        group: RankGroup,
        requests: list[tuple[int, int]],
        head_size: int,
        monkeypatch: pytest.MonkeyPatch,
        **options: Any,
    ) -> None:
        self.group, self.config, self.requests = group, config, requests
        self.interleave = config.parallel_config.cp_kv_cache_interleave_size
        with monkeypatch.context() as patch:
            patch.setattr(parallel_state, "_DCP", group)
            options |= dict(head_size=head_size, scale=head_size**-0.5)
            self.impl = make_impl(config, NUM_HEADS, 1, **options)
        assert self.impl.dcp_world_size == group.world_size
        assert self.impl.need_to_return_lse_for_decode
        layout = self.impl.runner.layout
        longest = [sum(request) for request in requests]
        self.table = make_block_table(longest, BLOCK_SIZE)
        num_blocks = num_blocks_for(longest, BLOCK_SIZE)
        self.cache = new_cache(layout, num_blocks, 1, BLOCK_SIZE)

    def slots(self, row: int, first: int, last: int) -> torch.Tensor:
        """Slots of a request's positions, as the model runner computes them.

        They are int64, and -1 for positions of other ranks.
        """
        positions = torch.arange(first, last, device=DEVICE)
        stripe, size = self.interleave * self.group.world_size, self.interleave
        place = positions // stripe * size + positions % size
        blocks = self.table[row, place // BLOCK_SIZE].long()
        slots = blocks * BLOCK_SIZE + place % BLOCK_SIZE
        is_own = positions // size % self.group.world_size == self.group.rank_in_group
        return torch.where(is_own, slots, -1)

    def common(
        self, padded_reqs: int = 0, padded_query_len: int = 0
    ) -> CommonAttentionMetadata:
        query_lens = [query for query, _ in self.requests]
        slots = [self.slots(i, c, q + c) for i, (q, c) in enumerate(self.requests)]
        lens = [sum(request) for request in self.requests]
        common = make_common(query_lens, lens, self.table, torch.cat(slots))
        num_reqs = len(query_lens) + padded_reqs
        return pad_to_graph(common, num_reqs, sum(query_lens), padded_query_len)

    def build(self, common: CommonAttentionMetadata | None = None) -> TurboMetadata:
        builder = make_builder(self.config, self.impl)
        assert not builder.supports_draft_decode_metadata_update
        return builder.build(0, common or self.common())


class SharedRequests:
    """Requests that ranks share.

    Attributes:
        key: K of each request, (context + query length, 1, D).
        value: V of each request, likewise.
        query: (T, Hq, D), the query heads of all ranks.

    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        requests: list[tuple[int, int]],
        num_ranks: int = 2,
        interleave: int = 1,
        name: str = "turbo4",
        head_size: int = 64,
        dtype: torch.dtype = FP16,
        num_drafts: int = 2,
        comm_backend: str = "ag_rs",
        sinks: torch.Tensor | None = None,
        logits_soft_cap: float | None = None,
    ) -> None:
        self.requests, self.num_ranks, self.dtype = requests, num_ranks, dtype
        self.options = {"logits_soft_cap": logits_soft_cap}
        if sinks is not None:
            self.options["sinks"] = sinks
        num_heads = num_ranks * NUM_HEADS
        self.query = gaussian(
            sum(query for query, _ in requests), num_heads, head_size, dtype=dtype
        )
        self.key, self.value = (
            [
                gaussian(sum(request), 1, head_size, dtype=dtype, seed=2 * row + seed)
                for row, request in enumerate(requests)
            ]
            for seed in (1, 2)
        )
        self.others = Ranks(num_ranks)
        self.ranks = []
        for index in range(num_ranks):
            config = with_drafts(make_vllm_config(folder, name, dtype), num_drafts)
            parallel = config.parallel_config
            parallel.decode_context_parallel_size = num_ranks
            parallel.cp_kv_cache_interleave_size = interleave
            parallel.dcp_comm_backend = comm_backend
            own = slice(index * NUM_HEADS, (index + 1) * NUM_HEADS)
            rank = Rank(
                config,
                RankGroup(self.others, index),
                requests,
                head_size,
                monkeypatch,
                sinks=None if sinks is None else sinks[own].contiguous(),
                logits_soft_cap=logits_soft_cap,
            )
            layout = rank.impl.runner.layout
            for row, (_, context) in enumerate(requests):
                reference.store(
                    StoreCall(
                        rank.cache,
                        rank.slots(row, 0, context),
                        self.key[row][:context],
                        self.value[row][:context],
                        layout,
                    )
                )
            self.ranks.append(rank)

    def run(self, path: str, kernels: KernelSet | None = None) -> torch.Tensor:
        """The output of all ranks' query heads, (T, Hq, D)."""
        ends = [context for _, context in self.requests]
        key, value = (
            torch.cat([x[end:] for x, end in zip(tensors, ends)])
            for tensors in (self.key, self.value)
        )
        for rank in self.ranks:
            set_path(rank.impl, path)
            if kernels is not None:
                rank.impl.runner.kernels = kernels
                rank.impl.runner.num_sms = 4
        metadata = [rank.build() for rank in self.ranks]

        def forward(index: int) -> torch.Tensor:
            rank = self.ranks[index]
            query = self.query.chunk(self.num_ranks, 1)[index]
            output = torch.full_like(query, 7, memory_format=torch.contiguous_format)
            return rank.impl.forward(
                None, query, key, value, rank.cache, metadata[index], output
            )

        return torch.cat(self.others.run(forward), 1)

    def context(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised K and V of a request's context, put together from all ranks."""
        length = self.requests[row][1]
        key, value = (
            torch.zeros(length, *x.shape[1:], device=DEVICE)
            for x in (self.key[row], self.value[row])
        )
        for rank in self.ranks:
            is_own = rank.slots(row, 0, length) >= 0
            count = int(is_own.sum())
            layout = rank.impl.runner.layout
            own = load_context(rank.cache, rank.table[row], count, layout)
            key[is_own], value[is_own] = own
        return key, value

    def check(self, output: torch.Tensor) -> None:
        """Compare each request to attention over all its tokens."""
        begin, scale = 0, self.query.shape[2] ** -0.5
        lens = [num_queries for num_queries, _ in self.requests]
        runner = self.ranks[0].impl.runner
        decodes = list(takewhile(lambda n: n <= runner.max_query_len, lens))
        is_rounded = rounds_queries(runner, decodes)
        for row, (num_queries, context) in enumerate(self.requests):
            part = slice(begin, begin + num_queries)
            begin = part.stop
            key, value = self.context(row)
            key = torch.cat([key, self.key[row][context:].float()])
            value = torch.cat([value, self.value[row][context:].float()])
            is_own = is_rounded and row < len(decodes)
            check_request(
                output[part],
                self.query[part],
                key,
                value,
                scale,
                self.dtype,
                num_queries if is_own else None,
                is_rounded,
                **self.options,
            )
