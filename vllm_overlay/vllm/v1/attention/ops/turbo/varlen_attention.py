# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One call of FlashAttention's varlen function, or of what serves as it."""

from collections.abc import Callable
from typing import Any

import torch


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
