# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The bars that turbo dtypes have to meet in `quality.py`, and its table."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "quality"))

from tasks import RIVALS  # noqa: E402

from turbo_quality.cases import KINDS  # noqa: E402

Row = dict[str, Any]

# (our dtype, vLLM's preset, the largest ratio of the first's KL to the second's).
KL_BARS = (
    ("turbo4", "turboquant_4bit_nc", 0.5),
    ("k4v3", "turboquant_4bit_nc", 1.0),
    ("turbo3", "turboquant_3bit_nc", 0.5),
)
# The same for bytes per token, against presets that compress every layer.
BYTE_BARS = (("k4v3", "turboquant_4bit_nc:all", 0.9),)
NEEDLE_BARS = ("turbo4", "k4v3")
PARTS = ("decode", "prefill")
HEADER = (
    "cache", "bytes a token", "of reference", "KL decode", "p99", "KL prefill", "p99",
    "top-1", "perplexity", "KL rivals", "top-1", "needle", "multi", "key-value",
    "greedy tokens",
)  # fmt: skip


def ratio_bar(
    text: str, value: float, other: float, limit: float, stderr: float | None = None
) -> Row:
    ratio = value / other
    return {
        "bar": text,
        "ratio": ratio,
        "stderr": stderr,
        "limit": limit,
        "held": ratio <= limit,
    }


def ratio_error(values: list[float], others: list[float]) -> float | None:
    """Returns the standard error of the ratio of two means over the same texts.

    It is the first-order error. A text that is hard for one arm is hard for the other,
    and that part cancels.
    """
    if len(values) < 2:
        return None
    own, other = np.array(values), np.array(others)
    rest = own - own.mean() / other.mean() * other
    return float(rest.std(ddof=1) / np.sqrt(len(rest)) / other.mean())


def bars(rows: list[Row]) -> list[Row]:
    """Returns each bar whose arms ran: its `bar`, `ratio`, `stderr`, `limit`, `held`.

    A needle bar's ratio is the share of the reference's needles that the arm misses.
    """
    ran = {row["arm"]: row for row in rows if "error" not in row}
    found = []
    for ours, preset, limit in KL_BARS:
        for theirs in (preset, f"{preset}:all"):
            if ours not in ran or theirs not in ran:
                continue
            for part in PARTS:
                own, other = (ran[name][part] for name in (ours, theirs))
                text = f"KL of {part}, {ours} over {theirs}"
                stderr = ratio_error(own["kl_texts"], other["kl_texts"])
                bar = own["kl_mean"], other["kl_mean"], limit, stderr
                found.append(ratio_bar(text, *bar))
    for ours, theirs, limit in BYTE_BARS:
        if ours in ran and theirs in ran:
            own, other = (ran[name]["bytes_per_token"] for name in (ours, theirs))
            found.append(ratio_bar(f"bytes, {ours} over {theirs}", own, other, limit))
    reference = rows[0]["arm"]
    for ours in NEEDLE_BARS:
        if ours in ran and reference in ran:
            score = ran[reference]["tasks"]["needle"]["score"]
            missing = score - ran[ours]["tasks"]["needle"]["score"]
            text = f"needles that {ours} misses beyond {reference}"
            found.append(ratio_bar(text, missing, score or 1.0, 0.0))
    return found


def kl(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def cells(row: Row, reference: Row) -> list[str]:
    """Returns an arm's figures in the header's order."""
    decode, prefill, tasks = row["decode"], row["prefill"], row["tasks"]
    rivals = row["rivals"]
    stderr = [part["kl_stderr"] for part in (decode, prefill, rivals)]
    spread = [f" ± {value:.0e}" if value else "" for value in stderr]
    return [
        f"`{row['arm']}`",
        f"{row['bytes_per_token']:,.0f}",
        f"{row['bytes_per_token'] / reference['bytes_per_token']:.1%}",
        kl(decode["kl_mean"]) + spread[0],
        kl(decode["kl_p99"]),
        kl(prefill["kl_mean"]) + spread[1],
        kl(prefill["kl_p99"]),
        f"{decode['top1']:.2%}",
        f"{decode['perplexity']:.4f}",
        kl(rivals["kl_mean"]) + spread[2],
        f"{rivals['top1']:.1%}",
        *(f"{tasks[kind]['score']:.1%}" if kind in tasks else "" for kind in KINDS),
        f"{row['greedy_prefix']:.1f}",
    ]


def table(lines: list[list[str]]) -> list[str]:
    """Returns rows of a Markdown table; the first is its header."""
    first, *rest = ["| " + " | ".join(line) + " |" for line in lines]
    return [first, "|" + "---|" * len(lines[0]), *rest]


def notes(rows: list[Row]) -> list[str]:
    """Returns notes on single arms, for the table's reader."""
    lines = []
    for row in rows:
        if "error" in row:
            lines.append(f"- `{row['arm']}`: not measured: {row['error']}")
        else:
            changes = "".join(f"; {change}" for change in row["overrides"])
            backends = ", ".join(row["backends"])
            lines.append(
                f"- `{row['arm']}`: {backends}, chunks of {row['chunk']}{changes}"
            )
    return lines


def markdown(report: dict[str, Any]) -> str:
    """Returns the table, the bars, and a description of the measurement."""
    facts, plan, rows = report["facts"], report["plan"], report["arms"]
    reference = rows[0]
    measured = [cells(row, reference) for row in rows if "error" not in row]
    positions = {part: reference[part]["positions"] for part in PARTS}
    versions = ", ".join(
        f"{name} {facts[name]}" for name in ("vllm", "torch", "triton")
    )
    text = [
        f"`{report['model']}` in {report['dtype']} on {facts['gpu'] or 'a CPU'}; "
        f"{versions}; commit {facts['commit']}.",
        f"KL divergence in nats from `{reference['arm']}`, mean ± standard error and "
        f"99th percentile, of {plan['texts']} texts of {plan['context']} tokens: the "
        f"last {plan['decode_steps']} decoded one by one ({positions['decode']:,} "
        f"positions), and all beyond the first chunk prefilled in chunks "
        f"({positions['prefill']:,}). Top-1 agreement and perplexity are those of "
        "decoding. Rivals: the first digit of an answer that weighs "
        f"{RIVALS} far codes at once, {reference['rivals']['positions']} texts. Greedy "
        "tokens: how many of "
        f"{plan['continuation_steps']} agree before the first that differs.",
        "",
        *table([list(HEADER), *measured]),
        "",
        *notes(rows),
    ]
    if report["bars"]:
        lines = [["bar", "measured", "at most", "held"]]
        for bar in report["bars"]:
            held = "yes" if bar["held"] else "**no**"
            spread = f" ± {bar['stderr']:.3f}" if bar["stderr"] else ""
            ratio = f"{bar['ratio']:.3f}{spread}"
            lines.append([bar["bar"], ratio, f"{bar['limit']:.2f}", held])
        text += ["", *table(lines)]
    return "\n".join([*text, "", f"    {facts['command']}", ""])
