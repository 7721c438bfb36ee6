# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Randomised Hadamard rotation of K, V and q.

``rotate(x) = H (s * x) / sqrt(D)`` with H Sylvester's Hadamard matrix of order D and s
a fixed vector of signs. The signs matter: without them a constant vector would become
one spike.
"""

import hashlib
import math
from functools import cache

import torch

from vllm.v1.attention.ops.turbo.format import fp32

_SEED = "turbo-kv-cache-1"
# The device on which matrices are made, whatever the default device.
_CPU = torch.device("cpu")


@cache
def hadamard(order: int) -> torch.Tensor:
    """Sylvester's matrix of a power of two, int64 (order, order), entries +-1."""
    with _CPU:
        matrix = torch.ones(1, 1, dtype=torch.int64)
        step = torch.tensor([[1, 1], [1, -1]])
    while matrix.shape[0] < order:
        matrix = torch.kron(matrix, step)
    return matrix


@cache
def rotation_signs(head_size: int) -> torch.Tensor:
    """The signs s, int64 of shape (head_size,): part of the stored format."""
    label = f"{_SEED}/attention/{head_size}".encode()
    digest = hashlib.shake_256(label).digest((head_size + 7) // 8)
    bits = [digest[i // 8] >> (i % 8) & 1 for i in range(head_size)]
    return 1 - 2 * torch.tensor(bits, dtype=torch.int64, device=_CPU)


@cache
def rotation_matrix(
    head_size: int,
    device: torch.device,
    dtype: torch.dtype = torch.float16,
    inverse: bool = False,
) -> torch.Tensor:
    """The unnormalised rotation R with ``rotate(x) = x @ R / sqrt(D)``.

    Args:
        head_size: D.
        device: The device that keeps the matrix.
        dtype: The matrix's dtype; the entries are exact in any.
        inverse: Whether to return the transpose of R, which rotates back.

    Returns:
        (head_size, head_size) contiguous, entries +-1.

    """
    matrix = rotation_signs(head_size)[:, None] * hadamard(head_size).T
    if inverse:
        matrix = matrix.T
    return matrix.to(device=device, dtype=dtype).contiguous()


@cache
def inverse_sqrt(head_size: int) -> float:
    """1 / sqrt(D), rounded to fp32."""
    return fp32(1 / math.sqrt(head_size))
