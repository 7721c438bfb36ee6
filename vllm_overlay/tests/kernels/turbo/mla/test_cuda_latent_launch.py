# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Launches of CUDA's store and gather of MLA: tuning, graphs, refusals and registers.
test_latent_store.py and test_latent_gather.py have their results.
"""

from collections.abc import Callable

import pytest
import torch

from vllm.v1.attention.ops.turbo.cuda import latent_gather, latent_store
from vllm.v1.attention.ops.turbo.latent.format import LATENT_SIZES
from vllm.v1.attention.ops.turbo.latent.interface import GatherCall, LatentStoreCall
from vllm.v1.attention.ops.turbo.reference import latent as reference

from ..builds.compile_kernels import compile_to_ptx
from ..builds.test_cuda_architectures import (
    LET_NEXT_BEGIN,
    NVCC,
    check_overlap,
    requires_nvcc,
)
from ..utils import (
    BF16,
    DEVICE,
    by_kernel,
    random_slots,
    requires_cuda,
    requires_nvidia,
)
from .latent_sequences import SOME_PLANS, Latents
from .latent_utils import latent_cache, latent_presets, latent_vectors
from .test_latent_format import layout_of
from .test_latent_gather import arguments
from .test_latent_store import CUDA, LAYOUT, TUNED, check_latent_bytes


@requires_nvidia
@latent_presets
@pytest.mark.parametrize("head_size", [576, 320])
@pytest.mark.parametrize("num_tokens", [63, 512, 513, 1025, 5000])
def test_default_parts(name, head_size, num_tokens):
    """The number of tokens chooses the number of lanes for a scale group."""
    layout = layout_of(name, head_size)
    slots = random_slots(num_tokens, 2 * num_tokens)
    check_latent_bytes(CUDA, layout, *latent_vectors(layout, num_tokens), slots)


def test_parts_follow_the_sizes():
    for head_size in LATENT_SIZES:
        layout = layout_of("turbo4", head_size)
        few, many = latent_store.store_sizes(layout)
        assert latent_store.default_parts(few, layout) == 4
        assert latent_store.default_parts(many - 1, layout) == 4
        assert latent_store.default_parts(many, layout) == 1


@requires_nvidia
@by_kernel("kernel", [(kernel,) for kernel in TUNED])
def test_graph_replays_with_other_slots(kernel):
    layout = layout_of("turbo4", 576)
    kv_c, k_pe = latent_vectors(layout, 24)
    cache, expected = (latent_cache(layout, 5, 16) for _ in range(2))
    slots = torch.full((24,), -1, device=DEVICE)
    kernel.launch(LatentStoreCall(cache, slots, kv_c, k_pe, layout))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(LatentStoreCall(cache, slots, kv_c, k_pe, layout))
    slots.copy_(random_slots(24, 80))
    graph.replay()
    reference.store(LatentStoreCall(expected, slots, kv_c, k_pe, layout))
    assert torch.equal(cache, expected)


@requires_cuda
def test_inputs_that_the_kernel_does_not_take():
    cache = latent_cache(LAYOUT, 2, 16)
    kv_c, k_pe = latent_vectors(LAYOUT, 4)
    assert k_pe is not None
    slots = torch.arange(4, device=DEVICE)

    def refused(message: str, *call: torch.Tensor | None, error=ValueError) -> None:
        store: Callable[..., None] = latent_store.store
        with pytest.raises(error, match=message):
            store(LatentStoreCall(*call, LAYOUT))

    odd = torch.empty(4, 260, dtype=BF16, device=DEVICE)
    refused("kv_c: the stride of axis 0, 260", cache, slots, odd[:, :256], k_pe)
    refused("kv_c: 255 along axis 1", cache, slots, kv_c[:, :255], k_pe)
    refused("kv_c: of 3 tokens, not 4", cache, slots, kv_c[:3], k_pe)
    refused("k_pe: 60 along axis 1", cache, slots, kv_c, k_pe[:, :60])
    refused("k_pe: the module is of 64", cache, slots, kv_c, None)
    refused("k_pe: dtype float16", cache, slots, kv_c, k_pe.half(), error=TypeError)
    refused("kv_c: dtype float32", cache, slots, kv_c.float(), k_pe, error=TypeError)
    refused(
        "slot_mapping: dtype int32", cache, slots.int(), kv_c, k_pe, error=TypeError
    )
    assert (cache == 0xFF).all()


@requires_cuda
def test_outputs_that_the_kernel_does_not_take():
    cache = latent_cache(LAYOUT, 1, 16)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    rows = torch.empty(3, 322, dtype=BF16, device=DEVICE)
    for output, num_tokens, message in (
        (rows[:, :320], 3, "the stride of axis 0, 322"),
        (rows[:, :319], 3, "319 along axis 1, not 320"),
        (rows[:, :320].contiguous(), 4, "3 rows, not 4"),
    ):
        call = GatherCall(cache, output, table, LAYOUT, *arguments([num_tokens], None))
        with pytest.raises(ValueError, match=f"output: {message}"):
            latent_gather.gather(call)


@requires_cuda
def test_means_that_the_kernels_do_not_take():
    cache = latent_cache(LAYOUT, 1, 16)
    kv_c, k_pe = latent_vectors(LAYOUT, 3)
    slots = torch.arange(3, device=DEVICE)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    rows = torch.empty(3, 320, dtype=BF16, device=DEVICE)
    numbers = torch.zeros(512, device=DEVICE)
    for mean, error, message in (
        (numbers[:255], ValueError, "255 along axis 0, not 256"),
        (numbers[1:257], ValueError, "its address"),
        (numbers[::2], ValueError, "the last axis is not contiguous"),
        (numbers[:256].bfloat16(), TypeError, "dtype bfloat16"),
    ):
        with pytest.raises(error, match=f"mean: {message}"):
            latent_store.store(LatentStoreCall(cache, slots, kv_c, k_pe, LAYOUT, mean))
        call = GatherCall(cache, rows, table, LAYOUT, *arguments([3], None), mean)
        with pytest.raises(error, match=f"mean: {message}"):
            latent_gather.gather(call)
        batch = Latents(LAYOUT, [3])
        batch.rotated_mean = mean
        with pytest.raises(error, match=f"rotated_mean: {message}"):
            batch.attend(SOME_PLANS[0])


@requires_nvcc
@pytest.mark.parametrize("name, capability", [("turbo3", 80), ("turbo4", 90)])
def test_store_compiles_without_spills(name, capability):
    module = latent_store.LATENT_STORE.module(layout_of(name, 576), None)
    found, ptx = compile_to_ptx(module, capability, NVCC)
    # A multiprocessor has room for five blocks of 128 threads.
    assert found.spills == 0 and found.registers <= 96
    check_overlap(module.kernel, capability, ptx)
    assert (LET_NEXT_BEGIN in ptx) == (capability >= 90)


@requires_nvcc
def test_gather_compiles_without_spills():
    module = latent_gather.GATHER.module(layout_of("turbo3", 576), None)
    found, ptx = compile_to_ptx(module, 90, NVCC)
    assert found.spills == 0
    check_overlap(module.kernel, 90, ptx)
