# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The rotation of vectors in PyTorch, as the store kernels round it."""

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.formats.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.reference.levels import exponent_of, power_of_two

_FP32_MAX = torch.finfo(torch.float32).max
_INT8_MAX = torch.iinfo(torch.int8).max


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate vectors as the store kernels do: in block fixed point.

    NaN counts as zero, and infinity as the largest fp32 number.

    Args:
        x: (..., D), any floating dtype.

    Returns:
        (..., D) fp32, ``H (s * x) / sqrt(D)`` with x rounded to 1/2048 of the
        vector's largest magnitude.

    """
    head_size = x.shape[-1]
    x = torch.nan_to_num(x.float(), 0.0, _FP32_MAX, -_FP32_MAX)
    largest = x.abs().amax(-1, keepdim=True)
    exponent = exponent_of(largest).clamp(min=fmt.MIN_INPUT_EXPONENT)
    integers = torch.floor(x * power_of_two(fmt.ROTATION_EXPONENT - exponent) + 0.5)
    matrix = rotation_matrix(head_size, x.device, torch.float32)
    unit = power_of_two(exponent - fmt.ROTATION_EXPONENT)
    return integers @ matrix * (unit * inverse_sqrt(head_size))


def inverse_rotate(y: torch.Tensor) -> torch.Tensor:
    """Rotate back: (..., D) to (..., D), both fp32."""
    head_size = y.shape[-1]
    matrix = rotation_matrix(head_size, y.device, torch.float32)
    return y.float() @ matrix.T * inverse_sqrt(head_size)


def round_query(rotated_query: torch.Tensor) -> torch.Tensor:
    """Round queries to int8 as the CUDA decode kernel does, with one scale a head.

    The rotation leaves no outliers. The squared error is 4e-5 of the query's square,
    compared to 5e-3 for keys of four bits.

    Args:
        rotated_query: (..., D), as ``rotate`` returns them.

    Returns:
        (..., D) fp32, the rounded queries that scores are computed from.

    """
    query = rotated_query.to(torch.float16).float()
    largest = query.abs().amax(-1, keepdim=True)
    # One division in fp32, as in the kernel, because half of the largest is next to a
    # tie. An int / tensor would be a reciprocal and a product.
    inverse = torch.full_like(largest, _INT8_MAX) / largest
    inverse = torch.where(largest > 0, inverse, 0.0)
    codes = torch.round(query.double() * inverse.double()).float()
    return codes * (largest / _INT8_MAX)
