# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA decode kernels of MLA: their modules, and attention over stored latents.

The emulated GPU has the instructions of all plans. A GPU runs its own plans and those
of earlier GPUs, so that a GPU of compute capability 9.0 runs all.
"""

import json
import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.attention.ops.turbo.cuda import latent_decode
from vllm.v1.attention.ops.turbo.cuda.build import compiler_flags, module_name
from vllm.v1.attention.ops.turbo.cuda.compiler import nvcc_release
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES
from vllm.v1.attention.ops.turbo.cuda.latent_plans import (
    COPYING_SLICES,
    SLICES,
    WARPGROUPS,
    Plan,
    plan_for,
    plans_of,
)
from vllm.v1.attention.ops.turbo.interface import DecodeBatch, Partials
from vllm.v1.attention.ops.turbo.latent.format import LATENT_SIZES, LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import LatentCall
from vllm.v1.attention.ops.turbo.reference import latent as reference

from .compile_kernels import RECORDED, compile_to_ptx, excess
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
    requires_cuda,
    spread_pages,
)

PLANS = (*WARPGROUPS, *SLICES, *COPYING_SLICES)
LAYOUT = LatentFormat.from_cache_dtype("turbo4", 576)
SCALE = 192**-0.5


def name_of(plan: Plan) -> str:
    kind = "warpgroups"
    if plan.teams:
        kind = "slices" if plan.is_bulk else "copying-slices"
    return f"{plan.columns}-{kind}"


def marked(plan: Plan) -> Any:
    """A plan that is skipped on GPUs without its instructions."""
    runs = CUDA_IS_EMULATED
    if ON_NVIDIA:
        capability = current_platform.get_device_capability()
        runs = capability is not None and plan.runs_on(capability.to_int())
    lacks = pytest.mark.skipif(not runs, reason=f"no GPU for {name_of(plan)}")
    return pytest.param(plan, marks=lacks, id=name_of(plan))


all_plans = pytest.mark.parametrize("plan", [marked(plan) for plan in PLANS])
# A plan of few columns of each kind, and the one whose warpgroups share tokens.
some_plans = pytest.mark.parametrize(
    "plan",
    [marked(p) for p in PLANS if p.columns == 16 or p.shares and p.columns == 40],
)


@pytest.mark.parametrize(
    "capability, num_rows, columns",
    [
        *((90, rows, 8) for rows in (1, 8)),
        *((90, rows, 16) for rows in (9, 16)),
        *((90, rows, 24) for rows in (20, 24)),
        (90, 32, 32),
        *((90, rows, 40) for rows in (33, 80)),
        *((90, rows, 48) for rows in (48, 96)),
        *((90, rows, 64) for rows in (49, 64, 128)),
        *((80, rows, 8) for rows in (1, 8)),
        *((120, rows, 16) for rows in (9, 16)),
        *((86, rows, 24) for rows in (20, 24, 48)),
        *((100, rows, 32) for rows in (32, 64, 80, 128)),
    ],
)
def test_rows_are_served_by_the_plan_that_is_soonest(capability, num_rows, columns):
    assert plan_for(num_rows, plans_of(capability)).columns == columns


@pytest.mark.parametrize("capability", [*ARCHITECTURES, 87, 103, 121])
def test_gpus_are_served_by_plans_that_run_on_them(capability):
    served = plans_of(capability)
    assert all(plan.runs_on(capability) for plan in served)
    assert min(plan.columns for plan in served) == 8
    assert all(plan.is_bulk == (capability >= 90) for plan in served)
    assert not any(plan.runs_on(75) for plan in PLANS)
    assert not any(plan.runs_on(100) for plan in WARPGROUPS)


def test_splits_follow_the_blocks_that_a_sequence_can_have():
    splits = partial(latent_decode.num_decode_splits, plans=plans_of(90))
    # A sequence alone has a split a multiprocessor, and one that begins inside.
    assert splits(1, 16, 132) == 133
    assert splits(1, 64, 132) == 133
    # Each of two passes has half of the splits.
    assert splits(1, 128, 132) == 67
    assert splits(1, 16, 132, query_len=8) == 67
    # Room for a large batch is bounded.
    assert splits(128, 16, 132) == 8
    assert splits(4096, 16, 132) == 3
    assert splits(0, 16, 1) == 2
    # On other GPUs 64 rows are two passes.
    assert latent_decode.num_decode_splits(1, 64, 132, plans=plans_of(80)) == 67


def test_layouts_and_gpus_without_a_kernel():
    reason = latent_decode.unsupported_reason
    assert all(reason(capability) is None for capability in ARCHITECTURES)
    assert "8.0" in (reason(75) or "")
    turbo3 = LatentFormat.from_cache_dtype("turbo3", 576)
    assert latent_decode.serves(LAYOUT) and not latent_decode.serves(turbo3)
    with pytest.raises(RuntimeError, match="turbo3"):
        latent_decode.LATENT_DECODE.module(turbo3, SLICES[0])


def test_modules_are_for_their_architecture_alone():
    """Instructions for warpgroups need sm_90a, which the library's name has."""
    layouts = [LatentFormat.from_cache_dtype("turbo4", size) for size in LATENT_SIZES]
    names = set()
    for layout, plan in product(layouts, PLANS):
        module = latent_decode.LATENT_DECODE.module(layout, plan)
        suffix = "" if plan.teams else "a"
        target = f"compute_90{suffix},code=sm_90{suffix}"
        assert compiler_flags(module, "90")[0].endswith(target)
        assert f"_sm90{suffix}_" in module_name(module, "90")
        assert module.source.is_file()
        names.add(module_name(module, "90"))
    assert len(names) == len(layouts) * len(PLANS)


