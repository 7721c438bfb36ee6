# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FlashAttention's varlen function, or the function that serves in its place."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm.platforms import current_platform
from vllm.v1.attention.backends.fa_utils import (
    get_flash_attn_version,
    is_flash_attn_varlen_func_available,
)
from vllm.v1.attention.ops.turbo.interface import Scoring
from vllm.v1.attention.ops.turbo.layer.efficient_attention import efficient_attention
from vllm.v1.attention.ops.turbo.planning.prefill import FLASH_ATTN_MAX_HEAD_SIZE
from vllm.v1.attention.ops.turbo.planning.tokens import SeqLens


class FlashAttn(NamedTuple):
    """The function that attends in sequences which are laid end to end.

    Attributes:
        function: FlashAttention's varlen function, with its version bound, or
            ``efficient_attention``.
        is_efficient: Whether it is ``efficient_attention``, which takes ``SeqLens``.

    """

    function: Callable[..., Any]
    is_efficient: bool = False

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        queries: SeqLens,
        keys: SeqLens,
        scoring: Scoring,
        causal: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Attend in the sequences; return the LSE.

        K and V must not have more rows than the sequences. FlashAttention multiplies
        rows after the last sequence by zero, and scratch may hold NaN.

        Args:
            query: (T, Hq, D).
            key: (S, H, D).
            value: (S, H, D).
            output: (T, Hq, D), written.
            queries: Lengths of R sequences' queries.
            keys: Lengths of their keys.
            scoring: The rules for scores, of which the scale and the soft cap are used.
            causal: Whether the last query is aligned with the last key, and no query
                sees a later key.
            options: Further arguments of ``function``.

        Returns:
            (Hq, T) fp32, natural log-sum-exp.

        """
        if scoring.soft_cap is not None:
            options["softcap"] = scoring.soft_cap
        if self.is_efficient:
            arguments = query, key, value, output, queries, keys, scoring.scale, causal
            return self.function(*arguments, **options)
        _, lse, *_ = self.function(
            q=query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_q=queries.cu_lens,
            max_seqlen_q=queries.max_len,
            cu_seqlens_k=keys.cu_lens,
            max_seqlen_k=keys.max_len,
            softmax_scale=scoring.scale,
            causal=causal,
            return_softmax_lse=True,
            **options,
        )
        return lse


def get_flash_attn(head_size: int) -> FlashAttn | None:
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

            return FlashAttn(partial(flash_attn_varlen_func, fa_version=version))
    if is_large and current_platform.is_cuda():
        return FlashAttn(efficient_attention, is_efficient=True)
    return None
