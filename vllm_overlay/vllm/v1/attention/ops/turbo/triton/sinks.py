# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention sinks in a prefill: logits that join the softmax and have no values."""

import torch

from vllm.triton_utils import tl, triton


@triton.jit(do_not_specialize=["num_tokens"])
def _weigh_by_sinks_kernel(
    output_ptr,  # [T, Hq, D] contiguous
    lse_ptr,  # [Hq, T] fp32
    sinks_ptr,  # [Hq]
    num_tokens,
    stride_lse_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (i, h): tokens [i * BLOCK_T, ...), query head h."""
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < num_tokens
    p_lse = lse_ptr + head.to(tl.int64) * stride_lse_head + token
    lse = tl.load(p_lse, mask=inside, other=0.0)
    sink = tl.load(sinks_ptr + head).to(tl.float32)
    share = 1 / (1 + tl.exp(sink - lse))
    d = tl.arange(0, BLOCK_D)[None, :]
    p_output = output_ptr + ((token * NUM_HEADS + head) * HEAD_SIZE)[:, None] + d
    mask = inside[:, None] & (d < HEAD_SIZE)
    output = tl.load(p_output, mask=mask, other=0.0).to(tl.float32)
    output = (output * share[:, None]).to(output_ptr.dtype.element_ty)
    tl.store(p_output, output, mask=mask)


def weigh_by_sinks(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> None:
    """Scale outputs so that sinks have their share of the softmax's weights.

    Args:
        output: (T, Hq, D) contiguous, changed.
        lse: (Hq, T) fp32 natural log-sum-exp of the scores, last axis contiguous.
        sinks: (Hq,) of any floating dtype, contiguous: logits.

    """
    num_tokens, num_heads, head_size = output.shape
    assert output.is_contiguous() and lse.stride(1) == 1 and sinks.is_contiguous()
    assert lse.shape == (num_heads, num_tokens) and sinks.shape == (num_heads,)
    block_t = 32
    _weigh_by_sinks_kernel[(triton.cdiv(num_tokens, block_t), num_heads)](
        output,
        lse,
        sinks,
        num_tokens,
        lse.stride(0),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_T=block_t,
        BLOCK_D=triton.next_power_of_2(head_size),
        num_warps=4,
    )
