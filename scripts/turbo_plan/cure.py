# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Advice on a model that does not fit: more GPUs, or fewer bits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turbo_plan.planner import Planned

# Bits of a weight, with its scales.
BITS = {"8 bits (FP8)": 8.25, "4 bits (AWQ, GPTQ)": 4.5}
UNQUANTISED_BITS = 16
# The most GPUs of one model.
MOST_GPUS = 64


def smallest_parallel(size: float, room: float, heads: int, at_least: int) -> int:
    """Returns the fewest GPUs that have room for the weights.

    Args:
        size: Bytes of all weights.
        room: Bytes that a GPU has for them.
        heads: Query heads, which GPUs divide.
        at_least: A number of GPUs that is too small.

    Returns:
        0 if no number up to MOST_GPUS is enough.

    """
    counts = (2**i for i in range(MOST_GPUS.bit_length()))
    fitting = (n for n in counts if n > at_least and not heads % n and size <= n * room)
    return next(fitting, 0)


def cure_of(plans: Sequence["Planned"], tensor_parallel: int, context: int) -> str:
    """Returns advice if no dtype has room for a user; "" if one has.

    A GPU's room for weights is its memory without the cache of one user. That cache
    counts as large on more GPUs as on these, so the numbers are on the safe side.
    """
    models = [(each, each.model) for each in plans if each.model]
    if not models or any(each.users >= 1 for each, _ in models):
        return ""
    plan, model = models[0]
    room = max(
        x.cache_bytes + y.weights.size - y.user_bytes(context) for x, y in models
    )
    size = model.weights.size * tensor_parallel
    count = smallest_parallel(size, room, plan.heads, tensor_parallel)
    ways = [f"--tp {count}"] if count else []
    if not plan.is_quantised:
        share = model.weights.size / UNQUANTISED_BITS
        fits = (name for name, bits in BITS.items() if share * bits <= room)
        ways += [f"weights of {name}" for name in fits][:1]
    problem = (
        "The weights do not fit"
        if plan.cache_bytes <= 0
        else f"Beside the weights not one user of {context} tokens fits"
    )
    if not ways:
        return f"{problem}, nor do fewer bits or up to {MOST_GPUS} GPUs make room."
    return f"{problem}: take {' or '.join(ways)}."
