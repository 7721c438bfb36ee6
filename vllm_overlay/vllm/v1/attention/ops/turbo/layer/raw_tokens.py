# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of extends to their own query tokens, before attention to packed pages.

The merge of an extend's splits can attend to the query tokens itself, one by one. With
dozens of them this takes longer than the pages.
"""

from typing import Any

from vllm.v1.attention.ops.turbo.interface import (
    AttendedTokens,
    DecodeBatch,
    RawTokens,
    Scoring,
)
from vllm.v1.attention.ops.turbo.layer.flash import FlashAttn
from vllm.v1.attention.ops.turbo.planning.scratch import RawScratch
from vllm.v1.attention.ops.turbo.planning.tokens import SeqLens


def attend_to_raw_tokens(
    raw: RawTokens,
    batch: DecodeBatch,
    scratch: RawScratch,
    flash_attn: FlashAttn,
    scoring: Scoring,
) -> RawTokens:
    """Attend from each sequence's query tokens to these tokens alone, causally.

    These keys have no offset taken off. Sinks do not take part, because the merge adds
    them.

    Args:
        raw: The query tokens of the batch's sequences, end to end, T of them.
        batch: The sequences, with a ``query_start_loc``, one of ``query_len`` tokens.
        scratch: Scratch for T or more tokens. It is written, and read by the merge.
        flash_attn: The function that attends.
        scoring: The layer's rules for scores.

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
    if scoring.sliding_window is not None:
        options["window_size"] = [scoring.sliding_window - 1, 0]
    output = scratch.output[:num_tokens]
    lens = SeqLens(batch.query_start_loc, batch.query_len, num_tokens)
    lse = flash_attn.attend(
        raw.query, key, value, output, lens, lens, scoring, **options
    )
    return raw._replace(attended=AttendedTokens(output, lse))
