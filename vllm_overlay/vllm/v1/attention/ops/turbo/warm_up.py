# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A first run of a layer's kernels, within vLLM's profile run.

A driver loads a kernel when it is first launched, and then allocates local memory for
all threads that the GPU can hold: 130 MiB on an H200 for 500 bytes a thread. What was
there before the cache is in the account; what comes later may be missing.
"""

from typing import TYPE_CHECKING

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo.metadata import ExtendBatch, TurboMetadata
from vllm.v1.attention.ops.turbo.prefill_plan import build_prefill_metadata

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.dispatch import KernelDispatch

# Cached tokens of the requests that have any.
_CONTEXT = 16
# Query tokens of a request that is no decode.
_QUERY_LEN = 2
# Of layers whose kernels have run in this process.
_warm: set[tuple[object, ...]] = set()


def small_batch(
    dispatch: "KernelDispatch", block_size: int, query_len: int, device: torch.device
) -> TurboMetadata:
    """One request of each kind: a decode, an extend if there are any, a prefill behind
    cached tokens and one of a prompt.

    Args:
        dispatch: Of the layer.
        block_size: Tokens of a block.
        query_len: Query tokens of the decode.
        device: Of the kernels.

    """
    extends = []
    query_lens, contexts = [query_len], [_CONTEXT]
    if dispatch.kernels.extend_attention is not None:
        extends.append(ExtendBatch(1, 1, query_len, _QUERY_LEN, _QUERY_LEN, None))
        query_lens.append(_QUERY_LEN)
        contexts.append(_CONTEXT)
    first_prefill = len(query_lens)
    query_lens += [_QUERY_LEN] * 2
    contexts += [_CONTEXT, 0]
    seq_lens = [q + context for q, context in zip(query_lens, contexts)]
    width = cdiv(max(seq_lens), block_size)
    table = torch.arange(len(seq_lens) * width, dtype=torch.int32, device=device)
    # A request's blocks, and so its slots, are one after the other.
    slots = [
        row * width * block_size + position
        for row, (context, seq_len) in enumerate(zip(contexts, seq_lens))
        for position in range(context, seq_len)
    ]
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    starts = torch.tensor([0, *query_lens[first_prefill:]]).cumsum(0).int()
    table = table.view(-1, width)
    prefill = build_prefill_metadata(
        starts,
        lengths[first_prefill:],
        table[first_prefill:],
        dispatch.stored,
        dispatch.prefill_limits,
        device,
    )
    return TurboMetadata(
        num_actual_tokens=len(slots),
        slot_mapping=torch.tensor(slots, device=device),
        seq_lens=lengths.to(device),
        block_table=table,
        num_decodes=1,
        num_decode_tokens=query_len,
        decode_query_len=query_len,
        decode_start_loc=None,
        extends=extends,
        prefill=prefill,
    )


def warm_up(dispatch: "KernelDispatch", device: torch.device) -> None:
    """Run a layer's kernels, unless those of a layer like it have run.

    The workspace has to have been taken.
    """
    kernels = dispatch.kernels.name, dispatch.stored, dispatch.max_decode_query_len
    key = (dispatch.workspace, dispatch.layout, *kernels, device)
    if key in _warm:
        return
    block_size = dispatch.cache_config.block_size or 1
    block_size = cdiv(block_size, fmt.TILE_TOKENS) * fmt.TILE_TOKENS
    for query_len in sorted({1, dispatch.max_decode_query_len}):
        metadata = small_batch(dispatch, block_size, query_len, device)
        shape = (metadata.block_table.numel(), dispatch.num_kv_heads, block_size)
        slot_size = dispatch.layout.slot_size
        cache = torch.zeros(*shape, slot_size, dtype=torch.uint8, device=device)
        heads = dispatch.num_heads + 2 * dispatch.num_kv_heads
        shape = (metadata.num_actual_tokens, heads, dispatch.head_size)
        qkv = torch.zeros(shape, dtype=dispatch.dtype, device=device)
        query, new_key, value = qkv.split(
            [dispatch.num_heads, dispatch.num_kv_heads, dispatch.num_kv_heads], 1
        )
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        dispatch._forward_kernels(query, new_key, value, cache, metadata, output)
    _warm.add(key)
