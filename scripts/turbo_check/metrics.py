# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How far one engine's records and answers are from the reference's.

KL divergence has k + 1 outcomes: the reference's k likeliest tokens, and any other.
Fewer outcomes diverge less, so it is a lower bound of the divergence over the whole
vocabulary. Both are equal if k is the vocabulary's size.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from turbo_quality.metrics import common_prefix, kl_divergence

Records = dict[str, np.ndarray]


def normalised(logprobs: np.ndarray) -> np.ndarray:
    """Returns log-probabilities, (..., outcome), whose sum is 1 in float64.

    A sum over a large vocabulary in fp32 is off by 1e-5, in all outcomes alike.
    """
    logprobs = logprobs.astype(np.float64)
    return logprobs - np.log(np.exp(logprobs).sum(axis=-1, keepdims=True))


def compare_records(reference: Records, other: Records) -> dict[str, Any]:
    """Compares records of the same texts.

    Args:
        reference: `logprobs` (text, position, k + 1), `target` and `top` (text,
            position), as in `probe.Record`.
        other: The same of another engine.

    Returns:
        As `turbo_quality.metrics.compare`; `perplexity_change` is relative.

    """
    # No rest is impossible in both if all tokens are told apart.
    with np.errstate(invalid="ignore"):
        divergences = kl_divergence(
            *(normalised(part["logprobs"]) for part in (reference, other))
        )
    means = divergences.mean(axis=1)
    spread = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else None
    scores = [part["target"].mean(dtype=np.float64) for part in (reference, other)]
    return {
        "kl_mean": float(means.mean()),
        "kl_texts": means.tolist(),
        "kl_stderr": None if spread is None else float(spread),
        "kl_p99": float(np.quantile(divergences, 0.99)),
        "top1": float((reference["top"] == other["top"]).mean()),
        "perplexity": math.exp(-scores[1]),
        "perplexity_change": math.expm1(scores[0] - scores[1]),
        "positions": divergences.size,
    }


def compare_needles(
    needles: list[dict[str, Any]], reference: list[bool], other: list[bool]
) -> dict[str, Any]:
    """Returns how many needles are found, and which ones only the reference finds.

    Args:
        needles: `context` and `depth` of each.
        reference: Whether the reference's answer is right.
        other: The same of another engine.

    """
    pairs = list(zip(needles, reference, other, strict=True))
    lost = [needle for needle, a, b in pairs if a and not b]
    return {
        "cases": len(needles),
        "found": sum(other),
        "lost": len(lost),
        "gained": sum(b and not a for _, a, b in pairs),
        "lost_at": [{key: n[key] for key in ("context", "depth")} for n in lost],
    }


def greedy_agreement(
    reference: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
) -> float:
    """Returns the mean length of the beginning that continuations share, in tokens."""
    shared = [common_prefix(*pair) for pair in zip(reference, other, strict=True)]
    return float(np.mean(shared))


def rank_layers(keys: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Returns a row a layer; the first layer is the one whose K changes scores most.

    Args:
        keys: By layer name, as `probe.KeyStatistics.result` has them.

    Returns:
        `layer` (number, or name without one); `head`, the head with the largest `ratio`
        of `k_mean` to `k_deviation`, and its `ratio`, `k_mean`, `k_deviation` and
        `k_left`; `v_ratio`, the largest ratio of V; `score`, the mean over heads.

    """
    rows = []
    for name, of_layer in keys.items():
        mean, deviation = (np.array(of_layer[f"k_{x}"]) for x in ("mean", "deviation"))
        ratios = mean / np.maximum(deviation, 1e-9)
        head = int(ratios.argmax())
        v_deviation = np.maximum(of_layer["v_deviation"], 1e-9)
        rows.append(
            {
                "layer": next((x for x in name.split(".") if x.isdigit()), name),
                "head": head,
                "ratio": float(ratios[head]),
                **{x: of_layer[x][head] for x in ("k_mean", "k_deviation", "k_left")},
                "v_ratio": float((np.array(of_layer["v_mean"]) / v_deviation).max()),
                "score": float(np.mean(of_layer["score"])),
            }
        )
    return sorted(rows, key=lambda row: row["score"], reverse=True)
