# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA gather kernel of MLA dequantises as the reference does."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo.cuda import latent_gather
from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import GatherCall
from vllm.v1.attention.ops.turbo.reference import latent as reference

from .attention_utils import assert_within
from .compile_kernels import compile_to_ptx
from .latent_utils import fill_latent_cache, latent_cache, latent_presets
from .test_cuda_architectures import NVCC, check_overlap, requires_nvcc
from .test_latent_gather import OUTPUT_ROUNDING, arguments
from .utils import BF16, DEVICE, FP16, make_block_table, num_blocks_for, requires_cuda

FP32 = torch.float32
LAYOUT = LatentFormat.from_cache_dtype("turbo4", 320)


def check_gather(
    layout: LatentFormat,
    seq_lens: list[int],
    seq_starts: list[int] | None,
    lengths: list[int],
    dtype: torch.dtype,
    block_size: int = 32,
) -> None:
    """Compare to the reference; rows and columns past the output must stay."""
    cache = latent_cache(layout, num_blocks_for(seq_lens, block_size), block_size)
    table = make_block_table(seq_lens, block_size)
    fill_latent_cache(cache, table, seq_lens, layout)
    call = arguments(lengths, seq_starts)
    num_tokens, width = call[2], layout.head_size
    shape = (num_tokens + 2, width + 8)
    buffer = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
    expected = torch.full(shape, math.nan, dtype=FP32, device=DEVICE)
    latent_gather.gather(GatherCall(cache, buffer[:, :width], table, layout, *call))
    reference.gather(GatherCall(cache, expected[:, :width], table, layout, *call))
    assert buffer[num_tokens:].isnan().all() and buffer[:, width:].isnan().all()
    found, expected = buffer[:num_tokens, :width].float(), expected[:num_tokens, :width]
    # The kernel computes in fp32.
    norm = expected[:, : layout.rank].norm(dim=-1, keepdim=True)
    allowed = OUTPUT_ROUNDING[dtype] * expected.abs() + 2.0**-22 * norm
    assert_within(found, expected, allowed)


@requires_cuda
@latent_presets
@pytest.mark.parametrize(
    "head_size, dtype",
    [(576, BF16), (512, FP32), (320, FP16), (256, BF16)],
    ids=["576-bf16", "512-fp32", "320-fp16", "256-bf16"],
)
def test_gather_equals_the_reference(name, head_size, dtype):
    """Chunks of sequences that begin anywhere, one of them without tokens."""
    layout = LatentFormat.from_cache_dtype(name, head_size)
    check_gather(layout, [70, 20, 40], [32, 0, 5], [38, 0, 33], dtype)


@requires_cuda
def test_without_starts():
    check_gather(LAYOUT, [1, 49], None, [1, 49], BF16, 48)


@requires_cuda
def test_no_tokens():
    check_gather(LAYOUT, [5], [0], [0], BF16)


@requires_cuda
def test_outputs_that_the_kernel_does_not_take():
    cache = latent_cache(LAYOUT, 1, 16)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    call = arguments([3], None)
    rows = torch.empty(3, 322, dtype=BF16, device=DEVICE)
    with pytest.raises(ValueError, match="output: the stride of axis 0, 322"):
        latent_gather.gather(GatherCall(cache, rows[:, :320], table, LAYOUT, *call))
    with pytest.raises(ValueError, match="output: 319 along axis 1, not 320"):
        latent_gather.gather(GatherCall(cache, rows[:, :319], table, LAYOUT, *call))
    with pytest.raises(ValueError, match="output: 3 rows, not 4"):
        tokens = rows[:, :320].contiguous(), table, LAYOUT, *arguments([4], None)
        latent_gather.gather(GatherCall(cache, *tokens))


@requires_nvcc
def test_compiles_without_spills():
    module = latent_gather.GATHER.module(
        LatentFormat.from_cache_dtype("turbo3", 576), None
    )
    found, ptx = compile_to_ptx(module, 90, NVCC)
    assert found.spills == 0
    check_overlap(module.kernel, 90, ptx)
