# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""PyTorch's memory-efficient attention, called like FlashAttention's varlen function.

It takes heads of any size, and has kernels for every NVIDIA GPU (Rabe and Staats 2021,
"Self-attention Does Not Need O(n^2) Memory"; xFormers).
"""

import torch

# The aten operator's number for a causal mask whose last query sees the last key.
_CAUSAL_FROM_BOTTOM_RIGHT = 2


def efficient_attention(
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
    return_softmax_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in sequences that are laid end to end.

    The operator has no grouped queries, so query heads that share a KV head take a call
    each. In a call PyTorch allocates the output, a copy of it in fp32, and an LSE that
    is padded to ``max_seqlen_q`` for each sequence. ``PrefillLimits.raw_tokens`` bounds
    their memory.

    Args:
        q: (T, Hq, D).
        k: (N, H, D), Hq a multiple of H.
        v: (N, H, D).
        out: (T, Hq, D), written.
        cu_seqlens_q: (R + 1,) int32, where sequences' queries begin; the last is T.
        max_seqlen_q: Most queries of a sequence.
        cu_seqlens_k: (R + 1,) int32, where sequences' keys begin. A sequence without
            keys has an output of zero.
        max_seqlen_k: Most keys of a sequence.
        softmax_scale: The factor of scores, q times k; usually D ** -0.5.
        causal: Whether a sequence's last query sees all its keys, the query before it
            all but the last key, and so on.
        return_softmax_lse: As in FlashAttention's function. The LSE is always returned.

    Returns:
        ``out`` and the LSE in nats, (Hq, T) fp32; minus infinity without keys.

    """
    group = q.shape[1] // k.shape[1]
    tokens = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:], tokens, right=True)
    position = tokens - cu_seqlens_q[sequence]
    without_keys = (cu_seqlens_k.diff() == 0)[sequence]
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    for member in range(group):
        heads = slice(member, None, group)
        result, padded_lse, *_ = torch.ops.aten._efficient_attention_forward(
            q[None, :, heads],
            k[None],
            v[None],
            None,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            0.0,
            _CAUSAL_FROM_BOTTOM_RIGHT if causal else 0,
            True,
            scale=softmax_scale,
        )
        out[:, heads] = result[0].masked_fill_(without_keys[:, None, None], 0)
        own_lse = padded_lse[sequence, :, position]
        lse[heads] = own_lse.masked_fill_(without_keys[:, None], -torch.inf).T
        # The next call reuses their memory.
        del result, padded_lse
    return out, lse
