# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compares the format's choices by their effect on a model's predictions.

Every arm runs held-out text through the model in fp32 with its cache in place of K and
V, and is compared with the same model on exact K and V. Writes choices.json, with all
figures, and choices.md, a table a question.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import upstream
from attention import STORED, Cache, LabModel, Reading
from measure import Comparison
from report import setting, table, write_results
from rotations import ROTATIONS
from scalar import ScaleRule
from variants import (
    Variant,
    parts,
    plain_variants,
    preset,
    scale_variants,
    upstream_preset,
)

QUALITY = Path(__file__).resolve().parents[1]
MODEL = QUALITY.parents[1] / "models" / "needle-qwen3"
PRESETS = ("turbo4", "k4v3", "turbo3")
# The remark above a question's table.
REMARKS = {
    "Rotation": "Scalar codes at both widths, keys unbiased on average.",
    "Scales": "Scalar codes at both widths, keys unbiased on average.",
    "Codes of 3 bits": "The same bytes and kind of scales.",
}


@dataclass(frozen=True)
class Arm:
    """One row: a cache, under the question that it answers."""

    question: str
    name: str
    layers: tuple[Variant | None, ...]
    reading: Reading = STORED
    query: str = "exact"

    def num_bytes(self, head_size: int) -> float:
        """Bytes of a token and KV head, on average over the layers."""
        in_bf16 = 4 * head_size
        sizes = [layer.num_bytes if layer else in_bf16 for layer in self.layers]
        return sum(sizes) / len(sizes)


class Arms:
    """All arms for a model's layers, its head size, and the length of texts."""

    def __init__(self, num_layers: int, head_size: int, length: int):
        self.num_layers = num_layers
        self.head_size = head_size
        self.length = length

    def uniform(self, question: str, variant: Variant, **kwargs) -> Arm:
        return Arm(question, variant.name, (variant,) * self.num_layers, **kwargs)

    def named(self, question: str, name: str, variant: Variant | None, **kwargs) -> Arm:
        return Arm(question, name, (variant,) * self.num_layers, **kwargs)

    def __iter__(self) -> Iterator[Arm]:
        yield from self.formats()
        yield from self.rotations()
        yield from self.scales()
        yield from self.narrow_codes()
        yield from self.key_statistics()
        yield from self.mixed_layers()
        yield from self.prefills()
        yield from self.queries()

    def formats(self) -> Iterator[Arm]:
        question = "Formats"
        plain = plain_variants(self.head_size)
        for variant in plain.values():
            yield self.uniform(question, variant)
        for name in PRESETS:
            yield self.uniform(question, preset(name, self.head_size))
        kept = upstream.boundary_layers(self.num_layers)
        for name in upstream.PRESETS:
            variant = upstream_preset(name, self.head_size)
            yield self.uniform(question, variant)
            layers = [
                plain["bf16"] if layer in kept else variant
                for layer in range(self.num_layers)
            ]
            yield Arm(question, f"{name}, boundary layers in bf16", tuple(layers))

    def rotations(self) -> Iterator[Arm]:
        for bits in (4, 3):
            for kind in ROTATIONS:
                name = f"{bits} bits, {kind}"
                rule = ScaleRule(16, "delta")
                variant = parts(name, self.head_size, bits, rule, kind)
                yield self.uniform("Rotation", variant)

    def scales(self) -> Iterator[Arm]:
        for bits in (4, 3):
            for variant in scale_variants(self.head_size, bits):
                yield self.uniform("Scales", variant)

    def narrow_codes(self) -> Iterator[Arm]:
        question, unbiased = "Codes of 3 bits", "on average"
        name = f"scalar, unbiased {unbiased}"
        scalar = parts(name, self.head_size, 3, ScaleRule(16, "delta"))
        yield self.uniform(question, scalar)
        name = f"trellis-coded, unbiased {unbiased}"
        yield self.uniform(
            question, preset("turbo3", self.head_size, unbiased, name=name)
        )
        yield self.uniform(question, preset("turbo3", self.head_size))

    def key_statistics(self) -> Iterator[Arm]:
        changes: dict[str, dict[str, dict]] = {
            "Mean of K": {"without mean": {"subtracts_mean": True}},
            "Bias of K": {
                "unbiased on average": {"unbiased": "on average"},
                "least squares": {"unbiased": "none"},
            },
        }
        for question, changed in changes.items():
            for name in ("turbo4", "turbo3"):
                yield self.uniform(question, preset(name, self.head_size))
                for label, change in changed.items():
                    label = f"{name}, {label}"
                    variant = preset(name, self.head_size, name=label, **change)
                    yield self.uniform(question, variant)

    def mixed_layers(self) -> Iterator[Arm]:
        wide, narrow = (preset(name, self.head_size) for name in ("turbo4", "turbo3"))
        choices = {f"layer {index}": {index} for index in range(self.num_layers)}
        choices |= {"no layer": set(), "every layer": set(range(self.num_layers))}
        choices["boundary layers"] = upstream.boundary_layers(self.num_layers)
        for name, kept in choices.items():
            layers = [
                wide if index in kept else narrow for index in range(self.num_layers)
            ]
            yield Arm("turbo3 with turbo4 in", name, tuple(layers))

    def prefills(self) -> Iterator[Arm]:
        half, whole = self.length // 2, self.length
        for name in ("turbo4", "turbo3"):
            variant = preset(name, self.head_size)
            readings = {"stored": STORED, "the token itself raw": Reading(whole, 1)}
            for divisor in (1, 2, 8):
                chunk = half // divisor
                readings[f"raw, prompt in chunks of {chunk}"] = Reading(half, chunk)
            chunk = self.length // 16
            readings[f"raw, all in chunks of {chunk}"] = Reading(whole, chunk)
            for label, reading in readings.items():
                yield self.named(
                    "Prefill", f"{name}, {label}", variant, reading=reading
                )

    def queries(self) -> Iterator[Arm]:
        for rounding in ("fp16", "int8"):
            yield self.named(
                "Query in scores", f"exact K and V, {rounding}", None, query=rounding
            )
        for name in ("turbo4", "turbo3"):
            variant = preset(name, self.head_size)
            for rounding in ("exact", "fp16", "int8"):
                yield self.named(
                    "Query in scores", f"{name}, {rounding}", variant, query=rounding
                )


