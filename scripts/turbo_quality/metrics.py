# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Distances between two engines' distributions, and between their answers."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def kl_divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns KL(reference || other) in nats.

    Args:
        reference: Log-probabilities, (..., token); each row's probabilities sum to 1.
        other: The same, of the other engine.

    """
    reference = reference.astype(np.float64)
    other = other.astype(np.float64)
    probability = np.exp(reference)
    # A token of probability 0 adds nothing, whatever its probability in the other.
    excess = np.where(probability > 0, reference - other, 0.0)
    return (probability * excess).sum(axis=-1)


def compare(
    reference: np.ndarray, other: np.ndarray, targets: np.ndarray
) -> dict[str, Any]:
    """Compares distributions over the same contexts.

    Args:
        reference: Log-probabilities, (text, position, token).
        other: The same of the other engine.
        targets: The token that follows, (text, position).

    Returns:
        `kl_mean`; `kl_texts`, the means of the texts; `kl_stderr`, the standard error
        of the mean over texts, which are independent while positions are not; `kl_p99`
        over all positions; `top1`, the share of positions with the same likeliest
        token; `perplexity` of the other engine on the targets; and `positions`.

    """
    # A text at a time, because all of them take gigabytes in float64.
    divergences = np.stack([kl_divergence(*pair) for pair in zip(reference, other)])
    means = divergences.mean(axis=1)
    scores = np.take_along_axis(other, targets[..., None], axis=-1)
    agreement = reference.argmax(axis=-1) == other.argmax(axis=-1)
    spread = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else None
    return {
        "kl_mean": float(means.mean()),
        "kl_texts": means.tolist(),
        "kl_stderr": None if spread is None else float(spread),
        "kl_p99": float(np.quantile(divergences, 0.99)),
        "top1": float(agreement.mean()),
        "perplexity": float(np.exp(-scores.mean(dtype=np.float64))),
        "positions": divergences.size,
    }


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many leading tokens two answers share."""
    for index, (a, b) in enumerate(zip(first, second)):
        if a != b:
            return index
    return min(len(first), len(second))


def score_tasks(
    tasks: list[dict[str, Any]], answers: list[list[int]]
) -> dict[str, Any]:
    """Returns, by kind of task, the share of right answers and the grid of all cells.

    Args:
        tasks: `kind`, `length`, `depth` and `answer` (tokens) of each.
        answers: The generated tokens of each task.

    """
    cells: dict[str, dict[tuple[int, float | None], list[bool]]] = {}
    for task, tokens in zip(tasks, answers, strict=True):
        cell = cells.setdefault(task["kind"], {})
        place = task["length"], task["depth"]
        cell.setdefault(place, []).append(tokens == task["answer"])
    return {
        kind: {
            "score": float(np.mean(sum(grid.values(), []))),
            "cases": sum(map(len, grid.values())),
            "grid": [
                {"length": length, "depth": depth, "score": float(np.mean(cell))}
                for (length, depth), cell in sorted(grid.items())
            ],
        }
        for kind, grid in cells.items()
    }
