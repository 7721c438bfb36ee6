# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The rotation in block fixed point, for Triton kernels (see ``reference.rotate``)."""

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.triton.scales import exponent_of, power_of_two

_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_ROTATION_EXPONENT = tl.constexpr(fmt.ROTATION_EXPONENT)
_MIN_INPUT_EXPONENT = tl.constexpr(fmt.MIN_INPUT_EXPONENT)


@triton.jit
def load_integers(
    x_ptr,  # [T] pointers to vectors
    token_mask,  # [T]
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEEP_NAN: tl.constexpr = False,
    offset_ptr=None,  # [T] pointers to fp32 vectors
):
    """Load vectors, less an offset if there is one, in block fixed point.

    ``reference.rotate`` has the rule.

    Returns:
        Integers, fp16 [T, D]; the rest that rounding took off them, in units of 1/2048,
        fp16 [T, D]; and the unit of the integers, fp32 [T]. With KEEP_NAN the unit of a
        vector with a NaN is NaN. Without it, NaN counts as zero.

    """
    d = tl.arange(0, BLOCK_D)
    mask = token_mask[:, None] & (d < HEAD_SIZE)[None, :]
    x = tl.load(x_ptr[:, None] + d[None, :], mask=mask, other=0.0)
    if offset_ptr is not None:
        offset = tl.load(offset_ptr[:, None] + d[None, :], mask=mask, other=0.0)
        difference = x.to(tl.float32) - offset
        x = tl.where(mask, difference, 0.0).to(x.dtype)
    x = x.to(tl.float32)
    num_nan = tl.sum((x != x).to(tl.int32), 1)
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, -_FP32_MAX), _FP32_MAX)
    exponent = exponent_of(tl.max(tl.abs(x), 1))
    exponent = tl.maximum(exponent, _MIN_INPUT_EXPONENT)
    to_integer = power_of_two(-exponent + _ROTATION_EXPONENT)[:, None]
    x = x * to_integer
    integers = tl.floor(x + 0.5)
    rest = (x - integers) * 2048.0
    unit = power_of_two(exponent - _ROTATION_EXPONENT)
    if KEEP_NAN:
        unit = tl.where(num_nan > 0, float("nan"), unit)
    return integers.to(tl.float16), rest.to(tl.float16), unit


@triton.jit
def rotate_integers(
    integers,  # [T, D] fp16
    matrix_ptr,  # [D, D] fp16, entries +-1
    coordinate,  # [C]
    coordinate_mask,  # [C]
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Some coordinates of H (s * x), exact, fp32 [T, C]."""
    d = tl.arange(0, BLOCK_D)
    p_matrix = matrix_ptr + d[:, None] * HEAD_SIZE + coordinate[None, :]
    mask = (d < HEAD_SIZE)[:, None] & coordinate_mask[None, :]
    matrix = tl.load(p_matrix, mask=mask, other=0.0)
    return tl.dot(integers, matrix)
