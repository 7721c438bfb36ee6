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
    TURBO_PRESETS,
    VALUE_CODEBOOKS,
    TurboFormat,
)
from vllm.v1.attention.ops.turbo.reference import codec as codec
from vllm.v1.attention.ops.turbo.reference.bytes import (
    pack_codes,
    pack_scales,
    path_bits,
    unpack_codes,
    unpack_scales,
)

from ..utils import ON_GPU, all_codebooks, all_head_sizes, all_presets, random_pages
from .fit_codebooks import (
    NUM_VECTORS,
    codebook_of,
    fit_keys,
    fit_values,
    gaussian_vectors,
    quality,
    rounded_in_half,
    table_levels,
)

SIZES = {
    "turbo4": (68, 86, 102, 120, 136, 204, 272, 544),
    "k4v3": (60, 76, 90, 106, 120, 180, 240, 480),
    "turbo3": (52, 66, 78, 92, 104, 156, 208, 416),
}

# Scale words by head size: number of words, bytes of a word, groups of a word, bits of
# a delta, and step of a delta.
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

# Sizes of K and V: each for both, and pairs.
all_sizes = pytest.mark.parametrize(
    "sizes",
    [(size, size) for size in HEAD_SIZES] + [(192, 128), (64, 80), (112, 256)],
    ids=str,
)


def test_every_preset_is_covered():
    assert set(SIZES) == set(TURBO_PRESETS)


@all_presets
def test_bytes_per_token(name):
    layouts = [TurboFormat.from_cache_dtype(name, size) for size in HEAD_SIZES]
    assert tuple(layout.slot_size for layout in layouts) == SIZES[name]


@pytest.mark.parametrize(
    "name, expected", [("turbo4", 170), ("k4v3", 154), ("turbo3", 130)]
)
def test_bytes_per_token_of_two_sizes(name, expected):
    """K of 192 and V of 128 take the bytes that each takes beside its equal."""
    layout = TurboFormat.from_cache_dtype(name, 192, 128)
    assert layout.slot_size == expected and not layout.is_even
    keys, values = (TurboFormat.from_cache_dtype(name, size) for size in (192, 128))
    assert layout.key_packed_size == keys.key_packed_size
    assert layout.value_packed_size == values.value_packed_size


def test_a_size_of_v_is_that_of_k_by_default():
    layouts = (TurboFormat.from_cache_dtype("turbo4", 64, size) for size in (None, 64))
    assert len({hash(layout) for layout in layouts}) == 1


def test_unknown_head_size_of_v_names_the_way_out():
    with pytest.raises(ValueError, match="turbo4.*not 160.*dtype fp8"):
        TurboFormat.from_cache_dtype("turbo4", 192, 160)


@all_presets
@pytest.mark.parametrize("head_size", [32, 72, 160, 576])
def test_unknown_head_size_names_the_way_out(name, head_size):
    with pytest.raises(ValueError, match=f"{name}.*not {head_size}.*dtype fp8"):
        TurboFormat.from_cache_dtype(name, head_size)


def test_unknown_preset_names_the_presets():
    with pytest.raises(ValueError, match="turbo4, k4v3, turbo3"):
        TurboFormat.from_cache_dtype("turbo2", 128)


def check_addresses(layout, addresses: torch.Tensor, planes: tuple[str, ...]) -> None:
    """Check that addresses, (16, C), are the tile's bytes, each once.

    Planes are aligned: kernels load 32-bit words, in vectors of up to 16 bytes.
    """
    assert addresses.shape == (16, layout.slot_size)
    every = torch.arange(16 * layout.slot_size)
    assert torch.equal(addresses.flatten().sort().values, every)
    assert layout.tile_bytes == 16 * layout.slot_size
    offsets = [getattr(layout, f"{plane}_offset") for plane in planes]
    assert all(offset % 16 == 0 for offset in (*offsets, layout.tile_bytes))


