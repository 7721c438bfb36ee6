# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode attention over packed pages: split-KV attention, then a combination.

One program serves all query heads of a KV head, so a page is read once. Attention runs
in rotated space: q is rotated before, and the output is rotated back.
"""

import torch

from vllm.platforms import current_platform
from vllm.triton_utils import triton
from vllm.v1.attention.ops.turbo.format import KEY_GAIN, TILE_TOKENS, TurboFormat
from vllm.v1.attention.ops.turbo.rotation import inverse_sqrt, rotation_matrix
from vllm.v1.attention.ops.turbo.triton.codec import (
    MIN_OUTPUT_COLUMNS,
    check_pages,
    tile_layout,
)
from vllm.v1.attention.ops.turbo.triton.decode_kernel import (
    MAX_KV_SPLITS,
    combine_kernel,
    decode_kernel,
)

LOG2_E = 1.4426950408889634
# Programs of a launch that fill a multiprocessor.
PROGRAMS_PER_SM = 32


def default_tuning(head_size: int) -> tuple[int, int, int | None]:
    """Tokens of a step, depth of the pipeline, and the most registers of a thread.

    Issuing instructions takes most of the time. Large steps repeat the softmax and
    addresses least, and 168 registers let 12 programs share a multiprocessor. Heads
    above 128 would spill registers with these. A program has one warp: with more, each
    would dequantise the same values.
    """
    # Tuning: heads of 128, GQA 4, an H200, 2026-11.
    return (64, 3, 168) if head_size <= 128 else (32, 2, None)


def num_kv_splits(num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Splits of a sequence, so that the programs fill the GPU.

    The number depends on the batch and not on lengths, so a CUDA graph of a batch size
    keeps its grid.
    """
    programs = max(1, num_seqs * num_kv_heads)
    wanted = triton.cdiv(num_sms * PROGRAMS_PER_SM, programs)
    return max(1, min(MAX_KV_SPLITS, wanted))


def decode_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    scratch: tuple[torch.Tensor, torch.Tensor],
    num_splits: int,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend from each sequence's newest token to its cached tokens, itself among them.

    Args:
        query: (B, Hq, D), fp16 or bf16.
        kv_cache: (num_blocks, H, N, C) uint8; a (block, head) contiguous.
        block_table: (B, max_blocks) int32.
        seq_lens: (B,) int32; the output of a sequence without tokens is zero.
        scale: The softmax scale.
        scratch: fp32 of at least B * num_splits rows of (Hq, D), and of (Hq,).
        num_splits: Splits of a sequence, from ``num_kv_splits``.
        sliding_window: The most tokens that are seen; None for all.

    Returns:
        (B, Hq, D) fp32.

    """
    num_seqs, num_heads, head_size = query.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    layout = TurboFormat(head_size)
    check_pages(kv_cache, layout)
    partial, lse = scratch
    assert partial.is_contiguous() and lse.is_contiguous()
    assert min(len(partial), len(lse)) >= num_seqs * num_splits
    assert block_table.shape[0] >= num_seqs and seq_lens.shape[0] >= num_seqs
    device, fp32 = query.device, torch.float32
    factor = scale * LOG2_E * KEY_GAIN * inverse_sqrt(head_size)
    rotated = query.float() @ rotation_matrix(head_size, device, fp32)
    rotated *= factor
    block_n, num_stages, max_registers = default_tuning(head_size)
    options = {}
    if max_registers and current_platform.is_cuda():
        options["maxnreg"] = max_registers
    decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        rotated,
        kv_cache,
        block_table,
        seq_lens,
        partial,
        lse,
        num_splits,
        sliding_window or 0,
        *kv_cache.stride()[:2],
        block_table.stride(0),
        block_size // TILE_TOKENS,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        LAYOUT=tile_layout(layout),
        STEP_IN_BLOCK=block_size % block_n == 0,
        SLIDING=sliding_window is not None,
        BLOCK_H=max(
            MIN_OUTPUT_COLUMNS, triton.next_power_of_2(num_heads // num_kv_heads)
        ),
        BLOCK_N=block_n,
        NUM_STAGES=num_stages,
        num_warps=1,
        **options,
    )
    combined = torch.empty_like(rotated)
    combine_kernel[(num_seqs, num_heads)](
        partial,
        lse,
        combined,
        num_splits,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_S=8,
        num_warps=4,
    )
    output = combined @ rotation_matrix(head_size, device, fp32, inverse=True)
    return output.mul_(inverse_sqrt(head_size))
