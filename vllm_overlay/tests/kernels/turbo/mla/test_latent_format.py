# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stored format of MLA: sizes, planes, errors, and ``latent_golden.json``.

The reading of given bytes never changes under a dtype's name. The bytes that given
vectors are stored as change only if the encoder finds better codes.
``python -m tests.kernels.turbo.test_latent_format`` writes the file.
"""

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.formats.pages import check_pages
from vllm.v1.attention.ops.turbo.latent.format import (
    LATENT_CODEBOOKS,
    LATENT_PRESETS,
    LATENT_SIZES,
    LatentFormat,
)
from vllm.v1.attention.ops.turbo.latent.interface import LatentStoreCall
from vllm.v1.attention.ops.turbo.reference import codec
from vllm.v1.attention.ops.turbo.reference import latent as reference
from vllm.v1.attention.ops.turbo.reference.rotation import inverse_rotate, rotate

from ..formats.test_format import (
    check_addresses,
    documented_rows,
    little_endian,
    scale_by_contract,
)
from ..formats.test_golden import digest, pseudo_random
from ..formats.test_reference import check_bytes_touched
from ..utils import DEVICE, ON_GPU, gaussian
from .latent_utils import (
    latent_cache,
    latent_head_sizes,
    latent_presets,
    latent_vectors,
    random_latent_pages,
)

FILE = Path(__file__).with_name("latent_golden.json")
NUM_TOKENS = 24
# Tokens, one of each tile, whose bytes are in the file.
TOKENS = (5, 18)

SIZES = {
    (512, 64): (340, 276),
    (512, 0): (272, 208),
    (256, 64): (204, 172),
    (256, 0): (136, 104),
}
ERROR_BOUNDS = {4: 0.0054, 3: 0.0192}
ROPE_ERROR_BOUND = 0.0001


def layout_of(name: str, head_size: int) -> LatentFormat:
    return LatentFormat.from_cache_dtype(name, head_size)


def test_bytes_per_token():
    for head_size, sizes in LATENT_SIZES.items():
        layouts = [layout_of(name, head_size) for name in ("turbo4", "turbo3")]
        assert tuple(layout.slot_size for layout in layouts) == SIZES[sizes]
        assert all(layout.head_size == head_size for layout in layouts)
    assert set(LATENT_PRESETS) == {"turbo4", "turbo3"}


def test_documented_bytes():
    assert documented_rows(LatentFormat) == [
        (*sizes, *of_presets) for sizes, of_presets in SIZES.items()
    ]


@pytest.mark.parametrize("name", ["k4v3", "fp8", "auto"])
def test_other_dtypes_name_the_way_out(name):
    with pytest.raises(ValueError, match=f"dtype {name} .*MLA.*turbo4 or turbo3"):
        layout_of(name, 576)


@latent_presets
@pytest.mark.parametrize("head_size", [128, 448, 640])
def test_other_sizes_name_the_way_out(name, head_size):
    with pytest.raises(
        ValueError, match=rf"dtype {name} .*512 \+ 64.* not {head_size} .*dtype fp8"
    ):
        layout_of(name, head_size)


@latent_presets
@latent_head_sizes
def test_tokens_share_no_byte(name, head_size):
    layout = layout_of(name, head_size)
    planes = ("path_bits", "rope", "scales", "rope_scales")
    check_addresses(layout, reference.latent_addresses(layout), planes)


def latent_by_contract(page: bytes, token: int, layout: LatentFormat) -> list[float]:
    """One latent of a page, decoded by the docstring of LatentFormat."""
    rank, bits = layout.rank, layout.bits
    tile, n = divmod(token, 16)
    start = tile * 16 * layout.slot_size
    scales = start + 2 * rank * bits + 16 * layout.rope + n * rank // 32

    def path(group: int, e: int) -> int:
        if e < 0:
            return 0
        address = start + 4 * rank + n * rank // 8 + 2 * group
        return little_endian(page, address, 2) >> e & 1

    result = []
    for c in range(rank):
        g, e = divmod(c, 16)
        if bits == 4:
            k, h = c % 8 // 2, c % 2
            word = little_endian(page, start + n * rank // 2 + 4 * (c // 8), 4)
            level = word >> 4 * (k + 4 * h) & 15
        else:
            word = little_endian(page, start + n * rank // 4 + 4 * g, 4)
            subset = 2 * (path(g, e) ^ path(g, e - 2)) + path(g, e - 1)
            level = 4 * (word >> 2 * e & 3) + subset
        scale = np.float32(scale_by_contract(page, scales, g, rank))
        level = np.float32(layout.codebook.levels[level])
        result.append(float(level * scale * np.float32(layout.codebook.gain)))
    return result


def rope_by_contract(page: bytes, token: int, layout: LatentFormat) -> list[float]:
    tile, n = divmod(token, 16)
    codes = tile * 16 * layout.slot_size + 2 * layout.rank * layout.bits
    scales = codes + 16 * layout.rope + layout.rank // 2 + n * layout.rope // 16
    codes += n * layout.rope
    result = []
    for r in range(layout.rope):
        exponent, mantissa = divmod(page[scales + r // 16], 8)
        scale = (mantissa + 8 * (exponent > 0)) * 2.0 ** (max(exponent, 1) - 18)
        result.append((page[codes + r] - 256 * (page[codes + r] > 127)) * scale)
    return result


@latent_presets
@latent_head_sizes
def test_load_follows_the_contract(name, head_size):
    layout = layout_of(name, head_size)
    pages = random_latent_pages(layout, 2, 32)
    page = bytes(pages[1].flatten().tolist())
    tokens = [0, 5, 15, 16, 31]
    slots = 32 + torch.tensor(tokens, device=DEVICE)
    latent, rope = reference.load(pages, slots, layout)
    expected = [latent_by_contract(page, n, layout) for n in tokens]
    assert torch.equal(latent.cpu(), torch.tensor(expected))
    expected = [rope_by_contract(page, n, layout) for n in tokens]
    assert torch.equal(rope.cpu(), torch.tensor(expected))


@latent_presets
@pytest.mark.parametrize("rank", [256, 512])
def test_pack_round_trip(name, rank):
    bits = LATENT_PRESETS[name]
    packed = torch.randint(256, (50, rank * bits // 8), dtype=torch.uint8)
    index = reference.unpack_latent_codes(packed, bits)
    assert index.shape == (50, rank) and int(index.max()) == 15
    assert torch.equal(reference.pack_latent_codes(index, bits), packed)


@latent_presets
@latent_head_sizes
def test_store_touches_its_bytes_only(name, head_size):
    """Store tokens of one page in one call; slot -1 and padding store nothing."""
    layout = layout_of(name, head_size)
    cache = latent_cache(layout, 4, 32)
    kv_c, k_pe = latent_vectors(layout, 6)
    slots = torch.tensor([3 * 32 + 17, 0, -1, 3 * 32 + 15], device=DEVICE)
    touched = torch.zeros(4, 32 * layout.slot_size, dtype=torch.bool)
    rows = reference.latent_addresses(layout)
    for block, token in ((3, 17), (0, 0), (3, 15)):
        touched[block, token // 16 * layout.tile_bytes + rows[token % 16]] = True
    assert touched.sum() == 3 * layout.slot_size
    call = LatentStoreCall(cache, slots, kv_c, k_pe, layout)
    check_bytes_touched(partial(reference.store, call), cache.flatten(1), touched)
    loaded = reference.load(cache, slots[[0, 1, 3]], layout)
    error = (inverse_rotate(loaded[0]) - kv_c[[0, 1, 3]].float()).norm(dim=-1)
    assert (error <= 0.2 * kv_c[[0, 1, 3]].float().norm(dim=-1)).all()
    if k_pe is not None:
        error = (loaded[1] - k_pe[[0, 1, 3]].float()).norm(dim=-1)
        assert (error <= 0.01 * k_pe[[0, 1, 3]].float().norm(dim=-1)).all()


@pytest.mark.parametrize("rank", [256, 512])
@pytest.mark.parametrize("bits", LATENT_CODEBOOKS)
def test_squared_error_and_slope(bits, rank):
    """20,000 vectors, or on a CPU a tenth, exact to 0.2 %, except in one case."""
    layout = LatentFormat(f"turbo{bits}", bits, rank, 0)
    product = norm = energy = 0.0
    for seed in range(10 if ON_GPU or (bits, rank) == (4, 512) else 1):
        x = gaussian(2000, rank, seed=seed)
        decoded = reference.dequantize_latent(
            *reference.quantize_latent(x, layout), layout
        )
        y = rotate(x)
        product += (decoded * y).sum().item()
        norm += (y * y).sum().item()
        energy += (decoded * decoded).sum().item()
    error = 1 + (energy - 2 * product) / norm
    assert error <= ERROR_BOUNDS[bits], f"squared error {error:.5f}"
    assert abs(product / norm - 1) <= 0.0005, f"slope {product / norm:.5f}"


@pytest.mark.parametrize("bits", LATENT_CODEBOOKS)
def test_gain_is_the_fit(bits):
    """The gain compensates the slope of codes that are chosen for least error."""
    codebook = replace(LATENT_CODEBOOKS[bits], unbiased=False)
    x = gaussian(4000, 512, seed=1)
    decoded = codec.dequantize(*codec.quantize(x, codebook), codebook)
    slope = ((decoded * x).sum() / (x * x).sum()).item()
    assert 1 / slope == pytest.approx(codebook.gain, abs=2e-4)


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3])
def test_squared_error_of_rope(magnitude):
    x = magnitude * gaussian(20_000, 64)
    codes, scales = reference.quantize_rope(x)
    decoded = reference.dequantize_rope(codes, scales)
    error = ((decoded - x).square().sum() / x.square().sum()).item()
    assert error <= ROPE_ERROR_BOUND, f"squared error {error:.6f}"


def test_scales_of_rope_are_the_smallest_that_hold():
    """The largest magnitude is the most that a scale holds, or the next number."""
    held = 127 * codec.scale_values(torch.arange(0xF8, dtype=torch.uint8))
    x = torch.zeros(0xF8, 16)
    x[:, 3] = -held
    codes, scales = reference.quantize_rope(x)
    assert scales[:, 0].tolist() == list(range(0xF8))
    assert (codes[1:, 3] == -127).all()
    x[:, 3] = torch.nextafter(held, torch.tensor(torch.inf))
    codes, scales = reference.quantize_rope(x)
    assert scales[:, 0].tolist() == [*range(1, 0xF8), 0xF7]
    assert (codes <= 127).all() and codes[-1, 3] == 127


@pytest.mark.parametrize(
    "value, code, scale",
    [(float("nan"), 0, 0), (float("inf"), 127, 0xF7), (-float("inf"), -127, 0xF7)]
    + [(1e-41, 0, 1), (0.0, 0, 0), (-3e38, -127, 0xF7)],
)
def test_special_inputs_of_rope_are_defined(value, code, scale):
    codes, scales = reference.quantize_rope(torch.full((2, 64), value))
    assert (codes == code).all() and (scales == scale).all()


@latent_presets
def test_special_inputs_of_latents_are_defined(name):
    layout = layout_of(name, 512)
    x = gaussian(3, 512)
    x[0] = 0
    x[1, 7], x[1, 9] = float("nan"), float("inf")
    x[2] *= 1e30
    index, scales = reference.quantize_latent(x, layout)
    assert (scales <= fmt.SCALE_CODE_MAX).all()
    decoded = reference.dequantize_latent(index, scales, layout)
    assert decoded.isfinite().all() and not decoded[0].any()
    # Kernels decode to fp16.
    assert decoded.half().isfinite().all()


def test_other_pages_are_refused():
    layout = layout_of("turbo4", 576)
    cache = latent_cache(layout, 2, 32)
    check_pages(cache, layout)
    for other in (cache[..., 1:], cache[:, :24], cache[:, ::2]):
        with pytest.raises(ValueError, match="slots of 340 bytes"):
            check_pages(other, layout)


def golden_vectors(layout: LatentFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Latents and rotary keys of the golden page, bf16."""
    x = pseudo_random(NUM_TOKENS * layout.head_size).double() / 2**31 - 1
    x = x.view(NUM_TOKENS, layout.head_size)
    exponents = torch.arange(NUM_TOKENS) % 9 - 4
    x = (x * 2.0 ** exponents[:, None]).bfloat16()
    return x[:, : layout.rank], x[:, layout.rank :] if layout.rope else None


