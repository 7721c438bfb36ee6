# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tables that `check_model.py` prints."""

from typing import Any

from turbo_process.arm import TURBO_DTYPES
from turbo_quality.report import table

from turbo_check.advice import MILLI, gain_of_layer, ran

Row = dict[str, Any]

# Layers whose K is shown; the JSON has all.
SHOWN_LAYERS = 5


def cells(row: Row, contexts: list[int], is_reference: bool) -> list[str]:
    """Returns an arm's figures in the header's order."""
    divergences = [row["decode"][str(context)] for context in contexts]
    divergences += [row["prefill"]] if row["prefill"] else []
    needles = row["needles"]
    line = [
        f"`{row['arm']}`",
        f"{row['bytes_per_token']:,.0f}",
        f"{row['capacity']:.2f}x",
        *(
            f"{MILLI * d['kl_mean']:.2f} / {MILLI * d['kl_p99']:.1f}"
            for d in divergences
        ),
        f"{row['perplexity']:.3f}"
        if is_reference
        else f"{row['perplexity_change']:+.2%}",
        f"{row['top1']:.1%}",
        f"{row['greedy_prefix']:.1f} of {row['greedy_steps']}",
        f"{needles['found']} of {needles['cases']}",
    ]
    if "gsm8k" in row:
        score = row["gsm8k"]
        line.append(f"{score['score']:.1%} ± {score['stderr']:.1%}")
    return line


def arms_table(rows: list[Row], contexts: list[int]) -> list[str]:
    header = ["cache", "bytes a token", "capacity"]
    header += [f"KL at {context}" for context in contexts]
    header += ["KL in prefill"] if rows[0]["prefill"] else []
    header += ["perplexity", "same top token", "greedy tokens", "needles"]
    measured = [row for row in rows if ran(row)]
    if any("gsm8k" in row for row in measured):
        header.append("GSM8K")
    lines = [cells(row, contexts, row is rows[0]) for row in measured]
    width = len(header)
    return table([header, *(line + [""] * (width - len(line)) for line in lines)])


def keys_table(layers: list[Row]) -> list[str]:
    """Returns the layers whose K has the longest mean beside its deviation."""
    header = ["layer", "head", "mean of K", "left of it", "deviation", "ratio", "V's"]
    ranked = sorted(layers, key=lambda layer: layer["ratio"], reverse=True)
    lines = [
        [
            str(layer["layer"]),
            str(layer["head"]),
            f"{layer['k_mean']:.1f}",
            f"{layer['k_left']:.1f}",
            f"{layer['k_deviation']:.1f}",
            f"{layer['ratio']:.2f}",
            f"{layer['v_ratio']:.2f}",
        ]
        for layer in ranked[:SHOWN_LAYERS]
    ]
    return table([header, *lines])


def layers_table(rows: list[Row], packed: Row) -> list[str]:
    header = ["in bf16", "bytes a token", "KL", "less than all packed"]
    lines = []
    for row in rows:
        if ran(row):
            gain, stderr = gain_of_layer(row, packed)
            spread = f" ± {MILLI * stderr:.2f}" if stderr is not None else ""
            lines.append(
                [
                    ", ".join(row["skip_layers"]),
                    f"{row['bytes_per_token']:,.0f}",
                    f"{MILLI * row['kl_mean']:.2f}",
                    f"{MILLI * gain:.2f}{spread}",
                ]
            )
    return table([header, *lines])


def prefill_note(rows: list[Row], chunk: int) -> list[str]:
    """Returns a sentence about the column of prefill, if there is one."""
    prefill = next(row["prefill"] for row in rows if ran(row))
    if not prefill:
        return []
    return [
        f"In prefill: of the longest texts' positions from {chunk} on, whose chunks "
        f"read the cache ({prefill['positions']:,} positions).",
    ]


def markdown(report: dict[str, Any]) -> str:
    """Returns all tables with their explanations, and the advice."""
    facts, plan, rows = report["facts"], report["plan"], report["arms"]
    positions = next(row["positions"] for row in rows if ran(row))
    outcomes = (
        "the whole vocabulary"
        if report["is_exact"]
        else f"the reference's {plan['top']} likeliest tokens and any other, a lower "
        "bound of the whole vocabulary's"
    )
    text = [
        f"`{report['model']}` on {facts['gpu'] or 'a CPU'}; vllm {facts['vllm']}, "
        f"torch {facts['torch']}; commit {facts['commit']}.",
        f"KL divergence from `{rows[0]['arm']}` in millinats, mean / 99th percentile, "
        f"of {outcomes}, while decoding the last {plan['decode_steps']} tokens of each "
        f"context ({positions:,} positions).",
        *prefill_note(rows, plan["chunk"]),
        "",
        *arms_table(rows, report["contexts"]),
    ]
    notes = [f"- `{row['arm']}`: {row['error']}" for row in rows if not ran(row)]
    notes += [
        f"- `{row['arm']}`: no GSM8K: {row['gsm8k_error']}"
        for row in rows
        if "gsm8k_error" in row
    ]
    # An engine says at start why it serves without a window.
    notes += [
        f"- `{row['arm']}`: this engine cannot have a recent window; its log says why."
        for row in rows
        if ran(row) and row["arm"] in TURBO_DTYPES and not row["window_layers"]
    ]
    text += ["", *notes] if notes else []
    if report["keys"]:
        text += [
            "",
            "Length of the mean of K over positions beside K's deviation from it, of "
            f"the worst head of {len(report['keys'])} layers; left of it: without the "
            "offset that the turbo dtypes take off.",
            "",
            *keys_table(report["keys"]),
        ]
    layers = report["layers"]
    if layers:
        packed = next(row for row in rows if row["arm"] == layers["packed"])
        skipped = " ".join(layers["skip"])
        flag = f"--kv-cache-dtype-skip-layers {skipped}"
        text += [
            "",
            f"`{layers['packed']}` with single layers in bf16, KL in millinats:",
            "",
            *layers_table(layers["rows"], packed),
            "",
            *(
                f"- {row['arm']}: {row['error']}"
                for row in layers["rows"]
                if not ran(row)
            ),
            f"Worth their bytes: {flag}" if skipped else "No layer is worth its bytes.",
        ]
    return "\n".join([*text, "", f"Advice: {report['advice']}.", ""])
