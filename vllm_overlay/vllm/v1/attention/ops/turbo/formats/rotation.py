# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Randomised Hadamard rotation of K, V and q.

``rotate(x) = H (s * x) / sqrt(D)`` with H a Hadamard matrix of order D and s a fixed
vector of signs. The signs matter: without them a constant vector would become one
spike. For orders that are not a power of two, H is the Kronecker product of a Paley
matrix (12, 20 or 28) and a Sylvester matrix. So it is a true Hadamard matrix: every
entry is +-1 and the rows are orthogonal.
"""

import hashlib
import math
from functools import cache

import torch

from vllm.v1.attention.ops.turbo.format import fp32

_SEED = "turbo-kv-cache-1"
# Orders of the Paley factor of a head size that is not a power of two.
_PALEY_ORDERS = (12, 20, 28)
# The device on which matrices are made, whatever the default device.
_CPU = torch.device("cpu")


def _quadratic_character(prime: int) -> torch.Tensor:
    """A table of the quadratic character chi over the integers mod ``prime``."""
    chi = torch.full((prime,), -1, dtype=torch.int64)
    squares = torch.arange(1, prime) ** 2 % prime
    chi[squares] = 1
    chi[0] = 0
    return chi


def _jacobsthal(prime: int) -> torch.Tensor:
    """The Jacobsthal matrix Q[i, j] = chi(i - j), shape (prime, prime)."""
    index = torch.arange(prime)
    return _quadratic_character(prime)[(index[:, None] - index) % prime]


def _paley(order: int) -> torch.Tensor:
    """The Hadamard matrix of order 12, 20 (Paley I) or 28 (Paley II)."""
    if order == 28:
        prime = 13
        core = torch.zeros(prime + 1, prime + 1, dtype=torch.int64)
        core[0, 1:] = core[1:, 0] = 1
        core[1:, 1:] = _jacobsthal(prime)
        on_diagonal = torch.tensor([[1, -1], [-1, -1]])
        off_diagonal = torch.tensor([[1, 1], [1, -1]])
        identity = torch.eye(prime + 1, dtype=torch.int64)
        return torch.kron(core, off_diagonal) + torch.kron(identity, on_diagonal)
    prime = order - 1
    skew = torch.zeros(order, order, dtype=torch.int64)
    skew[0, 1:] = 1
    skew[1:, 0] = -1
    skew[1:, 1:] = _jacobsthal(prime)
    return torch.eye(order, dtype=torch.int64) + skew


@cache
def hadamard(order: int) -> torch.Tensor:
    """The Hadamard matrix, int64 of shape (order, order) with entries +-1.

    Raises:
        ValueError: If no construction here has this order.

    """
    for base in (1, *_PALEY_ORDERS):
        quotient, remainder = divmod(order, base)
        if remainder == 0 and quotient & (quotient - 1) == 0:
            break
    else:
        raise ValueError(f"no Hadamard matrix of order {order} is constructed here")
    with _CPU:
        matrix = torch.ones(1, 1, dtype=torch.int64) if base == 1 else _paley(base)
        step = torch.tensor([[1, 1], [1, -1]])
    while matrix.shape[0] < order:
        matrix = torch.kron(matrix, step)
    return matrix


@cache
def rotation_signs(head_size: int, kind: str = "attention") -> torch.Tensor:
    """The signs s, int64 of shape (head_size,): part of the stored format.

    Args:
        head_size: D.
        kind: The kind of layer; each kind has its own signs.

    """
    label = f"{_SEED}/{kind}/{head_size}".encode()
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
