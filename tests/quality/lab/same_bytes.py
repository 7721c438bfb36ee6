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
    codebook_round_trip,
    computed_levels,
    random_levels,
    trellis_codebook,
    trellis_round_trip,
    two_codebook_round_trip,
    vector_round_trip,
)
from report import run_programme, table
from scalar import E5M3_OFFSETS, ScaleRule, fitted, gaussian_vectors, relative_error

from vllm.v1.attention.ops.turbo.format import SCALE_OFFSETS, VALUE_CODEBOOKS

HEAD_SIZE = 128
NUM_VECTORS = 1000
TRELLIS_VECTORS = 200
FORMAT_SCALES = "E5M3 a vector less 3 bits per 16"


@dataclass(frozen=True)
class Code:
    """A way to store a vector.

    Attributes:
        name: Its name in the table.
        num_bytes: Bytes of a vector of 128.
        round_trip: Maps (n, 128) to the same shape.
        decode: A kernel's work for an element, against the format's.
        encode: The store's work.
        vectors: The number of vectors that it is measured on.

    """

    name: str
    num_bytes: float
    round_trip: Callable[[torch.Tensor], torch.Tensor]
    decode: str
    encode: str
    vectors: int = NUM_VECTORS


def the_format(bits: int) -> Code:
    """Values as they are stored."""
    name = f"the format: {FORMAT_SCALES}"
    decode = "1 permute a K pair or 2 FMAs a V; a scale per 16, a subtraction each"
    encode = f"{len(SCALE_OFFSETS)} scales tried a group, then the codes again"
    codebook = VALUE_CODEBOOKS[bits]
    if codebook.trellis:
        name += ", 4-state trellis of 16 levels"
        decode = (
            "4 bits of two planes, by shifts and logic on words of 8 codes; then as "
            "with 4 bits"
        )
        encode += "; Viterbi each time: 4 states an element, one after the other"
    stored = partial(codebook_round_trip, codebook=codebook)
    return Code(name, HEAD_SIZE * bits / 8 + 4, stored, decode, encode)


def the_other_code(bits: int) -> Code:
    """The format's scales with its code of the other width: trellis or scalar."""
    if VALUE_CODEBOOKS[bits].trellis:
        quantizer = fitted(bits, ScaleRule(16, "delta"), HEAD_SIZE)
        return Code(
            f"{FORMAT_SCALES}, 8 levels",
            quantizer.num_bytes(HEAD_SIZE),
            quantizer.round_trip,
            "3 bits of two planes, by shifts and logic on words of 8 codes; then as "
            "with 4 bits",
            f"{len(E5M3_OFFSETS)} scales tried a group, then the codes again",
        )
    codebook = trellis_codebook(bits, HEAD_SIZE)
    return Code(
        f"{FORMAT_SCALES}, 4-state trellis of 32 levels",
        HEAD_SIZE * bits / 8 + 4,
        partial(codebook_round_trip, codebook=codebook),
        "16 magnitudes: for int8 keys two permutes and a select; V one more logic "
        "instruction an element",
        f"Viterbi for each of {len(SCALE_OFFSETS)} scales and once more: 4 states an "
        "element, one after the other",
    )


def scalar_codes(bits: int) -> list[Code]:
    found = []
    tried = f"{len(E5M3_OFFSETS)} scales tried a group"
    rules = {
        "norm in fp32": (ScaleRule(HEAD_SIZE, "norm32"), "no scale per 16", "1 pass"),
        "E5M3 per 32": (
            ScaleRule(32),
            "half as many scales, without the subtraction; K's products end every 32 "
            "coordinates instead of 16",
            tried,
        ),
        "E5M3 a vector less 2 bits per 8": (
            ScaleRule(8, "delta", delta_bits=2),
            "twice as many scales; K's products end every 8 coordinates",
            f"{tried}, then the codes again",
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
            HEAD_SIZE * bits / 8 + 4,
            partial(two_codebook_round_trip, bits=bits),
            "scales as with E5M3 per 32; K's table is chosen a group, V's cubic gets "
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


def codes(bits: int) -> list[Code]:
    """All codes that are compared, the format first."""
    found = [the_format(bits), the_other_code(bits)]
    return found + scalar_codes(bits) + vector_codes(bits) + trellis_codes(bits)


def measure() -> list[dict]:
    rows = []
    for bits in (4, 3):
        for code in codes(bits):
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
        "blocks. Codes are scalar where a row says nothing else, and the format's "
        "are V's. Written by `tests/quality/lab/same_bytes.py`.",
    ]
    head = [
        "code",
        "bytes",
        "error",
        "of the format's",
        "bound",
        "decoding",
        "encoding",
    ]
    for bits in (4, 3):
        own = [row for row in rows if row["bits"] == bits]
        cells = [
            [
                row["code"],
                f"{row['bytes']:.4g}",
                f"{row['error']:.5f}",
                f"{100 * row['error'] / own[0]['error']:.0f} %",
                f"{row['bound']:.5f}",
                row["decode"],
                row["encode"],
            ]
            for row in own
        ]
        lines += ["", f"## {bits} bits", "", *table([head, *cells])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_programme("same_bytes", __doc__, measure, markdown)
