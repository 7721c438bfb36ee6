# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measures how far a model's predictions moved: divergence, perplexity, agreement."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from attention import Cache, LabModel

Key = TypeVar("Key")
# Distributions at a time: those of a long text would not fit in float64.
ROWS = 512


def kl_divergence(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(exact || other) in nats for log-probabilities (..., vocabulary).

    In float64: at small divergences it is a difference of nearly equal numbers.
    """
    pairs = [x.reshape(-1, x.shape[-1]).split(ROWS) for x in (exact, other)]
    rows = [_divergence(a.double(), b.double()) for a, b in zip(*pairs)]
    return torch.cat(rows).view(exact.shape[:-1])


def _divergence(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (exact.exp() * (exact - other)).sum(-1)


@dataclass
class Comparison:
    """Sums up predictions against the exact model's, batch by batch."""

    divergences: list[torch.Tensor] = field(default_factory=list)
    agreements: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)

    def add(
        self, exact: torch.Tensor, other: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Take log-probabilities (batch, T, vocabulary) of tokens (batch, T)."""
        self.divergences.append(kl_divergence(exact, other).cpu())
        self.agreements.append((exact.argmax(-1) == other.argmax(-1)).float().cpu())
        following = tokens[:, 1:, None]
        losses = [-x[:, :-1].gather(-1, following)[..., 0] for x in (exact, other)]
        self.losses.append((losses[1] - losses[0]).double().cpu())

    def by_text(self, positions: slice) -> torch.Tensor:
        """The divergence of each text over some positions, in nats a token."""
        return torch.cat(self.divergences)[:, positions].mean(-1)

    def figures(self, positions: slice) -> dict[str, float]:
        """The figures over some positions of every text.

        Returns:
            ``kl`` and ``kl_p99`` in nats a token, ``kl_error``, the standard error
            of the mean with texts as samples, ``perplexity`` as its relative
            change, ``agreement``, the share of equal most likely tokens, and
            ``texts``, their number.

        """
        divergence = torch.cat(self.divergences)[:, positions]
        by_text = self.by_text(positions)
        spread = by_text.std().item() if len(by_text) > 1 else 0.0
        loss = torch.cat(self.losses)[:, positions].mean().item()
        agreement = torch.cat(self.agreements)[:, positions].mean().item()
        return {
            "kl": divergence.mean().item(),
            "kl_error": spread / math.sqrt(len(by_text)),
            "kl_p99": percentile(divergence.flatten(), 0.99),
            "perplexity": math.expm1(loss),
            "agreement": agreement,
            "texts": len(by_text),
        }


def comparisons(
    lab: LabModel, texts: Iterable[torch.Tensor], caches: Mapping[Key, Cache]
) -> dict[Key, Comparison]:
    """Compares a model's predictions on each cache with those on exact K and V.

    Args:
        lab: The model.
        texts: (1, T) each.
        caches: The caches that K and V are read from.

    """
    found = {key: Comparison() for key in caches}
    for tokens in texts:
        exact = lab.log_probs(tokens, Cache([None] * lab.num_layers))
        for key, cache in caches.items():
            found[key].add(exact, lab.log_probs(tokens, cache), tokens)
    return found


def compare(
    lab: LabModel,
    texts: Iterable[torch.Tensor],
    caches: Mapping[Key, Cache],
    positions: slice,
) -> dict[Key, dict[str, float]]:
    """Figures of caches by `comparisons`, over some positions of each text."""
    found = comparisons(lab, texts, caches)
    return {key: each.figures(positions) for key, each in found.items()}


def paired(own: Comparison, base: Comparison, positions: slice) -> dict[str, float]:
    """How much further than another cache one is away on the same texts.

    Returns:
        ``kl`` in nats a token, and ``kl_error``, the standard error of the mean with
        texts as samples; 0 with one text.

    """
    gain = own.by_text(positions) - base.by_text(positions)
    spread = gain.std().item() if len(gain) > 1 else 0.0
    return {"kl": gain.mean().item(), "kl_error": spread / math.sqrt(len(gain))}


def percentile(x: torch.Tensor, share: float) -> float:
    """The smallest element that a share of all elements does not exceed."""
    rank = max(1, math.ceil(share * x.numel()))
    return x.kthvalue(rank).values.item()
