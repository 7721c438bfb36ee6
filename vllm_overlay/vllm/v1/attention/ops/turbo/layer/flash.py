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

# Head sizes of K and V that FlashAttention 3 and 4 take as they are.
FLASH_ATTN_PAIRS = ((192, 128),)


class FlashAttn(NamedTuple):
    """The function that attends in sequences which are laid end to end.

    Attributes:
        function: FlashAttention's varlen function, with its version bound, or
            ``efficient_attention``.
        is_efficient: Whether it is ``efficient_attention``, which takes ``SeqLens``.
        takes_pairs: Whether it takes the head sizes of ``FLASH_ATTN_PAIRS``.

    """

    function: Callable[..., Any]
    is_efficient: bool = False
    takes_pairs: bool = False

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
            value: (S, H, D of V). If the function does not take the two sizes, vectors
                of the smaller one are padded with zeros, which change no score, and
                the output is cut.
            output: (T, Hq, D of V), written.
            queries: Lengths of R sequences' queries.
            keys: Lengths of their keys.
            scoring: The rules for scores, of which the scale and the soft cap are used.
            causal: Whether the last query is aligned with the last key, and no query
                sees a later key.
            options: Further arguments of ``function``.

        Returns:
            (Hq, T) fp32, natural log-sum-exp.

        """
        sizes = key.shape[2], value.shape[2]
        if sizes[0] != sizes[1] and not (
            self.takes_pairs and sizes in FLASH_ATTN_PAIRS
        ):
            query, key, value = (
                torch.nn.functional.pad(x, (0, max(sizes) - x.shape[2]))
                for x in (query, key, value)
            )
            whole = output.new_empty(*output.shape[:2], max(sizes))
            lens = queries, keys
            lse = self.attend(
                query, key, value, whole, *lens, scoring, causal, **options
            )
            output.copy_(whole[..., : sizes[1]])
            return lse
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

            function = partial(flash_attn_varlen_func, fa_version=version)
            return FlashAttn(function, takes_pairs=version >= 3)
    if is_large and current_platform.is_cuda():
        return FlashAttn(efficient_attention, is_efficient=True)
    return None
