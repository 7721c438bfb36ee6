# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decode attention of MLA over packed pages: split-KV attention, then merge.

K and V are one latent, decoded once to fp16 for both products. Rows are the query heads
of a sequence's query tokens, and a program has a block of rows. Softmax is in base 2.
"""

from functools import cache
from typing import NamedTuple

from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.turbo.formats.pages import check_pages
from vllm.v1.attention.ops.turbo.interface import LOG2_E, Partials
from vllm.v1.attention.ops.turbo.latent.interface import (
    LATENT_MAX_SPLITS,
    LatentCall,
)
from vllm.v1.attention.ops.turbo.triton.latent_codec import latent_layout
from vllm.v1.attention.ops.turbo.triton.latent_decode_kernel import (
    LatentStrides,
    decode_latent_kernel,
)
from vllm.v1.attention.ops.turbo.triton.pages import block_divisor


class LatentTuning(NamedTuple):
    """Launch parameters of the decode kernel.

    Attributes:
        block_h: Rows of a program.
        block_n: Tokens of a step of a program.
        num_warps: Warps of a program.
        num_stages: Depth of the software pipeline.

    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


# Fits in 100 KiB of shared memory.
SMALL_TILE = LatentTuning(16, 32, 4, 2)
# The rows of a warpgroup's tensor core instructions, which only Hopper has: tokens are
# decoded once for four times as many rows. It takes 147 KiB of shared memory. Triton
# 3.6 does not compile it for codes of three bits.
LARGE_TILE = LatentTuning(64, 64, 8, 1)
# Warps that a multiprocessor runs at once with either tile, limited by registers.
_WARPS_PER_SM = 8


@cache
def _is_hopper() -> bool:
    return current_platform.is_cuda() and current_platform.is_device_capability(90)


def default_tuning(num_rows: int, bits: int = 4) -> LatentTuning:
    """The launch parameters for a number of rows.

    Args:
        num_rows: The most query heads times query tokens of a sequence.
        bits: Bits of a code.

    """
    # Tuning: us of small / large tiles, 32 x 32768, an H200, 2026-11, rows of
    # benchmarks/results/h200/mla_triton.jsonl.
    # 16 rows: 562 / 858.
    # 20 rows: 1108 / 860, and 1317 by tiles of 32 rows without warpgroups.
    # 64 rows: 862 by large tiles.
    if num_rows > SMALL_TILE.block_h and bits == 4 and _is_hopper():
        return LARGE_TILE
    return SMALL_TILE


@triton.jit(
    do_not_specialize=["num_splits", "max_query_len"],
    do_not_specialize_on_alignment=["query_start_loc_ptr"],
)
def _merge_latent_kernel(
    partial_ptr,  # [B, S, Q, Hq, L] fp32
    partial_lse_ptr,  # [B, S, Q, Hq] fp32, base 2
    output_ptr,  # [T, Hq, L]
    lse_ptr,  # [T, Hq] fp32
    query_start_loc_ptr,  # [B + 1]
    mean_ptr,  # [L] fp32, added to outputs, or None
    num_splits,
    max_query_len,
    stride_output_token,
    stride_output_head,
    stride_lse_token,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    UNIFORM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """Program (r, b): row r of the (token, head) pairs of sequence b."""
    row = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    place = row // NUM_HEADS
    if UNIFORM:
        token = batch * max_query_len + place
    else:
        first_token = tl.load(query_start_loc_ptr + batch)
        token = first_token.to(tl.int64) + place
        if token >= tl.load(query_start_loc_ptr + batch + 1):
            return
    split_rows = max_query_len * NUM_HEADS
    first_partial = batch * num_splits * split_rows + row
    s = tl.arange(0, MAX_SPLITS)
    p_lse = partial_lse_ptr + first_partial + s * split_rows
    lse = tl.load(p_lse, mask=s < num_splits, other=float("-inf"))
    largest = tl.max(lse, 0)
    # A row without tokens has an LSE of -inf, and its output is zero.
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(lse - largest), 0)
    # Not "> 0", so that NaN is kept.
    reciprocal = tl.where(total != 0, 1 / total, 0.0)
    c = tl.arange(0, RANK)
    combined = tl.zeros([RANK], tl.float32)
    if mean_ptr is not None:
        combined = tl.where(total != 0, tl.load(mean_ptr + c), 0.0)
    for first_split in range(0, num_splits, BLOCK_S):
        split = first_split + tl.arange(0, BLOCK_S)
        partial_row = first_partial + split * split_rows
        mask = split < num_splits
        some_lse = tl.load(
            partial_lse_ptr + partial_row, mask=mask, other=float("-inf")
        )
        weight = tl.exp2(some_lse - largest) * reciprocal
        # Splits without tokens were not written. NaN is kept.
        written = (weight != 0)[:, None] & (c >= 0)[None, :]
        p_partial = partial_ptr + (partial_row * RANK)[:, None] + c[None, :]
        partial = tl.load(p_partial, mask=written, other=0.0)
        combined += tl.sum(partial * weight[:, None], 0)
    head = row % NUM_HEADS
    p_output = output_ptr + token * stride_output_token + head * stride_output_head
    tl.store(p_output + c, combined.to(output_ptr.dtype.element_ty))
    natural = (largest + tl.log2(total)) * (1 / LOG2_E)
    tl.store(lse_ptr + token * stride_lse_token + head, natural)


