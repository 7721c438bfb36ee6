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
    value_ptr,  # [T, H, D of V]
    isolated_key_ptr,  # [T, H, D]
    isolated_value_ptr,  # [T, H, D of V]
    num_rows,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D_V: tl.constexpr,
):
    """Program i: rows [i * BLOCK_T, ...) of the (token, head) pairs."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = (row // NUM_HEADS)[:, None]
    head = (row % NUM_HEADS)[:, None]
    d_v = tl.arange(0, BLOCK_D_V)[None, :]
    m_value = (row < num_rows)[:, None] & (d_v < HEAD_SIZE_V)
    value_ptrs = value_ptr + token * stride_value_token + head * stride_value_head + d_v
    value = tl.load(value_ptrs, mask=m_value, other=0.0)
    d = tl.arange(0, BLOCK_D)[None, :]
    m_key = (row < num_rows)[:, None] & (d < HEAD_SIZE)
    key_ptrs = key_ptr + token * stride_key_token + head * stride_key_head + d
    key = tl.load(key_ptrs, mask=m_key, other=0.0)
    key, value = isolated(key, value)
    dtype = isolated_key_ptr.dtype.element_ty
    p_value = isolated_value_ptr + (row[:, None] * HEAD_SIZE_V + d_v)
    tl.store(p_value, value.to(dtype), mask=m_value)
    p_key = isolated_key_ptr + (row[:, None] * HEAD_SIZE + d)
    tl.store(p_key, key.to(dtype), mask=m_key)


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
        value: (T, H, D of V), likewise.
        isolated_key: (T, H, D) contiguous, of the same dtype, written.
        isolated_value: (T, H, D of V), likewise.

    """
    num_tokens, num_heads, head_size_v = value.shape
    head_size = key.shape[2]
    assert key.shape[:2] == value.shape[:2], (key.shape, value.shape)
    assert key.stride(2) == value.stride(2) == 1
    assert isolated_key.shape == key.shape and isolated_value.shape == value.shape
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
        HEAD_SIZE_V=head_size_v,
        BLOCK_T=block_t,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_D_V=triton.next_power_of_2(head_size_v),
        num_warps=4,
    )
