# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The advice that `check_model.py` gives on its measurements."""

import math
from typing import Any

Row = dict[str, Any]

# A ratio of KL to fp8's, either way, that counts as equal: few positions tell no more.
ALIKE = 1.25
MILLI = 1000
# Nats. So little KL costs at most half a per cent of perplexity on the average, even if
# fp8 has much less.
NEGLIGIBLE_KL = 0.005
# The most needles lost, less those gained, in standard errors of that difference.
MAX_LOST_ERRORS = 2.0
# Share of the needles that the reference has to find for them to say anything.
MIN_FOUND = 0.5
# The least that a layer in bf16 has to take off KL: as a multiple of an equal share of
# all layers, and in standard errors.
MIN_LAYER_SHARE = 2.0
MIN_LAYER_ERRORS = 2.0


def ran(row: Row) -> bool:
    return "error" not in row


def find_fp8(rows: list[Row]) -> Row | None:
    """Returns the row of fp8 if it was measured."""
    fp8 = (row for row in rows if row["cache_dtype"].startswith("fp8") and ran(row))
    return next(fp8, None)


def says_needles(reference: Row) -> bool:
    """Whether the reference finds enough of the needles for others' to be judged."""
    needles = reference["needles"]
    return needles["found"] >= MIN_FOUND * needles["cases"]


def loses_needles(needles: Row) -> bool:
    """Whether more needles are lost than by chance, by the error of paired answers."""
    net = needles["lost"] - needles["gained"]
    moved = needles["lost"] + needles["gained"]
    stderr = math.sqrt(max(moved - net**2 / needles["cases"], 0.0))
    return net > MAX_LOST_ERRORS * stderr


def distance(row: Row, fp8: Row | None) -> str:
    """Returns how far an arm is from the reference, in words, beside fp8 if it ran."""
    size = f"{MILLI * row['kl_mean']:.2f} millinats"
    kl = f"KL {size}"
    if fp8 is None or fp8 is row:
        top = f"top token differs at {1 - row['top1']:.1%}"
        return f"{'the measure, ' if row is fp8 else ''}{kl}, {top}"
    ratio = row["kl_mean"] / max(fp8["kl_mean"], 1e-12)
    top = f"top token differs at {1 - row['top1']:.1%}, fp8's at {1 - fp8['top1']:.1%}"
    kl = f"KL {ratio:.2f} times fp8's"
    if ratio <= 1 / ALIKE:
        word = "closer than fp8"
    elif ratio <= ALIKE:
        word = "as close as fp8"
    elif row["kl_mean"] <= NEGLIGIBLE_KL:
        word = f"farther than fp8 by little, {size} in all"
    else:
        word = "farther than fp8"
    return f"{word} ({kl}, {top}), at {size_of(row, fp8):.0%} of its bytes"


def size_of(row: Row, other: Row) -> float:
    return row["bytes_per_token"] / other["bytes_per_token"]


def advise(rows: list[Row]) -> str:
    """Returns one sentence on all arms but the reference, which is the first.

    Most users serve with fp8 unmeasured, so the others are compared with it.
    """
    reference, *others = rows
    fp8 = find_fp8(others)
    parts = []
    for row in others:
        if row["cache_dtype"] == reference["cache_dtype"] or row.get("skip_layers"):
            continue
        if not ran(row):
            parts.append(f"{row['arm']}: not measured")
            continue
        name = f"{row['arm']} with window" if row.get("window_layers") else row["arm"]
        said = distance(row, fp8)
        needles = row["needles"]
        if says_needles(reference) and loses_needles(needles):
            said += f", but {needles['lost']} of {needles['cases']} needles are lost"
        parts.append(f"{name}: {said}")
    if not parts:
        return "nothing to advise on"
    if not any(row["cache_dtype"].startswith("fp8") for row in others):
        parts.append("with fp8 in --kv-cache-dtype others are compared with it")
    if not says_needles(reference):
        needles = reference["needles"]
        parts.append(
            f"needles say nothing, for the reference finds {needles['found']} of "
            f"{needles['cases']}"
        )
    return "; ".join(parts)


def gain_of_layer(row: Row, packed: Row) -> tuple[float, float | None]:
    """Returns the KL that a layer in bf16 takes off, and its standard error, in nats.

    Both arms decode the same texts, so the texts' own difficulty cancels.
    """
    gains = [a - b for a, b in zip(packed["kl_texts"], row["kl_texts"], strict=True)]
    mean = sum(gains) / len(gains)
    if len(gains) < 2:
        return mean, None
    variance = sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1)
    return mean, math.sqrt(variance / len(gains))


def layers_to_skip(rows: list[Row], packed: Row) -> list[str]:
    """Returns the layers that are worth their bytes in bf16.

    Args:
        rows: Arms that leave one layer each in bf16.
        packed: The arm of that dtype that leaves none.

    """
    worth = []
    for row in rows:
        if not ran(row):
            continue
        gain, stderr = gain_of_layer(row, packed)
        part = packed["kl_mean"] / packed["layers"]
        if gain > MIN_LAYER_SHARE * part and gain > MIN_LAYER_ERRORS * (stderr or 0.0):
            worth += row["skip_layers"]
    return worth
