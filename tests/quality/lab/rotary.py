# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""RoPE of a model in the lab: each position's turn, and the way back."""

import torch
from attention import LabModel


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)


@torch.inference_mode()
def rope(lab: LabModel, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position, (T, D) fp32, with halves of pairs apart.

    Raises:
        ValueError: If the model has no such RoPE for whole heads.

    """
    rotary = getattr(lab.model.model, "rotary_emb", None)
    if rotary is None:
        raise ValueError(f"{lab.model.config.model_type} has no RoPE for whole heads")
    positions = torch.arange(num_tokens, device=lab.device)[None]
    cos, sin = rotary(torch.zeros(1, device=lab.device), positions)
    if cos.shape[-1] != lab.head_size:
        raise ValueError("RoPE turns a part of a head")
    return cos[0], sin[0]


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of (..., T, D); with ``-sin`` the way back."""
    return x * cos + rotate_half(x) * sin


def at_positions(
    vectors: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor
) -> list[torch.Tensor]:
    """Vectors of (H, D) at each position, (H, T, D)."""
    return [turn(x[:, None], cos, sin) for x in vectors]
