# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The first run of an MLA layer's kernels, in vLLM's profile run: see ``warm_up``."""

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.turbo.format import TILE_TOKENS
from vllm.v1.attention.ops.turbo.latent.interface import GatherCall
from vllm.v1.attention.ops.turbo.latent.runner import LatentRunner, plan_spans

# Cached tokens before the query tokens.
_CONTEXT = 16


def batches(runner: LatentRunner) -> list[list[int]]:
    """Batches, as query tokens of requests, that launch every kernel of attention.

    Requests have one query token each, equally many, or unequally many.
    """
    most = min(runner.max_query_len, runner.max_num_tokens - 1)
    found = [[1, 1]]
    for length in sorted({min(n, most) for n in (2, runner.decode_len, most)}):
        if length > 1:
            found += [[length], [length, 1]]
    return found


def _run_attention(
    runner: LatentRunner, kv_cache: torch.Tensor, query_lens: list[int]
) -> None:
    """Store, attend and gather for requests with these numbers of query tokens."""
    device, shape, layout = kv_cache.device, runner.shape, runner.layout
    num_tokens, num_seqs = sum(query_lens), len(query_lens)
    seq_lens = torch.tensor(query_lens, dtype=torch.int32) + _CONTEXT
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    width = cdiv(int(seq_lens.max()), kv_cache.shape[1])
    # All requests may share the pages, which are zero.
    table = torch.arange(width, dtype=torch.int32).expand(num_seqs, -1).contiguous()
    table, seq_lens, starts = (x.to(device) for x in (table, seq_lens, starts))
    size = layout.rank + layout.rope
    vectors = (num_tokens, 1 + shape.num_heads, size)
    zeros = torch.zeros(vectors, dtype=shape.dtype, device=device)
    latents, ropes = zeros.split([layout.rank, layout.rope], -1)
    slots = torch.arange(num_tokens, device=device)
    runner.store(kv_cache, slots, latents[:, 0], ropes[:, 0])
    query = latents[:, 1:].contiguous()
    lse = torch.empty(num_tokens, shape.num_heads, device=device)
    cached = query, ropes[:, 1:], kv_cache
    if runner.is_sparse:
        lists = slots.int().expand(num_tokens, -1).contiguous()
        counts = torch.full_like(lists[0], num_tokens)
        runner.attend_to_lists(*cached, lists, counts, torch.empty_like(query), lse)
    else:
        spans = plan_spans(query_lens, num_tokens, starts, runner.decode_len)
        plan = runner.plan(spans, table, seq_lens)
        runner.decode(*cached, plan, torch.empty_like(query), lse)
    call = GatherCall(
        kv_cache,
        zeros[:, 0].contiguous(),
        table,
        layout,
        starts,
        torch.zeros(num_tokens, dtype=torch.int32, device=device),
        num_tokens,
        torch.zeros(num_seqs, dtype=torch.int32, device=device),
    )
    runner.gather(call)


def _run_store(runner: LatentRunner, kv_cache: torch.Tensor, num_tokens: int) -> None:
    """Launch a store of ``num_tokens`` tokens without slots."""
    device, layout = kv_cache.device, runner.layout
    size = layout.rank + layout.rope
    zeros = torch.zeros(1, size, dtype=runner.shape.dtype, device=device)
    latent, rope = zeros.expand(num_tokens, -1).split([layout.rank, layout.rope], -1)
    slots = torch.full((num_tokens,), -1, device=device)
    runner.store(kv_cache, slots, latent, rope)


def run_kernels(runner: LatentRunner, device: torch.device) -> None:
    """Launch each kernel of a layer, with zeros."""
    block_size = runner.cache_config.block_size or 1
    block_size = cdiv(block_size, TILE_TOKENS) * TILE_TOKENS
    num_blocks = cdiv(2 * runner.max_query_len + _CONTEXT, block_size)
    pages = (num_blocks, block_size, runner.layout.slot_size)
    kv_cache = torch.zeros(pages, dtype=torch.uint8, device=device)
    for query_lens in batches(runner):
        _run_attention(runner, kv_cache, query_lens)
    for num_tokens in runner.entry_points.store_sizes(runner.layout):
        if num_tokens <= runner.max_num_tokens:
            _run_store(runner, kv_cache, num_tokens)
