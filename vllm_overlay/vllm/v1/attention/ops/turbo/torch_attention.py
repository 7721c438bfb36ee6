# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Turbo attention in plain PyTorch: CPU tensors, and GPUs without a kernel."""

import torch

from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import TurboFormat


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: list[int],
    seq_lens: list[int],
    scale: float,
    layout: TurboFormat,
    output: torch.Tensor,
) -> None:
    """Causal attention of a batch, one sequence after the other, in fp32.

    Args:
        query: (T, Hq, D), the sequences' queries one after the other.
        key: (T, H, D) keys of the query tokens; None to take them, like all
            tokens before them, from the cache.
        value: (T, H, D), likewise.
        kv_cache: (num_blocks, H, N, C) uint8, holding the query tokens too.
        block_table: (R, max_blocks).
        query_start_loc: R + 1 offsets into ``query``.
        seq_lens: R lengths, the query tokens included.
        scale: Softmax scale.
        layout: The cache's format.
        output: (T, Hq, D), written.

    """
    block_size = kv_cache.shape[2]
    bounds = zip(query_start_loc, query_start_loc[1:], seq_lens)
    for row, (begin, end, seq_len) in enumerate(bounds):
        if begin == end:
            continue
        positions = torch.arange(seq_len, device=query.device)
        blocks = block_table[row, positions // block_size].long()
        slots = blocks * block_size + positions % block_size
        if key is not None and value is not None:
            slots = slots[: seq_len - (end - begin)]
        keys, values = reference.load(kv_cache, slots, layout)
        keys = reference.inverse_rotate(keys) * layout.key_codebook.gain
        values = reference.inverse_rotate(values)
        if key is not None and value is not None:
            keys = torch.cat([keys, key[begin:end].float()])
            values = torch.cat([values, value[begin:end].float()])
        result, _ = reference.attention(query[begin:end].float(), keys, values, scale)
        output[begin:end] = result.to(output.dtype)
