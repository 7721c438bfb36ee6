# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The bounds of all steps' decodes and extends."""

from typing import NamedTuple

from vllm.v1.attention.ops.turbo.formats.output_scratch import num_raw_tiles
from vllm.v1.attention.ops.turbo.interface import MAX_KV_SPLITS
from vllm.v1.attention.ops.turbo.planning.decode import (
    MAX_CALL_TOKENS,
    MAX_OUTPUT_CALL_TOKENS,
)
from vllm.v1.attention.ops.turbo.planning.scratch import LayerShape


class LargestBatch(NamedTuple):
    """The maxima of each size over all steps.

    Attributes:
        num_tokens: Query tokens of decodes and extends.
        num_partials: Partial results of a call.
        num_raw_tokens: Query tokens of a call that attend to each other before it.
        num_raw_tiles: Tiles of query tokens of a call that ends in outputs.
        num_slots: Query slots of a call, as ``DecodePlan.num_slots``.

    """

    num_tokens: int
    num_partials: int
    num_raw_tokens: int
    num_raw_tiles: int
    num_slots: int


def largest_batch(
    shape: LayerShape,
    max_num_seqs: int,
    max_num_tokens: int,
    max_query_len: int,
    extend_len: int,
    max_extend_tokens: int,
    max_merged_tokens: int | None,
    extends_to_outputs: bool = False,
) -> LargestBatch:
    """Bound the sizes of all steps.

    A call has at most ``LayerShape.max_partials`` partial results, or more if a single
    request needs more, and at most ``MAX_KV_SPLITS`` a query token.

    Args:
        shape: The shape of the layer.
        max_num_seqs: The most requests of a step.
        max_num_tokens: The most query tokens of a step.
        max_query_len: The most query tokens of a decode request.
        extend_len: The most query tokens of an extend; 0: there are no extends.
        max_extend_tokens: The most query tokens of all extends of a step.
        max_merged_tokens: As in ``DecodePlanner``.
        extends_to_outputs: As in ``DecodePlanner``.

    """
    num_tokens = num_call_tokens = max_num_seqs * max_query_len
    num_raw_tokens = raw_tiles = 0
    if extend_len > 0:
        max_query_len = max(max_query_len, extend_len)
        # Each request counts as the longest. A request that is too long for a call of
        # several has a call of its own.
        num_slots = max_num_seqs * extend_len
        num_call_slots = min(num_slots, max(MAX_CALL_TOKENS, extend_len))
        num_call_tokens = max(num_call_tokens, num_call_slots)
        extended = min(num_slots, max_num_tokens, max_extend_tokens)
        num_tokens += extended
        if max_merged_tokens is not None and extend_len > max_merged_tokens:
            most = max(shape.max_partials, extend_len)
            num_raw_tokens = min(extended, num_call_slots, most)
        if extends_to_outputs:
            most = min(extended, max(MAX_OUTPUT_CALL_TOKENS, extend_len))
            raw_tiles = num_raw_tiles(most, min(max_num_seqs, most))
            raw_tiles = min(raw_tiles, shape.max_raw_tiles)
    num_partials = min(
        max(shape.max_partials, max_query_len), num_call_tokens * MAX_KV_SPLITS
    )
    return LargestBatch(
        num_tokens,
        num_partials,
        num_raw_tokens,
        raw_tiles,
        max(num_tokens, MAX_CALL_TOKENS, extend_len),
    )
