# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode attention over packed pages: split-KV attention, then merge.

One program serves all query heads of a KV head, so a page is read once; more query
tokens take more programs. The attention runs in rotated space; ``triton_merge`` has
the way back. Softmax is in base 2.
"""

from typing import NamedTuple

import torch

from vllm.platforms import current_platform
from vllm.triton_utils import triton
from vllm.v1.attention.ops.turbo.format import TILE_TOKENS, TurboFormat
from vllm.v1.attention.ops.turbo.interface import (
    MAX_KV_SPLITS,
    NewestToken,
    check_pages,
    count_sequences,
)
from vllm.v1.attention.ops.turbo.triton.codec import (
    MIN_OUTPUT_COLUMNS,
    block_divisor,
    layout_constants,
)
from vllm.v1.attention.ops.turbo.triton.decode_kernel import decode_kernel
from vllm.v1.attention.ops.turbo.triton.merge import merge_splits


class DecodeTuning(NamedTuple):
    """How the decode kernel is launched.

    Attributes:
        block_n: Tokens a step of a program.
        num_warps: Warps a program. One is best: more would each dequantise
            the same values.
        num_stages: Depth of the software pipeline.
        max_registers: 32-bit registers of a thread, on NVIDIA GPUs; None for no limit.

    """

    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def default_tuning(head_size: int) -> DecodeTuning:
    """Launch parameters, chosen on an H200 at head size 128 and GQA 4.

    ``benchmark_turbo_decode.py --variants`` compares others. The time goes into issuing
    instructions: large blocks repeat the softmax and addresses least, and 168 registers
    let 12 programs share a multiprocessor. Larger heads would spill then.
    """
    if head_size <= 128:
        return DecodeTuning(64, 1, 3, max_registers=168)
    return DecodeTuning(32, 1, 2)


def block_sizes(block_size: int, head_size: int) -> list[int]:
    """Block sizes of which each takes another kernel.

    Args:
        block_size: Tokens of a block. A runner may cut it into smaller ones.
        head_size: Coordinates of a vector of query, key or value, D.

    """
    has_whole_steps = block_size % default_tuning(head_size).block_n == 0
    return [block_size, TILE_TOKENS] if has_whole_steps else [block_size]


def num_kv_splits(
    num_seqs: int, num_kv_heads: int, num_sms: int, query_len: int = 1
) -> int:
    """Splits a sequence, so that the programs fill the GPU.

    It depends on the batch alone, not on the lengths, so a CUDA graph of a
    batch size keeps its grid.

    Args:
        num_seqs: Sequences in the (padded) batch.
        num_kv_heads: KV heads.
        num_sms: Multiprocessors of the GPU.
        query_len: Query tokens a sequence.

    """
    programs_per_sm = 32
    programs = max(1, num_seqs * query_len * num_kv_heads)
    wanted = triton.cdiv(num_sms * programs_per_sm, programs)
    return max(1, min(MAX_KV_SPLITS, wanted))


def decode_attention(
    rotated_query: torch.Tensor,
    query_scale: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: TurboFormat,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    output: torch.Tensor,
    newest: NewestToken | None = None,
    query_len: int = 1,
    query_start_loc: torch.Tensor | None = None,
    tuning: DecodeTuning | None = None,
) -> None:
    """Attend from each sequence's last tokens to its cached tokens, causally.

    Args:
        rotated_query: (T, Hq, D) fp16 contiguous, from ``triton_store.store``; a
            sequence's tokens one after the other.
        query_scale: (T, Hq) fp32 contiguous, likewise.
        kv_cache: (num_blocks, H, N, C) uint8; N a multiple of 16, a
            (block, head) contiguous.
        block_table: (>= B, max_blocks) int32.
        seq_lens: (>= B,) int32, query tokens included; zero for padding, whose
            output is zero.
        layout: The cache's format.
        partial: (B * Q * S, Hq, D) fp32 scratch, contiguous; S splits a sequence.
        partial_lse: (B * Q * S, Hq) fp32 scratch, contiguous.
        output: (T, Hq, D), written; last axis contiguous.
        newest: The query tokens, to be attended to in place of what the cache holds
            of them.
        query_len: Q, query tokens a sequence, at most.
        query_start_loc: (B + 1,) int32, where sequences' tokens begin; what lies past
            the last is not written. None if each has Q, so that T = B * Q.
        tuning: Launch parameters; None for ``default_tuning``'s.

    """
    num_tokens, num_heads, head_size = rotated_query.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    check_pages(kv_cache, layout)
    assert partial.is_contiguous() and partial_lse.is_contiguous()
    assert output.stride(2) == 1 and block_table.stride(1) == 1
    num_seqs = count_sequences(num_tokens, query_len, query_start_loc)
    if num_seqs == 0:
        return
    num_splits = partial.shape[0] // (num_seqs * query_len)
    assert 1 <= num_splits <= MAX_KV_SPLITS, num_splits
    if tuning is None:
        tuning = default_tuning(head_size)
    group = num_heads // num_kv_heads
    block_h = max(MIN_OUTPUT_COLUMNS, triton.next_power_of_2(group))
    parts = triton.cdiv(group * query_len, block_h)
    options = {}
    if tuning.max_registers and current_platform.is_cuda():
        options["maxnreg"] = tuning.max_registers
    decode_kernel[(num_seqs, num_kv_heads, num_splits * parts)](
        rotated_query,
        query_scale,
        kv_cache,
        block_table,
        seq_lens,
        seq_lens if query_start_loc is None else query_start_loc,
        partial,
        partial_lse,
        num_splits,
        query_len,
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        **block_divisor(block_size),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        **layout_constants(layout),
        BLOCK_H=block_h,
        BLOCK_N=tuning.block_n,
        NUM_STAGES=tuning.num_stages,
        STEP_IN_BLOCK=block_size % tuning.block_n == 0,
        MULTIPLE=query_len > 1,
        UNIFORM=query_start_loc is None,
        WITH_NEWEST=newest is not None,
        num_warps=tuning.num_warps,
        **options,
    )
    merge_splits(
        partial,
        partial_lse,
        seq_lens,
        output,
        num_kv_heads,
        newest,
        query_len,
        query_start_loc,
    )
