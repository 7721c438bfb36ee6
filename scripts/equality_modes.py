# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ways of running vLLM that are to give the same answers."""

from dataclasses import dataclass, field
from typing import Any

# Tokens of a chunk, where prompts are prefilled in chunks.
CHUNK = 128
# Requests that find room for their prompts when blocks are scarce.
SCARCE_REQUESTS = 4


@dataclass(frozen=True)
class Mode:
    """One way to run the same prompts.

    Attributes:
        args: Of `LLM`, beyond those of the quiet run.
        batch: Prompts a `generate`; 0: all.
        repeat: Whether all is run twice, and the second time counts.
        defect: What is broken on purpose, so that the answers must differ.
        only_bounded: Whether the answers are equal under turbo_prefill "stored" alone:
            under "raw" it depends on the mode which tokens a token sees quantised.
        scarce: Whether blocks are so few that requests are preempted.
        gpus: How many it takes; 0: none, but no more than a CPU.

    """

    args: dict[str, Any] = field(default_factory=dict)
    batch: int = 0
    repeat: bool = False
    defect: str | None = None
    only_bounded: bool = False
    scarce: bool = False
    gpus: int = 0


MODES = {
    "quiet": Mode(batch=1),
    "batched": Mode(),
    "graphs": Mode({"enforce_eager": False}, gpus=1),
    "async": Mode({"enforce_eager": False, "async_scheduling": True}, gpus=1),
    "triton": Mode({"attention_config": {"turbo_kernel": "triton"}}, gpus=1),
    "tensor_parallel": Mode({"tensor_parallel_size": 2}, gpus=2),
    "pipeline_parallel": Mode({"pipeline_parallel_size": 2}, gpus=2),
    "prefix": Mode({"enable_prefix_caching": True}, repeat=True, only_bounded=True),
    "chunked": Mode(
        {"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK},
        only_bounded=True,
    ),
    "preempted": Mode(scarce=True, only_bounded=True),
    # Of two requests, each reads a page of the other's.
    "swapped": Mode(batch=2, defect="swapped"),
    "zeroed": Mode(defect="zeroed"),
}
