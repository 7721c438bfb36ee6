# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The gather kernels of MLA dequantise as the reference does."""

import math

import torch

from vllm.v1.attention.ops.turbo.latent.format import LATENT_PRESETS, LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import GatherCall
from vllm.v1.attention.ops.turbo.reference import latent as reference
from vllm.v1.attention.ops.turbo.triton import latent_gather as triton_gather

from ..attention_utils import assert_within
from ..utils import (
    BF16,
    DEVICE,
    FP16,
    KernelUnderTest,
    by_kernel,
    cuda_module,
    make_block_table,
    num_blocks_for,
    requires_cuda,
    requires_triton,
)
from .latent_utils import fill_latent_cache, latent_cache, long_mean
from .test_latent_format import layout_of

FP32 = torch.float32
TRITON = KernelUnderTest("triton", triton_gather.gather, (requires_triton,))
CUDA = KernelUnderTest(
    "cuda", lambda call: cuda_module("latent_gather").gather(call), (requires_cuda,)
)
REFERENCE = KernelUnderTest("reference", reference.gather, ())
all_kernels = by_kernel("kernel", [(TRITON,), (CUDA,)])
LAYOUT = layout_of("turbo4", 320)
CASES = [(576, BF16), (576, FP32), (512, FP32), (320, FP16), (256, BF16)]
# Rounding of the output's dtype. A kernel's own rounding comes on top.
OUTPUT_ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 0.0}


def arguments(
    lengths: list[int], seq_starts: list[int] | None
) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
    """``cu_seq_lens``, ``token_to_seq``, ``num_tokens`` and ``seq_starts``."""
    lens = torch.tensor(lengths, device=DEVICE)
    ends = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    seqs = torch.arange(len(lengths), device=DEVICE).repeat_interleave(lens).int()
    starts = None
    if seq_starts is not None:
        starts = torch.tensor(seq_starts, dtype=torch.int32, device=DEVICE)
    return ends, seqs, sum(lengths), starts


def check_gather(
    kernel: KernelUnderTest,
    layout: LatentFormat,
    seq_lens: list[int],
    seq_starts: list[int] | None,
    lengths: list[int],
    dtype: torch.dtype,
    block_size: int = 32,
    mean: torch.Tensor | None = None,
) -> None:
    """Compare to the reference without a mean, and to the mean added to it. Rows and
    columns past the output must stay.
    """
    cache = latent_cache(layout, num_blocks_for(seq_lens, block_size), block_size)
    table = make_block_table(seq_lens, block_size)
    fill_latent_cache(cache, table, seq_lens, layout)
    call = arguments(lengths, seq_starts)
    num_tokens, width, rank = call[2], layout.head_size, layout.rank
    shape = (num_tokens + 2, width + 8)
    buffer = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
    expected = torch.full(shape, math.nan, dtype=FP32, device=DEVICE)
    kernel.launch(GatherCall(cache, buffer[:, :width], table, layout, *call, mean))
    reference.gather(GatherCall(cache, expected[:, :width], table, layout, *call))
    if mean is not None:
        expected[:, :rank] += mean
    assert buffer[num_tokens:].isnan().all() and buffer[:, width:].isnan().all()
    found, expected = buffer[:num_tokens, :width].float(), expected[:num_tokens, :width]
    norm = expected[:, :rank].norm(dim=-1, keepdim=True)
    allowed = OUTPUT_ROUNDING[dtype] * expected.abs()
    if kernel is TRITON:
        # It evaluates the levels in fp16.
        allowed[:, :rank] += 2.0**-11 * norm * rank**-0.5 * 4
    else:
        # It computes in fp32.
        allowed += 2.0**-22 * norm
    assert_within(found, expected, allowed)


@by_kernel(
    "kernel, layout, dtype",
    [
        (kernel, layout_of(name, size), dtype)
        for kernel in (TRITON, CUDA)
        for name in LATENT_PRESETS
        for size, dtype in CASES
    ],
)
def test_gather_equals_the_reference(kernel, layout, dtype):
    """Chunks of sequences that begin anywhere, one of them without tokens."""
    check_gather(kernel, layout, [70, 20, 40], [32, 0, 5], [38, 0, 33], dtype)


@by_kernel(
    "kernel, layout, dtype",
    [
        (kernel, layout_of(*layout), dtype)
        for kernel, dtypes in (
            (REFERENCE, [FP32]),
            (TRITON, [BF16]),
            (CUDA, [BF16, FP16, FP32]),
        )
        for layout in (("turbo4", 576), ("turbo3", 256))
        for dtype in dtypes
    ],
)
def test_mean_is_added(kernel, layout, dtype):
    """A mean that is much longer than the latents; rotary keys do not get it."""
    mean = long_mean(layout)
    lengths = [38, 0, 33]
    check_gather(kernel, layout, [70, 20, 40], [32, 0, 5], lengths, dtype, mean=mean)


@all_kernels
def test_without_starts(kernel):
    check_gather(kernel, LAYOUT, [1, 49], None, [1, 49], BF16, 48)


@all_kernels
def test_no_tokens(kernel):
    check_gather(kernel, LAYOUT, [5], [0], [0], BF16)
