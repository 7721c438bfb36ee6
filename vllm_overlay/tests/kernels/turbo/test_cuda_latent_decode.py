# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA decode kernel of MLA: what is built, and attention over stored latents.

The emulated GPU multiplies as warpgroups do; timing is a matter for Hopper alone.
"""

import math

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo.cuda import latent_decode
from vllm.v1.attention.ops.turbo.cuda.build import compiler_flags, module_name
from vllm.v1.attention.ops.turbo.interface import DecodeBatch, Partials
from vllm.v1.attention.ops.turbo.latent_format import LATENT_SIZES, LatentFormat
from vllm.v1.attention.ops.turbo.reference import latent as reference

from .compile_kernels import compile_to_ptx
from .latent_utils import fill_latent_cache, latent_cache
from .test_cuda_architectures import NVCC, check_overlap, requires_nvcc
from .utils import (
    BF16,
    CUDA_IS_EMULATED,
    DEVICE,
    FP16,
    ON_NVIDIA,
    gaussian,
    make_block_table,
    num_blocks_for,
    spread_pages,
)

requires_hopper = pytest.mark.skipif(
    not CUDA_IS_EMULATED
    and (
        not ON_NVIDIA
        or not current_platform.is_device_capability(latent_decode.CAPABILITY)
    ),
    reason="needs a Hopper GPU",
)
LAYOUT = LatentFormat.from_cache_dtype("turbo4", 576)
SCALE = 192**-0.5


@pytest.mark.parametrize(
    "num_rows, columns",
    [
        (1, 8),
        (8, 8),
        (9, 16),
        (16, 16),
        (20, 24),
        (32, 32),
        (33, 40),
        (48, 48),
        (49, 64),
        (64, 64),
        (80, 40),
        (96, 48),
        (128, 64),
    ],
)
def test_rows_are_served_by_the_plan_that_is_soonest(num_rows, columns):
    assert latent_decode.plan_for(num_rows).columns == columns


def test_splits_follow_the_blocks_that_a_sequence_can_have():
    splits = latent_decode.num_decode_splits
    # Alone, one a multiprocessor, and one that begins inside.
    assert splits(1, 16, 132) == 133
    # Of two passes each has half of them.
    assert splits(1, 64, 132) == 133
    assert splits(1, 128, 132) == 67
    assert splits(1, 16, 132, query_len=8) == 67
    # Room for a large batch is bounded.
    assert splits(128, 16, 132) == 8
    assert splits(4096, 16, 132) == 3
    assert splits(0, 16, 1) == 2


def test_layouts_and_gpus_without_a_kernel_are_told():
    reason = latent_decode.unsupported_reason
    assert reason(LAYOUT, 90) is None
    assert "Hopper" in (reason(LAYOUT, 80) or "")
    assert "Hopper" in (reason(LAYOUT, 100) or "")
    turbo3 = LatentFormat.from_cache_dtype("turbo3", 576)
    assert "turbo3" in (reason(turbo3, 90) or "")
    with pytest.raises(RuntimeError, match="turbo3"):
        latent_decode.module(turbo3, latent_decode.PLANS[0])


def test_modules_are_for_their_architecture_alone():
    """The instructions are of sm_90a, and the library's name says so."""
    modules = [
        latent_decode.module(LatentFormat.from_cache_dtype("turbo4", size), plan)
        for size in LATENT_SIZES
        for plan in latent_decode.PLANS
    ]
    names = {module_name(module, "90") for module in modules}
    assert len(names) == len(modules)
    for module in modules:
        assert module.source.is_file()
        assert compiler_flags(module, "90")[0].endswith("compute_90a,code=sm_90a")
        assert "_sm90a_" in module_name(module, "90")


@requires_nvcc
@pytest.mark.parametrize("num_rows", [16, 40])
def test_compiles_to_products_that_overlap(num_rows):
    """Of the least instance of either kind, ptxas does not serialize products."""
    layout = LatentFormat.from_cache_dtype("turbo4", 256)
    module = latent_decode.module(layout, latent_decode.plan_for(num_rows))
    found, ptx = compile_to_ptx(module, 90, NVCC)
    assert found.registers <= 255 and found.spills <= 16
    assert "wgmma.mma_async" in ptx
    check_overlap(module.kernel, 90, ptx)


