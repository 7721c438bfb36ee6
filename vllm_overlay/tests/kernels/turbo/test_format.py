# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stored format: sizes, planes, scales and codebooks."""

from pathlib import Path

import numpy as np
import pytest
import regex as re
import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import (
    HEAD_SIZES,
    KEY_CODEBOOKS,
    SCALE_MAX,
    SCALE_OFFSETS,
    TURBO_PRESETS,
    VALUE_CODEBOOKS,
    TurboFormat,
)

from .fit_codebooks import (
    NUM_VECTORS,
    as_half,
    fit_cubic,
    fit_key,
    gaussian_vectors,
    quality,
    rounded_in_half,
    table_levels,
)
from .utils import ON_GPU, all_codebooks, all_head_sizes, all_presets, random_pages

SIZES = {
    "turbo4": (68, 86, 102, 120, 136, 204, 272, 544),
    "k4v3": (60, 76, 90, 106, 120, 180, 240, 480),
    "turbo3": (52, 66, 78, 92, 104, 156, 208, 416),
}

# Words of scales of groups of 16, by head size: words, bytes, groups of a word, bits
# and steps of a delta.
SCALE_WORDS = {
    64: (1, 2, 4, 2, 2),
    80: (1, 3, 5, 3, 1),
    96: (1, 3, 6, 2, 2),
    112: (1, 4, 7, 3, 1),
    128: (1, 4, 8, 3, 1),
    192: (3, 2, 4, 2, 2),
    256: (2, 4, 8, 3, 1),
    512: (4, 4, 8, 3, 1),
}


def test_every_preset_is_covered():
    assert set(SIZES) == set(TURBO_PRESETS)


@all_presets
def test_bytes_per_token(name):
    layouts = [TurboFormat.from_cache_dtype(name, size) for size in HEAD_SIZES]
    assert tuple(layout.slot_size for layout in layouts) == SIZES[name]
    assert tuple(layout.slot_size_aligned for layout in layouts) == SIZES[name]


@all_presets
@pytest.mark.parametrize("head_size", [32, 72, 160, 576])
def test_unknown_head_size_names_the_way_out(name, head_size):
    with pytest.raises(ValueError, match=f"{name}.*not {head_size}.*dtype fp8"):
        TurboFormat.from_cache_dtype(name, head_size)


def test_unknown_preset_names_the_presets():
    with pytest.raises(ValueError, match="turbo4, k4v3, turbo3"):
        TurboFormat.from_cache_dtype("turbo2", 128)


@all_presets
@all_head_sizes
def test_tokens_share_no_byte(name, head_size):
    """The tokens' addresses are the tile's, each once."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    keys, values = reference.tile_addresses(layout)
    assert keys.shape == (16, layout.key_packed_size)
    assert values.shape == (16, layout.value_packed_size)
    addresses = torch.cat([keys, values], 1).flatten().sort().values
    assert torch.equal(addresses, torch.arange(16 * layout.slot_size))
    assert layout.tile_bytes == 16 * layout.slot_size


@all_presets
@all_head_sizes
def test_planes_are_aligned(name, head_size):
    """Kernels load codes as 32-bit words, in vectors of up to 16 bytes."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    for offset in (
        layout.value_codes_offset,
        layout.key_scales_offset,
        layout.value_scales_offset,
        layout.tile_bytes,
    ):
        assert offset % 16 == 0