def read_text(path: Path, chunks: int, length: int, device: str) -> torch.Tensor:
    """The first ``chunks`` texts of ``length`` bytes, a token each."""
    content, needed = path.read_bytes(), chunks * length
    if len(content) < needed:
        raise ValueError(f"{path} has {len(content)} bytes, {needed} are needed")
    tokens = torch.frombuffer(bytearray(content[:needed]), dtype=torch.uint8)
    return tokens.long().view(chunks, length).to(device)


def run(args: argparse.Namespace) -> dict:
    """All figures, and the setting that they were measured in."""
    lab = LabModel(args.model, args.device)
    texts = read_text(args.text, args.chunks + 1, args.length, args.device)
    # The mean of K comes from text that nothing else is measured on.
    means = lab.key_means(texts[-1:])
    batches = texts[:-1].split(args.batch)
    exact_cache = Cache([None] * lab.num_layers)
    exact = [lab.log_probs(batch, exact_cache) for batch in batches]
    half = args.length // 2
    parts_of_text = {
        "all": slice(0, None),
        "prompt": slice(0, half),
        "decoded": slice(half, None),
    }
    rows, measured = [], {}
    for arm in Arms(lab.num_layers, lab.head_size, args.length):
        if args.questions and arm.question not in args.questions:
            continue
        key = (arm.layers, arm.reading, arm.query)
        if key not in measured:
            started = time.monotonic()
            cache = Cache(arm.layers, arm.reading, arm.query, means)
            comparison = Comparison()
            for batch, expected in zip(batches, exact):
                comparison.add(expected, lab.log_probs(batch, cache), batch)
            measured[key] = {
                part: comparison.figures(positions)
                for part, positions in parts_of_text.items()
            }
            seconds = time.monotonic() - started
            print(f"{arm.question}: {arm.name}: {seconds:.1f} s", file=sys.stderr)
        rows.append(
            {
                "question": arm.question,
                "arm": arm.name,
                "bytes": arm.num_bytes(lab.head_size),
                **measured[key],
            }
        )
    sizes = {"chunks": args.chunks, "length": args.length}
    return {"setting": setting(args) | sizes, "rows": rows}


def markdown(results: dict) -> str:
    """The tables."""
    described = results["setting"]
    lines = [
        "# What each choice does to a model's predictions",
        "",
        f"{described['model']}, {described['chunks']} texts of {described['length']} "
        f"bytes, fp32 on {described['device']}, PyTorch {described['torch']}. KL in "
        "millinats a token from the same model on exact K and V, with the standard "
        "error of the mean; bytes of a token and KV head; everything is read from the "
        "cache where no row says otherwise. Written by `tests/quality/lab/choices.py`.",
    ]
    for question, rows in groupby(results["rows"], lambda row: row["question"]):
        lines += ["", f"## {question}", ""]
        if question in REMARKS:
            lines += [REMARKS[question], ""]
        columns = ["arm", "bytes", "KL", "99 %", "perplexity", "same top token"]
        if question == "Prefill":
            columns += ["KL of first half", "KL of second half"]
        lines += table([columns, *map(cells_of, rows)])
    return "\n".join(lines) + "\n"


def cells_of(row: dict) -> list[str]:
    figures = row["all"]
    cells = [
        row["arm"],
        f"{row['bytes']:.4g}",
        f"{1e3 * figures['kl']:.3g} ± {1e3 * figures['kl_error']:.2g}",
        f"{1e3 * figures['kl_p99']:.3g}",
        f"{100 * figures['perplexity']:+.2f} %",
        f"{100 * figures['agreement']:.2f} %",
    ]
    if row["question"] == "Prefill":
        cells += [f"{1e3 * row[part]['kl']:.3g}" for part in ("prompt", "decoded")]
    return cells


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="its folder")
    parser.add_argument("--text", type=Path, default=QUALITY / "heldout.txt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chunks", type=int, default=12, help="texts to measure on")
    parser.add_argument("--length", type=int, default=8192, help="of a text, in bytes")
    parser.add_argument("--batch", type=int, default=4, help="texts at a time")
    parser.add_argument("--questions", nargs="*", help="tables to make, or all")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    results = run(args)
    write_results(args.output, "choices", results, markdown(results))


if __name__ == "__main__":
    main()
