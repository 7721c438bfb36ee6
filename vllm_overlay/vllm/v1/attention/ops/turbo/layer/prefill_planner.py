# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes the planner of the prefills of layers that share a step's plan."""

from collections.abc import Sequence

import torch

from vllm.v1.attention.ops.turbo.layer.runner import TurboRunner
from vllm.v1.attention.ops.turbo.planning.prefill import (
    PrefillPlanner,
    prefill_limits,
)


def prefill_planner(
    runners: Sequence[TurboRunner], stored: bool, device: torch.device
) -> PrefillPlanner | None:
    """The planner of some layers' prefills; None without layers.

    Args:
        runners: The runners of the layers.
        stored: Whether the layers also read query tokens from the cache.
        device: The kernels' device.

    """
    if not runners:
        return None
    # The cache spec does not tell: without the hybrid cache manager layers with and
    # without a window are in the same group.
    full = [runner for runner in runners if runner.scoring.sliding_window is None]
    limits = None
    if full:
        limits = prefill_limits(
            max((runner.context_shape for runner in full), key=lambda x: x.num_heads),
            stored,
        )
    window_tokens = {
        runner.scoring.sliding_window: runner.prefill_limits.piece_tokens
        for runner in runners
        if runner.scoring.sliding_window is not None
    }
    shared = runners[0].context_parallel
    local_lens = None if shared is None else shared.local_lens
    return PrefillPlanner(stored, limits, device, window_tokens, local_lens)
