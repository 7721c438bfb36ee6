# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Round trips of MLA's latents and rotary keys through cache formats, and their bytes.

Latents are (..., L) and rotary keys (..., R), in fp32 but of bf16's values, as a model
in bf16 hands them to a cache. vLLM's formats are written again after its kernels
(``concat_and_cache_mla`` and the writers of ``fp8_ds_mla`` and ``nvfp4_ds_mla``). These
take one size of latent, and the last runs on one architecture.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import upstream
from rotations import rotation
from variants import as_fp8, format_round_trip, identity

from vllm.v1.attention.ops.turbo.format import KEY_CODEBOOKS
from vllm.v1.attention.ops.turbo.latent.format import LATENT_PRESETS, LatentFormat
from vllm.v1.attention.ops.turbo.reference import inverse_rotate
from vllm.v1.attention.ops.turbo.reference import latent as reference

RoundTrip = Callable[[torch.Tensor], torch.Tensor]

# Vectors at a time: the search for a path takes hundreds of bytes a coordinate.
VECTORS = 16384
NVFP4_GROUP = 16
E2M1_MAX = 6.0
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Where the next level begins, and whether the point itself belongs to it: ties go to
# the level of even mantissa.
E2M1_STEPS = (
    *((0.25, False), (0.75, True), (1.25, False), (1.75, True)),
    *((2.5, False), (3.5, True), (5.0, False)),
)
SMALLEST_E4M3 = 2.0**-9
FP8_GROUP = 128
FP8_MAX = 448.0
SMALLEST_FP8_SCALE = 1e-4


@dataclass(frozen=True)
class LatentVariant:
    """A cache of one kind.

    Attributes:
        name: Its name in tables.
        latent, rope: Round trips.
        latent_bytes, rope_bytes: Bytes of a token.

    """

    name: str
    latent: RoundTrip
    rope: RoundTrip
    latent_bytes: float
    rope_bytes: float

    @property
    def num_bytes(self) -> float:
        return self.latent_bytes + self.rope_bytes

    def with_rope(self, other: "LatentVariant", name: str) -> "LatentVariant":
        """This one's latents beside another's rotary keys."""
        return replace(self, name=name, rope=other.rope, rope_bytes=other.rope_bytes)


def in_parts(x: torch.Tensor, round_trip: RoundTrip) -> torch.Tensor:
    """A round trip of vectors (..., n), `VECTORS` at a time."""
    rows = x.reshape(-1, x.shape[-1]).split(VECTORS)
    return torch.cat([round_trip(part) for part in rows]).view(x.shape)


def turbo_latent(x: torch.Tensor, layout: LatentFormat) -> torch.Tensor:
    """Latents as ``latent.format`` stores them, rotated back."""
    codes = reference.quantize_latent(x, layout)
    return inverse_rotate(reference.dequantize_latent(*codes, layout))


def turbo_rope(x: torch.Tensor) -> torch.Tensor:
    """Rotary keys as ``latent.format`` stores them."""
    return reference.dequantize_rope(*reference.quantize_rope(x))


def as_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest number of two exponent bits and one of mantissa, at most 6."""
    magnitude = x.abs()
    index = torch.zeros_like(x, dtype=torch.int64)
    for point, is_reached in E2M1_STEPS:
        index += magnitude >= point if is_reached else magnitude > point
    return torch.tensor(E2M1_LEVELS, device=x.device)[index] * x.sign()


def as_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """E2M1, with an E4M3 scale a group of 16 and none above them."""
    grouped = x.unflatten(-1, (-1, NVFP4_GROUP))
    scale = grouped.abs().amax(-1, keepdim=True) * (1 / E2M1_MAX)
    scale = as_fp8(scale.clamp(min=SMALLEST_E4M3))
    return (as_e2m1(grouped * (1 / scale)) * scale).flatten(-2)


def rotated(x: torch.Tensor, round_trip: RoundTrip) -> torch.Tensor:
    """A round trip behind the series' own rotation."""
    matrix = rotation("randomised", x.shape[-1], x.device)
    return round_trip(x @ matrix) @ matrix.T


def as_scaled_fp8(x: torch.Tensor) -> torch.Tensor:
    """E4M3, with a power of two a group of 128."""
    grouped = x.unflatten(-1, (-1, FP8_GROUP))
    scale = grouped.abs().amax(-1, keepdim=True) * (1 / FP8_MAX)
    exponent = scale.clamp(min=SMALLEST_FP8_SCALE).log2().ceil()
    return (as_fp8(grouped / exponent.exp2()) * exponent.exp2()).flatten(-2)


def _turbo(name: str, rank: int, rope: int) -> LatentVariant:
    layout = LatentFormat.from_cache_dtype(name, rank + rope)
    return LatentVariant(
        name,
        partial(in_parts, round_trip=partial(turbo_latent, layout=layout)),
        turbo_rope,
        layout.code_bytes + layout.scale_bytes,
        layout.rope + layout.rope_scale_bytes,
    )


@cache
def latent_variants(rank: int, rope: int) -> dict[str, LatentVariant]:
    """The formats that are compared, by name; bf16, their baseline, is first.

    "nvfp4_ds_mla" has 352 bytes at 512 + 64, and is in proportion at other sizes. The
    turboquant preset's keys stand for what vLLM's pull request 41803 does to latents.
    """
    nvfp4_bytes = rank / 2 + rank / NVFP4_GROUP
    formats = [
        LatentVariant("bf16", identity, identity, 2 * rank, 2 * rope),
        LatentVariant("fp8", as_fp8, as_fp8, rank, rope),
        LatentVariant(
            "fp8_ds_mla", as_scaled_fp8, identity, rank + rank / 32, 2 * rope
        ),
        *(_turbo(name, rank, rope) for name in LATENT_PRESETS),
        LatentVariant("nvfp4_ds_mla", as_nvfp4, as_fp8, nvfp4_bytes, rope),
        LatentVariant(
            "nvfp4_ds_mla, rotated",
            partial(rotated, round_trip=as_nvfp4),
            as_fp8,
            nvfp4_bytes,
            rope,
        ),
        LatentVariant(
            "turboquant_4bit_nc, rope in bf16",
            partial(upstream.key_round_trip, preset="turboquant_4bit_nc"),
            identity,
            rank / 2 + 2,
            2 * rope,
        ),
    ]
    return {each.name: each for each in formats}


@cache
def rope_variants(rank: int, rope: int) -> dict[str, LatentVariant]:
    """turbo4 with other rotary keys than its own, and these beside exact latents."""
    formats = latent_variants(rank, rope)
    exact, turbo4 = formats["bf16"], formats["turbo4"]
    four_bits = replace(
        exact,
        rope=partial(format_round_trip, codebook=KEY_CODEBOOKS[4]),
        rope_bytes=rope / 2 + rope / 32,
    )
    ropes = {
        "bf16": exact,
        "int8": turbo4,
        "E4M3": formats["fp8"],
        "4 bits, rotated": four_bits,
    }
    made = [
        latents.with_rope(other, f"latent {what}, rope {name}")
        for what, latents in (("bf16", exact), ("turbo4", turbo4))
        for name, other in ropes.items()
        if other is not latents
    ]
    nvfp4 = formats["nvfp4_ds_mla, rotated"]
    made.append(nvfp4.with_rope(turbo4, "latent nvfp4, rotated, rope int8"))
    return {each.name: each for each in made}