def num_decode_splits(
    num_seqs: int, num_heads: int, num_sms: int, query_len: int = 1
) -> int:
    """A ``SplitsFn``: as many splits as run at once."""
    num_rows = query_len * num_heads
    tuning = default_tuning(num_rows)
    programs = max(1, num_seqs * triton.cdiv(num_rows, tuning.block_h))
    at_once = num_sms * _WARPS_PER_SM // tuning.num_warps
    return max(1, min(LATENT_MAX_SPLITS, at_once // programs))


def decode_attention(
    call: LatentCall, partials: Partials, tuning: LatentTuning | None = None
) -> None:
    """A ``LatentAttentionFn``; ``tuning`` is for benchmarks."""
    kv_cache, layout, batch = call.kv_cache, call.layout, call.batch
    query, output, lse = call.query, call.output, call.lse
    num_heads = query.shape[1]
    check_pages(kv_cache, layout)
    num_splits = call.check(partials)
    if batch.num_seqs == 0:
        return
    num_rows = num_heads * batch.query_len
    if tuning is None:
        tuning = default_tuning(num_rows, layout.bits)
    query_rope = call.query_rope if layout.rope else None
    start_loc = batch.query_start_loc
    grid = (triton.cdiv(num_rows, tuning.block_h), batch.num_seqs, num_splits)
    decode_latent_kernel[grid](
        query,
        query_rope,
        kv_cache,
        batch.block_table,
        batch.seq_lens,
        batch.seq_lens if start_loc is None else start_loc,
        partials,
        call.scale * LOG2_E,
        num_splits,
        batch.query_len,
        LatentStrides(
            *query.stride()[:2],
            *((0, 0) if query_rope is None else query_rope.stride()[:2]),
        ),
        kv_cache.stride(0),
        batch.block_table.stride(0),
        **block_divisor(kv_cache.shape[1]),
        NUM_HEADS=num_heads,
        LAYOUT=latent_layout(layout),
        BLOCK_H=tuning.block_h,
        BLOCK_N=tuning.block_n,
        NUM_STAGES=tuning.num_stages,
        MULTIPLE=batch.query_len > 1,
        UNIFORM=start_loc is None,
        SPARSE=call.is_sparse,
        num_warps=tuning.num_warps,
    )
    _merge_latent_kernel[(num_rows, batch.num_seqs)](
        partials.output,
        partials.lse,
        output,
        lse,
        batch.seq_lens if start_loc is None else start_loc,
        call.rotated_mean,
        num_splits,
        batch.query_len,
        output.stride(0),
        output.stride(1),
        lse.stride(0),
        NUM_HEADS=num_heads,
        RANK=layout.rank,
        UNIFORM=start_loc is None,
        MAX_SPLITS=LATENT_MAX_SPLITS,
        BLOCK_S=4,
        LOG2_E=LOG2_E,
        num_warps=4,
    )
