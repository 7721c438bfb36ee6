# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merge of decode attention's splits as a CUDA kernel: see triton_merge."""

from collections.abc import Callable
from functools import cache

import torch

from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.ops.turbo.cuda.build import CudaModule, build_and_load
from vllm.v1.attention.ops.turbo.cuda.constants import head_size_header
from vllm.v1.attention.ops.turbo.interface import (
    LOG2_E,
    MAX_KV_SPLITS,
    NewestToken,
    count_sequences,
)

SUPPORTED_HEAD_SIZES = (64, 128, 256)
# kMergeWarps of merge/params.cuh.
_BLOCK_WARPS = 8
# Warps of a multiprocessor that rows are spread over.
_WARPS_PER_SM = 32


def module(head_size: int) -> CudaModule:
    """What is built."""
    assert head_size in SUPPORTED_HEAD_SIZES, head_size
    return CudaModule("merge", str(head_size), head_size_header(head_size))


@cache
def load(head_size: int, device: torch.device) -> Callable[..., None]:
    """Build, if need be, and load the kernel of a head size.

    Raises:
        RuntimeError: If it cannot be built.

    """
    return build_and_load(module(head_size), device)


def warps_a_row(num_rows: int, num_splits: int, num_sms: int) -> int:
    """Warps that share a row's splits: a power of two.

    As many as the GPU has room for, so that the splits are read at once. With one
    split there is one, so a result does not depend on the batch then.
    """
    warps = 1
    while (
        2 * warps <= min(_BLOCK_WARPS, num_splits)
        and 2 * warps * num_rows <= _WARPS_PER_SM * num_sms
    ):
        warps *= 2
    return warps


def merge_splits(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    num_kv_heads: int,
    newest: NewestToken | None = None,
    num_warps: int | None = None,
    query_len: int = 1,
    query_start_loc: torch.Tensor | None = None,
) -> None:
    """Combine splits in rotated space into outputs.

    The kernel before it on the stream may let it begin early; it waits for that to
    end before it reads ``partial`` and ``partial_lse``, but not with what it reads of
    ``newest`` and ``seq_lens``.

    Args:
        partial: (B * S * Q, Hq, D) fp32, contiguous, each a softmax of its own; S
            splits a sequence. Not read where the LSE is -inf.
        partial_lse: (B * S * Q, Hq) fp32, contiguous, in base 2.
        seq_lens: (>= B,) int32, the newest tokens included.
        output: (T, Hq, D) bf16, fp16 or fp32, written; last axis contiguous.
        num_kv_heads: KV heads.
        newest: The tokens that the splits leave out, of ``output``'s dtype; None if
            there are none.
        num_warps: Warps a row; None to choose by the batch.
        query_len: Q, query tokens a sequence, at most.
        query_start_loc: (B + 1,) int32, where sequences' tokens begin; None if each
            has Q, so that T = B * Q.

    Raises:
        RuntimeError: If the kernel cannot be built; see ``build_and_load`` for what its
            function raises.

    """
    num_tokens, num_heads, head_size = output.shape
    num_seqs = count_sequences(num_tokens, query_len, query_start_loc)
    if num_seqs == 0:
        return
    num_rows = num_seqs * query_len * num_heads
    num_splits = partial.shape[0] // (num_seqs * query_len)
    assert 1 <= num_splits <= MAX_KV_SPLITS, num_splits
    with_newest = newest is not None
    if newest is None:
        # Not read, but a launch needs arguments.
        newest = NewestToken(output, output, output, 0.0)
    query, key, value, scale = newest
    if num_warps is None:
        num_sms = num_compute_units(output.device.index)
        num_warps = warps_a_row(num_rows, num_splits, num_sms)
    assert num_warps in (1, 2, 4, _BLOCK_WARPS), num_warps
    load(head_size, output.device)(
        partial,
        partial_lse,
        seq_lens,
        output,
        query,
        key,
        value,
        num_kv_heads,
        with_newest,
        scale * LOG2_E,
        query_start_loc,
        num_seqs,
        query_len,
        num_warps.bit_length() - 1,
    )
