# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Round trips of K and V through vLLM's own turboquant presets.

The presets and the centroids are vLLM's. The arithmetic is written again, so that it
runs on any device and shape, and a test compares it with vLLM's kernels.
"""

import math
from functools import cache

import torch

from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
from vllm.model_executor.layers.quantization.turboquant.config import (
    TQ_PRESETS,
    TurboQuantConfig,
)
from vllm.v1.attention.ops.turbo.formats.rotation import hadamard

PRESETS = tuple(TQ_PRESETS)
NUM_BOUNDARY_LAYERS = 2  # kept in bf16 at each end of a dense model


@cache
def config(preset: str, head_size: int) -> TurboQuantConfig:
    return TurboQuantConfig.from_cache_dtype(preset, head_size)


@cache
def tables(preset: str, head_size: int, device: torch.device) -> list[torch.Tensor]:
    """Rotation, centroids and the thresholds between them."""
    centroids = get_centroids(head_size, config(preset, head_size).centroid_bits)
    thresholds = (centroids[1:] + centroids[:-1]) / 2
    matrix = hadamard(head_size).float() / math.sqrt(head_size)
    return [x.to(device) for x in (matrix, centroids, thresholds)]


def boundary_layers(num_layers: int) -> set[int]:
    """Layers that vLLM leaves in the model's dtype."""
    kept = min(NUM_BOUNDARY_LAYERS, num_layers // 2)
    return {*range(kept), *range(num_layers - kept, num_layers)}


def key_round_trip(key: torch.Tensor, preset: str) -> torch.Tensor:
    """Keys as attention sees them, (..., D) fp32."""
    head_size = key.shape[-1]
    chosen = config(preset, head_size)
    key = key.float()
    if chosen.key_fp8:
        return key.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    matrix, centroids, thresholds = tables(preset, head_size, key.device)
    norm = key.norm(dim=-1, keepdim=True)
    rotated = (key / (norm + 1e-8)) @ matrix
    decoded = centroids[torch.bucketize(rotated, thresholds, right=True)]
    if chosen.norm_correction:
        length = decoded.square().sum(-1, keepdim=True)
        decoded = decoded * (1 / torch.sqrt(length + 1e-16))
    return (norm.half().float() * decoded) @ matrix


def value_round_trip(value: torch.Tensor, preset: str) -> torch.Tensor:
    """Values as attention sees them, (..., D) fp32."""
    bits = config(preset, value.shape[-1]).effective_value_quant_bits
    value = value.float()
    lowest = value.amin(-1, keepdim=True)
    largest_code = 2**bits - 1
    scale = (value.amax(-1, keepdim=True) - lowest) / largest_code
    scale = scale.clamp(min=1e-8)
    codes = ((value - lowest) / scale + 0.5).int().clamp(0, largest_code)
    return codes * scale.half().float() + lowest.half().float()


def slot_bytes(preset: str, head_size: int) -> int:
    """Bytes a token and KV head."""
    return config(preset, head_size).slot_size_aligned
