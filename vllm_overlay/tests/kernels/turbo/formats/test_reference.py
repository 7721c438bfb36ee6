# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The encoder of the format: its error and its limits."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import (
    HEAD_SIZES,
    KEY_CODEBOOKS,
    VALUE_CODEBOOKS,
    Codebook,
    TurboFormat,
)
from vllm.v1.attention.ops.turbo.interface import StoreCall
from vllm.v1.attention.ops.turbo.reference import codec as codec
from vllm.v1.attention.ops.turbo.reference.bytes import (
    pack_codes,
    pack_scales,
    unpack_codes,
    unpack_scales,
)
from vllm.v1.attention.ops.turbo.reference.levels import encode, trellis

from ..utils import (
    ON_GPU,
    all_codebooks,
    all_head_sizes,
    all_presets,
    gaussian,
    layer_caches,
)


def quantize_gaussian(
    codebook: Codebook, num_vectors: int, head_size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian vectors, whose rotation is Gaussian also, and their decoded values."""
    x = gaussian(num_vectors, head_size, seed=seed)
    return x, codec.dequantize(*codec.quantize(x, codebook), codebook)


# Relative squared error on Gaussian vectors. Each key is unbiased, which costs 2 %.
ERROR_BOUNDS = {
    VALUE_CODEBOOKS[4]: 0.0054,
    VALUE_CODEBOOKS[3]: 0.0189,
    KEY_CODEBOOKS[4]: 0.0054,
    KEY_CODEBOOKS[3]: 0.0192,
}


@all_codebooks
def test_mean_squared_error(codebook):
    """100,000 vectors on a GPU, 10,000 on a CPU: these give the error to 0.2 %."""
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
    # Shorter vectors have larger steps in products, and deltas of 2 bits are coarser.
    words = fmt.scale_words(head_size)
    factor = 1.02 if words.delta_step == 1 else 1.15
    assert error <= factor * ERROR_BOUNDS[codebook], f"squared error {error:.5f}"


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_rounding_of_queries_is_small_beside_the_codes(head_size):
    query = gaussian(4096, head_size)
    rounded = reference.round_query(query)
    error = ((rounded - query).square().sum() / query.square().sum()).item()
    assert 2e-5 < error < 0.01 * ERROR_BOUNDS[KEY_CODEBOOKS[4]]


def test_rounded_queries_at_the_edges():
    assert not reference.round_query(torch.zeros(2, 64)).any()
    # Halfway between two codes, but 127 / 3 is rounded down.
    query = torch.tensor([3.0, 1.5, -3.0, 0.0])
    assert torch.equal(
        reference.round_query(query) * (127 / 3), torch.tensor([127.0, 63, -127, 0])
    )


@pytest.mark.parametrize("bits, bound", [(4, 0.0015), (3, 0.005)])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3])
def test_each_key_is_unbiased(bits, bound, magnitude):
    """The error along the key itself, which affects attention most, is small."""
    codebook = KEY_CODEBOOKS[bits]

    def error_along(codebook: Codebook) -> float:
        x = magnitude * gaussian(2000, 128)
        decoded = codec.dequantize(*codec.quantize(x, codebook), codebook)
        ratio = codebook.gain * (decoded * x).sum(-1) / (x * x).sum(-1)
        return (ratio - 1).square().mean().sqrt().item()

    assert error_along(codebook) <= bound
    assert error_along(replace(codebook, unbiased=False)) >= 1.7 * bound


@pytest.mark.parametrize(
    "head_size, groups, expected",
    [
        # Deltas up to 7: in reach, the first of two equals, the next in reach, and none
        # in reach.
        (
            128,
            [((100, 101), (1, 2)), ((95, 96), (0, 1)), ((98, 99), (1, 1))]
            + [((92, 94), (0, 1)), ((80, 81), (0, 1))]
            + 3 * [((100, 99), (0, 1))],
            [100, 95, 98, 94, 93, 100, 100, 100],
        ),
        # Deltas of 0, 2, 4 and 6, and a code of another parity.
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
    packed = pack_scales(chosen, words)
    assert unpack_scales(packed, words).tolist() == expected


@pytest.mark.parametrize("codebook", [KEY_CODEBOOKS[3], VALUE_CODEBOOKS[3]])
def test_no_path_is_better(codebook):
    """The chosen path is the best of all 65,536, each with its best levels."""
    y = codec.by_group(gaussian(4, 64, seed=4)).cpu()
    scale = torch.tensor([0.5, 1.5, 2.0, 2.5])[:, None]  # by group, some too small
    unit = torch.ones_like(scale)
    index, error = trellis(y, scale, unit, codebook)
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
    assert torch.equal(unpack_codes(pack_codes(index, 3, True), 3, True).long(), index)


@all_codebooks
@pytest.mark.parametrize("head_size", [96, 128])
def test_scales_have_least_error(codebook, head_size):
    """No other base of a word has a smaller error, and each group has the best
    candidate for its base, up to the rounding of compared errors.
    """
    x = gaussian(200, head_size, seed=3)
    x *= torch.logspace(-3, 3, 200, device=x.device)[:, None]
    _, scales = codec.quantize(x, codebook)
    grouped = codec.by_group(x)
    words = fmt.scale_words(head_size)
    shape = (words.num_words, words.word_groups)
    largest = grouped.abs().amax((-2, -1), keepdim=True)

    def error(scale_codes: torch.Tensor) -> torch.Tensor:
        scale = codec.scale_values(scale_codes.to(torch.uint8))[..., None]
        index, _ = encode(grouped, scale, 1 / largest, codebook)
        decoded = codec.levels_of(index, codebook) * scale
        errors = (grouped - decoded).double().square().sum(-1)
        return errors.unflatten(-1, shape)

    floor = codec.scale_floor(grouped.abs().amax(-1))
    codes = [floor + offset for offset in fmt.SCALE_OFFSETS]
    errors = torch.stack([error(code) for code in codes], -1)
    codes = torch.stack(codes, -1).unflatten(-2, shape)
    scales = scales.int()
    chosen = error(scales)
    scales = scales.unflatten(-1, shape)
    # A group without a candidate in reach has an estimated error.
    known = (codes == scales[..., None]).any(-1).all(-1)
    assert known.float().mean() > 0.5
    rounding = largest**2 * head_size * 2.0**-fmt.ERROR_FRACTION_BITS

    def totals(base: torch.Tensor) -> torch.Tensor:
        steps = base - codes
        reached = (steps >= 0) & (steps <= words.max_delta * words.delta_step)
        reached &= steps % words.delta_step == 0
        return errors.masked_fill(~reached, math.inf).amin(-1).sum(-1)

    best = codes.gather(-1, errors.argmin(-1, keepdim=True)).amax(-2, keepdim=True)
    chosen = (chosen.sum(-1) - rounding[..., 0]).masked_fill(~known, -math.inf)
    for offset in fmt.BASE_OFFSETS:
        assert (chosen <= totals(best + offset)).all()


def test_low_bases_are_chosen():
    """A base below one group's best scale is chosen if others gain more."""
    words = fmt.scale_words(128)
    codes = torch.tensor([[90, 91, 92], *7 * [[82, 83, 84]]])
    errors = torch.tensor([[5.0, 1.2, 1.0], *7 * [[0.0, 1.0, 9.0]]])
    chosen = codec.scales_in_reach(codes, errors, words)
    assert chosen.tolist() == [90, *7 * [83]]
    errors = torch.tensor([[99.0, 1.2, 1.0], *7 * [[0.0, 1.0, 1.0]]])
    chosen = codec.scales_in_reach(codes, errors, words)
    assert chosen.tolist() == [92, *7 * [85]]


@pytest.mark.parametrize("magnitude", [1e-5, 1e-4, 1e-3])
@all_codebooks
def test_small_vectors_are_kept(codebook, magnitude):
    """Scales below fp16's normal numbers are coarser, but never zero by choice."""
    x = gaussian(500, 128) * magnitude
    _, scales = codec.quantize(x, codebook)
    assert (scales > 0).all()
    decoded = codec.dequantize(*codec.quantize(x, codebook), codebook)
    error = (codebook.gain * decoded - x).square().sum() / x.square().sum()
    assert error <= (1.3 if magnitude >= 1e-4 else 8) * ERROR_BOUNDS[codebook]


def special_vectors(head_size: int) -> dict[str, torch.Tensor]:
    """Vectors that an encoder must survive, fp32, by name."""
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
    """Vectors of a magnitude below about 1e-6 are stored as zero."""
    codebook = VALUE_CODEBOOKS[4]
    for magnitude, is_zero in ((1e-4, False), (4e-6, False), (1e-7, True)):
        y = gaussian(100, 128) * magnitude
        decoded = codec.dequantize(*codec.quantize(y, codebook), codebook)
        assert (decoded == 0).all(-1).all() == is_zero, magnitude
        assert (decoded == 0).all(-1).any() == is_zero, magnitude


def check_bytes_touched(
    store: Callable[[], None], buffer: torch.Tensor, touched: torch.Tensor
) -> None:
    """Check that a store writes each byte that ``touched`` marks, and no other."""
    written = []
    for filler in (0xFF, 0):
        buffer.fill_(filler)
        store()
        stored = buffer.cpu()
        assert (stored[~touched] == filler).all()
        written.append(stored[touched])
    # A byte that was not written has kept both values.
    assert torch.equal(*written)


@all_presets
@pytest.mark.parametrize(
    "sizes", [*((size, size) for size in HEAD_SIZES), (192, 128)], ids=str
)
def test_store_touches_its_bytes_only(name, sizes):
    """Store tokens of one page in one call; slot -1 and padding store nothing."""
    layout = TurboFormat.from_cache_dtype(name, *sizes)
    buffer, caches = layer_caches(layout, 4, 2, 32)
    cache = caches[1]
    key, value = (gaussian(6, 2, size, seed=n) for n, size in enumerate(sizes))
    slots = torch.tensor([3 * 32 + 17, 0, -1, 3 * 32 + 15], device=cache.device)
    touched = torch.zeros_like(buffer, dtype=torch.bool).cpu()
    region = cache.shape[2] * cache.shape[3]
    rows = torch.cat(reference.tile_addresses(layout), 1)
    page = cache.storage_offset()
    for block, token in ((3, 17), (0, 0), (3, 15)):
        for head in range(2):
            start = page + (2 * block + head) * region
            start += token // 16 * layout.tile_bytes
            touched[start + rows[token % 16]] = True
    assert touched.sum() == 3 * 2 * layout.slot_size
    call = StoreCall(cache, slots, key, value, layout)
    check_bytes_touched(partial(reference.store, call), buffer, touched)