@requires_nvcc
@pytest.mark.parametrize("num_rows", [16, 40])
def test_compiles_to_products_that_overlap(num_rows):
    """The products of either kind's smallest instance are not serialized."""
    layout = LatentFormat.from_cache_dtype("turbo4", 256)
    module = latent_decode.LATENT_DECODE.module(layout, plan_for(num_rows, WARPGROUPS))
    found, ptx = compile_to_ptx(module, 90, NVCC)
    assert found.registers <= 255 and found.spills <= 16
    assert "wgmma.mma_async" in ptx
    check_overlap(module.kernel, 90, ptx)


@requires_nvcc
@pytest.mark.parametrize("capability, is_bulk", [(80, False), (120, True)])
def test_slices_compile_for_other_gpus(capability, is_bulk):
    """Slices spill no more than is recorded, all of it outside the loop over tiles."""
    module = latent_decode.LATENT_DECODE.module(
        LAYOUT, plan_for(8, plans_of(capability))
    )
    found, ptx = compile_to_ptx(module, capability, NVCC)
    # So few registers leave room for blocks of four teams.
    assert found.registers <= 128
    assert "movmatrix" in ptx and "wgmma" not in ptx
    assert ("cp.async.bulk" in ptx) == is_bulk
    check_overlap(module.kernel, capability, ptx)
    recorded = json.loads(RECORDED.read_text())
    name = f"{module.kernel} {module.instance}"
    if nvcc_release(NVCC) == recorded["nvcc"]:
        assert excess(name, capability, found, recorded) is None