def scale_by_contract(
    page: bytes, start: int, unit: int, size: int, scale_group: int
) -> int:
    """Scale code of a unit of the vector whose scales start at a byte."""
    if scale_group == 32:
        return page[start + unit % -(-size // 32)]
    _, num_bytes, word_groups, bits, step = SCALE_WORDS[size]
    word, place = divmod(unit % (size // 16), word_groups)
    start += word * num_bytes
    word = int.from_bytes(page[start : start + num_bytes], "little")
    return word % 256 - step * (word >> 8 + bits * place & (1 << bits) - 1)


def decode_by_contract(
    page: bytes, token: int, side: int, layout: TurboFormat
) -> list[float]:
    """One vector of a page, decoded as the docstring of TurboFormat says."""
    size = layout.head_size
    units, scale_bytes = size // 8, -(-size // 32)
    bits = (layout.key_bits, layout.value_bits)
    planes = [2 * size * bits[0], 2 * size * bits[1], 16 * scale_bytes]
    tile, n = divmod(token, 16)
    start = tile * 16 * layout.slot_size
    codes = start + sum(planes[:side])
    scales = start + sum(planes[: side + 2]) + n * scale_bytes
    codebook = (layout.key_codebook, layout.value_codebook)[side]
    result = []
    for r in range(size):
        i, u = divmod(r, units)
        if bits[side] == 4:
            p = codes + n * size // 2 + 4 * u
            code = int.from_bytes(page[p : p + 4], "little") >> 4 * i & 15
        else:
            p = codes + n * size // 4 + 2 * fmt.low_plane_units(units).index(u)
            code = int.from_bytes(page[p : p + 2], "little") >> 2 * i & 3
            p = codes + 4 * size + n * units + fmt.high_plane_units(units).index(u)
            code |= (page[p] >> i & 1) << 2
        scale_code = scale_by_contract(page, scales, u, size, codebook.scale_group)
        exponent, mantissa = divmod(scale_code, 8)
        if exponent == 0:
            scale = mantissa * 2.0**-17
        else:
            scale = (8 + mantissa) * 2.0 ** (exponent - 18)
        result.append(float(np.float32(codebook.levels[code])) * scale)
    return result


def test_order_of_units():
    """The parts of a 32-bit word are units far apart."""
    assert fmt.low_plane_units(8) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert fmt.high_plane_units(8) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert fmt.low_plane_units(10) == [0, 5, 1, 6, 2, 7, 3, 8, 4, 9]
    assert fmt.high_plane_units(10) == list(range(10))


@all_presets
@all_head_sizes
def test_load_follows_the_contract(name, head_size):
    layout = TurboFormat.from_cache_dtype(name, head_size)
    pages = random_pages(layout, 2, 1, 32)
    page = bytes(pages[1].flatten().tolist())
    tokens = [0, 5, 15, 16, 31]
    slots = 32 + torch.tensor(tokens, device=pages.device)
    for side, loaded in enumerate(reference.load(pages, slots, layout)):
        expected = [decode_by_contract(page, n, side, layout) for n in tokens]
        expected = torch.tensor(expected, dtype=torch.float32)
        assert torch.equal(loaded[:, 0].cpu(), expected)


@all_head_sizes
def test_scale_words(head_size):
    """They take the bytes of an E5M3 scale for each 32 coordinates."""
    num_bytes = -(-head_size // 32)
    words = fmt.scale_words(head_size, 16)
    assert words == SCALE_WORDS[head_size]
    assert words.num_bytes == num_bytes
    assert words.num_groups == head_size // 16
    assert 8 + words.word_groups * words.delta_bits <= 8 * words.word_bytes
    assert fmt.scale_words(head_size, 32) == (num_bytes, 1, 1, 0, 1)


@pytest.mark.parametrize("scale_group", [16, 32])
@all_head_sizes
def test_scales_pack_round_trip(head_size, scale_group):
    words = fmt.scale_words(head_size, scale_group)
    delta = torch.randint(words.max_delta + 1, (50, words.num_words, words.word_groups))
    delta[..., -1] = 0
    base = torch.randint(21, 0xF8, (50, words.num_words, 1))
    codes = (base - words.delta_step * delta).flatten(-2).to(torch.uint8)
    packed = reference.pack_scales(codes, words)
    assert packed.shape == (50, words.num_bytes)
    assert torch.equal(reference.unpack_scales(packed, words), codes)


@pytest.mark.parametrize("bits", [3, 4])
@all_head_sizes
def test_pack_round_trip(bits, head_size):
    codes = torch.randint(1 << bits, (50, head_size), dtype=torch.uint8)
    packed = reference.pack_codes(codes, bits)
    assert packed.shape == (50, head_size * bits // 8)
    assert torch.equal(reference.unpack_codes(packed, bits), codes)


def test_scales_are_ascending_and_finite():
    values = reference.scale_values(torch.arange(256, dtype=torch.uint8))
    finite = values[: fmt.SCALE_CODE_MAX + 1]
    assert finite[0] == 0
    assert (finite.diff() > 0).all()
    assert finite[-1] == fmt.SCALE_MAX
    assert not values[fmt.SCALE_CODE_MAX + 1 :].isfinite().any()


def test_scale_floor_is_the_largest_scale_not_above():
    values = reference.scale_values(torch.arange(0xF8, dtype=torch.uint8))
    just_below = torch.nextafter(values[1:], torch.tensor(0.0))
    codes = torch.arange(0xF8, dtype=torch.int32)
    assert torch.equal(reference.scale_floor(values), codes)
    assert torch.equal(reference.scale_floor(just_below), codes[:-1])


@all_codebooks
def test_levels_and_thresholds(codebook):
    levels, magnitudes = codebook.levels, codebook.magnitudes
    assert len(levels) == 1 << codebook.bits
    assert list(levels) == sorted(levels)
    assert [-level for level in reversed(levels)] == list(levels)
    assert magnitudes[0] > 0
    assert 0.9 < magnitudes[-1] < 65504 / SCALE_MAX
    for low, threshold, high in zip(magnitudes, codebook.thresholds, magnitudes[1:]):
        assert threshold - low == pytest.approx(high - threshold, rel=1e-12)


@pytest.mark.parametrize(
    "bits, integers",
    [(4, (5, 17, 29, 43, 59, 77, 98, 123)), (3, (13, 42, 78, 127))],
)
def test_key_levels_are_int8(bits, integers):
    """A key level is (m + 1/2) / 128 with m of seven bits."""
    assert KEY_CODEBOOKS[bits].magnitudes == tuple((m + 0.5) / 128 for m in integers)


@pytest.mark.parametrize("bits", [3, 4])
def test_key_cubic_gives_levels_in_fp16(bits):
    """A kernel's fp16 multiply-adds, fused or not, give 128 * level exactly."""
    codebook = KEY_CODEBOOKS[bits]
    a, b = np.array(codebook.kernel_cubic)[:, None, None]
    ways = rounded_in_half(bits, a.astype(np.float16), b.astype(np.float16))
    assert len(ways) == 4
    for levels in ways:
        assert tuple(levels[0] / 128) == codebook.magnitudes


@all_codebooks
def test_kernel_cubics_are_fp16(codebook):
    for coefficient in codebook.kernel_cubic:
        assert float(np.float16(coefficient)) == coefficient


@pytest.mark.parametrize("bits", [3, 4])
def test_value_cubic_is_the_levels(bits):
    codebook = VALUE_CODEBOOKS[bits]
    a, b = codebook.kernel_cubic
    for code, level in enumerate(codebook.levels):
        v = (code - ((1 << bits) - 1) / 2) / (1 << (bits - 2))
        assert level == pytest.approx(a * v + b * v**3, rel=1e-12)


@pytest.mark.skipif(ON_GPU, reason="runs on the CPU alone, where it is tested")
@pytest.mark.parametrize("bits", [3, 4])
def test_codebooks_are_the_fit(bits):
    """The constants come out of their fit again."""
    offsets = SCALE_OFFSETS[bits]
    key, value = KEY_CODEBOOKS[bits], VALUE_CODEBOOKS[bits]
    vectors = gaussian_vectors(NUM_VECTORS, value.scale_group)
    cubic = fit_cubic(vectors, bits, offsets)
    assert as_half(cubic) == value.kernel_cubic
    if key.scale_group != value.scale_group:
        vectors = gaussian_vectors(NUM_VECTORS, key.scale_group)
        cubic = fit_cubic(vectors, bits, offsets)
    table, key_cubic = fit_key(vectors, bits, offsets, cubic)
    assert tuple((m + 0.5) / 128 for m in table) == key.magnitudes
    assert key_cubic == key.kernel_cubic
    others = gaussian_vectors(NUM_VECTORS, key.scale_group, seed=1)
    found = quality(others, table_levels(table), offsets)
    assert 1 / found.slope == pytest.approx(key.gain, abs=2e-4)


def test_documented_bytes():
    """The documentation's table is the format's."""
    page = Path(__file__).parents[3] / "docs/features/quantization/turbo.md"
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", page.read_text(), re.MULTILINE)
    documented = {int(size): [int(n) for n in cells.split("|")] for size, cells in rows}
    sizes = zip(*(SIZES[name] for name in ("turbo4", "k4v3", "turbo3")))
    assert documented == {
        head_size: [*of_presets, 4 * head_size]
        for head_size, of_presets in zip(HEAD_SIZES, sizes)
    }
