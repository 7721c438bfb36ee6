# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A plan as numbers, as text and as a picture."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turbo_plan.gpus import GIB, MEASURED_QUERIES, Gpu

if TYPE_CHECKING:
    from turbo_plan.planner import Planned

HEADER = ("KV cache", "bytes a token", "MiB a user", "tokens", "users", "ms a token")
ROOT = Path(__file__).resolve().parents[2]
UNMEASURED = (
    "An estimate: of {} nothing was measured, and an H200's efficiencies stand."
)
ALONE = (
    "An estimate of time: engines were measured with a Llama of 8B's shape alone, "
    "without experts, states or windows."
)
MANY = (
    "An estimate of time: attention was not measured alone with more than {} query "
    "heads a KV head, of which this model has {}."
)
APART = "The time that GPUs take to exchange what layers give is not counted."


def row_of(planned: "Planned", gpu: Gpu, users: int, context: int) -> dict[str, Any]:
    """One dtype's numbers, of each GPU."""
    model = planned.model
    if model is None:
        return {"kv_cache_dtype": planned.dtype, "refused": planned.refused}
    fits = users <= planned.users
    seconds = model.tpot(gpu, planned.dtype, users, context)
    return {
        "kv_cache_dtype": planned.dtype,
        "weights_bytes": model.weights.size,
        "kv_cache_bytes": planned.cache_bytes,
        "bytes_per_token": model.token_bytes,
        "bytes_per_user": model.user_bytes(context),
        "tokens": planned.tokens,
        "users": int(planned.users),
        "block_size": planned.block_size,
        "tpot_ms": seconds * 1e3 if fits else None,
    }


def notes_of(plans: Sequence["Planned"], gpu: Gpu, tensor_parallel: int) -> list[str]:
    """What to know of the numbers."""
    models = [each.model for each in plans if each.model]
    notes = [] if gpu.is_measured else [UNMEASURED.format(gpu.device.name)]
    layers = [layer for model in models for layer in model.cache]
    if any(model.weights.experts for model in models) or any(
        layer.state or layer.window for layer in layers
    ):
        notes.append(ALONE)
    queries = max((layer.queries for layer in layers), default=0)
    if queries > MEASURED_QUERIES:
        notes.append(MANY.format(MEASURED_QUERIES, queries))
    return notes + [APART] * (tensor_parallel > 1)


def table(content: dict[str, Any]) -> str:
    """The plan as text."""
    served = [row for row in content["rows"] if "refused" not in row]
    lines = [
        f"{content['model']} on {content['gpus']} x {content['gpu']}, "
        f"{content['users']} users of {content['context']} tokens"
    ]
    if served:
        weights, left = (
            served[0][name] / GIB for name in ("weights_bytes", "kv_cache_bytes")
        )
        lines.append(
            f"Of each GPU: {weights:.1f} GiB of weights, {left:.1f} for the cache"
        )
        if left <= 0:
            lines.append(
                "The weights do not fit: take more GPUs, --tp, or quantise them."
            )
    lines += ["", "".join(f"{name:>14}" for name in HEADER)]
    for row in content["rows"]:
        if "refused" in row:
            # Of attention, what each of vLLM's backends says.
            reason = row["refused"].rpartition("Reasons: ")[2]
            lines.append(f"{row['kv_cache_dtype']:>14}  {reason[:300]}")
            continue
        time = row["tpot_ms"]
        cells = (
            row["kv_cache_dtype"],
            f"{row['bytes_per_token']:,.0f}",
            f"{row['bytes_per_user'] / 2**20:,.1f}",
            f"{row['tokens']:,}",
            f"{row['users']:,}",
            "no room" if time is None else f"{time:.2f}",
        )
        lines.append("".join(f"{cell:>14}" for cell in cells))
    return "\n".join([*lines, "", *content["notes"]]).rstrip()


def user_counts(most: float) -> list[int]:
    """Numbers of users to draw, up to so many."""
    if most < 1:
        return []
    doubled = [2**i for i in range(32) if 2**i < most]
    return [*doubled, int(most)]


def draw(
    plans: Sequence["Planned"], content: dict[str, Any], gpu: Gpu, path: Path
) -> None:
    """Draws how many users fit, and the time per output token against their number."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from pictures import LOOKS, plt, save

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.5))
    context = content["context"]
    for planned in plans:
        counts = user_counts(planned.users)
        if planned.model is None or not counts:
            continue
        look = next(look for look in LOOKS if planned.dtype in look.arms)
        times = [
            1e3 * planned.model.tpot(gpu, planned.dtype, count, context)
            for count in counts
        ]
        left.bar(look.label, counts[-1], color=look.colour)
        style = {"color": look.colour, "marker": look.marker, "markersize": 4}
        right.plot(counts, times, label=look.label, **style)
    left.set_ylabel(f"users of {context} tokens that fit")
    right.set(xscale="log", xlabel="users", ylabel="time per output token, ms")
    right.set_ylim(bottom=0)
    right.grid(True, which="major", alpha=0.3)
    if right.get_lines():
        right.legend(fontsize=8)
    kind = "an estimate" if content["notes"] else "measured efficiencies"
    name = f"{content['model']}, {content['gpus']} x {content['gpu']}"
    figure.suptitle(f"{name}: {kind}", fontsize=10)
    # The plan alone is for the standard output.
    with redirect_stdout(sys.stderr):
        save(figure, path)
