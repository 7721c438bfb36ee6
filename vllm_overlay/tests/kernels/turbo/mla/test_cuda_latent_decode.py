# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA decode kernels of MLA: their plans and modules."""

import json
from functools import partial
from itertools import product

import pytest

from vllm.v1.attention.ops.turbo.cuda import latent_decode
from vllm.v1.attention.ops.turbo.cuda.build import compiler_flags, module_name
from vllm.v1.attention.ops.turbo.cuda.compiler import nvcc_release
from vllm.v1.attention.ops.turbo.cuda.family import ARCHITECTURES
from vllm.v1.attention.ops.turbo.cuda.latent_plans import (
    ROWS,
    SLICES,
    WARPGROUPS,
    plan_for,
    plans_of,
)
from vllm.v1.attention.ops.turbo.latent.format import LATENT_SIZES, LatentFormat

from ..builds.compile_kernels import RECORDED, compile_to_ptx, excess
from ..builds.test_cuda_architectures import NVCC, check_overlap, requires_nvcc
from .latent_sequences import PLANS

LAYOUT = LatentFormat.from_cache_dtype("turbo4", 576)


@pytest.mark.parametrize(
    "capability, num_rows, columns",
    [
        *((90, rows, 16) for rows in (1, 8, 9, 16)),
        *((90, rows, 24) for rows in (20, 24)),
        (90, 32, 32),
        *((90, rows, 64) for rows in (33, 48, 64, 80, 96, 128)),
        *((80, rows, 8) for rows in (1, 8)),
        *((120, rows, 16) for rows in (9, 16)),
        *((86, rows, 24) for rows in (20, 24, 48)),
        *((100, rows, 32) for rows in (32, 64, 80, 128)),
    ],
)
def test_rows_are_served_by_the_plan_that_is_soonest(capability, num_rows, columns):
    assert plan_for(num_rows, plans_of(capability)).columns == columns


@pytest.mark.parametrize("num_rows", [32, 48, 64, 128])
def test_other_sizes_have_no_plan_by_rows(num_rows):
    by_rows = [plan_for(num_rows, plans_of(90, size)).by_rows for size in (320, 576)]
    assert by_rows == [False, num_rows > 32]


@pytest.mark.parametrize("capability", [*ARCHITECTURES, 87, 103, 121])
def test_gpus_are_served_by_plans_that_run_on_them(capability):
    served = plans_of(capability)
    assert all(plan.runs_on(capability) for plan in served)
    assert min(plan.columns for plan in served) == (16 if capability == 90 else 8)
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
@pytest.mark.parametrize("plan", [WARPGROUPS[-1], *ROWS], ids=["columns", "rows"])
def test_compiles_to_products_that_overlap(plan):
    """Registers move from producers to consumers, and neither spill."""
    module = latent_decode.LATENT_DECODE.module(LAYOUT, plan)
    found, ptx = compile_to_ptx(module, 90, NVCC)
    assert found.registers <= 168 and found.spills == 0
    assert "wgmma.mma_async" in ptx and "setmaxnreg" in ptx
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
