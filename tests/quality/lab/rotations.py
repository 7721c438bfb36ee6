# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rotations a quantiser may have in front of it, all as orthogonal matrices."""

from functools import cache

import torch
from turboquant import random_rotation

from vllm.v1.attention.ops.turbo.formats.rotation import hadamard, rotation_matrix


def _quaternions(count: int, generator: torch.Generator) -> torch.Tensor:
    """Random unit quaternions w + xi + yj + zk, (count, 4)."""
    q = torch.randn(count, 4, generator=generator).double()
    return q / q.norm(dim=-1, keepdim=True)


def _left(q: torch.Tensor) -> torch.Tensor:
    """Matrices of p -> q p, (count, 4, 4)."""
    w, x, y, z = q.unbind(-1)
    rows = [(w, -x, -y, -z), (x, w, -z, y), (y, z, w, -x), (z, -y, x, w)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def _right(q: torch.Tensor) -> torch.Tensor:
    """Matrices of p -> p q*, the conjugate of q on the right, (count, 4, 4)."""
    w, x, y, z = q.unbind(-1)
    rows = [(w, x, y, z), (-x, w, -z, y), (-y, z, w, -x), (-z, -y, x, w)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def _rotors(head_size: int, generator: torch.Generator) -> torch.Tensor:
    """RotorQuant: a rotation of its own for each group of three coordinates.

    A rotor R of Cl(3, 0) acts by x -> R x R~, which is a unit quaternion's
    p -> q p q* on vectors. One or two coordinates that are left over stay.
    """
    groups = head_size // 3
    q = _quaternions(groups, generator)
    blocks = (_left(q) @ _right(q))[:, 1:, 1:]
    matrix = torch.eye(head_size, dtype=torch.float64)
    matrix[: 3 * groups, : 3 * groups] = torch.block_diag(*blocks)
    return matrix


def _double_quaternions(head_size: int, generator: torch.Generator) -> torch.Tensor:
    """Groups of four coordinates, p -> q p r*: any rotation of four dimensions."""
    groups = head_size // 4
    left = _left(_quaternions(groups, generator))
    right = _right(_quaternions(groups, generator))
    return torch.block_diag(*(left @ right))


ROTATIONS = ("none", "plain", "randomised", "dense", "rotor3", "quaternion4")


@cache
def rotation(kind: str, head_size: int, device: torch.device) -> torch.Tensor:
    """The matrix M of ``y = x @ M``, fp32 and orthogonal.

    Args:
        kind: One of ROTATIONS. "plain" is a Hadamard matrix, "randomised" the
            format's: a Hadamard matrix after fixed signs.
        head_size: D.
        device: The device that it is kept on.

    """
    generator = torch.Generator().manual_seed(20)
    if kind == "none":
        matrix = torch.eye(head_size)
    elif kind == "plain":
        matrix = hadamard(head_size).double() * head_size**-0.5
    elif kind == "randomised":
        signed = rotation_matrix(head_size, torch.device("cpu"), torch.float64)
        matrix = signed * head_size**-0.5
    elif kind == "dense":
        matrix = random_rotation(head_size, generator)
    elif kind == "rotor3":
        matrix = _rotors(head_size, generator)
    elif kind == "quaternion4":
        matrix = _double_quaternions(head_size, generator)
    else:
        raise ValueError(f"unknown rotation {kind!r}; there are {ROTATIONS}")
    return matrix.to(device, torch.float32)
