# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One call of FlashAttention's varlen function, or of what serves as it, and the keys
that it is given where these are read from the cache.
"""

from collections.abc import Callable
from typing import Any

import torch

from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.planning.scratch import PrefillScratch
from vllm.v1.attention.ops.turbo.planning.sliding_window import KeyRuns


def read_runs(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    runs: KeyRuns,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    layout: TurboFormat,
    scratch: PrefillScratch | None,
    key_offset: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of runs, end to end in scratch: see ``lay_out_runs``.

    Args:
        kv_cache: (num_blocks, H, N, C) uint8.
        block_table: (R, max_blocks) int32.
        runs: Which tokens.
        key: (T, H, D), of those that are not read from the cache; None if all are.
        value: (T, H, D), likewise.
        layout: The cache's format.
        scratch: Room for the tokens.
        key_offset: (G, H, D) fp32, taken off the cached keys, by segments; None if
            nothing was.

    """
    from vllm.v1.attention.ops.turbo.triton.runs import lay_out_runs

    assert scratch is not None
    run_key, run_value = (x[: runs.num_tokens] for x in (scratch.key, scratch.value))
    lay_out_runs(
        kv_cache,
        block_table,
        runs,
        run_key if key is None else key,
        run_value if value is None else value,
        layout,
        run_key,
        run_value,
        key_offset,
    )
    return run_key, run_value


def attend(
    flash_attn: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    cu_lens: torch.Tensor,
    max_len: int,
    scale: float,
    causal: bool = True,
    **options: Any,
) -> torch.Tensor:
    """Attention of sequences that lie end to end, into ``output``; returns its LSE.

    K and V have not a row more than the sequences: FlashAttention multiplies what
    follows the last one by zero, and scratch may hold NaN.
    """
    _, lse, *_ = flash_attn(
        q=query,
        k=key,
        v=value,
        out=output,
        cu_seqlens_q=query_start_loc,
        max_seqlen_q=max_query_len,
        cu_seqlens_k=cu_lens,
        max_seqlen_k=max_len,
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=True,
        **options,
    )
    return lse
