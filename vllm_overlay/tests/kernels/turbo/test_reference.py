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
    ("turbo4", 64): ("e38d1ccf93847b2d", "7d133080ec9de3e2"),
    ("turbo4", 80): ("be174fa3b0b45bc5", "2b75741fd86ac21c"),
    ("turbo4", 96): ("30c9c5d711d006fa", "d1d6c6cdfebadeb0"),
    ("turbo4", 112): ("95e14d4e0268fd3f", "ba2b7cbf296aac95"),
    ("turbo4", 128): ("0a29b2bba7fe7927", "5175b9dc9fb557eb"),
    ("turbo4", 192): ("218c2a567cb47402", "8c89c616c5262d55"),
    ("turbo4", 256): ("feefd96228e206b7", "04110a5659a62d34"),
    ("turbo4", 512): ("6c45abfd0d5c4f9d", "91c8b998d6342317"),
    ("k4v3", 64): ("c6dbc5e6546159ce", "202c62f4cf6461cd"),
    ("k4v3", 80): ("54a6162f013100e4", "21e67699d2d7fcc3"),
    ("k4v3", 96): ("3527df442b1cff28", "83c74a97ee15d427"),
    ("k4v3", 112): ("224a2596c0c6df85", "2e743ed48fae1e8f"),
    ("k4v3", 128): ("0e8e736b389c4eb8", "4df1e3783275a379"),
    ("k4v3", 192): ("dd408e5804337b08", "e897a31fc4954a0a"),
    ("k4v3", 256): ("79b8045ad89dbca1", "edcee40433497e0d"),
    ("k4v3", 512): ("26b6023115b22db2", "660113a91242a807"),
    ("turbo3", 64): ("62de306b03657bf9", "ba41ab54d4c5470f"),
    ("turbo3", 80): ("a82fc17d432cfb60", "7b0bf5b005b4cb86"),
    ("turbo3", 96): ("db81245e1f783731", "57b8c7cf230316ac"),
    ("turbo3", 112): ("d663b48f56243dd0", "21a110ff3fe6977e"),
    ("turbo3", 128): ("2459f917770f9be4", "b2676296dcf76a6d"),
    ("turbo3", 192): ("486daf1e86f9d148", "2229b61663df1238"),
    ("turbo3", 256): ("d960a016ce6e4f48", "7bd2488361a4e4f7"),
    ("turbo3", 512): ("0511ff758b35e04a", "e837c093d6262de4"),
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
    VALUE_CODEBOOKS[4]: 0.0063,
    VALUE_CODEBOOKS[3]: 0.0262,
    KEY_CODEBOOKS[4]: 0.00645,
    KEY_CODEBOOKS[3]: 0.0269,
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
    # Steps in the products of smaller vectors are larger.
    assert error <= 1.02 * ERROR_BOUNDS[codebook], f"squared error {error:.5f}"


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


@all_codebooks
def test_scales_have_least_error(codebook):
    """No candidate scale with its nearest levels has a smaller error, except by
    the rounding of the errors that are compared.
    """
    x = gaussian(200, 128, seed=3)
    x *= torch.logspace(-3, 3, 200, device=x.device)[:, None]
    _, scales = reference.quantize(x, codebook)
    levels = torch.tensor(codebook.levels, dtype=torch.float64, device=x.device)
    groups = reference.group_of_coordinate(128).to(x.device)

    def error(members: torch.Tensor, scale_codes: torch.Tensor) -> torch.Tensor:
        scale = reference.scale_values(scale_codes.to(torch.uint8))
        grid = levels * scale[:, None, None]
        return ((members[..., None] - grid) ** 2).amin(-1).sum(-1)

    for group in range(4):
        members = x[:, groups == group].double()
        largest = members.abs().amax(-1)
        rounding = largest**2 * fmt.SCALE_GROUP * 2.0**-fmt.ERROR_FRACTION_BITS
        floor = reference.scale_floor(largest.float())
        chosen = error(members, scales[:, group])
        for offset in codebook.scale_offsets:
            assert (chosen <= error(members, floor + offset) + rounding).all()


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
    """What is read from two tiles of bytes that are all valid scales."""
    index = torch.arange(2 * layout.tile_bytes)
    some_bytes = ((index * 2654435761) % 2**32 >> 24).clamp(max=fmt.SCALE_CODE_MAX)
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
