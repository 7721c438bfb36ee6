# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The encoder of the format: its error, its limits and its golden bytes."""

import hashlib
import itertools
from dataclasses import replace

import pytest
import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo import reference_codec as codec
from vllm.v1.attention.ops.turbo.format import (
    HEAD_SIZES,
    KEY_CODEBOOKS,
    TURBO_PRESETS,
    VALUE_CODEBOOKS,
    Codebook,
    TurboFormat,
)

from .utils import (
    ON_GPU,
    all_codebooks,
    all_head_sizes,
    all_presets,
    gaussian,
    layer_caches,
)

# SHA-256, shortened, of the bytes that are stored of given vectors, and of the
# coordinates that are read from given bytes. The format is an ABI: the second never
# changes under a dtype's name; the first only if the encoder chooses better codes.
GOLDEN = {
    ("turbo4", 64): ("b29cd85b8157bfb3", "70b579b86eb8b6cf"),
    ("turbo4", 80): ("cccc6ea4ae9bd7d2", "1831d31093c30d10"),
    ("turbo4", 96): ("b3202d39c69ca4d0", "d850b11f27c17548"),
    ("turbo4", 112): ("1367535c0ba56bca", "6838aff0cf9c51d0"),
    ("turbo4", 128): ("676fc3cf99852fef", "89c2a6d61356b08c"),
    ("turbo4", 192): ("4cb5c2911f82b2f7", "ee32000812da3b60"),
    ("turbo4", 256): ("b53f55de3295e67f", "4a6965b3bfbe8ee0"),
    ("turbo4", 512): ("c365e3a48d38c317", "e35c666deff3190a"),
    ("k4v3", 64): ("12630ac4505a2bf2", "77ac5470c9bf5b34"),
    ("k4v3", 80): ("76b6a636615417f9", "94162eab159a328f"),
    ("k4v3", 96): ("893228ae9dd7e6e8", "9a8fe4745a0c7beb"),
    ("k4v3", 112): ("68c4d5c37447435a", "6bcb6371cb22fdb4"),
    ("k4v3", 128): ("4c15d2fc2fe7ac54", "032335119de886b5"),
    ("k4v3", 192): ("cb2ed577fd617cd3", "04edf85e3bfc52ae"),
    ("k4v3", 256): ("eab7d49608fadcb6", "e56edcc980a2984b"),
    ("k4v3", 512): ("f6fe9bcc933458c7", "388c49dfdcd2091c"),
    ("turbo3", 64): ("b4954a7cbd615a55", "4bc50016f1722768"),
    ("turbo3", 80): ("215f4320e283d627", "829c806b2e1e52f0"),
    ("turbo3", 96): ("1d6e0313574ea2bc", "9e1fd3327650475e"),
    ("turbo3", 112): ("32427591145c51a4", "40a29c93dbb12fe6"),
    ("turbo3", 128): ("2a72756d549467fd", "e1a2147156fa76ad"),
    ("turbo3", 192): ("401f8e8cc70c5268", "1e73eb2df03a7cdf"),
    ("turbo3", 256): ("8da14188aa24a2bf", "a1cd00ceabf3021d"),
    ("turbo3", 512): ("21a7ee00aae4d9cd", "f244e6729273e0cf"),
}


