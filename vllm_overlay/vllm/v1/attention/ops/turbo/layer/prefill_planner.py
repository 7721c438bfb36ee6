# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Plans the prefills of layers that share a step's plan, if they read the same tokens
from the cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.layer.runner import TurboRunner
from vllm.v1.attention.ops.turbo.planning.prefill import (
    LocalLensFn,
    PrefillLimits,
    plan_prefill,
    prefill_limits,
)
from vllm.v1.attention.ops.turbo.planning.prefill_plan import PrefillPlan
from vllm.v1.attention.ops.turbo.planning.spans import Span, plan_spans


class PrefillPlanner(NamedTuple):
    """Plans the prefills of some layers.

    Attributes:
        stored: Whether query tokens, too, are read from the cache.
        limits: The bounds of the scratch of layers without a sliding window; None if
            all have one.
        window_tokens: By sliding window, the tokens that may be seen at a time.
        device: Where the kernels run.
        local_lens: How many of sequences' first tokens this rank has, where ranks share
            them; None where they do not.

    """

    stored: bool
    limits: PrefillLimits | None
    window_tokens: dict[int, int]
    device: torch.device
    local_lens: LocalLensFn | None = None

    @staticmethod
    def of_layers(
        runners: Sequence[TurboRunner], stored: bool, device: torch.device
    ) -> "PrefillPlanner | None":
        """The planner of some layers; None of none.

        Args:
            runners: The layers'.
            stored: Whether they read query tokens, too, from the cache.
            device: Where the kernels run.

        """
        if not runners:
            return None
        # Not by the spec: without the hybrid cache manager layers with a window and
        # without are in one group.
        full = [runner for runner in runners if runner.sliding_window is None]
        limits = None
        if full:
            limits = prefill_limits(
                max(
                    (runner.context_shape for runner in full), key=lambda x: x.num_heads
                ),
                stored,
                any(runner.key_offset is not None for runner in full),
            )
        window_tokens = {
            runner.sliding_window: runner.prefill_limits.piece_tokens
            for runner in runners
            if runner.sliding_window is not None
        }
        shared = runners[0].context_parallel
        local_lens = None if shared is None else shared.local_lens
        return PrefillPlanner(stored, limits, window_tokens, device, local_lens)

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        spans: list[Span],
    ) -> tuple[int, PrefillPlan]:
        """Plan R requests that lie side by side in a batch.

        Args:
            query_start_loc: (R + 1,) int32 on the host, places in the batch.
            seq_lens: (R,) int32 on the host, exact.
            block_table: (R, max_blocks) int32 on the device.
            spans: Theirs, by places among the R requests and in the batch.

        Returns:
            The place of their first token, and the plan.

        """
        begin = int(query_start_loc[0])
        plan = plan_prefill(
            query_start_loc - begin,
            seq_lens,
            block_table,
            self.stored,
            self.limits,
            self.device,
            self.window_tokens,
            self.local_lens,
        )
        spans = [x._replace(begin=x.begin - begin, end=x.end - begin) for x in spans]
        plan.spans = plan_spans(spans, plan, block_table, self.stored, self.device)
        return begin, plan
