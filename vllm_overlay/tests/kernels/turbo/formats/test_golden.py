# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stored format, byte by byte, against ``golden.json``.

The format is an ABI. The reading of given bytes never changes under a dtype's name and
a layout version. The bytes that given vectors are stored as change only if the encoder
finds better codes.
``python -m tests.kernels.turbo.formats.test_golden`` writes the file.
"""

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import HEAD_SIZES, TURBO_PRESETS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import KeyOffset, StoreCall

FILE = Path(__file__).with_name("golden.json")
NUM_TOKENS = 24
# Every layout of one head size, and those of a model whose K and V differ in it. There
# ``k4v3`` would be the K of the first and the V of the second.
ENTRIES = [
    *(f"{name} {size}" for name, size in itertools.product(TURBO_PRESETS, HEAD_SIZES)),
    "turbo4 192 128",
    "turbo3 192 128",
]
# Tokens, one of each tile, whose bytes are in the file.
TOKENS = (5, 18)


def pseudo_random(count: int) -> torch.Tensor:
    """Integers of 32 bits, as int64, without a random number generator."""
    return torch.arange(count) * 2654435761 % 2**32


def layout_of(name: str) -> TurboFormat:
    """The layout of an entry: a dtype and the head size, or those of K and of V."""
    dtype, *sizes = name.split()
    return TurboFormat.from_cache_dtype(dtype, *map(int, sizes))


def vectors(layout: TurboFormat) -> list[torch.Tensor]:
    """Keys and values of two heads, (T, H, D) bf16 each."""
    result = []
    for side, head_size in enumerate((layout.head_size, layout.head_size_v)):
        x = pseudo_random(2 * NUM_TOKENS * 2 * head_size).double() / 2**31 - 1
        x = x.view(2, NUM_TOKENS, 2, head_size)[side]
        exponents = torch.arange(NUM_TOKENS) % 9 - 4
        result.append((x * 2.0 ** exponents[:, None, None]).bfloat16())
    return result


def long_offset(head_size: int) -> torch.Tensor:
    """An offset of K, (H, D) fp32; every eighth coordinate is up to 256."""
    x = (pseudo_random(7 * 2 * head_size)[::7] / 2**31 - 1).view(2, head_size)
    x[:, torch.arange(head_size) % 8 == 0] *= 256
    return x.float()


def empty_page(layout: TurboFormat) -> torch.Tensor:
    """A page of zeros, of two tiles and two heads."""
    return torch.zeros(1, 2, 2 * fmt.TILE_TOKENS, layout.slot_size, dtype=torch.uint8)


def stored(layout: TurboFormat, tokens: tuple[int, ...] | None = None) -> torch.Tensor:
    """A page with given vectors, stored for all or some tokens."""
    key, value = vectors(layout)
    cache = empty_page(layout)
    slots = torch.arange(NUM_TOKENS)
    if tokens is not None:
        slots[[n for n in range(NUM_TOKENS) if n not in tokens]] = -1
    reference.store(StoreCall(cache, slots, key, value, layout))
    return cache


def stored_with_offset(
    layout: TurboFormat, store: Callable[..., None], device: torch.device
) -> torch.Tensor:
    """A page of keys with a bias, which ``store`` takes off as an offset."""
    offset = long_offset(layout.head_size)
    key, value = vectors(layout)
    cache = empty_page(layout).to(device)
    bounds = torch.tensor([0, NUM_TOKENS], dtype=torch.int32, device=device)
    store(
        StoreCall(
            cache,
            torch.arange(NUM_TOKENS, device=device),
            (key.float() + offset).bfloat16().to(device),
            value.to(device),
            layout,
            key_offset=KeyOffset(offset[None].to(device), bounds[1:], bounds),
        )
    )
    return cache.cpu()


def read(layout: TurboFormat) -> torch.Tensor:
    """Coordinates of two tiles of bytes, limited so that all scales are valid: K's,
    then V's.
    """
    some_bytes = pseudo_random(2 * layout.tile_bytes) >> 24
    some_bytes = some_bytes.clamp(7, fmt.SCALE_CODE_MAX).to(torch.uint8)
    cache = some_bytes.view(1, 1, 2 * fmt.TILE_TOKENS, layout.slot_size)
    slots = torch.arange(2 * fmt.TILE_TOKENS)
    return torch.cat([x.flatten() for x in reference.load(cache, slots, layout)])


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16]


def golden(name: str) -> dict[str, str]:
    """The file's entry of a layout.

    It has digests of a page, of a page that was stored with an offset of K, and of the
    coordinates read from given bytes. ``tokens`` has the bytes, without zeros, of two
    tokens of the first head in hexadecimal.
    """
    layout = layout_of(name)
    some = stored(layout, TOKENS)[0, 0].flatten()
    cpu = torch.device("cpu")
    return {
        "page": digest(stored(layout)),
        "page with K offset": digest(stored_with_offset(layout, reference.store, cpu)),
        "read": digest(read(layout)),
        "tokens": bytes(some[some != 0].tolist()).hex(),
    }


def all_golden() -> dict[str, Any]:
    return {"layout version": fmt.LAYOUT_VERSION} | {n: golden(n) for n in ENTRIES}


def test_every_layout_has_golden_bytes():
    found = json.loads(FILE.read_text())
    assert found.pop("layout version") == fmt.LAYOUT_VERSION
    assert list(found) == ENTRIES


@pytest.mark.parametrize("name", ENTRIES)
def test_golden_bytes(name):
    assert golden(name) == json.loads(FILE.read_text())[name]


if __name__ == "__main__":
    FILE.write_text(json.dumps(all_golden(), indent=1) + "\n")