def attend(
    query: torch.Tensor,
    query_rope: torch.Tensor | None,
    cache: torch.Tensor,
    layout: LatentFormat,
    table: torch.Tensor,
    seq_lens: list[int],
    query_lens: list[int],
    num_splits: int,
    plans: Sequence[Plan] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (T, Hq, L) and LSE (T, Hq) of a batch, in fp32, with scratch of NaN."""
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
    pages = cache, layout, batch
    call = LatentCall(*pages, SCALE, output, lse, query, query_rope)
    latent_decode.decode_attention(call, partials, plans=plans)
    return output, lse


def check_against_reference(
    layout: LatentFormat,
    seq_lens: list[int],
    query_lens: list[int],
    num_heads: int,
    num_splits: int,
    dtype: torch.dtype = BF16,
    block_size: int = 64,
    plans: Sequence[Plan] | None = None,
) -> None:
    table = make_block_table(seq_lens, block_size)
    cache = latent_cache(layout, num_blocks_for(seq_lens, block_size), block_size)
    fill_latent_cache(cache, table, seq_lens, layout, dtype)
    whole = gaussian(sum(query_lens), num_heads, layout.head_size, dtype=dtype, seed=7)
    query = whole[..., : layout.rank]
    query_rope = whole[..., layout.rank :] if layout.rope else None
    run = partial(attend, query, query_rope, cache, layout, table)
    first = run(seq_lens, query_lens, num_splits, plans)
    again = run(seq_lens, query_lens, num_splits, plans)
    for one, other in zip(first, again):
        torch.testing.assert_close(one, other, rtol=0, atol=0)  # nothing races
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(DEVICE, torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    batch = DecodeBatch(len(seq_lens), table, lens, max(query_lens), starts)
    expected = torch.empty_like(first[0])
    expected_lse = torch.empty_like(first[1])
    pages = cache, layout, batch
    call = LatentCall(*pages, SCALE, expected, expected_lse, query, query_rope)
    reference.decode_attention(call)
    # Weights, queries and coordinates are rounded to fp16.
    error = (first[0] - expected).norm() / expected.norm()
    assert error <= 2**-9
    torch.testing.assert_close(first[1], expected_lse, rtol=1e-3, atol=2e-3)


@all_plans
def test_plans(plan):
    """Every column but the last has a row."""
    num_heads = plan.columns - 1
    lens = [1, 64, 65, 400, 0]
    check_against_reference(LAYOUT, lens, [1] * 5, num_heads, 3, plans=[plan])


@all_plans
def test_query_tokens_and_passes(plan):
    """Rows need up to three passes, and belong to tokens that see different lengths."""
    lens, query_lens = [4, 63, 66, 700, 33, 0, 1, 17], [4, 1, 3, 2, 4, 1, 1, 1]
    num_heads = plan.columns // 2 + 1
    check_against_reference(LAYOUT, lens, query_lens, num_heads, 5, plans=[plan])


@requires_cuda
def test_teams_that_take_tiles_in_pairs():
    plan = Plan(8, 2, 0, teams=2, tiles=2, held=1, is_bulk=False)
    check_against_reference(LAYOUT, [1, 16, 17, 700], [1] * 4, 5, 3, plans=[plan])


@requires_cuda
@pytest.mark.parametrize("num_heads", [1, 8, 16, 20, 32, 64, 80])
def test_heads(num_heads):
    lens = [1, 15, 16, 17, 63, 64, 65, 129, 1000, 4099]
    check_against_reference(LAYOUT, lens, [1] * len(lens), num_heads, 4)


@pytest.mark.parametrize("head_size", LATENT_SIZES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@some_plans
def test_layouts(plan, head_size, dtype):
    layout = LatentFormat.from_cache_dtype("turbo4", head_size)
    lens = [70, 513, 64]
    check_against_reference(
        layout, lens, [1] * 3, plan.columns, 3, dtype, 16, plans=[plan]
    )


@requires_cuda
@pytest.mark.parametrize("num_heads", [5, 12, 16])
def test_query_tokens_see_what_is_before_them(num_heads):
    lens, query_lens = [4, 63, 66, 700, 33, 0], [4, 1, 3, 2, 4, 1]
    check_against_reference(LAYOUT, lens, query_lens, num_heads, 5)


@pytest.mark.parametrize("num_splits", [1, 2, 133])
@some_plans
def test_one_long_sequence(plan, num_splits):
    check_against_reference(LAYOUT, [9001], [1], 16, num_splits, plans=[plan])


@some_plans
def test_a_split_alone_does_not_depend_on_the_batch(plan):
    lens = [300, 4000, 65]
    table = make_block_table(lens, 64)
    cache = latent_cache(LAYOUT, num_blocks_for(lens, 64), 64)
    fill_latent_cache(cache, table, lens, LAYOUT)
    query = gaussian(3, 16, LAYOUT.head_size, dtype=BF16, seed=7)
    parts = query[..., : LAYOUT.rank], query[..., LAYOUT.rank :]
    together, _ = attend(*parts, cache, LAYOUT, table, lens, [1, 1, 1], 1, [plan])
    for row, length in enumerate(lens):
        own = slice(row, row + 1)
        alone, _ = attend(
            *(part[own] for part in parts),
            cache,
            LAYOUT,
            table[own],
            [length],
            [1],
            1,
            [plan],
        )
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=0)


@some_plans
def test_pages_past_4_gib(plan):
    near = latent_cache(LAYOUT, 3, 64)
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=DEVICE)
    fill_latent_cache(near, table, [180], LAYOUT)
    far, blocks = spread_pages(near[:, None].contiguous())
    query = gaussian(1, 16, LAYOUT.head_size, dtype=BF16, seed=7)
    parts = query[..., : LAYOUT.rank], query[..., LAYOUT.rank :]
    expected, _ = attend(*parts, near, LAYOUT, table, [180], [1], 2, [plan])
    far_table = blocks[None].to(torch.int32)
    output, _ = attend(*parts, far[:, 0], LAYOUT, far_table, [180], [1], 2, [plan])
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
