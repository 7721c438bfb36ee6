# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A plan as numbers, as text and as a picture."""

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turbo_plan.gpus import GIB, LATENT_US, MEASURED_QUERIES, Gpu

if TYPE_CHECKING:
    from turbo_plan.planner import Planned

# The reason why a dtype is not planned for an encoder, which refuses no dtype.
NO_CACHE = (
    "this model keeps no KV cache, and its dtype changes nothing: leave out "
    "--kv-cache-dtype"
)

HEADER = ("KV cache", "bytes a token", "MiB a user", "tokens", "users", "ms a token")
STATES = "of states"
# An entry of vLLM's list of attention backends.
BACKEND = re.compile(r"(\w+): \[([^\]]*)\]")
UNKNOWN_DTYPE = "kv_cache_dtype not supported"
ROOT = Path(__file__).resolve().parents[2]
UNMEASURED = "An estimate: nothing was measured on {}, so an H200's efficiencies stand."
ALONE = (
    "An estimate of time: engines were measured only with an 8B Llama's shape, without "
    "experts, states or windows."
)
MANY = (
    "An estimate of time: attention was measured with up to {} query heads per KV "
    "head, and this model has {}."
)
LATENTS = (
    "No time: attention of MLA also depends on arithmetic. It was measured only on "
    "GPUs like the H200, with caches of {} and a latent of 512, and no indexer."
)
APART = "The time in which GPUs exchange layers' outputs is not counted."


def row_of(planned: "Planned", gpu: Gpu, users: int, context: int) -> dict[str, Any]:
    """Returns one dtype's numbers, for each GPU."""
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
        "state_bytes_per_user": model.state_bytes,
        "tokens": planned.tokens,
        "users": int(planned.users),
        "block_size": planned.block_size,
        "fits": fits,
        "tpot_ms": seconds * 1e3 if fits and seconds is not None else None,
    }


def notes_of(plans: Sequence["Planned"], gpu: Gpu, tensor_parallel: int) -> list[str]:
    """Returns notes on the numbers."""
    models = [each.model for each in plans if each.model]
    notes = [] if gpu.is_measured else [UNMEASURED.format(gpu.device.name)]
    layers = [layer for model in models for layer in model.cache]
    if any(model.weights.experts for model in models) or any(
        layer.state or layer.window for layer in layers
    ):
        notes.append(ALONE)
    times = (each.model.tpot(gpu, each.dtype, 1, 1) for each in plans if each.model)
    if None in times:
        notes.append(LATENTS.format(", ".join(LATENT_US)))
    queries = max((x.queries for x in layers if not x.is_latent), default=0)
    if queries > MEASURED_QUERIES:
        notes.append(MANY.format(MEASURED_QUERIES, queries))
    return notes + [APART] * (tensor_parallel > 1)


def short_reason(dtype: str, reason: str) -> str:
    """Returns the part of a refusal that concerns a dtype."""
    backends = {
        name: [each for each in said.split(", ") if each != UNKNOWN_DTYPE]
        for name, said in BACKEND.findall(reason.rpartition("Reasons: ")[2])
    }
    if not backends:
        return reason
    own = {name: x for name, x in backends.items() if name.startswith("TURBO")}
    if dtype.startswith(("turbo", "k4v3")) and any(own.values()):
        backends = {name: x for name, x in own.items() if name != "TURBOQUANT"} or own
    said = (f"{name}: {', '.join(each)}" for name, each in backends.items() if each)
    return "; ".join(said) or "no attention backend on this GPU has this dtype"


def refusals(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each reason with its dtypes, and one of the served dtypes."""
    served = [row["kv_cache_dtype"] for row in rows if "refused" not in row]
    dtypes = defaultdict(list)
    for row in rows:
        if "refused" in row:
            dtype = row["kv_cache_dtype"]
            dtypes[short_reason(dtype, row["refused"])].append(dtype)
    lines = [f"{', '.join(each)}: {reason}" for reason, each in dtypes.items()]
    if lines and served:
        lines.append(f"Served instead: --kv-cache-dtype {', '.join(served)}")
    return lines


def cells_of(row: dict[str, Any], has_states: bool) -> list[str]:
    """Returns one dtype's line of the table."""
    if "refused" in row:
        has_none = row["refused"] == NO_CACHE
        return [row["kv_cache_dtype"], "no cache" if has_none else "refused"]
    time, mib = row["tpot_ms"], 2**20
    states = [f"{row['state_bytes_per_user'] / mib:,.1f}"] if has_states else []
    return [
        row["kv_cache_dtype"],
        f"{row['bytes_per_token']:,.0f}",
        f"{row['bytes_per_user'] / mib:,.1f}",
        *states,
        f"{row['tokens']:,}",
        f"{row['users']:,}",
        "-" if time is None else f"{time:.2f}",
    ]


def table(content: dict[str, Any]) -> str:
    """Returns the plan as text."""
    served = [row for row in content["rows"] if "refused" not in row]
    lines = [
        f"{content['model']} on {content['gpus']} x {content['gpu']}, "
        f"{content['users']} users of {content['context']} tokens"
    ]
    if served:
        weights, left = (
            served[0][name] / GIB for name in ("weights_bytes", "kv_cache_bytes")
        )
        cache = (
            f"{left:.1f} for the cache"
            if left > 0
            else f"nothing for the cache ({-left:.1f} GiB short)"
        )
        lines.append(f"On each GPU: {weights:.1f} GiB of weights, {cache}")
    lines += [content["cure"]] if content["cure"] else []
    has_states = any(row["state_bytes_per_user"] for row in served)
    header = [*HEADER[:3], *([STATES] if has_states else []), *HEADER[3:]]
    grid = [header, *(cells_of(row, has_states) for row in content["rows"])]
    lines += ["", *("".join(f"{cell:>14}" for cell in line) for line in grid), ""]
    lines += refusals(content["rows"])
    crowded = [row["kv_cache_dtype"] for row in served if not row["fits"]]
    if crowded and not content["cure"]:
        lines.append(
            f"No time is given where {content['users']} users do not fit: "
            f"{', '.join(crowded)}."
        )
    return "\n".join([*lines, *content["notes"]]).rstrip()


def user_counts(most: float) -> list[int]:
    """Returns the numbers of users to draw, up to `most`."""
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
            planned.model.tpot(gpu, planned.dtype, count, context) for count in counts
        ]
        left.bar(look.label, counts[-1], color=look.colour)
        style = {"color": look.colour, "marker": look.marker, "markersize": 4}
        if None not in times:
            milliseconds = [1e3 * seconds for seconds in times if seconds]
            right.plot(counts, milliseconds, label=look.label, **style)
    left.set_ylabel(f"users of {context} tokens that fit")
    right.set(xscale="log", xlabel="users", ylabel="time per output token, ms")
    right.set_ylim(bottom=0)
    right.grid(True, which="major", alpha=0.3)
    if right.get_lines():
        right.legend(fontsize=8)
    kind = "an estimate" if content["notes"] else "measured efficiencies"
    name = f"{content['model']}, {content['gpus']} x {content['gpu']}"
    figure.suptitle(f"{name}: {kind}", fontsize=10)
    # Standard output is for the plan alone.
    with redirect_stdout(sys.stderr):
        save(figure, path)