def golden(name: str, head_size: int) -> dict[str, str]:
    """The file's entry of a layout.

    It has digests of a page and of the coordinates read from given bytes. ``tokens``
    has the bytes of two tokens, without zeros, in hexadecimal.
    """
    layout = layout_of(name, head_size)

    def stored(slots: torch.Tensor) -> torch.Tensor:
        page = torch.zeros(1, 32, layout.slot_size, dtype=torch.uint8)
        reference.store(LatentStoreCall(page, slots, *golden_vectors(layout), layout))
        return page

    tokens = torch.arange(NUM_TOKENS)
    is_kept = torch.isin(tokens, torch.tensor(TOKENS))
    some = stored(torch.where(is_kept, tokens, -1)).flatten()
    some_bytes = pseudo_random(32 * layout.slot_size) >> 24
    some_bytes = some_bytes.clamp(7, fmt.SCALE_CODE_MAX).to(torch.uint8)
    page = some_bytes.view(1, 32, layout.slot_size)
    read = reference.load(page, torch.arange(32), layout)
    return {
        "page": digest(stored(tokens)),
        "read": digest(torch.cat(read, -1)),
        "tokens": bytes(some[some != 0].tolist()).hex(),
    }


def all_golden() -> dict[str, dict[str, str]]:
    return {
        f"{name} {head_size}": golden(name, head_size)
        for name, head_size in itertools.product(LATENT_PRESETS, LATENT_SIZES)
    }


@latent_presets
@latent_head_sizes
def test_golden_bytes(name, head_size):
    expected = json.loads(FILE.read_text())[f"{name} {head_size}"]
    assert golden(name, head_size) == expected


if __name__ == "__main__":
    FILE.write_text(json.dumps(all_golden(), indent=1) + "\n")
