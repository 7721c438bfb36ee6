# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scalar quantisers of rotated vectors: a rule for scales and a fitted codebook.

Every rule gets its codebook by the same fit on the same Gaussian vectors, so that only
the rules differ.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from turboquant import lloyd_max

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.reference.levels import scale_floor, scale_values

# Scales tried, in steps of E5M3 from the group's largest magnitude rounded down.
E5M3_OFFSETS = tuple(range(-3, 3))
# The same for scales of a floating dtype: multiples of the largest magnitude.
FLOAT_FACTORS = tuple(2 ** (step / 12) for step in range(-7, 3))
FIT_VECTORS = 1000
FIT_ROUNDS = 25
SCALE_BYTES = {"e5m3": 1, "fp16": 2, "norm16": 2, "fp32": 4, "norm32": 4}


@dataclass(frozen=True)
class ScaleRule:
    """How the scales of a vector are chosen and stored.

    Attributes:
        group: Coordinates that share a scale.
        kind: "e5m3": a byte a scale, searched with the codes. "fp16", "fp32":
            likewise in those dtypes. "norm16", "norm32": the root mean square of
            the group, as the paper's norm. "delta": an E5M3 byte a vector, and a
            group's scale is so many steps below it.
        delta_bits: Bits of a group's steps, for "delta".

    """

    group: int
    kind: str = "e5m3"
    delta_bits: int = 3

    def num_bytes(self, head_size: int) -> float:
        """Bytes of a vector's scales."""
        groups = head_size / self.group
        if self.kind == "delta":
            return 1 + groups * self.delta_bits / 8
        return groups * SCALE_BYTES[self.kind]


@dataclass(frozen=True)
class ScalarQuantizer:
    """Codes and scales of rotated vectors, as the vectors that they decode to.

    Attributes:
        bits: Bits a code.
        rule: The rule of the scales.
        magnitudes: Upper half of the symmetric levels, ascending.

    """

    bits: int
    rule: ScaleRule
    magnitudes: tuple[float, ...]

    def num_bytes(self, head_size: int) -> float:
        """Bytes of a vector."""
        return head_size * self.bits / 8 + self.rule.num_bytes(head_size)

    def nearest(
        self, magnitude: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index of the nearest level for each coordinate, and that level.

        Args:
            magnitude: (..., groups, group), not negative.
            scale: (..., groups, 1).

        """
        levels = torch.tensor(self.magnitudes, device=magnitude.device)
        thresholds = (levels[1:] + levels[:-1]) / 2
        index = torch.zeros_like(magnitude, dtype=torch.uint8)
        for threshold in thresholds.unbind():
            index += magnitude > threshold * scale
        index = index.int()
        return index, levels[index]

    def _searched(self, magnitude: torch.Tensor) -> torch.Tensor:
        """The scale of least error for each group."""
        largest = magnitude.amax(-1, keepdim=True)
        if self.rule.kind in ("fp16", "fp32"):
            dtype = {"fp16": torch.float16, "fp32": torch.float32}[self.rule.kind]
            candidates = [(largest * f).to(dtype).float() for f in FLOAT_FACTORS]
        else:
            base = scale_floor(largest)
            codes = [(base + o).clamp(0, fmt.SCALE_CODE_MAX) for o in E5M3_OFFSETS]
            candidates = [scale_values(code.to(torch.uint8)) for code in codes]
        errors = []
        for scale in candidates:
            level = self.nearest(magnitude, scale)[1]
            errors.append((level * scale - magnitude).square().sum(-1, keepdim=True))
        best = torch.stack(errors).argmin(0, keepdim=True)
        return torch.stack(candidates).gather(0, best)[0]

    def scales(self, magnitude: torch.Tensor) -> torch.Tensor:
        """Scales (..., groups, 1) of magnitudes (..., groups, group)."""
        kind = self.rule.kind
        if kind.startswith("norm"):
            scale = magnitude.square().mean(-1, keepdim=True).sqrt()
            return scale.half().float() if kind == "norm16" else scale
        scale = self._searched(magnitude)
        if kind == "delta":
            codes = scale_floor(scale)
            lowest = codes.amax(-2, keepdim=True) - (1 << self.rule.delta_bits) + 1
            codes = torch.maximum(codes, lowest).clamp(min=0)
            scale = scale_values(codes.to(torch.uint8))
        return scale

    def round_trip(self, y: torch.Tensor) -> torch.Tensor:
        """Quantise and decode vectors (..., D) fp32."""
        grouped = y.unflatten(-1, (-1, self.rule.group))
        magnitude = grouped.abs()
        scale = self.scales(magnitude)
        level = self.nearest(magnitude, scale)[1]
        return (level * scale * grouped.sign()).flatten(-2)


def gaussian_vectors(
    count: int, head_size: int, seed: int = 0, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Standard normal vectors, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, head_size, generator=generator).to(device)


@cache
def fitted(bits: int, rule: ScaleRule, head_size: int = 128) -> ScalarQuantizer:
    """The quantiser of a rule with levels of least squared error.

    Alternates between scales and codes for the levels, and levels for the scales
    and codes (least squares), on Gaussian vectors.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    y = gaussian_vectors(FIT_VECTORS, head_size, seed=1, device=device)
    magnitude = y.unflatten(-1, (-1, rule.group)).abs()
    half = 1 << bits >> 1
    # The paper's levels, which reach the largest magnitude if a scale follows it.
    levels = lloyd_max(bits, head_size)[0][half:]
    reach = 1.1 / levels[-1] if not rule.kind.startswith("norm") else head_size**0.5
    initial = tuple((levels * reach).tolist())
    quantizer = ScalarQuantizer(bits, rule, initial)
    for _ in range(FIT_ROUNDS):
        scale = quantizer.scales(magnitude)
        index = quantizer.nearest(magnitude, scale)[0].flatten()
        weight = (scale * scale).expand_as(magnitude).flatten()
        moment = (scale * magnitude).flatten()
        zero = torch.zeros(half, device=device)
        total = zero.index_add(0, index, moment)
        updated = total / zero.index_add(0, index, weight)
        quantizer = replace(quantizer, magnitudes=tuple(updated.tolist()))
    return quantizer


def relative_error(decoded: torch.Tensor, x: torch.Tensor) -> float:
    """Squared error over squared length, of all vectors together."""
    return ((decoded - x).square().sum() / x.square().sum()).item()


def unbiased_gain(round_trip, head_size: int = 128) -> float:
    """The factor of decoded vectors that makes products with x right on average."""
    x = gaussian_vectors(FIT_VECTORS, head_size, seed=2)
    return (x.square().sum() / (round_trip(x) * x).sum()).item()
