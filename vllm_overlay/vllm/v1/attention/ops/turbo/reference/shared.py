# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention to a context that ranks share, in plain PyTorch."""

from typing import TYPE_CHECKING

import torch

from vllm.v1.attention.ops.turbo.format import TurboFormat
from vllm.v1.attention.ops.turbo.reference.attention import attention
from vllm.v1.attention.ops.turbo.reference.cache import load
from vllm.v1.attention.ops.turbo.reference.rotation import inverse_rotate

if TYPE_CHECKING:
    from vllm.v1.attention.ops.turbo.layer.context_parallel import ContextParallel


def _attend_to_own_context(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: list[int],
    local_lens: list[int],
    scale: float,
    layout: TurboFormat,
    logits_soft_cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to this rank's share of sequences: output and natural LSE, fp32."""
    block_size, device = kv_cache.shape[2], query.device
    output = torch.zeros(query.shape, dtype=torch.float32, device=device)
    lse = torch.full(query.shape[:2], -torch.inf, device=device)
    bounds = zip(query_start_loc, query_start_loc[1:], local_lens)
    for row, (begin, end, length) in enumerate(bounds):
        if begin == end or length == 0:
            continue
        positions = torch.arange(length, device=device)
        blocks = block_table[row, positions // block_size].long()
        slots = blocks * block_size + positions % block_size
        keys, values = load(kv_cache, slots, layout)
        output[begin:end], lse[begin:end] = attention(
            query[begin:end].float(),
            inverse_rotate(keys) * layout.key_codebook.gain,
            inverse_rotate(values),
            scale,
            causal=False,
            logits_soft_cap=logits_soft_cap,
        )
    return output, lse


def shared_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: list[int],
    seq_lens: list[int],
    scale: float,
    layout: TurboFormat,
    output: torch.Tensor,
    context_parallel: "ContextParallel",
    sinks: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
) -> None:
    """Causal attention of a batch, like ``paged_attention``, in fp32.

    Args:
        query: (T, Hq, D), of this rank's heads.
        key: (T, H, D), of the query tokens, which every rank has.
        value: (T, H, D), likewise.
        kv_cache: (num_blocks, H, N, C) uint8, this rank's share of the context.
        block_table: (R, max_blocks) of this share.
        query_start_loc: R + 1 offsets into ``query``.
        seq_lens: R lengths over all ranks, query tokens included.
        scale: Softmax scale.
        layout: The cache's format.
        output: (T, Hq, D), written.
        context_parallel: The ranks that share the context.
        sinks: (Hq,), a logit of each query head that joins the softmax and has no
            value; None for none.
        logits_soft_cap: The cap that bounds scores by a tanh; None for none.

    """
    starts = torch.tensor(query_start_loc)
    contexts = torch.tensor(seq_lens) - starts.diff()
    part, part_lse = _attend_to_own_context(
        context_parallel.gather(query),
        kv_cache,
        block_table,
        query_start_loc,
        context_parallel.local_lens(contexts.clamp(min=0)).tolist(),
        scale,
        layout,
        logits_soft_cap,
    )
    parts, lses = context_parallel.gather_parts(part, part_lse)
    outputs, all_lses = [*parts.unbind()], [*lses.unbind()]
    own = torch.zeros(query.shape, device=query.device)
    own_lse = torch.full(query.shape[:2], -torch.inf, device=query.device)
    for begin, end in zip(query_start_loc, query_start_loc[1:]):
        tokens = slice(begin, end)
        own[tokens], own_lse[tokens] = attention(
            query[tokens].float(),
            key[tokens].float(),
            value[tokens].float(),
            scale,
            logits_soft_cap=logits_soft_cap,
        )
    outputs.append(own)
    all_lses.append(own_lse)
    logits = torch.stack(all_lses)
    if sinks is not None:
        outputs.append(torch.zeros_like(own))
        logits = torch.cat([logits, sinks.float().expand_as(own_lse)[None]])
    weights = torch.softmax(logits, 0)[..., None]
    output.copy_((weights * torch.stack(outputs)).sum(0))
