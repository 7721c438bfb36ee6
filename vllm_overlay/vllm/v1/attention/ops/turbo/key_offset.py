# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The offset that is taken off K before it is stored, of models that add a bias to it.

For any vector m, q.k = q.(k - m) + q.m. What is stored is k - m, and whoever compares
the scores of cached keys with those of others adds q.m to the former; among themselves
nothing has to be added, for a softmax does not see what all scores have in common. So
m decides on quality alone. It is the mean of the rotated bias over a context's first
positions: a bias lies in coordinates that turn slowly, so that most of it is in the
mean, and the codes are left to what differs between keys.

m follows from the checkpoint's bias, from RoPE and from ``VERSION``: not from lengths,
ranks, dtypes or devices. Equal checkpoints make equal bytes.
"""

import copy
import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

# Of the rule below: another changes the bytes of models with a bias.
VERSION = 1
# Positions that the mean is taken over.
NUM_POSITIONS = 2048
# Of these, how many are rotated at a time.
_CHUNK = 1024
# The buffer of an attention layer. Sleeping engines keep buffers, and no other tensor.
BUFFER = "turbo_key_offset"


def find_rotary(parent: nn.Module) -> RotaryEmbeddingBase | None:
    """The rotary embedding beside an attention layer; None if there is none."""
    found = (x for x in parent.children() if isinstance(x, RotaryEmbeddingBase))
    return next(found, None)


def _exact_copy(rotary: RotaryEmbeddingBase) -> RotaryEmbeddingBase:
    """A copy on the CPU whose cosines and sines are not rounded to the model's dtype.

    The layer's own would change its cache for another dtype.
    """
    exact = copy.deepcopy(rotary).cpu()
    with torch.device("cpu"):
        try:
            table = exact._compute_cos_sin_cache()
        except TypeError:  # of a class that has several
            table = exact.cos_sin_cache
    exact.cos_sin_cache = table.float()
    return exact


@torch.no_grad()
def mean_rotated(
    bias: torch.Tensor, rotary: RotaryEmbeddingBase | None
) -> torch.Tensor:
    """The mean of a rotated bias over the first positions.

    Args:
        bias: (H, D), of any dtype, on any device.
        rotary: How K is rotated; None if it is not.

    Returns:
        (H, D) fp32 on the CPU.

    """
    bias = bias.detach().to("cpu", torch.float32)
    if rotary is None:
        return bias.clone()
    exact = _exact_copy(rotary)
    num_positions = min(NUM_POSITIONS, exact.cos_sin_cache.shape[0])
    total = torch.zeros(bias.shape, dtype=torch.float64)
    for first in range(0, num_positions, _CHUNK):
        positions = torch.arange(first, min(first + _CHUNK, num_positions))
        key = bias.flatten().repeat(len(positions), 1)
        _, rotated = exact.forward_native(positions, key.clone(), key)
        assert rotated is not None
        total += rotated.view(-1, *bias.shape).double().sum(0)
    return (total / num_positions).float()


def digest(offsets: Iterable[torch.Tensor | None]) -> str:
    """Eight hexadecimal digits that tell tables apart: pages can be shared by engines
    that say the same.

    Args:
        offsets: (H, D) fp32 of this rank's layers, in their order; None where keys are
            stored as they are.

    """
    found = hashlib.sha256(f"K offset {VERSION}".encode())
    for offset in offsets:
        found.update(b"-" if offset is None else offset.cpu().numpy().tobytes())
    return found.hexdigest()[:8]
