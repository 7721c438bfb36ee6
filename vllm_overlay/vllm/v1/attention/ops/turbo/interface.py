# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the sets of kernels, CUDA's and Triton's, have in common."""

import struct
from typing import NamedTuple

import torch

from vllm.v1.attention.ops.turbo.format import TILE_TOKENS, TurboFormat

# Scores are in base 2.
LOG2_E = 1.4426950408889634
# Splits a sequence is cut into at most; sizes the partial results.
MAX_KV_SPLITS = 64


class NewestToken(NamedTuple):
    """The sequences' newest tokens, attended to as they are: not quantised.

    A sequence's lie one after the other; each sees itself and those before it.

    Attributes:
        query: (T, Hq, D), not rotated.
        key: (T, H, D).
        value: (T, H, D). All three have a contiguous last axis.
        scale: Softmax scale.

    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float


def count_sequences(
    num_tokens: int, query_len: int, query_start_loc: torch.Tensor | None
) -> int:
    """Sequences of a batch of query tokens: see ``decode_attention``."""
    if query_start_loc is None:
        assert num_tokens % query_len == 0, (num_tokens, query_len)
        return num_tokens // query_len
    assert query_start_loc.dtype == torch.int32 and query_start_loc.stride(0) == 1
    return query_start_loc.shape[0] - 1


def half2_bits(value: float) -> str:
    """A number twice in fp16, as C++ and PTX write its 32 bits."""
    bits = struct.unpack("<H", struct.pack("<e", value))[0]
    return f"0x{bits:04X}{bits:04X}"


def check_pages(kv_cache: torch.Tensor, layout: TurboFormat) -> None:
    """Check what kernels take for granted of a layer's cache.

    Args:
        kv_cache: (num_blocks, H, N, C) uint8.
        layout: The cache's format.

    Raises:
        ValueError: If a (block, head) is not contiguous, or does not start at a
            multiple of 16 bytes, or is no whole number of tiles.

    """
    block_size, slot_size = kv_cache.shape[2:]
    alignments = (block_size, *kv_cache.stride()[:2], kv_cache.data_ptr())
    if (
        slot_size != layout.slot_size
        or kv_cache.stride()[2:] != (slot_size, 1)
        or any(x % TILE_TOKENS for x in alignments)
    ):
        raise ValueError(
            f"pages of {layout.name} have slots of {layout.slot_size} bytes, "
            f"contiguous, {TILE_TOKENS} or a multiple in a block; blocks and heads "
            f"begin at multiples of {TILE_TOKENS} bytes. These have shape "
            f"{tuple(kv_cache.shape)}, strides "
            f"{kv_cache.stride()} and address {kv_cache.data_ptr():#x}"
        )
