# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""PyTorch's memory-efficient attention, of sequences laid end to end.

It takes heads of any size, and has kernels for every NVIDIA GPU (Rabe and Staats 2021,
"Self-attention Does Not Need O(n^2) Memory"; xFormers).
"""

import torch

from vllm.v1.attention.ops.turbo.planning.tokens import SeqLens

# The aten operator's number for a causal mask whose last query sees the last key.
_CAUSAL_FROM_BOTTOM_RIGHT = 2


def efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    queries: SeqLens,
    keys: SeqLens,
    scale: float,
    causal: bool = True,
) -> torch.Tensor:
    """Attention in sequences that are laid end to end.

    The operator has no grouped queries, so query heads that share a KV head take a call
    each. In a call PyTorch allocates the output, a copy of it in fp32, and an LSE that
    is padded to ``queries.max_len`` for each sequence. ``PrefillLimits.raw_tokens``
    bounds their memory.

    Args:
        query: (T, Hq, D).
        key: (N, H, D), Hq a multiple of H.
        value: (N, H, D).
        output: (T, Hq, D), written.
        queries: Lengths of R sequences' queries, in sum T.
        keys: Lengths of their keys. A sequence without keys has an output of zero.
        scale: The factor of scores, q times k; usually D ** -0.5.
        causal: Whether a sequence's last query sees all its keys, the query before it
            all but the last key, and so on.

    Returns:
        The LSE in nats, (Hq, T) fp32; minus infinity without keys.

    """
    group = query.shape[1] // key.shape[1]
    tokens = torch.arange(len(query), dtype=torch.int32, device=query.device)
    sequence = torch.searchsorted(queries.cu_lens[1:], tokens, right=True)
    position = tokens - queries.cu_lens[sequence]
    without_keys = (keys.cu_lens.diff() == 0)[sequence]
    lse = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    for member in range(group):
        heads = slice(member, None, group)
        result, padded_lse, *_ = torch.ops.aten._efficient_attention_forward(
            query[None, :, heads],
            key[None],
            value[None],
            None,
            queries.cu_lens,
            keys.cu_lens,
            queries.max_len,
            keys.max_len,
            0.0,
            _CAUSAL_FROM_BOTTOM_RIGHT if causal else 0,
            True,
            scale=scale,
        )
        output[:, heads] = result[0].masked_fill_(without_keys[:, None, None], 0)
        own_lse = padded_lse[sequence, :, position]
        lse[heads] = own_lse.masked_fill_(without_keys[:, None], -torch.inf).T
        # The next call reuses their memory.
        del result, padded_lse
    return lse
