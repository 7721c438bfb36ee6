# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The caches that are compared: round trips of K and V, and their bytes.

A variant is a rotation, a quantiser for K and one for V, and whether a mean is taken
from K and its bias from the scores. Vectors have shape (..., D).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import upstream
from rotations import rotation
from scalar import ScalarQuantizer, ScaleRule, fitted, unbiased_gain

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import Codebook, TurboFormat
from vllm.v1.attention.ops.turbo.reference import codec as reference_codec

RoundTrip = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """A cache of one kind.

    Attributes:
        name: Its name in tables.
        key, value: Round trips.
        num_bytes: Bytes of a token and KV head, K and V together.
        subtracts_mean: Whether the mean of a layer's K is not stored.

    """

    name: str
    key: RoundTrip
    value: RoundTrip
    num_bytes: float
    subtracts_mean: bool = False

    def round_trip(
        self, key: torch.Tensor, value: torch.Tensor, mean: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as attention sees them.

        Args:
            key: (batch, H, T, D).
            value: (batch, H, T, D).
            mean: (H, 1, D), the mean of K on other text, if the variant subtracts it.
                It is added back, so that stored and raw keys may be mixed; softmax
                drops q.mean.

        """
        if not self.subtracts_mean:
            return self.key(key), self.value(value)
        assert mean is not None, f"{self.name} needs the mean of K"
        return self.key(key - mean) + mean, self.value(value)


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


def as_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def as_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def format_round_trip(
    x: torch.Tensor, codebook: Codebook, unbiased: bool = True
) -> torch.Tensor:
    """The stored format itself, by its reference."""
    decoded = reference_codec.dequantize(
        *reference_codec.quantize(reference.rotate(x), codebook), codebook
    )
    return reference.inverse_rotate(decoded) * (codebook.gain if unbiased else 1)


def rotated_round_trip(
    x: torch.Tensor, kind: str, quantizer: ScalarQuantizer, gain: float = 1.0
) -> torch.Tensor:
    matrix = rotation(kind, x.shape[-1], x.device)
    return quantizer.round_trip(x.float() @ matrix) @ matrix.T * gain


@cache
def preset(
    cache_dtype: str,
    head_size: int,
    unbiased: str = "each",
    subtracts_mean: bool = False,
    name: str | None = None,
) -> Variant:
    """A cache dtype of the format, as it is stored or with one thing changed.

    Keys are unbiased "each", "on average" by the gain alone, or "none".
    """
    layout = TurboFormat.from_cache_dtype(cache_dtype, head_size)
    codebook = replace(layout.key_codebook, unbiased=unbiased == "each")
    return Variant(
        name or cache_dtype,
        partial(format_round_trip, codebook=codebook, unbiased=unbiased != "none"),
        partial(format_round_trip, codebook=layout.value_codebook),
        layout.slot_size,
        subtracts_mean,
    )


@cache
def upstream_preset(name: str, head_size: int) -> Variant:
    return Variant(
        name,
        partial(upstream.key_round_trip, preset=name),
        partial(upstream.value_round_trip, preset=name),
        upstream.slot_bytes(name, head_size),
    )


@cache
def _gain(quantizer: ScalarQuantizer, head_size: int) -> float:
    return unbiased_gain(quantizer.round_trip, head_size)


@cache
def parts(
    name: str, head_size: int, bits: int, rule: ScaleRule, kind: str = "randomised"
) -> Variant:
    """A variant of scalar codes, of one width for K and V, K unbiased on average."""
    quantizer = fitted(bits, rule, head_size)
    gain = _gain(quantizer, head_size)
    return Variant(
        name,
        partial(rotated_round_trip, kind=kind, quantizer=quantizer, gain=gain),
        partial(rotated_round_trip, kind=kind, quantizer=quantizer),
        2 * quantizer.num_bytes(head_size),
    )


def scale_rules(head_size: int) -> dict[str, ScaleRule]:
    """The rules that are compared; all but the first search scale and codes."""
    return {
        "norm of the vector in fp32": ScaleRule(head_size, "norm32"),
        "fp16 a vector": ScaleRule(head_size, "fp16"),
        "fp16 per 64": ScaleRule(64, "fp16"),
        "E5M3 per 64": ScaleRule(64),
        "E5M3 per 32": ScaleRule(32),
        "E5M3 per 16": ScaleRule(16),
        "E5M3 a vector less 3 bits per 16": ScaleRule(16, "delta"),
    }


def scale_variants(head_size: int, bits: int) -> list[Variant]:
    """The scale rules, with scalar codes behind the format's rotation."""
    return [
        parts(f"{bits} bits, {name}", head_size, bits, rule)
        for name, rule in scale_rules(head_size).items()
    ]


@cache
def plain_variants(head_size: int) -> dict[str, Variant]:
    """The unrotated caches: exact, bf16 and fp8."""
    return {
        "bf16": Variant("bf16", as_bfloat16, as_bfloat16, 4 * head_size),
        "fp8": Variant("fp8", as_fp8, as_fp8, 2 * head_size),
    }
