# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stored format, byte by byte, against ``golden.json``.

The format is an ABI. What given bytes are read as never changes under a dtype's name
and a layout version; what given vectors are stored as only if the encoder chooses
better codes. ``python -m tests.kernels.turbo.test_golden`` writes the file.
"""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import HEAD_SIZES, TURBO_PRESETS, TurboFormat

from .utils import all_head_sizes, all_presets

FILE = Path(__file__).with_name("golden.json")
NUM_TOKENS = 24
# Tokens, one of each tile, whose bytes are in the file.
TOKENS = (5, 18)


def pseudo_random(count: int) -> torch.Tensor:
    """Integers of 32 bits, int64, that depend on no random number generator."""
    return torch.arange(count) * 2654435761 % 2**32


def stored(layout: TurboFormat, tokens: tuple[int, ...] | None = None) -> torch.Tensor:
    """A page of two tiles and two heads, with given vectors at all or some tokens."""
    x = pseudo_random(2 * NUM_TOKENS * 2 * layout.head_size).double() / 2**31 - 1
    x = x.view(2, NUM_TOKENS, 2, layout.head_size)
    exponents = torch.arange(NUM_TOKENS) % 9 - 4
    x = (x * 2.0 ** exponents[:, None, None]).bfloat16()
    cache = torch.zeros(1, 2, 2 * fmt.TILE_TOKENS, layout.slot_size, dtype=torch.uint8)
    slots = torch.arange(NUM_TOKENS)
    if tokens is not None:
        slots[[n for n in range(NUM_TOKENS) if n not in tokens]] = -1
    reference.store(cache, slots, x[0], x[1], layout)
    return cache


def read(layout: TurboFormat) -> torch.Tensor:
    """Coordinates of two tiles of bytes that no delta makes invalid scales."""
    some_bytes = pseudo_random(2 * layout.tile_bytes) >> 24
    some_bytes = some_bytes.clamp(7, fmt.SCALE_CODE_MAX).to(torch.uint8)
    cache = some_bytes.view(1, 1, 2 * fmt.TILE_TOKENS, layout.slot_size)
    slots = torch.arange(2 * fmt.TILE_TOKENS)
    return torch.stack(reference.load(cache, slots, layout))


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16]


def golden(name: str, head_size: int) -> dict[str, str]:
    """What the file has of a layout.

    The digest of a page; the digest of the coordinates that are read from given bytes;
    and, in hexadecimal, the bytes of two tokens of the first head without the zeros.
    """
    layout = TurboFormat.from_cache_dtype(name, head_size)
    some = stored(layout, TOKENS)[0, 0].flatten()
    return {
        "page": digest(stored(layout)),
        "read": digest(read(layout)),
        "tokens": bytes(some[some != 0].tolist()).hex(),
    }


def all_golden() -> dict[str, Any]:
    return {"layout version": fmt.LAYOUT_VERSION} | {
        f"{name} {head_size}": golden(name, head_size)
        for name, head_size in itertools.product(TURBO_PRESETS, HEAD_SIZES)
    }


def test_every_layout_has_golden_bytes():
    names = itertools.product(TURBO_PRESETS, HEAD_SIZES)
    layouts = {f"{name} {head_size}" for name, head_size in names}
    found = json.loads(FILE.read_text())
    assert found.pop("layout version") == fmt.LAYOUT_VERSION
    assert set(found) == layouts


@all_presets
@all_head_sizes
def test_golden_bytes(name, head_size):
    expected = json.loads(FILE.read_text())[f"{name} {head_size}"]
    assert golden(name, head_size) == expected


if __name__ == "__main__":
    FILE.write_text(json.dumps(all_golden(), indent=1) + "\n")
