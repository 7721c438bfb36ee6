# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ranks that share sequences, in one process. They are threads that run one at a time,
and wait for each other where ranks communicate.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


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
