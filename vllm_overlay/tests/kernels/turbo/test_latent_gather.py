# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The gather kernel of MLA dequantises as the reference does."""

import math

import pytest
import torch

from vllm.v1.attention.ops.turbo.latent.format import LatentFormat
from vllm.v1.attention.ops.turbo.latent.interface import GatherCall
from vllm.v1.attention.ops.turbo.reference import latent as reference

from .attention_utils import assert_within
from .latent_utils import fill_latent_cache, latent_cache, latent_presets
from .utils import BF16, DEVICE, FP16, make_block_table, num_blocks_for, requires_triton

pytestmark = requires_triton

FP32 = torch.float32
# Rounding of the output's dtype. The levels' evaluation in fp16 comes on top.
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
    layout: LatentFormat,
    seq_lens: list[int],
    seq_starts: list[int] | None,
    lengths: list[int],
    dtype: torch.dtype,
    block_size: int = 32,
) -> None:
    """Compare to the reference; rows and columns past the output must stay."""
    from vllm.v1.attention.ops.turbo.triton.latent_gather import gather

    cache = latent_cache(layout, num_blocks_for(seq_lens, block_size), block_size)
    table = make_block_table(seq_lens, block_size)
    fill_latent_cache(cache, table, seq_lens, layout)
    call = arguments(lengths, seq_starts)
    num_tokens = call[2]
    shape = (num_tokens + 2, layout.head_size + 8)
    buffer = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
    expected = torch.full(shape, math.nan, dtype=FP32, device=DEVICE)
    width = layout.head_size
    gather(GatherCall(cache, buffer[:, :width], table, layout, *call))
    reference.gather(GatherCall(cache, expected[:, :width], table, layout, *call))
    assert buffer[num_tokens:].isnan().all() and buffer[:, width:].isnan().all()
    found = buffer[:num_tokens, :width].float()
    expected = expected[:num_tokens, :width]
    norm = expected[:, : layout.rank].norm(dim=-1, keepdim=True)
    allowed = OUTPUT_ROUNDING[dtype] * expected.abs()
    allowed[:, : layout.rank] += 2.0**-11 * norm * layout.rank**-0.5 * 4
    assert_within(found, expected, allowed)


@latent_presets
@pytest.mark.parametrize(
    "head_size, dtype", [(576, BF16), (576, FP32), (320, FP16), (256, BF16)]
)
def test_gather_equals_the_reference(name, head_size, dtype):
    """Chunks of sequences that begin anywhere, one of them without tokens."""
    layout = LatentFormat.from_cache_dtype(name, head_size)
    check_gather(layout, [70, 20, 40], [32, 0, 5], [38, 0, 33], dtype)


def test_without_starts():
    layout = LatentFormat.from_cache_dtype("turbo4", 320)
    check_gather(layout, [1, 49], None, [1, 49], BF16, 48)


def test_no_tokens():
    layout = LatentFormat.from_cache_dtype("turbo4", 320)
    check_gather(layout, [5], [0], [0], BF16)
