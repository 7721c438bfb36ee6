# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The mean of an MLA layer's latents, which is taken off before they are stored.

A latent has no RoPE, so one vector is the mean at all positions. Kernels add it again
to outputs and to dequantised latents, so it affects only quality, and any vector is
correct. The first token's latent also loses it.
"""

from typing import NamedTuple

import torch
from torch import nn

from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix

# The buffer of an MLA layer. Sleeping engines keep buffers, and no other tensor.
BUFFER = "turbo_latent_mean"


class LatentMean(NamedTuple):
    """Views of a layer's buffer, at addresses that CUDA graphs read.

    Attributes:
        latent: (L,) fp32, the mean.
        rotated: (L,) fp32, the rotated mean.

    """

    latent: torch.Tensor
    rotated: torch.Tensor


def with_rotation(mean: torch.Tensor) -> torch.Tensor:
    """The buffer's rows, (2, L) fp32 on the CPU: the mean, and the rotated mean.

    Args:
        mean: (L,) of any floating dtype, on any device.

    """
    mean = mean.detach().to("cpu", torch.float32)
    matrix = rotation_matrix(mean.numel(), mean.device, torch.float64)
    # In fp64, so that all ranks and devices have the same bits.
    rotated = mean.double() @ matrix / mean.numel() ** 0.5
    return torch.stack([mean, rotated.float()])


@torch.no_grad()
def register_latent_mean(
    layer: nn.Module, mean: torch.Tensor, device: torch.device
) -> LatentMean:
    """Keep a mean in the layer's buffer, in place if it has one.

    Args:
        layer: The MLA layer.
        mean: (L,) of any floating dtype, on any device.
        device: The device of the layer's kernels.

    Raises:
        ValueError: If the mean is not finite.

    """
    if not mean.isfinite().all():
        raise ValueError("the mean of latents is not finite")
    rows = with_rotation(mean)
    buffer = getattr(layer, BUFFER, None)
    if buffer is None:
        layer.register_buffer(BUFFER, rows.to(device), persistent=False)
    else:
        buffer.copy_(rows)
    return LatentMean(*getattr(layer, BUFFER).unbind())