@all_presets
@all_sizes
def test_tokens_share_no_byte(name, sizes):
    layout = TurboFormat.from_cache_dtype(name, *sizes)
    keys, values = reference.tile_addresses(layout)
    assert keys.shape == (16, layout.key_packed_size)
    assert values.shape == (16, layout.value_packed_size)
    planes = ("value_codes", "key_scales", "value_scales")
    check_addresses(layout, torch.cat([keys, values], 1), planes)


def little_endian(page: bytes, start: int, num_bytes: int) -> int:
    return int.from_bytes(page[start : start + num_bytes], "little")


def scale_by_contract(page: bytes, start: int, group: int, size: int) -> float:
    """Scale of a group of the vector whose scales begin at byte ``start``."""
    _, num_bytes, word_groups, bits, step = SCALE_WORDS[size]
    word, place = divmod(group, word_groups)
    word = little_endian(page, start + word * num_bytes, num_bytes)
    scale_code = word % 256 - step * (word >> 8 + bits * place & (1 << bits) - 1)
    exponent, mantissa = divmod(scale_code, 8)
    if exponent == 0:
        return mantissa * 2.0**-17
    return (8 + mantissa) * 2.0 ** (exponent - 18)


def level_by_contract(
    page: bytes, start: int, side: int, n: int, r: int, size: int
) -> int:
    """Level of coordinate r of token n, in a trellis-coded plane at ``start``."""
    groups = size // 16
    g = r % groups
    p, i = r % (size // 8) // groups, r // (size // 8)
    h, t, j = n // 8, n % 8 // 2, n % 2

    def path(e: int) -> int:
        if e < 0:
            return 0
        if side == 1:
            piece = start + 4 * size + size * h + 16 * g + 4 * t + 2 * j
            return little_endian(page, piece, 2) >> e & 1
        first = start + 4 * size + n * size // 8
        if groups % 2:
            return little_endian(page, first + 2 * g, 2) >> e & 1
        word = little_endian(page, first + 4 * (g // 2), 4)
        return word >> 4 * (e // 2) + 2 * (g % 2) + e % 2 & 1

    e = 2 * i + p
    if side == 1:
        k, c = divmod(i, 2)
        piece = start + 2 * size * h + 32 * g + 8 * t + 4 * c + 2 * j
        branch = little_endian(page, piece, 2) >> (4 * k + 6 - 2 * p) % 16 & 3
    else:
        branches = little_endian(page, start + n * size // 4 + 4 * g, 4)
        branch = branches >> 4 * i + 2 * p & 3
    return 4 * branch + 2 * (path(e) ^ path(e - 2)) + path(e - 1)


def decode_by_contract(
    page: bytes, token: int, side: int, layout: TurboFormat
) -> list[float]:
    """One vector of a page, decoded by the docstring of TurboFormat."""
    sizes = (layout.head_size, layout.head_size_v)
    size, units = sizes[side], sizes[side] // 8
    bits = (layout.key_bits, layout.value_bits)
    scale_bytes = [-(-n // 32) for n in sizes]
    planes = [2 * sizes[0] * bits[0], 2 * sizes[1] * bits[1], 16 * scale_bytes[0]]
    tile, n = divmod(token, 16)
    start = tile * 16 * layout.slot_size
    codes = start + sum(planes[:side])
    scales = start + sum(planes[: side + 2]) + n * scale_bytes[side]
    codebook = (layout.key_codebook, layout.value_codebook)[side]
    result = []
    for r in range(size):
        i, u = divmod(r, units)
        if bits[side] == 4 and side == 0:
            word = little_endian(page, codes + n * size // 2 + 4 * u, 4)
            level = word >> 4 * i & 15
        elif bits[side] == 4:
            p, g = divmod(u, size // 16)
            place = 16 * (n % 8 // 2) + 8 * p + 4 * (i % 2) + 2 * (n % 2)
            word = little_endian(page, codes + 4 * size * (n // 8) + 64 * g + place, 2)
            level = (word * 65537 >> 4 * (i // 2) + 2) & 15
        else:
            level = level_by_contract(page, codes, side, n, r, size)
        scale = scale_by_contract(page, scales, u % (size // 16), size)
        result.append(float(np.float32(codebook.levels[level])) * scale)
    return result


@all_presets
@all_sizes
def test_load_follows_the_contract(name, sizes):
    layout = TurboFormat.from_cache_dtype(name, *sizes)
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
    """Scale words take a byte for each 32 coordinates."""
    num_bytes = -(-head_size // 32)
    words = fmt.scale_words(head_size)
    assert words == SCALE_WORDS[head_size]
    assert words.num_bytes == num_bytes
    assert words.num_groups == head_size // 16
    assert 8 + words.word_groups * words.delta_bits <= 8 * words.word_bytes


@all_head_sizes
def test_scales_pack_round_trip(head_size):
    words = fmt.scale_words(head_size)
    delta = torch.randint(words.max_delta + 1, (50, words.num_words, words.word_groups))
    delta[..., -1] = 0
    base = torch.randint(21, 0xF8, (50, words.num_words, 1))
    codes = (base - words.delta_step * delta).flatten(-2).to(torch.uint8)
    packed = pack_scales(codes, words)
    assert packed.shape == (50, words.num_bytes)
    assert torch.equal(unpack_scales(packed, words), codes)


@pytest.mark.parametrize("is_value", [False, True], ids=["key", "value"])
@pytest.mark.parametrize("bits", [3, 4])
@all_head_sizes
def test_pack_round_trip(bits, is_value, head_size):
    """Every byte has a meaning: none is lost on the way to levels and back."""
    packed = torch.randint(256, (50, head_size * bits // 8), dtype=torch.uint8)
    index = unpack_codes(packed, bits, is_value)
    assert index.shape == (50, head_size)
    assert int(index.max()) == 15
    assert torch.equal(pack_codes(index, bits, is_value), packed)


@all_head_sizes
def test_neighbours_on_a_path_agree(head_size):
    """The lower bit of a level's subset is the path bit of the previous code."""
    packed = torch.randint(256, (50, head_size * 3 // 8), dtype=torch.uint8)
    index = codec.by_group(unpack_codes(packed, 3, False).long())
    path = path_bits(index)
    assert (index[..., 0] & 1 == 0).all()
    assert torch.equal(index[..., 1:] & 1, path[..., :-1])
    assert torch.equal(index[..., 2:] >> 1 & 1, path[..., 2:] ^ path[..., :-2])


def test_scales_are_ascending_and_finite():
    values = codec.scale_values(torch.arange(256, dtype=torch.uint8))
    finite = values[: fmt.SCALE_CODE_MAX + 1]
    assert finite[0] == 0
    assert (finite.diff() > 0).all()
    assert finite[-1] == fmt.SCALE_MAX
    assert not values[fmt.SCALE_CODE_MAX + 1 :].isfinite().any()


def test_scale_floor_is_the_largest_scale_not_above():
    values = codec.scale_values(torch.arange(0xF8, dtype=torch.uint8))
    just_below = torch.nextafter(values[1:], torch.tensor(0.0))
    codes = torch.arange(0xF8, dtype=torch.int32)
    assert torch.equal(codec.scale_floor(values), codes)
    assert torch.equal(codec.scale_floor(just_below), codes[:-1])


@all_codebooks
def test_levels_and_thresholds(codebook):
    levels, magnitudes = codebook.levels, codebook.magnitudes
    assert len(levels) == 16
    assert list(levels) == sorted(levels)
    assert [-level for level in reversed(levels)] == list(levels)
    assert magnitudes[0] > 0
    assert 0.9 < magnitudes[-1] < 65504 / SCALE_MAX
    for low, threshold, high in zip(magnitudes, codebook.thresholds, magnitudes[1:]):
        assert threshold - low == pytest.approx(high - threshold, rel=1e-12)
    for subset, thresholds in enumerate(codebook.subset_thresholds):
        members = levels[subset::4]
        middles = [(low + high) / 2 for low, high in zip(members, members[1:])]
        assert thresholds == pytest.approx(middles, rel=1e-12)


def test_key_levels_are_int8():
    """Levels fit int8, even an upper level plus one, to which a kernel adds -1."""
    levels = fmt.KEY_LEVELS
    assert list(levels) == sorted(set(levels))
    assert levels[0] > 0 and levels[-1] + 1 < fmt.KEY_LEVEL_UNIT
    for codebook in KEY_CODEBOOKS.values():
        assert codebook.magnitudes == tuple(m / fmt.KEY_LEVEL_UNIT for m in levels)


def test_key_cubic_gives_levels_in_fp16():
    """A kernel's multiply-adds in fp16, fused or not, give the integers exactly."""
    a, b = np.array(fmt.KEY_COEFFICIENTS)[:, None, None]
    ways = rounded_in_half(a.astype(np.float16), b.astype(np.float16))
    assert len(ways) == 4
    for levels in ways:
        assert tuple(levels[0]) == fmt.KEY_LEVELS


@all_codebooks
def test_coefficients_are_fp16(codebook):
    for coefficient in codebook.coefficients:
        assert float(np.float16(coefficient)) == coefficient


@pytest.mark.parametrize("bits", [3, 4])
def test_value_quadratic_is_the_levels(bits):
    codebook = VALUE_CODEBOOKS[bits]
    a, b = codebook.coefficients
    for index, level in enumerate(codebook.levels):
        v = (index - 15 / 2) / 4
        assert level == pytest.approx(a * v + b * v * abs(v), rel=1e-12)


on_cpu_alone = pytest.mark.skipif(ON_GPU, reason="the fit runs on CPUs alone")


@on_cpu_alone
def test_levels_are_near_a_small_fit():
    x = gaussian_vectors(NUM_VECTORS // 15)
    assert fit_values(x) == pytest.approx(fmt.VALUE_COEFFICIENTS, rel=0.02)
    table, cubic = fit_keys(x)
    assert table == pytest.approx(fmt.KEY_LEVELS, abs=1)
    assert cubic == pytest.approx(fmt.KEY_COEFFICIENTS, rel=0.02)


# The fit gives the constants again. Each has a test of its own, because fits take long.
@on_cpu_alone
def test_value_levels_are_the_fit():
    assert fit_values(gaussian_vectors(NUM_VECTORS)) == fmt.VALUE_COEFFICIENTS


@on_cpu_alone
def test_key_levels_are_the_fit():
    found = fit_keys(gaussian_vectors(NUM_VECTORS))
    assert found == (fmt.KEY_LEVELS, fmt.KEY_COEFFICIENTS)


@on_cpu_alone
@pytest.mark.parametrize("bits", KEY_CODEBOOKS)
def test_key_gain_is_the_fit(bits):
    others = gaussian_vectors(NUM_VECTORS, seed=1)
    found = quality(others, codebook_of(bits, table_levels(fmt.KEY_LEVELS)))
    assert 1 / found.slope == pytest.approx(KEY_CODEBOOKS[bits].gain, abs=2e-4)


def documented_rows(layout: type) -> list[tuple[int, ...]]:
    """The rows of the table in a format's docstring."""
    number = r" +(\d+)"
    rows = re.findall(rf"^{4 * number}$", layout.__doc__ or "", re.MULTILINE)
    return [tuple(map(int, row)) for row in rows]


def test_documented_bytes():
    """The tables of the documentation and the docstring have the format's bytes."""
    sizes = dict(zip(HEAD_SIZES, zip(*SIZES.values())))
    page = Path(__file__).parents[4] / "docs/features/quantization/turbo.md"
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", page.read_text(), re.MULTILINE)
    documented = {int(size): [int(n) for n in cells.split("|")] for size, cells in rows}
    assert documented == {
        head_size: [*of_presets, 4 * head_size]
        for head_size, of_presets in sizes.items()
    }
    assert documented_rows(TurboFormat) == [
        (size, *of_presets) for size, of_presets in sizes.items()
    ]
