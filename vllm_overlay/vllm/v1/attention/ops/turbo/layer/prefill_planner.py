# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Plans the prefills of layers that share a step's plan.

These layers read the same tokens from the cache.
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
        stored: Whether query tokens are also read from the cache.
        limits: The bounds of the scratch of layers without a sliding window; None if
            all have one.
        window_tokens: ``PrefillLimits.piece_tokens`` by sliding window.
        device: The kernels' device.
        local_lens: Where ranks share the context, a function from numbers of first
            tokens, (R,) int32 on the host, to this rank's share of them; None where
            they do not.

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
        """The planner of some layers; None without layers.

        Args:
            runners: The runners of the layers.
            stored: Whether the layers also read query tokens from the cache.
            device: The kernels' device.

        """
        if not runners:
            return None
        # The cache spec does not tell: without the hybrid cache manager layers with a
        # window and layers without one are in the same group.
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
        """Plan R consecutive requests of a batch.

        Args:
            query_start_loc: (R + 1,) int32 on the host, where requests' tokens begin in
                the batch.
            seq_lens: (R,) int32 on the host, exact.
            block_table: (R, max_blocks) int32 on the device.
            spans: The requests' spans, with ``request`` among the R requests, and
                tokens' indices in the batch.

        Returns:
            The index of the first token in the batch, and the plan.

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
