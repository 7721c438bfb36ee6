# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The direction in which most queries of a KV head look.

A key's error counts by its products with queries. Queries that attend to a key have a
common direction in the key's own frame, which is turned back by RoPE to position 0. So
the store makes errors nearly orthogonal to it: see ``QueryDirection``. The direction is
the first principal one of the queries in a pass of text. A query counts as much as it
attends to the key. The first token, an attention sink, does not count, nor do the keys
of a query's newest tokens, which a recent window has in 8 bits.
"""

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.turbo import interface
from vllm.v1.attention.ops.turbo.formats.rotation import rotation_matrix
from vllm.v1.attention.ops.turbo.interface import Scoring
from vllm.v1.attention.ops.turbo.keys import offset as key_offset

# The newest tokens whose keys do not count.
NEWEST_TOKENS = 24
# The buffer of an attention layer. Sleeping engines keep buffers, and no other tensor.
BUFFER = "turbo_query_direction"
# Rounds of the power method. They begin with the mean of the queries, which is near the
# principal direction.
NUM_ROUNDS = 4


def query_directions(
    query: torch.Tensor,
    key: torch.Tensor,
    seen: torch.Tensor,
    scoring: Scoring,
    inverse: key_offset.Rotary | None,
) -> torch.Tensor:
    """The directions of the queries of a text's last slice.

    Args:
        query: (T, Hq, D).
        key: (S, H, D), of all the text's tokens.
        seen: (T, S) bool, the keys that a query sees.
        scoring: The layer's. It also has a scale and sinks.
        inverse: The inverse of RoPE for S positions; None without RoPE.

    Returns:
        (H, D) fp32 on the CPU, of length 1; zero for a head whose queries see no key
        that counts.

    """
    num_keys, num_kv_heads = key.shape[:2]
    # (H, queries, D) and (H, S, D); each query head's tokens follow one another.
    queries = query.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    group = queries.shape[1]
    queries, keys = queries.flatten(1, 2), key.float().transpose(0, 1)
    scores = queries @ keys.mT * scoring.scale
    scores = scores.masked_fill(~seen.repeat(group, 1), -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(num_kv_heads, group, 1)
        sinks = sinks.expand(-1, -1, len(query)).reshape(num_kv_heads, -1, 1)
        scores = torch.cat([scores, sinks], -1)
    places = torch.arange(num_keys, device=key.device)
    ages = places[-len(query) :, None] - places
    counts = (ages >= NEWEST_TOKENS) & (places > 0)
    weights = scores.softmax(-1)[..., :num_keys] * counts.repeat(group, 1)

    forward = None if inverse is None else key_offset.forward_of(inverse)
    direction = _turned_back(weights.mT @ queries, inverse)
    for _ in range(NUM_ROUNDS):
        rows = direction.expand(num_keys, -1, -1)
        if forward is not None:
            rows = key_offset.rotate_rows(rows.contiguous(), forward)
        products = queries @ rows.permute(1, 2, 0)
        direction = _turned_back((weights * products).mT @ queries, inverse)
    return direction.cpu()


def _turned_back(
    looked: torch.Tensor, inverse: key_offset.Rotary | None
) -> torch.Tensor:
    """The sum over keys of (H, S, D) in the keys' frames, at length 1: (H, D)."""
    rows = looked.transpose(0, 1).contiguous()
    if inverse is not None:
        rows = key_offset.rotate_rows(rows, inverse)
    total = rows.sum(0)
    return total / total.norm(dim=-1, keepdim=True).clamp(min=1e-30)


def direction_table(
    directions: torch.Tensor, rotary: key_offset.Rotary | None
) -> torch.Tensor:
    """The table of ``QueryDirection`` that follows from directions.

    Args:
        directions: (H, D) fp32 on the CPU, before RoPE.
        rotary: The rotation of K by row, from ``key_offset.mean_rotary`` with the rows
            of ``direction_segments``; None for none.

    Returns:
        (G, H, D) fp16 on the CPU.

    """
    rows = key_offset.mean_rotated(directions, rotary)
    # A segment's average turns fast coordinates away, and is shorter.
    rows = rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    head_size = rows.shape[-1]
    rotated = rows @ rotation_matrix(head_size, rows.device, torch.float32)
    # The rotation's matrix is sqrt(D) long, as are directions.
    return rotated.half()


def direction_segments(max_positions: int) -> key_offset.InRows:
    """Splits positions by rows of ``QueryDirection.table``, up to a position.

    Rows have whole segments, so that they do not depend on ``max_positions``.
    """
    segment = interface.DIRECTION_SEGMENT
    most = cdiv(max_positions, segment) * segment

    def in_rows(places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return places[:most].split(segment)

    return in_rows
