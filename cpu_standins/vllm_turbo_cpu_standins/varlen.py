# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FlashAttention's varlen function in PyTorch.

It is for backends whose other kernels Triton's interpreter runs. The module is a plugin
for pytest: `-p vllm_turbo_cpu_standins.varlen`.
"""

import torch

from vllm_turbo_cpu_standins.attention import _attend, _visible


def flash_attn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: list[int] | None = None,
    **lengths: int,
) -> torch.Tensor:
    """FlashAttention's function of this name, for sequences that are laid end to end.

    Args:
        q: [num_tokens, num_heads, head_size].
        k: [num_keys, num_kv_heads, head_size].
        v: As `k`.
        cu_seqlens_q: int32 [num_seqs + 1].
        cu_seqlens_k: int32 [num_seqs + 1].
        softmax_scale: Softmax scale.
        causal: Whether a query sees only positions up to its own.
        window_size: Positions before and after a query that it sees; None for all.
        lengths: `max_seqlen_q` and `max_seqlen_k`, which have to bound all.

    """
    output = torch.empty_like(q)
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert lengths["max_seqlen_q"] >= max(map(int, cu_seqlens_q.diff()))
    assert lengths["max_seqlen_k"] >= max(map(int, cu_seqlens_k.diff()))
    assert k.shape[0] == v.shape[0] == keys[-1] and q.shape[0] == queries[-1]
    window = -1 if window_size is None else window_size[0] + 1
    for first, last, first_key, last_key in zip(
        queries, queries[1:], keys, keys[1:], strict=False
    ):
        places = torch.arange(last_key - first_key)
        own = places[len(places) - (last - first) :]
        output[first:last] = _attend(
            q[first:last],
            k[first_key:last_key].float().transpose(0, 1),
            v[first_key:last_key].float().transpose(0, 1),
            _visible(own, places, causal, window),
            softmax_scale,
            0.0,
            None,
        ).to(q.dtype)
    return output


def serve_flash_attn() -> None:
    """Lets backends that are imported later find FlashAttention's function."""
    from vllm.v1.attention.backends import fa_utils

    fa_utils.flash_attn_varlen_func = flash_attn_varlen
    fa_utils.is_flash_attn_varlen_func_available = lambda: True
    fa_utils.get_flash_attn_version = lambda **unused: None


def pytest_configure() -> None:
    serve_flash_attn()
