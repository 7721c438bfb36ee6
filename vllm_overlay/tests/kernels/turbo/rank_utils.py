# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ranks that share sequences, in one process: threads that run one at a time, and wait
for each other where ranks communicate.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Ranks:
    """A few ranks, and what they have brought to a collective.

    Attributes:
        size: How many there are.

    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Triton's interpreter is for one thread.
        self._turn = threading.Lock()
        self._all_are_here = threading.Barrier(size)
        self._brought: list[torch.Tensor | None] = [None] * size

    def run(self, function: Callable[[int], Result]) -> list[Result]:
        """Run a function of a rank's number on all of them."""
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
        """What all ranks bring, by one of them, which brings this.

        Ranks have to bring as much: else they would wait for ever, or read what was
        not written.
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
    """The ranks as one of them has them: what is used of a ``GroupCoordinator``.

    Attributes:
        world_size: How many there are.
        rank_in_group: Which this is.
        num_collectives: How often it has waited for others.

    """

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks = ranks
        self.world_size = ranks.size
        self.rank_in_group = rank
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
        """As ``torch.distributed.all_to_all_single``, of tensors of one axis."""
        parts = [y.chunk(self.world_size) for y in self._exchange(sent)]
        received.copy_(torch.cat([part[self.rank_in_group] for part in parts]))
