# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand-ins for the small matrix products vLLM prepacks on CPUs with AMX."""

import torch


def convert_weight_packed(weight: torch.Tensor) -> torch.Tensor:
    """Returns a copy of `weight`, [n, k]: the product below needs no tiles."""
    return weight.clone()


def weight_packed_linear(
    out: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    bias: torch.Tensor | None,
    is_vnni: bool,
) -> None:
    """Writes `mat1 @ mat2.T + bias` into `out`.

    Args:
        out: [m, n].
        mat1: [m, k].
        mat2: [n, k], from `convert_weight_packed`.
        bias: fp32 [n], or None.
        is_vnni: Ignored: whether `mat2` is in the native op's tiles.

    """
    product = torch.nn.functional.linear(mat1, mat2)
    if bias is not None:
        product = product.float() + bias
    out.copy_(product)
