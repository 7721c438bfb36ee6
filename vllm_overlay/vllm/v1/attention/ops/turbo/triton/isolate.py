# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keeps non-finite values of one sequence from the others of a prefill."""

import torch

from vllm.triton_utils import tl, triton


@triton.jit
def isolated(key, value):
    """K and V, [N, D] fp32, as ``isolate_broken_values`` has them.

    A vector of V that is not finite becomes zero, and its key NaN.
    """
    # Infinities and NaN have the largest exponent.
    exponent = value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
    is_broken = (tl.max(exponent, 1) == 0x7F800000)[:, None]
    value = tl.where(is_broken, 0.0, value.to(tl.float32))
    key = tl.where(is_broken, float("nan"), key.to(tl.float32))
    return key, value


@triton.jit(do_not_specialize=["num_rows"])
def _isolate_kernel(
    key_ptr,  # [T, H, D]
    value_ptr,  # [T, H, D]
    isolated_key_ptr,  # [T, H, D]
    isolated_value_ptr,  # [T, H, D]
    num_rows,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program i: rows [i * BLOCK_T, ...) of the (token, head) pairs."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = (row // NUM_HEADS)[:, None]
    head = (row % NUM_HEADS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < num_rows)[:, None] & (d < HEAD_SIZE)
    value_ptrs = value_ptr + token * stride_value_token + head * stride_value_head + d
    value = tl.load(value_ptrs, mask=inside, other=0.0)
    key_ptrs = key_ptr + token * stride_key_token + head * stride_key_head + d
    key = tl.load(key_ptrs, mask=inside, other=0.0)
    key, value = isolated(key, value)
    offset = row[:, None] * HEAD_SIZE + d
    dtype = isolated_key_ptr.dtype.element_ty
    tl.store(isolated_value_ptr + offset, value.to(dtype), mask=inside)
    tl.store(isolated_key_ptr + offset, key.to(dtype), mask=inside)


def isolate_broken_values(
    key: torch.Tensor,
    value: torch.Tensor,
    isolated_key: torch.Tensor,
    isolated_value: torch.Tensor,
) -> None:
    """Copy K and V so that NaN and infinity of a sequence reach no other sequence.

    FlashAttention loads K and V in tiles, and a tile may end in tokens of the next
    sequence. Their weight is zero, but zero times NaN or infinity is NaN. Their scores
    are masked, whatever they are. So a vector of V that is not finite becomes zero, and
    its key becomes NaN: a query that sees the token gets NaN.

    Args:
        key: (T, H, D), last axis contiguous.
        value: (T, H, D), likewise.
        isolated_key: (T, H, D) contiguous, of the same dtype, written.
        isolated_value: (T, H, D), likewise.

    """
    num_tokens, num_heads, head_size = value.shape
    assert key.shape == value.shape and key.stride(2) == value.stride(2) == 1
    assert isolated_key.shape == isolated_value.shape == key.shape
    assert isolated_key.is_contiguous() and isolated_value.is_contiguous()
    if num_tokens == 0:
        return
    block_t = 16
    num_rows = num_tokens * num_heads
    _isolate_kernel[(triton.cdiv(num_rows, block_t),)](
        key,
        value,
        isolated_key,
        isolated_value,
        num_rows,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_T=block_t,
        BLOCK_D=triton.next_power_of_2(head_size),
        num_warps=4,
    )
