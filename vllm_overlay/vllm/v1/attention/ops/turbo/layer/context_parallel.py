# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode context parallelism: ranks with the same KV head share a sequence's tokens.

Each rank attends from the query heads of all ranks to its cached tokens, all of which
come before the step's tokens. The results are joined by their LSE in rotated space, and
each rank gets those of its own query heads. It then attends to the step's tokens, which
every rank has as computed, and to sinks.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


class ContextParallel:
    """The ranks that share a layer's sequences, from the view of one of them.

    Attributes:
        group: The group of these ranks.
        size: The number of ranks.
        rank: The index of this rank in the group.
        interleave_size: Consecutive tokens that one rank has.

    """

    def __init__(
        self,
        group: "GroupCoordinator",
        interleave_size: int,
        reduce: Callable[..., Any] = cp_lse_ag_out_rs,
    ) -> None:
        self.group = group
        self.size = group.world_size
        self.rank = group.rank_in_group
        self.interleave_size = interleave_size
        self._reduce = reduce
        self._is_alone = False

    @staticmethod
    def of_config(vllm_config: VllmConfig) -> "ContextParallel":
        """The ``ContextParallel`` of this process."""
        parallel = vllm_config.parallel_config
        uses_a2a = parallel.dcp_comm_backend == "a2a"
        return ContextParallel(
            get_dcp_group(),
            parallel.cp_kv_cache_interleave_size,
            dcp_a2a_lse_reduce if uses_a2a else cp_lse_ag_out_rs,
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Act as if all ranks had the same data, and do not wait for other ranks."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def local_lens(self, lens: torch.Tensor) -> torch.Tensor:
        """This rank's share of the sequences' first ``lens`` tokens, int32."""
        return get_dcp_local_seq_lens(lens, self.size, self.rank, self.interleave_size)

    def local_seq_lens(
        self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> torch.Tensor:
        """This rank's share of R sequences' contexts plus all query tokens, (R,) int32.

        Args:
            seq_lens: (R,) int32, query tokens included; less than these for padding.
            query_start_loc: (R + 1,) int32, where sequences' query tokens begin.

        """
        query_lens = torch.minimum(query_start_loc.diff(), seq_lens)
        return self.local_lens(seq_lens - query_lens) + query_lens

    def gather(self, query: torch.Tensor) -> torch.Tensor:
        """Gather (T, Hq, D) of each rank to (T, size * Hq, D), contiguous."""
        if self._is_alone:
            return query.repeat(1, self.size, 1)
        return self.group.all_gather(query.contiguous(), dim=1)

    def gather_parts(
        self, output: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the ranks' results for this rank's query heads, not joined.

        It is for CPUs.

        Args:
            output: (T, size * Hq, D), contiguous.
            lse: (T, size * Hq), contiguous.

        Returns:
            (size, T, Hq, D) and (size, T, Hq).

        """
        num_heads = output.shape[1] // self.size
        heads = slice(self.rank * num_heads, (self.rank + 1) * num_heads)
        parts = (
            self.group.all_gather(x, dim=0).view(self.size, *x.shape)[:, :, heads]
            for x in (output, lse)
        )
        return next(parts), next(parts)

    def reduce(
        self, output: torch.Tensor, lse: torch.Tensor, is_lse_base_on_e: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the ranks' results for their shares of sequences.

        Args:
            output: (T, size * Hq, D), contiguous; may be overwritten. Not read where
                the LSE is infinite.
            lse: (T, size * Hq) fp32; infinite where this rank has no tokens.
            is_lse_base_on_e: Whether the LSE is natural, or in base 2.

        Returns:
            (T, Hq, D) and (T, Hq) of this rank's query heads, both contiguous.

        """
        if self._is_alone:
            num_heads = output.shape[1] // self.size
            return output[:, :num_heads].contiguous(), lse[:, :num_heads].contiguous()
        output, lse = self._reduce(
            output,
            lse,
            self.group,
            return_lse=True,
            is_lse_base_on_e=is_lse_base_on_e,
        )
        return output.contiguous(), lse.contiguous()

    def check(
        self, num_tokens: int, num_slots: int, shape: LayerShape, device: torch.device
    ) -> None:
        """Exchange data as a prefill and a decode do, and check the results.

        If vLLM's NCCL communicator cannot load the library, its calls do nothing, and
        the result of a collective is whatever was in memory.

        Args:
            num_tokens: Query tokens of the prefill.
            num_slots: Query slots of the decode.
            shape: The layer's shape, with this rank's query heads.
            device: The device of the tensors.

        Raises:
            RuntimeError: If the received data differ from the sent data.

        """
        numbers = torch.arange(1, self.size + 1, device=device).float()
        own = float(self.rank + 1)
        size = num_tokens, shape.num_heads, shape.head_size
        gathered = self.gather(torch.full(size, own, dtype=shape.dtype, device=device))
        senders = numbers.repeat_interleave(shape.num_heads)[:, None]
        # Comparing all tokens would take more memory than any step.
        ends = [0, -1]
        is_right = (gathered[ends] == senders).all()
        part = torch.empty(
            num_slots, self.size * shape.num_heads, shape.head_size_v, device=device
        )
        for output, is_natural in ((gathered, True), (part, False)):
            lse = torch.zeros(output.shape[:2], device=device)
            joined, joined_lse = self.reduce(output.fill_(own), lse, is_natural)
            log = math.log if is_natural else math.log2
            for found, wanted in (
                (joined, (self.size + 1) / 2),
                (joined_lse, log(self.size)),
            ):
                error = (found[ends].float() - wanted).abs()
                is_right &= (error <= 0.01 * wanted).all()
        if not is_right:
            raise RuntimeError(
                "ranks that share sequences (--decode-context-parallel-size) do not "
                "receive what others send. Check that NCCL is as new as vLLM needs: "
                "VLLM_NCCL_SO_PATH names another library, and --dcp-comm-backend a2a "
                "uses PyTorch's instead"
            )