def quantize_gaussian(
    codebook: Codebook, num_vectors: int, head_size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian vectors, also when rotated, and what is decoded of them."""
    x = gaussian(num_vectors, head_size, seed=seed)
    return x, codec.dequantize(*codec.quantize(x, codebook), codebook)


# Relative squared error on Gaussian vectors. Keys are unbiased, a vector each, which
# costs 2 %.
ERROR_BOUNDS = {
    VALUE_CODEBOOKS[4]: 0.0053,
    VALUE_CODEBOOKS[3]: 0.0186,
    KEY_CODEBOOKS[4]: 0.0054,
    KEY_CODEBOOKS[3]: 0.0192,
}


@all_codebooks
def test_mean_squared_error(codebook):
    """100,000 vectors on a GPU; 10,000 already give the error to 0.2 %."""
    product = norm = energy = 0.0
    for seed in range(50 if ON_GPU else 5):
        x, decoded = quantize_gaussian(codebook, 2000, 128, seed)
        product += codebook.gain * (decoded * x).sum().item()
        norm += (x * x).sum().item()
        energy += codebook.gain**2 * (decoded * decoded).sum().item()
    error = 1 + (energy - 2 * product) / norm
    assert error <= ERROR_BOUNDS[codebook], f"squared error {error:.5f}"
    if codebook.unbiased:
        assert abs(product / norm - 1) <= 0.0005, f"slope {product / norm:.5f}"


@all_codebooks
@all_head_sizes
def test_mean_squared_error_of_head_sizes(codebook, head_size):
    x, decoded = quantize_gaussian(codebook, 200_000 // head_size, head_size)
    error = codebook.gain * decoded - x
    error = (error * error).mean().item() / (x * x).mean().item()
    # Steps in the products of smaller vectors are larger, and deltas of 2 bits coarser.
    words = fmt.scale_words(head_size)
    factor = 1.02 if words.delta_step == 1 else 1.15
    assert error <= factor * ERROR_BOUNDS[codebook], f"squared error {error:.5f}"


@pytest.mark.parametrize("bits, bound", [(4, 0.0015), (3, 0.0047)])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3])
def test_each_key_is_unbiased(bits, bound, magnitude):
    """The error along the key itself, which attention feels most."""
    codebook = KEY_CODEBOOKS[bits]

    def error_along(codebook: Codebook) -> float:
        x = magnitude * gaussian(2000, 128)
        decoded = codec.dequantize(*codec.quantize(x, codebook), codebook)
        ratio = codebook.gain * (decoded * x).sum(-1) / (x * x).sum(-1)
        return (ratio - 1).square().mean().sqrt().item()

    assert error_along(codebook) <= bound
    assert error_along(replace(codebook, unbiased=False)) >= 1.9 * bound


@pytest.mark.parametrize(
    "head_size, groups, expected",
    [
        # Deltas to 7: in reach, the first of equals, next in reach, none in reach.
        (
            128,
            [((100, 101), (1, 2)), ((95, 96), (0, 1)), ((98, 99), (1, 1))]
            + [((92, 94), (0, 1)), ((80, 81), (0, 1))]
            + 3 * [((100, 99), (0, 1))],
            [100, 95, 98, 94, 93, 100, 100, 100],
        ),
        # Deltas of 0, 2, 4 and 6: another parity, too.
        (
            64,
            [((100, 101), (1, 2)), ((97, 98), (0, 1))]
            + [((97, 99), (0, 1)), ((91, 93), (0, 1))],
            [100, 98, 98, 94],
        ),
    ],
    ids=["by-one", "by-two"],
)
def test_scales_in_reach(head_size, groups, expected):
    words = fmt.scale_words(head_size)
    codes, errors = torch.tensor(groups).unbind(1)
    chosen = codec.scales_in_reach(codes, errors.float(), words)
    assert chosen.tolist() == expected
    packed = codec.pack_scales(chosen, words)
    assert codec.unpack_scales(packed, words).tolist() == expected


@pytest.mark.parametrize("codebook", [KEY_CODEBOOKS[3], VALUE_CODEBOOKS[3]])
def test_no_path_is_better(codebook):
    """All 65,536 paths of a group, each with its best levels."""
    y = codec.by_group(gaussian(4, 64, seed=4)).cpu()
    scale = torch.tensor([0.5, 1.5, 2.0, 2.5])[:, None]  # by group, some too small
    unit = torch.ones_like(scale)
    index, error = codec._trellis(y, scale, unit, codebook)
    path = torch.arange(1 << 16)[:, None] >> torch.arange(16) & 1
    before = torch.nn.functional.pad(path, (2, 0))
    subset = 2 * (path ^ before[:, :-2]) + before[:, 1:-1]
    levels = torch.tensor(codebook.levels)
    for i, group in itertools.product(range(4), range(4)):
        of_levels = (y[i, group, :, None] - levels * scale[group]) ** 2
        of_levels = of_levels.clamp(max=fmt.ERROR_MAX)
        of_subsets = of_levels.unflatten(-1, (4, 4)).amin(-2)
        least = of_subsets[torch.arange(16), subset].sum(-1).amin()
        chosen = of_levels[torch.arange(16), index[i, group]].sum()
        assert chosen == pytest.approx(least.item(), rel=1e-3)
        assert error[i, group] * 2.0**-16 == pytest.approx(least.item(), rel=1e-3)
    index = codec.from_groups(index)
    assert torch.equal(codec.unpack_codes(codec.pack_codes(index, 3), 3).long(), index)


@all_codebooks
@pytest.mark.parametrize("head_size", [96, 128])
def test_scales_have_least_error(codebook, head_size):
    """No candidate in reach has, with its best levels, a smaller error, except by the
    rounding of the errors that are compared.
    """
    x = gaussian(200, head_size, seed=3)
    x *= torch.logspace(-3, 3, 200, device=x.device)[:, None]
    _, scales = codec.quantize(x, codebook)
    grouped = codec.by_group(x)
    words = fmt.scale_words(head_size)
    by_word = scales.int().unflatten(-1, (words.num_words, -1))
    base = by_word.amax(-1, keepdim=True).expand_as(by_word).flatten(-2)

    def error(scale_codes: torch.Tensor) -> torch.Tensor:
        scale = codec.scale_values(scale_codes.to(torch.uint8))[..., None]
        unit = torch.full_like(scale, 1.0) / largest[..., None]
        index, _ = codec._encode(grouped, scale, unit, codebook)
        decoded = codec.levels_of(index, codebook) * scale
        return (grouped - decoded).double().square().sum(-1)

    largest = grouped.abs().amax(-1)
    rounding = largest**2 * grouped.shape[-1] * 2.0**-fmt.ERROR_FRACTION_BITS
    floor = codec.scale_floor(largest)
    chosen = error(scales) - rounding
    best_of_all = torch.ones_like(scales, dtype=torch.bool)
    for offset in fmt.SCALE_OFFSETS:
        no_better = chosen <= error(floor + offset)
        steps = base - (floor + offset)
        reached = (steps >= 0) & (steps <= words.max_delta * words.delta_step)
        reached &= steps % words.delta_step == 0
        assert (no_better | ~reached).all()
        best_of_all &= no_better
    bases = (best_of_all & (scales == base)).unflatten(-1, (words.num_words, -1))
    assert bases.any(-1).all()


def special_vectors(head_size: int) -> dict[str, torch.Tensor]:
    """Vectors an encoder must survive, fp32, by what they are."""
    x = gaussian(head_size, seed=5)
    spike = torch.zeros_like(x)
    spike[head_size // 3] = 1
    nan, infinite = x.clone(), x.clone()
    nan[7] = float("nan")
    infinite[9] = float("inf")
    return {
        "zero": x * 0,
        "nan": nan,
        "all nan": x * float("nan"),
        "inf": infinite,
        "-inf": -infinite,
        "huge": x * 1e30,
        "largest": x.sign() * torch.finfo(torch.float32).max,
        "tiny": x * 1e-30,
        "denormal": x * 1e-41,
        "spike": spike,
    }


@all_presets
@all_head_sizes
def test_special_inputs_are_defined(name, head_size):
    layout = TurboFormat.from_cache_dtype(name, head_size)
    for codebook in (layout.key_codebook, layout.value_codebook):
        for case, x in special_vectors(head_size).items():
            codes, scales = codec.quantize(reference.rotate(x), codebook)
            assert (scales <= fmt.SCALE_CODE_MAX).all(), case
            decoded = codec.dequantize(codes, scales, codebook)
            assert decoded.isfinite().all(), case
            is_zero = case in ("zero", "all nan", "tiny", "denormal")
            assert (decoded == 0).all() == is_zero, case


def test_nan_counts_as_zero():
    vectors = special_vectors(128)
    nan = vectors["nan"]
    assert torch.equal(reference.rotate(nan), reference.rotate(nan.nan_to_num(0.0)))


def test_huge_inputs_saturate_with_their_sign():
    codebook = VALUE_CODEBOOKS[4]
    y = reference.rotate(special_vectors(128)["huge"])
    decoded = codec.dequantize(*codec.quantize(y, codebook), codebook)
    assert torch.equal(decoded.sign(), y.sign())
    assert (decoded.abs() >= 0.99 * fmt.SCALE_MAX).all()


def test_smallest_vectors():
    """About 1e-6 is the least magnitude that is not stored as zero."""
    codebook = VALUE_CODEBOOKS[4]
    for magnitude, is_zero in ((1e-4, False), (4e-6, False), (1e-7, True)):
        y = gaussian(100, 128) * magnitude
        decoded = codec.dequantize(*codec.quantize(y, codebook), codebook)
        assert (decoded == 0).all(-1).all() == is_zero, magnitude
        assert (decoded == 0).all(-1).any() == is_zero, magnitude


@all_presets
@all_head_sizes
def test_store_touches_its_bytes_only(name, head_size):
    """Tokens of one page in one call; slot -1 and padding store nothing."""
    layout = TurboFormat.from_cache_dtype(name, head_size)
    buffer, caches = layer_caches(layout, 4, 2, 32)
    cache = caches[1]
    key, value = gaussian(6, 2, head_size), gaussian(6, 2, head_size, seed=1)
    slots = torch.tensor([3 * 32 + 17, 0, -1, 3 * 32 + 15], device=cache.device)
    reference.store(cache, slots, key, value, layout)
    untouched = torch.ones_like(buffer, dtype=torch.bool).cpu()
    region = cache.shape[2] * cache.shape[3]
    rows = torch.cat(reference.tile_addresses(layout), 1)
    page = cache.storage_offset()
    for block, token in ((3, 17), (0, 0), (3, 15)):
        for head in range(2):
            start = page + (2 * block + head) * region
            start += token // 16 * layout.tile_bytes
            untouched[start + rows[token % 16]] = False
    assert (~untouched).sum() == 3 * 2 * layout.slot_size
    assert (buffer.cpu()[untouched] == 0xFF).all()
    # Every other byte was written: an all-ones page would say otherwise.
    buffer.fill_(0)
    reference.store(cache, slots, key, value, layout)
    assert (buffer.cpu()[untouched] == 0).all()


def golden_cache(layout: TurboFormat) -> torch.Tensor:
    """A page of vectors that depend on no random number generator."""
    shape = (2, 24, 2, layout.head_size)
    index = torch.arange(2 * 24 * 2 * layout.head_size)
    x = ((index * 2654435761) % 2**32).double() / 2**31 - 1
    x = (x.view(shape) * 2.0 ** (torch.arange(24) % 9 - 4)[:, None, None]).bfloat16()
    cache = torch.zeros(1, 2, 32, layout.slot_size, dtype=torch.uint8)
    reference.store(cache, torch.arange(24), x[0], x[1], layout)
    return cache


def test_every_layout_has_golden_bytes():
    assert set(GOLDEN) == set(itertools.product(TURBO_PRESETS, HEAD_SIZES))


def golden_coordinates(layout: TurboFormat) -> torch.Tensor:
    """What is read from two tiles of bytes that no delta makes invalid scales."""
    index = torch.arange(2 * layout.tile_bytes)
    some_bytes = ((index * 2654435761) % 2**32 >> 24).clamp(7, fmt.SCALE_CODE_MAX)
    cache = some_bytes.to(torch.uint8).view(1, 1, 32, layout.slot_size)
    return torch.stack(reference.load(cache, torch.arange(32), layout))


def golden_digests(layout: TurboFormat) -> tuple[str, str]:
    stored, read = (
        hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16]
        for x in (golden_cache(layout), golden_coordinates(layout))
    )
    return stored, read


@all_presets
@all_head_sizes
def test_golden_bytes(name, head_size):
    layout = TurboFormat.from_cache_dtype(name, head_size)
    assert golden_digests(layout) == GOLDEN[name, head_size]
