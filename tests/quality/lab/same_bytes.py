# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Is there a better code of the same bytes, and what would it cost?

Squared error on Gaussian vectors of 128, which rotated vectors nearly are, for the
format and for codes of as many bytes. Writes same_bytes.json and same_bytes.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from blockcodes import (
    computed_levels,
    random_levels,
    trellis_round_trip,
    two_codebook_round_trip,
    vector_round_trip,
)
from report import run_programme
from scalar import E5M3_OFFSETS, ScaleRule, fitted, gaussian_vectors, relative_error

from vllm.v1.attention.ops.turbo import reference_codec
from vllm.v1.attention.ops.turbo.format import VALUE_CODEBOOKS, Codebook

HEAD_SIZE = 128
NUM_VECTORS = 1000
TRELLIS_VECTORS = 200


@dataclass(frozen=True)
class Code:
    """A way to store a vector.

    Attributes:
        name: In the table.
        num_bytes: Of a vector of 128.
        round_trip: (n, 128) to the same.
        decode: What a kernel does for an element, against the format's.
        encode: What the store does.
        vectors: How many it is measured on.

    """

    name: str
    num_bytes: float
    round_trip: Callable[[torch.Tensor], torch.Tensor]
    decode: str
    encode: str
    vectors: int = NUM_VECTORS


def as_stored(y: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    return reference_codec.dequantize(*reference_codec.quantize(y, codebook), codebook)


def scalar_codes(bits: int) -> list[Code]:
    codes = HEAD_SIZE * bits / 8
    codebook = VALUE_CODEBOOKS[bits]
    stored = partial(as_stored, codebook=codebook)
    found = [
        Code(
            "the format: E5M3 per 32",
            codes + 4,
            stored,
            "1 permute a K pair or 2 FMAs a V, a scale per 32",
            f"{len(codebook.scale_offsets)} scales tried a group",
        )
    ]
    rules = {
        "norm in fp32": (ScaleRule(HEAD_SIZE, "norm32"), "no scale per 32", "1 pass"),
        "E5M3 a vector less 3 bits per 16": (
            ScaleRule(16, "delta"),
            "as the format; twice as many scales, each a subtraction more; K's "
            "products end every 16 coordinates instead of 32",
            f"{len(E5M3_OFFSETS)} scales tried a group, then the codes again",
        ),
        "E5M3 a vector less 2 bits per 8": (
            ScaleRule(8, "delta", delta_bits=2),
            "as above, four times as many scales",
            "as above",
        ),
    }
    for name, (rule, decode, encode) in rules.items():
        quantizer = fitted(bits, rule, HEAD_SIZE)
        found.append(
            Code(
                name,
                quantizer.num_bytes(HEAD_SIZE),
                quantizer.round_trip,
                decode,
                encode,
            )
        )
    found.append(
        Code(
            "two codebooks, E5M2 per 32",
            codes + 4,
            partial(two_codebook_round_trip, bits=bits),
            "as the format for K, a table chosen a group; V's cubic gets "
            "coefficients a group",
            "8 pairs tried a group",
        )
    )
    return found


def vector_codes(bits: int) -> list[Code]:
    found = []
    for size in (2, 4):
        if bits * size > 12:
            continue
        points = 1 << bits * size
        kib = points * size * 2 / 1024
        found.append(
            Code(
                f"{size}-D codebook of {points}, E5M3 per 32",
                HEAD_SIZE * bits / 8 + 4,
                partial(vector_round_trip, bits=bits, size=size),
                f"a load from a table of {kib:g} KiB in fp16 for {size} elements, in "
                "shared memory, with bank conflicts; no int8 operand",
                f"{points} distances for {size} elements and a scale tried",
                TRELLIS_VECTORS,
            )
        )
    return found


def trellis_codes(bits: int) -> list[Code]:
    found = []
    for state_bits in (6, 8, 10, 12):
        states = 1 << state_bits
        computed = state_bits == 12
        levels = (computed_levels if computed else random_levels)(state_bits)
        first_state = (state_bits - bits) / 8
        window = "2 shifts and a mask"
        found.append(
            Code(
                f"trellis of {states} states, levels "
                + ("computed" if computed else "in a table"),
                HEAD_SIZE * bits / 8 + first_state + 2,
                partial(trellis_round_trip, bits=bits, levels=levels),
                f"{window}, a multiply-add, a byte sum and a conversion"
                if computed
                else f"{window}, and a load from a table of {states * 2} bytes",
                f"Viterbi: {states} states an element, one after the other",
                TRELLIS_VECTORS,
            )
        )
    return found


def measure() -> list[dict]:
    rows = []
    for bits in (4, 3):
        for code in scalar_codes(bits) + vector_codes(bits) + trellis_codes(bits):
            y = gaussian_vectors(code.vectors, HEAD_SIZE, seed=11)
            rows.append(
                {
                    "bits": bits,
                    "code": code.name,
                    "bytes": code.num_bytes,
                    "error": relative_error(code.round_trip(y), y),
                    "bound": 4 ** (-8 * code.num_bytes / HEAD_SIZE),
                    "decode": code.decode,
                    "encode": code.encode,
                }
            )
    return rows


def markdown(rows: list[dict]) -> str:
    lines = [
        "# Codes of about the same bytes",
        "",
        "Squared error over squared length of Gaussian vectors of 128; bytes of a "
        "vector; the bound is that of any code of so many bytes, however long its "
        "blocks. Written by `tests/quality/lab/same_bytes.py`.",
    ]
    for bits in (4, 3):
        lines += [
            "",
            f"## {bits} bits",
            "",
            "| code | bytes | error | of the format's | bound | decoding | encoding |",
            "|---|---|---|---|---|---|---|",
        ]
        own = [row for row in rows if row["bits"] == bits]
        for row in own:
            share = row["error"] / own[0]["error"]
            lines.append(
                f"| {row['code']} | {row['bytes']:.4g} | {row['error']:.5f} | "
                f"{100 * share:.0f} % | {row['bound']:.5f} | {row['decode']} | "
                f"{row['encode']} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_programme("same_bytes", __doc__, measure, markdown)
