# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FlashAttention's varlen function, or the function that serves in its place."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vllm.platforms import current_platform
from vllm.v1.attention.backends.fa_utils import (
    get_flash_attn_version,
    is_flash_attn_varlen_func_available,
)
from vllm.v1.attention.ops.turbo.layer.efficient_attention import efficient_attention
from vllm.v1.attention.ops.turbo.planning.prefill import FLASH_ATTN_MAX_HEAD_SIZE
from vllm.v1.attention.ops.turbo.planning.tokens import SeqLens


def get_flash_attn(head_size: int) -> Callable[..., Any] | None:
    """FlashAttention's varlen function for a head size, with its version bound.

    vLLM picks the version for this GPU. For heads above ``FLASH_ATTN_MAX_HEAD_SIZE`` it
    is FlashAttention 4 if vLLM picks that, or else, on NVIDIA GPUs, PyTorch's
    memory-efficient attention. It is None if this GPU has no such function.
    """
    is_large = head_size > FLASH_ATTN_MAX_HEAD_SIZE
    if is_flash_attn_varlen_func_available():
        version = get_flash_attn_version(head_size=head_size)
        if version is not None and (version == 4 or not is_large):
            from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

            return partial(flash_attn_varlen_func, fa_version=version)
    return efficient_attention if is_large and current_platform.is_cuda() else None


def attend(
    flash_attn: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    queries: SeqLens,
    keys: SeqLens,
    scale: float,
    causal: bool = True,
    **options: Any,
) -> torch.Tensor:
    """Attend in sequences that are laid end to end; return the LSE.

    K and V must not have more rows than the sequences. FlashAttention multiplies rows
    after the last sequence by zero, and scratch may hold NaN.

    Args:
        flash_attn: FlashAttention's varlen function, with version and soft cap bound,
            or ``efficient_attention``.
        query: (T, Hq, D).
        key: (S, H, D).
        value: (S, H, D).
        output: (T, Hq, D), written.
        queries: Lengths of R sequences' queries.
        keys: Lengths of their keys.
        scale: Softmax scale.
        causal: Whether the last query is aligned with the last key, and no query sees
            a later key.
        options: Further arguments of ``flash_attn``.

    Returns:
        (Hq, T) fp32, natural log-sum-exp.

    """
    if flash_attn is efficient_attention:
        arguments = query, key, value, output, queries, keys, scale, causal
        return efficient_attention(*arguments, **options)
    _, lse, *_ = flash_attn(
        q=query,
        k=key,
        v=value,
        out=output,
        cu_seqlens_q=queries.cu_lens,
        max_seqlen_q=queries.max_len,
        cu_seqlens_k=keys.cu_lens,
        max_seqlen_k=keys.max_len,
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=True,
        **options,
    )
    return lse
