# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for FlashAttention, and for kernels that need not run."""

import math
from importlib.util import find_spec

import pytest
import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.layer.flash import FlashAttn, get_flash_attn

from .utils import ON_GPU


def flash_attn_of_gpu(head_size: int) -> FlashAttn | None:
    """The result of ``get_flash_attn`` on a GPU; None without one. The test is skipped
    if vLLM picks a version that needs a package that is not installed.
    """
    found = get_flash_attn(head_size) if ON_GPU else None
    version = found and getattr(found.function, "keywords", {}).get("fa_version")
    if version == 4 and find_spec("cutlass") is None:
        pytest.skip("FlashAttention 4 needs the package nvidia-cutlass-dsl")
    return found


# Rows of K and V that FlashAttention loads at a time.
FLASH_ATTN_TILE = 128


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    hidden: torch.Tensor,
    logits_soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.attention``, with any mask ``hidden``, (Q, T) bool."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,thd->hqt", query, key) * scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    scores = scores.masked_fill(hidden.to(scores.device), -math.inf)
    output = torch.einsum("hqt,thd->qhd", torch.softmax(scores, -1), value)
    return output, torch.logsumexp(scores, -1).T


def flash_attn_stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool = False,
    window_size: list[int] | None = None,
    softcap: float = 0.0,
    lse_of_none: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention's varlen function in PyTorch, with the arguments that turbo gives.

    Args:
        lse_of_none: LSE of a sequence without keys. Its output is zero.

    Returns:
        ``out`` and the LSE, (Hq, T) fp32.

    """
    sliding_window, left = None, -1
    if window_size is not None:
        left, right = window_size
        assert left >= 0 and right == (0 if causal else -1)
        if causal:
            sliding_window = left + 1
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) == max_seqlen_k
    lse = torch.full((q.shape[1], q.shape[0]), lse_of_none, device=q.device)
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for row in range(len(bounds_q) - 1):
        queries = slice(bounds_q[row], bounds_q[row + 1])
        keys = slice(bounds_k[row], bounds_k[row + 1])
        if keys.start == keys.stop:
            out[queries] = 0
            continue
        operands = [x.float() for x in (q[queries], k[keys], v[keys])]
        if causal or left < 0:
            result, row_lse = reference.attention(
                *operands,
                softmax_scale,
                causal,
                sliding_window,
                logits_soft_cap=softcap or None,
            )
        else:
            num_queries, num_keys = (len(x) for x in operands[:2])
            first = torch.arange(num_queries) + num_keys - num_queries - left
            hidden = torch.arange(num_keys) < first[:, None]
            result, row_lse = masked_attention(
                *operands, softmax_scale, hidden, softcap or None
            )
        out[queries] = result.to(out.dtype)
        lse[:, queries] = row_lse.T
        # The tile's other rows are another sequence's. Their weight is 0, so that a NaN
        # or Inf in them reaches the output, as on a GPU.
        others = v[keys.stop : keys.stop + FLASH_ATTN_TILE].float()
        nothing = (0.0 * others).sum(0).repeat_interleave(q.shape[1] // v.shape[1], 0)
        out[queries] += nothing.to(out.dtype)
    return out, lse


FLASH_ATTN = FlashAttn(flash_attn_stand_in)


def no_kernel(*args, **arguments) -> None:
    """A stand-in for kernels, in tests that check only their arguments."""


def no_flash_attn(q, **arguments):
    return arguments["out"], torch.zeros(q.shape[1], q.shape[0], device=q.device)


NO_FLASH_ATTN = FlashAttn(no_flash_attn)
