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
    ("turbo4", 64): ("adba10bd2f4008e2", "70b579b86eb8b6cf"),
    ("turbo4", 80): ("4539745e232325d4", "1831d31093c30d10"),
    ("turbo4", 96): ("fb575753820e4610", "d850b11f27c17548"),
    ("turbo4", 112): ("5ce177a6d86a9628", "6838aff0cf9c51d0"),
    ("turbo4", 128): ("f950d7d57fda082b", "89c2a6d61356b08c"),
    ("turbo4", 192): ("800d323d705df153", "ee32000812da3b60"),
    ("turbo4", 256): ("4a7ca520f830953b", "4a6965b3bfbe8ee0"),
    ("turbo4", 512): ("0cf9d51ee7041715", "e35c666deff3190a"),
    ("k4v3", 64): ("f90d5eb742c219c1", "21e417e0b32fbe89"),
    ("k4v3", 80): ("4e37d7cd9a0be635", "0a7a9557d8089715"),
    ("k4v3", 96): ("19690403cf6de0b8", "4962949779ca09ac"),
    ("k4v3", 112): ("bad0b84c84226114", "2ee1d0be15e58f2e"),
    ("k4v3", 128): ("913a801807e63912", "1004fd025bb8570f"),
    ("k4v3", 192): ("e029384b198e607f", "bb6484ea3fe27d40"),
    ("k4v3", 256): ("d43781f350a30b0a", "e0222b4290dc77ac"),
    ("k4v3", 512): ("b316cbd1141c51db", "f19415c1bb94e54d"),
    ("turbo3", 64): ("778344497e1db5e2", "75d062cf37911627"),
    ("turbo3", 80): ("0f49dc0e3eaab413", "c67dbe78626814d9"),
    ("turbo3", 96): ("b7f6070328c292d0", "0f77b123ba578851"),
    ("turbo3", 112): ("d6f7cad33d5cc132", "e854ace665a6cdea"),
    ("turbo3", 128): ("39777fdd97715bc6", "057cb0ff29525693"),
    ("turbo3", 192): ("735e8ce3caaea5ca", "3cf8b67cb3889f67"),
    ("turbo3", 256): ("a57889283e7552a7", "d402d930c973f299"),
    ("turbo3", 512): ("d30976a3d5df6679", "384d71ea8f447cac"),
}


def quantize_gaussian(
    codebook: Codebook, num_vectors: int, head_size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian vectors, also when rotated, and what is decoded of them."""
    x = gaussian(num_vectors, head_size, seed=seed)
    return x, reference.dequantize(*reference.quantize(x, codebook), codebook)


# Relative squared error on Gaussian vectors. Keys are unbiased, a vector each, which
# costs 2 %.
ERROR_BOUNDS = {
    VALUE_CODEBOOKS[4]: 0.0053,
    VALUE_CODEBOOKS[3]: 0.0225,
    KEY_CODEBOOKS[4]: 0.0055,
    KEY_CODEBOOKS[3]: 0.0232,
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
    words = fmt.scale_words(head_size, codebook.scale_group)
    factor = 1.02 if words.delta_step == 1 else 1.15
    assert error <= factor * ERROR_BOUNDS[codebook], f"squared error {error:.5f}"


@pytest.mark.parametrize("bits, bound", [(4, 0.003), (3, 0.005)])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3])
def test_each_key_is_unbiased(bits, bound, magnitude):
    """The error along the key itself, which attention feels most."""
    codebook = KEY_CODEBOOKS[bits]

    def error_along(codebook: Codebook) -> float:
        x = magnitude * gaussian(2000, 128)
        decoded = reference.dequantize(*reference.quantize(x, codebook), codebook)
        ratio = codebook.gain * (decoded * x).sum(-1) / (x * x).sum(-1)
        return (ratio - 1).square().mean().sqrt().item()

    assert error_along(codebook) <= bound
    assert error_along(replace(codebook, unbiased=False)) >= 2 * bound


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
    words = fmt.scale_words(head_size, 16)
    codes, errors = torch.tensor(groups).unbind(1)
    chosen = reference.scales_in_reach(codes, errors.float(), words)
    assert chosen.tolist() == expected
    packed = reference.pack_scales(chosen, words)
    assert reference.unpack_scales(packed, words).tolist() == expected


@all_codebooks
@pytest.mark.parametrize("head_size", [96, 128])
def test_scales_have_least_error(codebook, head_size):
    """No candidate in reach has, with its nearest levels, a smaller error, except by
    the rounding of the errors that are compared.
    """
    x = gaussian(200, head_size, seed=3)
    x *= torch.logspace(-3, 3, 200, device=x.device)[:, None]
    _, scales = reference.quantize(x, codebook)
    levels = torch.tensor(codebook.levels, dtype=torch.float64, device=x.device)
    groups = reference.group_of_coordinate(head_size, codebook.scale_group).to(x.device)
    words = fmt.scale_words(head_size, codebook.scale_group)
    by_word = scales.int().unflatten(-1, (words.num_words, -1))
    base = by_word.amax(-1, keepdim=True).expand_as(by_word).flatten(-2)

    def error(members: torch.Tensor, scale_codes: torch.Tensor) -> torch.Tensor:
        scale = reference.scale_values(scale_codes.to(torch.uint8))
        grid = levels * scale[:, None, None]
        return ((members[..., None] - grid) ** 2).amin(-1).sum(-1)

    best_of_all = torch.ones_like(scales, dtype=torch.bool)
    for group in range(scales.shape[1]):
        members = x[:, groups == group].double()
        largest = members.abs().amax(-1)
        rounding = largest**2 * members.shape[1] * 2.0**-fmt.ERROR_FRACTION_BITS
        floor = reference.scale_floor(largest.float())
        chosen = error(members, scales[:, group]) - rounding
        for offset in codebook.scale_offsets:
            no_better = chosen <= error(members, floor + offset)
            steps = base[:, group] - (floor + offset)
            reached = (steps >= 0) & (steps <= words.max_delta * words.delta_step)
            reached &= steps % words.delta_step == 0
            assert (no_better | ~reached).all()
            best_of_all[:, group] &= no_better
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
            codes, scales = reference.quantize(reference.rotate(x), codebook)
            assert (scales <= fmt.SCALE_CODE_MAX).all(), case
            decoded = reference.dequantize(codes, scales, codebook)
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
    decoded = reference.dequantize(*reference.quantize(y, codebook), codebook)
    assert torch.equal(decoded.sign(), y.sign())
    assert (decoded.abs() >= 0.99 * fmt.SCALE_MAX).all()


def test_smallest_vectors():
    """About 1e-6 is the least magnitude that is not stored as zero."""
    codebook = VALUE_CODEBOOKS[4]
    for magnitude, is_zero in ((1e-4, False), (4e-6, False), (1e-7, True)):
        y = gaussian(100, 128) * magnitude
        decoded = reference.dequantize(*reference.quantize(y, codebook), codebook)
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
