# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keys whose error lies across more directions than their own.

The format makes the error of a key orthogonal to what is stored. A few codes that move
to a neighbouring level make it nearly orthogonal to other directions, too. The bytes
are as many, and readers need not know the directions. Two are compared: the one in
which most queries look, and the mean of K, because a query that looks for one of
several far tokens is near their whole keys.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from attention import Cache, LabModel
from rotary import turn
from variants import Variant

from vllm.v1.attention.ops.turbo import format as fmt
from vllm.v1.attention.ops.turbo import reference
from vllm.v1.attention.ops.turbo.format import Codebook, TurboFormat
from vllm.v1.attention.ops.turbo.reference import codec

# Codes of a key that move, beside one for each direction. Keys of three bits have none:
# the search for a factor finds parts of the directions, too.
MOVES = 2
# The weight of a squared error along the direction, beside one across it.
WEIGHTS = {"mean": fmt.BIAS_WEIGHT, "queries": 64.0}
# Vectors at a time.
BATCH = 8192
HALF = fmt.NUM_LEVELS // 2
# Tokens that ``query_directions`` runs, the newest that it leaves out, and the distance
# between the keys that it looks at.
TOKENS, WINDOW, KEY_STEP = 512, 24, 8


def query_directions(
    lab: LabModel, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> list[torch.Tensor]:
    """The direction of the queries that attend to keys, by layer: (H, D).

    It is the first principal direction of the queries in the keys' own frame, which is
    turned back by RoPE to position 0. A query counts as much as it attends to the key.
    The first token and the newest ones are left out.

    Args:
        lab: The model.
        tokens: (1, T).
        cos: (T, D) at least, of RoPE.
        sin: Likewise.

    """
    tokens = tokens[:, :TOKENS]
    cache = Cache([None] * lab.num_layers, recorded=[], recorded_queries=[])
    lab.log_probs(tokens, cache)
    assert cache.recorded is not None and cache.recorded_queries is not None
    places = torch.arange(tokens.shape[1], device=lab.device)
    age = places[:, None] - places
    found = []
    for (key, _), (query, scale) in zip(cache.recorded, cache.recorded_queries):
        num_kv_heads, _, size = key.shape[1:]
        grouped = query[0].unflatten(0, (num_kv_heads, -1))  # (H, Hq / H, T, D)
        scores = torch.einsum("hgqd,hkd->hgqk", grouped, key[0]) * scale
        weights = scores.masked_fill(age < 0, -math.inf).softmax(-1)
        weights = weights * (age >= WINDOW) * (places > 0)
        moment = torch.zeros(num_kv_heads, size, size, device=lab.device)
        for place in range(0, tokens.shape[1], KEY_STEP):
            root = grouped * weights[..., place].sqrt()[..., None]
            root = turn(root, cos[place], -sin[place]).flatten(1, 2)
            moment += root.mT @ root
        found.append(torch.linalg.eigh(moment).eigenvectors[..., -1])
    return found


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Products of vectors (N, G, 16) as (N, 1, 1)."""
    return (a * b).sum((-2, -1), keepdim=True)


@dataclass(frozen=True)
class Target:
    """Rotated vectors by group, and the directions that errors shall lie across.

    Attributes:
        y: (N, G, 16), the vectors.
        directions: (N, G, 16) each, of length 1 or zero; the first one is y's own.
        weights: The weights of squared errors along these.
        scale: (N, G, 1).
        codebook: That of keys.

    """

    y: torch.Tensor
    directions: list[torch.Tensor]
    weights: list[float]
    scale: torch.Tensor
    codebook: Codebook

    def error(self, index: torch.Tensor) -> torch.Tensor:
        """The vectors less what levels give."""
        levels = codec.levels_of(index, self.codebook)
        return self.y - levels * self.scale * self.codebook.gain

    def along(self, error: torch.Tensor) -> list[torch.Tensor]:
        return [dot(error, x) for x in self.directions]

    def cost(self, along: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, along, strict=True)
        return torch.stack([weight * x**2 for weight, x in pairs]).sum(0)


def searched(target: Target, with_others: bool) -> torch.Tensor:
    """Levels by the search for a factor, and for parts of the other directions.

    It is ``reference.unbias.unbiased`` without the codes that move.
    """
    y = target.y
    others = target.directions[1:] if with_others else []
    normaliser = codec.normaliser_of(y)
    square = dot(y, y).clamp(min=1e-30)
    factor, parts = torch.ones_like(square), [torch.zeros_like(square)] * len(others)
    best = torch.zeros_like(y, dtype=torch.int64)
    least = torch.full_like(square, math.inf)
    for _ in range(fmt.UNBIAS_ROUNDS + 1):
        wanted = sum([x * part for x, part in zip(others, parts)], y * factor)
        index = codec.encode(wanted, target.scale, normaliser, target.codebook)[0]
        error = target.error(index)
        along = target.along(error)
        cost = target.cost(along) if with_others else along[0].abs()
        best = torch.where(cost < least, index, best)
        least = torch.minimum(cost, least)
        factor = factor + dot(error, y) / square
        factor = factor.clamp(1 - fmt.UNBIAS_LIMIT, 1 + fmt.UNBIAS_LIMIT)
        parts = [part + x for part, x in zip(parts, along[1:])]
    return best


def moved(target: Target, index: torch.Tensor) -> torch.Tensor:
    """Levels after a few codes moved to the next level, each to the least cost.

    A code moves the way that makes the products' errors smaller, but not across zero.
    """
    for _ in range(MOVES + len(target.directions) - 1):
        error = target.error(index)
        along = target.along(error)
        triples = zip(target.weights, along, target.directions)
        up = torch.stack([w * x * direction for w, x, direction in triples]).sum(0) > 0
        other = index + torch.where(up, 1, -1)
        possible = (other >= 0) & (other < fmt.NUM_LEVELS)
        possible &= (other < HALF) == (index < HALF)
        other = torch.where(possible, other, index)
        other_error = target.error(other)
        step = other_error - error
        pairs = zip(along, target.directions)
        cost = target.cost([x + step * direction for x, direction in pairs])
        cost = cost + other_error**2 - error**2
        least, place = cost.masked_fill(~possible, math.inf).flatten(-2).min(-1)
        worth = least < target.cost(along).flatten()
        here = torch.zeros_like(index.flatten(-2), dtype=torch.bool)
        here = here.scatter(-1, place[:, None], worth[:, None]).view_as(index)
        index = torch.where(here, other, index)
    return index


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors (N, G, 16) at length 1; zero stays zero."""
    return x / dot(x, x).sqrt().clamp(min=1e-20)


def round_trip(
    x: torch.Tensor,
    others: Sequence[torch.Tensor],
    codebook: Codebook,
    weights: Sequence[float],
) -> torch.Tensor:
    """Keys, (N, D), as they are read from the cache; ``others`` are (N, D) each."""
    y = codec.by_group(reference.rotate(x)).clamp(-fmt.SCALE_MAX, fmt.SCALE_MAX)
    rotated = [codec.by_group(reference.rotate(other)) for other in others]
    directions = [unit(each) for each in (y, *rotated)]
    scale = codec.scale_values(codec.choose_scales(y, codebook))[..., None]
    all_weights = [fmt.BIAS_WEIGHT, *weights]
    target = Target(y, directions, all_weights, scale, codebook)
    index = searched(target, codebook.trellis)
    if not codebook.trellis:
        index = moved(target, index)
    return reference.inverse_rotate(codec.from_groups(y - target.error(index)))


@dataclass(frozen=True)
class Across(Variant):
    """A layer whose keys' errors lie across more directions than their own.

    Attributes:
        others: (H, T, D) each, the directions at each position.
        weights: The weights of squared errors along them.

    """

    others: tuple[torch.Tensor, ...] = ()
    weights: tuple[float, ...] = ()

    def round_trip(
        self, key: torch.Tensor, value: torch.Tensor, mean: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert mean is not None
        layout = TurboFormat.from_cache_dtype(self.name, key.shape[-1])
        others = [x[:, : key.shape[-2]].expand_as(key) for x in self.others]
        vectors = [x.flatten(0, -2).split(BATCH) for x in (key - mean, *others)]
        stored = [
            round_trip(x, directions, layout.key_codebook, self.weights)
            for x, *directions in zip(*vectors, strict=True)
        ]
        return torch.cat(stored).view_as(key) + mean, self.value(value)


def across(variant: Variant, others: dict[str, torch.Tensor]) -> Across:
    """A layer's cache with the errors of keys across directions, by their names."""
    values = {x.name: getattr(variant, x.name) for x in fields(Variant)}
    weights = tuple(WEIGHTS[name] for name in others)
    return Across(**values, others=tuple(others.values()), weights=weights)
