# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Launches of the CUDA kernels: order, devices and failures."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.cuda import build as cuda_build
from vllm.v1.attention.ops.turbo.cuda import merge as cuda_merge
from vllm.v1.attention.ops.turbo.cuda import store as cuda_store
from vllm.v1.attention.ops.turbo.cuda.build import LaunchRefused
from vllm.v1.attention.ops.turbo.cuda.family import load_instance
from vllm.v1.attention.ops.turbo.interface import DecodeBatch, Partials, StoreCall

from ..attention_kernels import KERNELS, kernels, without
from ..attention_utils import attend_by, merge_call
from ..cuda_steps import (
    BLOCK_SIZE,
    NUM_KV_HEADS,
    Scratch,
    Step,
    new_cache,
    normal,
    random_sequences,
    step_of,
)
from ..kernel_under_test import Kernel
from ..sequences import LAYOUT
from ..utils import BF16, DEVICE, ON_NVIDIA, requires_nvidia, slots_of

pytestmark = requires_nvidia

attention = kernels(without("partials"))
# Longer than any launch by the host takes.
DELAY_NS = 30_000_000


@triton.jit
def _copy_late(source_ptr, target_ptr, size, DELAY: tl.constexpr, BLOCK: tl.constexpr):
    """Copy numbers after a delay, in which the next kernel may begin."""
    tl.extra.cuda.gdc_launch_dependents()
    start = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - start < DELAY:
        pass
    for first in range(0, size, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        mask = offsets < size
        numbers = tl.load(source_ptr + offsets, mask=mask)
        tl.store(target_ptr + offsets, numbers, mask=mask)


def copy_late(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy with one block, so that the GPU has room for the next kernel."""
    assert source.is_contiguous() and target.is_contiguous()
    _copy_late[(1,)](source, target, source.numel(), DELAY_NS, 1024)


requires_overlap = pytest.mark.skipif(
    not (ON_NVIDIA and current_platform.has_device_capability(90)),
    reason="needs a GPU on which kernels overlap",
)


def attend(
    kernel: Kernel, step: Step, cache: torch.Tensor, scratch: Scratch
) -> torch.Tensor:
    """Attend to stored tokens, from rotated queries in the scratch."""
    attend_by(
        kernel.attend,
        scratch.rotated,
        cache,
        LAYOUT,
        step.batch,
        scratch.partials,
        scratch.output,
    )
    return scratch.output


@requires_overlap
@attention
@pytest.mark.parametrize("late", ["rotated_query", "query_scale", "cache"])
def test_attention_waits_for_the_kernel_before_it(kernel, late):
    """Attention may begin early, but must wait to read queries and pages."""
    cache, step = random_sequences(LAYOUT, [4000, 17, 0, 300])
    scratch = Scratch.of(step.query, 6)
    step.run(cache, LAYOUT, scratch)
    expected = attend(kernel, step, cache, scratch).clone()
    target = cache if late == "cache" else getattr(scratch, late)
    written = target.clone()
    for _ in range(3):
        target.copy_(written.flip(0))
        scratch.output.fill_(math.nan)
        torch.accelerator.synchronize()
        # The attention must be the next kernel after the copy.
        copy_late(written, target)
        assert torch.equal(attend(kernel, step, cache, scratch), expected)


@requires_overlap
@pytest.mark.parametrize("late", ["partial", "partial_lse"])
def test_the_merge_waits_for_the_kernel_before_it(late):
    """The merge must wait to read partial results."""
    partial = normal(384, 8, 128, seed=1).float()
    partial_lse = normal(384, 8, seed=2).float()
    target = partial if late == "partial" else partial_lse
    seq_lens = torch.full((64,), 1000, dtype=torch.int32, device=DEVICE)
    output = torch.empty(64, 8, 128, dtype=BF16, device=DEVICE)
    partials = Partials(partial, partial_lse)
    table = torch.empty(64, 0, dtype=torch.int32, device=DEVICE)
    batch = DecodeBatch(64, table, seq_lens)
    call = merge_call(batch, output, NUM_KV_HEADS)
    cuda_merge.merge_splits(partials, call)
    expected = output.clone()
    written = target.clone()
    for _ in range(3):
        target.copy_(written.flip(0))
        output.fill_(math.nan)
        torch.accelerator.synchronize()
        copy_late(written, target)
        cuda_merge.merge_splits(partials, call)
        assert torch.equal(output, expected)


@requires_overlap
@pytest.mark.parametrize("num_seqs", [2, 600], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("late", ["query", "key", "value", "slots"])
def test_the_store_waits_for_the_kernel_before_it(late, num_seqs):
    """The store must wait to read queries, keys, values and slots."""
    blocks = torch.arange(num_seqs, dtype=torch.int32, device=DEVICE)
    step = step_of(LAYOUT, blocks[:, None], [1] * num_seqs)
    step.slots.copy_(torch.arange(num_seqs, device=DEVICE) * BLOCK_SIZE)
    cache = torch.zeros_like(new_cache(LAYOUT, num_seqs))
    scratch = Scratch.of(step.query, 2)

    def stored() -> list[torch.Tensor]:
        step.store(cache, LAYOUT, scratch)
        return [x.clone() for x in (cache, *scratch.rotated)]

    expected = stored()
    target = getattr(step, late)
    written = target.clone()
    for _ in range(3):
        target.copy_(written.flip(0))
        for x in (cache, *scratch.rotated):
            x.zero_()
        torch.accelerator.synchronize()
        copy_late(written, target)
        assert all(map(torch.equal, stored(), expected))


@requires_overlap
@pytest.mark.parametrize("window", [None, 128], ids=["full", "sliding"])
def test_layers_of_a_graph_share_scratch(window):
    """All layers share the scratch. Before a layer's store there is, in turn, a kernel
    that makes its query, the previous layer's merge, a memset, or kernels of two
    streams.
    """
    seq_lens, num_layers = [4000, 17, 1, 300, 129], 8
    caches = []
    for _ in range(num_layers):
        cache, step = random_sequences(LAYOUT, seq_lens)
        caches.append(cache)
    ends = [
        slots_of(step.block_table[i], n - 1, n, BLOCK_SIZE).to(DEVICE)
        for i, n in enumerate(seq_lens)
    ]
    step.slots.copy_(torch.cat(ends))
    given = normal(num_layers + 1, *step.query.shape, seed=1)
    queries, outputs = given.clone(), torch.full_like(given, math.nan)
    scratch = Scratch.of(step.query, 6)
    side = torch.cuda.Stream()

    def go_on(i: int) -> None:
        if i % 4 == 0:
            torch.add(given[i + 1], outputs[i], out=queries[i + 1])
        elif i % 4 == 2:
            outputs[i + 1].zero_()
        elif i % 4 == 3:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step.key.neg_()
            step.value.neg_()
            torch.cuda.current_stream().wait_stream(side)

    def run(enable_pdl: bool) -> None:
        for i, cache in enumerate(caches):
            own = step._replace(query=queries[i])
            there = scratch._replace(output=outputs[i])
            own.run(cache, LAYOUT, there, True, window, enable_pdl)
            go_on(i)

    found = []
    for enable_pdl in (False, True):
        run(enable_pdl)
        torch.accelerator.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(enable_pdl)
        for _ in range(20):
            outputs.fill_(math.nan)
            graph.replay()
            found.append([x.clone() for x in (outputs[:-1], *caches)])
    assert not found[0][0].isnan().any()
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))


@pytest.mark.skipif(
    not ON_NVIDIA or torch.accelerator.device_count() < 2, reason="needs two GPUs"
)
@attention
def test_kernels_run_where_their_tensors_are(kernel):
    """The current device may be another one, and does not change."""
    assert torch.accelerator.current_device_index() == 0
    cache, step = random_sequences(LAYOUT, [700, 17, 0])
    outputs = []
    for index in (1, 0):
        device = torch.device("cuda", index)
        there = type(step)(*(x.to(device) for x in step))
        pages = cache.to(device)
        scratch = Scratch(*(x.to(device) for x in Scratch.of(step.query, 6)))
        cuda_store.store(
            StoreCall(
                pages,
                there.slots,
                there.key,
                there.value,
                LAYOUT,
                there.query,
                scratch.rotated,
                128**-0.5,
            )
        )
        attend(kernel, there, pages, scratch)
        assert torch.accelerator.current_device_index() == 0
        outputs.append(scratch.output.cpu())
    # GPUs of different sizes cut the work in different ways.
    largest = outputs[1].abs().max()
    assert largest > 0 and (outputs[0] - outputs[1]).abs().max() <= 2**-6 * largest


@pytest.fixture
def other_architecture(monkeypatch: pytest.MonkeyPatch):
    """Have kernels built for an architecture that this GPU cannot run."""
    number = "80" if current_platform.has_device_capability(90) else "90"
    load_instance.cache_clear()
    monkeypatch.setattr(cuda_build, "_architecture", lambda device: number)
    yield
    load_instance.cache_clear()


@pytest.mark.parametrize("kernel", ["store", "decode", "extend_mma", "merge"])
def test_a_kernel_without_an_image_is_refused(other_architecture, monkeypatch, kernel):
    """A refused launch is an error, after which the GPU goes on to work."""
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    step = step_of(LAYOUT, table, [0])
    scratch = Scratch.of(step.query, 6)
    cache = torch.zeros_like(new_cache(LAYOUT, 1))
    with pytest.raises(LaunchRefused, match="^cudaError"):
        if kernel == "store":
            cuda_store.store(StoreCall(cache, step.slots, step.key, step.value, LAYOUT))
        elif kernel == "merge":
            call = merge_call(step.batch, scratch.output, NUM_KV_HEADS)
            cuda_merge.merge_splits(scratch.partials, call)
        else:
            attend(KERNELS[kernel], step, cache, scratch)
    assert torch.ones(3, device=DEVICE).sum() == 3
    torch.accelerator.synchronize()
    assert not cache.any()


# The program runs in a process of its own, because a fault ends all work on the GPU.
FAULT = """
import sys
import torch
from PACKAGE.cuda_steps import Scratch, random_sequences
from vllm.v1.attention.ops.turbo.cuda.build import LaunchRefused
from vllm.v1.attention.ops.turbo.format import TurboFormat

layout = TurboFormat.from_cache_dtype("turbo4", 128)
cache, step = random_sequences(layout, [4000])
step.run(cache, layout, Scratch.of(step.query, 6))
torch.accelerator.synchronize()
step.block_table.fill_(2**30)
step.run(cache, layout, Scratch.of(step.query, 6))
try:
    torch.accelerator.synchronize()
except RuntimeError:
    pass
else:
    sys.exit("nothing has failed")
try:
    step.run(cache, layout, Scratch.of(step.query, 6))
except LaunchRefused as error:
    sys.exit(f"taken for a refusal: {error}")
except RuntimeError:
    print("a fault")
"""


def test_a_fault_in_flight_is_no_refusal():
    program = FAULT.replace("PACKAGE", Scratch.__module__.rpartition(".")[0])
    root = str(Path(__file__).resolve().parents[__name__.count(".")])
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])},
    )
    assert result.returncode == 0 and result.stdout == "a fault\n", result.stderr
