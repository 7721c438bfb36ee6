# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The randomised Hadamard rotation: matrices, signs and exactness."""

import hashlib

import pytest
import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import HEAD_SIZES
from vllm.v1.attention.ops.turbo.formats.rotation import (
    hadamard,
    inverse_sqrt,
    rotation_matrix,
    rotation_signs,
)

from ..utils import DEVICE, all_head_sizes, gaussian, model_dtypes

# Shortened SHA-256 of the signs and of the matrix. Both are part of the stored format.
GOLDEN = {
    64: ("ac9e7c7f3f57f10a", "24d4e7a33fe420ea"),
    80: ("deeecb0b4022873b", "ec86570ab5504d0d"),
    96: ("9c61d6f72a36aba4", "d9aff9652b93b217"),
    112: ("0b454aafa7f05181", "f9d4af507429ad3c"),
    128: ("cfbe8d604631d8fb", "688860aafda22194"),
    192: ("dfde466e3d0149b0", "9eccfe9309d11c3f"),
    256: ("adad877ebb388e82", "4518da9633b0ca80"),
    512: ("9b546e1d5dd601ac", "5f7e24eed227e2b1"),
}


def digest(tensor: torch.Tensor) -> str:
    bits = (tensor > 0).flatten().tolist()
    return hashlib.sha256(bytes(bits)).hexdigest()[:16]


@all_head_sizes
def test_hadamard(head_size):
    matrix = hadamard(head_size)
    assert matrix.shape == (head_size, head_size)
    assert (matrix.abs() == 1).all()
    identity = torch.eye(head_size, dtype=torch.int64)
    assert torch.equal(matrix @ matrix.T, head_size * identity)


@pytest.mark.parametrize("order", [3, 36, 52, 72])
def test_unknown_order_is_refused(order):
    with pytest.raises(ValueError, match=f"order {order}"):
        hadamard(order)


@all_head_sizes
def test_signs_and_matrix_are_pinned(head_size):
    signs = rotation_signs(head_size)
    assert signs.shape == (head_size,)
    assert (signs.abs() == 1).all()
    matrix = rotation_matrix(head_size, torch.device("cpu"))
    assert (digest(signs), digest(matrix)) == GOLDEN[head_size]


@pytest.mark.parametrize("head_size", [96, 128, 112])
def test_a_default_device_changes_nothing(head_size):
    """The matrix is the same if a model is built with another default device."""
    expected = rotation_matrix(head_size, torch.device("cpu"))
    for function in (rotation_matrix, rotation_signs, hadamard):
        function.cache_clear()
    with torch.device("meta"):
        matrix = rotation_matrix(head_size, torch.device("cpu"))
    assert torch.equal(matrix, expected)


def test_kinds_of_layers_have_signs_of_their_own():
    assert not torch.equal(rotation_signs(128), rotation_signs(128, "mla"))


@all_head_sizes
def test_matrix_and_inverse(head_size):
    matrix = rotation_matrix(head_size, DEVICE)
    inverse = rotation_matrix(head_size, DEVICE, inverse=True)
    assert matrix.dtype == torch.float16
    assert matrix.is_contiguous() and inverse.is_contiguous()
    assert torch.equal(inverse, matrix.T)
    expected = hadamard(head_size) * rotation_signs(head_size)
    assert torch.equal(matrix.T.cpu().long(), expected)


@all_head_sizes
def test_smooth_vectors_become_no_spike(head_size):
    """Constant and alternating vectors, and rows of a Hadamard matrix, become no spike.

    The largest sum of independent signs stays below 4.5 sigma.
    """
    constant = torch.ones(head_size, device=DEVICE)
    alternating = constant.clone()
    alternating[1::2] = -1
    for x in (constant, alternating, *hadamard(head_size)[1:4].to(DEVICE).float()):
        y = reference.rotate(x)
        peak = (y.abs().max() / y.square().mean().sqrt()).item()
        assert peak < 4.5, f"largest coordinate {peak:.2f} times the rms"


@all_head_sizes
@model_dtypes
def test_round_trip(head_size, dtype):
    """The error of a round trip is at most 2**-10 of the largest input."""
    x = gaussian(200, head_size, dtype=dtype)
    x = x * torch.logspace(-3, 3, 200, device=DEVICE, dtype=dtype)[:, None]
    back = reference.inverse_rotate(reference.rotate(x))
    error = (back - x.float()).abs().amax(-1)
    assert (error <= 2.0**-10 * x.float().abs().amax(-1)).all()


@all_head_sizes
def test_rotation_keeps_dot_products(head_size):
    x, y = gaussian(100, head_size), gaussian(100, head_size, seed=1)
    rotated = (reference.rotate(x) * reference.rotate(y)).sum(-1)
    error = (rotated - (x * y).sum(-1)).abs()
    assert (error <= 2.0**-9 * x.norm(dim=-1) * y.norm(dim=-1)).all()


def fixed_point(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers, (T, D) fp64, and units, (T, 1) fp32, of vectors (T, D)."""
    _, exponent = torch.frexp(x.abs().amax(-1, keepdim=True))
    unit = torch.ldexp(torch.ones_like(x[:, :1]), exponent - 1 - fmt.ROTATION_EXPONENT)
    return torch.floor(x.double() / unit + 0.5), unit


@all_head_sizes
def test_sums_are_exact(head_size):
    """Any order and precision of accumulation gives the same bits: sums are exact."""
    x = gaussian(50, head_size) * 2.0 ** (torch.arange(50, device=DEVICE) - 25)[:, None]
    integers, unit = fixed_point(x)
    assert integers.abs().max() <= 2 ** (fmt.ROTATION_EXPONENT + 1)
    matrix = rotation_matrix(head_size, DEVICE, torch.float64)
    expected = (integers @ matrix).float() * (unit * inverse_sqrt(head_size))
    assert torch.equal(reference.rotate(x), expected)
    order = torch.randperm(head_size, generator=torch.Generator().manual_seed(0))
    order = order.to(DEVICE)
    permuted = integers[:, order].float() @ matrix[order].float()
    assert torch.equal(permuted, (integers @ matrix).float())


def test_every_head_size_is_pinned():
    assert set(GOLDEN) == set(HEAD_SIZES)