def attend(
    query: torch.Tensor,
    query_rope: torch.Tensor | None,
    cache: torch.Tensor,
    layout: LatentFormat,
    table: torch.Tensor,
    seq_lens: list[int],
    query_lens: list[int],
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs in fp32 and LSE of a batch, with scratch of NaN."""
    num_seqs, query_len = len(seq_lens), max(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(DEVICE, torch.int32)
    count = num_seqs * num_splits * query_len
    shape = (count, *query.shape[1:])
    partials = Partials(
        torch.full(shape, math.nan, device=DEVICE),
        torch.full(shape[:2], math.nan, device=DEVICE),
    )
    output = torch.full_like(query, math.nan, dtype=torch.float32)
    lse = torch.full(query.shape[:2], math.nan, device=DEVICE)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    batch = DecodeBatch(num_seqs, table, lens, query_len, starts)
    latent_decode.decode_attention(
        query, query_rope, cache, layout, batch, partials, output, lse, SCALE
    )
    return output, lse


def check_against_reference(
    layout: LatentFormat,
    seq_lens: list[int],
    query_lens: list[int],
    num_heads: int,
    num_splits: int,
    dtype: torch.dtype = BF16,
    block_size: int = 64,
) -> None:
    table = make_block_table(seq_lens, block_size)
    cache = latent_cache(layout, num_blocks_for(seq_lens, block_size), block_size)
    fill_latent_cache(cache, table, seq_lens, layout, dtype)
    whole = gaussian(sum(query_lens), num_heads, layout.head_size, dtype=dtype, seed=7)
    query = whole[..., : layout.rank]
    query_rope = whole[..., layout.rank :] if layout.rope else None
    first = attend(
        query, query_rope, cache, layout, table, seq_lens, query_lens, num_splits
    )
    again = attend(
        query, query_rope, cache, layout, table, seq_lens, query_lens, num_splits
    )
    for one, other in zip(first, again):
        torch.testing.assert_close(one, other, rtol=0, atol=0)  # nothing races
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(DEVICE, torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    batch = DecodeBatch(len(seq_lens), table, lens, max(query_lens), starts)
    expected = torch.empty_like(first[0])
    expected_lse = torch.empty_like(first[1])
    reference.decode_attention(
        query, query_rope, cache, layout, batch, None, expected, expected_lse, SCALE
    )
    # Operands are rounded to fp16: weights, queries and coordinates.
    error = (first[0] - expected).norm() / expected.norm()
    assert error <= 2**-9
    torch.testing.assert_close(first[1], expected_lse, rtol=1e-3, atol=2e-3)


def name_of(plan: latent_decode.Plan) -> str:
    return f"{plan.columns}-columns"


@requires_hopper
@pytest.mark.parametrize("plan", latent_decode.PLANS, ids=name_of)
def test_plans(plan):
    """Every column has a row, but the last."""
    num_heads = plan.columns - 1
    assert latent_decode.plan_for(num_heads) == plan
    check_against_reference(LAYOUT, [1, 64, 65, 400, 0], [1] * 5, num_heads, 3)


@requires_hopper
@pytest.mark.parametrize("num_heads", [1, 8, 16, 20, 32, 64, 80])
def test_heads(num_heads):
    lens = [1, 15, 16, 17, 63, 64, 65, 129, 1000, 4099]
    check_against_reference(LAYOUT, lens, [1] * len(lens), num_heads, 4)


@requires_hopper
@pytest.mark.parametrize("head_size", LATENT_SIZES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("num_heads", [16, 40])
def test_layouts(num_heads, head_size, dtype):
    layout = LatentFormat.from_cache_dtype("turbo4", head_size)
    lens = [70, 513, 64]
    check_against_reference(layout, lens, [1] * 3, num_heads, 3, dtype, 16)


@requires_hopper
@pytest.mark.parametrize("num_heads", [5, 12, 16])
def test_query_tokens_see_what_is_before_them(num_heads):
    lens, query_lens = [4, 63, 66, 700, 33, 0], [4, 1, 3, 2, 4, 1]
    check_against_reference(LAYOUT, lens, query_lens, num_heads, 5)


@requires_hopper
@pytest.mark.parametrize("num_splits", [1, 2, 133])
def test_one_long_sequence(num_splits):
    check_against_reference(LAYOUT, [9001], [1], 16, num_splits)


@requires_hopper
def test_a_split_alone_does_not_depend_on_the_batch():
    lens = [300, 4000, 65]
    table = make_block_table(lens, 64)
    cache = latent_cache(LAYOUT, num_blocks_for(lens, 64), 64)
    fill_latent_cache(cache, table, lens, LAYOUT)
    query = gaussian(3, 16, LAYOUT.head_size, dtype=BF16, seed=7)
    parts = query[..., : LAYOUT.rank], query[..., LAYOUT.rank :]
    together, _ = attend(*parts, cache, LAYOUT, table, lens, [1, 1, 1], 1)
    for row, length in enumerate(lens):
        own = slice(row, row + 1)
        alone, _ = attend(
            *(part[own] for part in parts), cache, LAYOUT, table[own], [length], [1], 1
        )
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=0)


@requires_hopper
def test_pages_past_4_gib():
    near = latent_cache(LAYOUT, 3, 64)
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=DEVICE)
    fill_latent_cache(near, table, [180], LAYOUT)
    far, blocks = spread_pages(near[:, None].contiguous())
    query = gaussian(1, 16, LAYOUT.head_size, dtype=BF16, seed=7)
    parts = query[..., : LAYOUT.rank], query[..., LAYOUT.rank :]
    expected, _ = attend(*parts, near, LAYOUT, table, [180], [1], 2)
    far_table = blocks[None].to(torch.int32)
    output, _ = attend(*parts, far[:, 0], LAYOUT, far_table, [180], [1], 2)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
