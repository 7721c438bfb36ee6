# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of extends to their own query tokens, before attention to packed pages.

The merge of an extend's splits can attend to the query tokens itself, one by one. With
dozens of them this takes longer than the pages.
"""

from collections.abc import Callable
from typing import Any

import torch

from vllm.v1.attention.ops.turbo.interface import (
    AttendedTokens,
    DecodeBatch,
    RawTokens,
)
from vllm.v1.attention.ops.turbo.layer.flash import attend
from vllm.v1.attention.ops.turbo.planning.scratch import RawScratch
from vllm.v1.attention.ops.turbo.planning.tokens import SeqLens


def attend_to_raw_tokens(
    raw: RawTokens,
    batch: DecodeBatch,
    scratch: RawScratch,
    flash_attn: Callable[..., torch.Tensor],
    sliding_window: int | None = None,
) -> RawTokens:
    """Attend from each sequence's query tokens to these tokens alone, causally.

    These keys have no offset taken off. Sinks do not take part, because the merge adds
    them.

    Args:
        raw: The query tokens of the batch's sequences, end to end, T of them.
        batch: The sequences, with a ``query_start_loc``, one of ``query_len`` tokens.
        scratch: Scratch for T or more tokens. It is written, and read by the merge.
        flash_attn: FlashAttention's varlen function, with version and soft cap bound.
        sliding_window: The most tokens that a query token sees; None for no limit.

    Returns:
        The tokens, with the result in ``attended``.

    """
    from vllm.v1.attention.ops.turbo.triton.isolate import isolate_broken_values

    assert batch.query_start_loc is not None
    key, value, num_tokens = raw.key, raw.value, raw.query.shape[0]
    if batch.num_seqs > 1:
        key, value = scratch.key[:num_tokens], scratch.value[:num_tokens]
        isolate_broken_values(raw.key, raw.value, key, value)
    options: dict[str, Any] = {}
    if sliding_window is not None:
        options["window_size"] = [sliding_window - 1, 0]
    output = scratch.output[:num_tokens]
    lens = SeqLens(batch.query_start_loc, batch.query_len, num_tokens)
    lse = attend(
        flash_attn,
        raw.query,
        key,
        value,
        output,
        lens,
        lens,
        raw.scale,
        **options,
    )
    return raw._replace(attended=AttendedTokens(output, lse))
