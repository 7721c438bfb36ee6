# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scores the retrieval model on held-out names, values and text, in PyTorch.

An answer counts if each of its tokens, and the one that ends the turn, is the most
likely one after those before it: what greedy decoding would have said.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from needle_model import CONTEXT, MODEL_FOLDER, load_model
from tasks import (
    END_OF_TEXT,
    Case,
    held_out_documents,
    key_value_case,
    multi_needle_case,
    needle_case,
)
from transformers import PreTrainedModel

TOKENS_A_BATCH = 65536


@dataclass(frozen=True)
class Plan:
    """What is asked, and how often."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cases: int
    key_value_lengths: tuple[int, ...]
    text_bytes: int
    sample_tokens: int


FULL = Plan(
    lengths=(512, 1024, 2048, 4096, CONTEXT),
    depths=(0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0),
    cases=40,
    key_value_lengths=(512, 1024, 2048, 4096, CONTEXT),
    text_bytes=262144,
    sample_tokens=200,
)
SHORT = Plan((512,), (0.0, 0.5, 1.0), 4, (512,), 8192, 16)


@torch.inference_mode()
def logits_of(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """Returns the last hidden states' logits in float32, (rows, tokens, vocabulary)."""
    hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state
    return model.lm_head(hidden).float()


@torch.inference_mode()
def answered(model: PreTrainedModel, cases: Sequence[Case]) -> list[bool]:
    """Returns for each case whether greedy decoding would give its answer."""
    device = model.device
    longest = max(len(c.prompt_token_ids) + len(c.answer_token_ids) for c in cases)
    size = max(1, TOKENS_A_BATCH // longest)
    results: list[bool] = []
    for first in range(0, len(cases), size):
        batch = cases[first : first + size]
        # The end is padded, which a causal model does not see.
        rows = torch.full((len(batch), longest), END_OF_TEXT)
        for row, case in zip(rows, batch):
            tokens = case.prompt_token_ids + case.answer_token_ids
            row[: len(tokens)] = torch.tensor(tokens)
        rows = rows.to(device)
        hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state
        for row, states, case in zip(rows, hidden, batch):
            start, count = len(case.prompt_token_ids), len(case.answer_token_ids)
            guesses = model.lm_head(states[start - 1 : start - 1 + count]).argmax(-1)
            results.append(bool((guesses == row[start : start + count]).all()))
    return results


def percent(model: PreTrainedModel, cases: Sequence[Case]) -> float:
    results = answered(model, cases)
    return round(100 * sum(results) / len(results), 1)


def bits_per_byte(model: PreTrainedModel, tokens: Sequence[int], window: int) -> float:
    """Returns the mean over windows that start afresh, their first token left out."""
    count = max(1, len(tokens) // window)
    used = torch.tensor(tokens[: count * window], device=model.device)
    total = 0.0
    rows = used.view(count, -1)
    for row in rows:
        logits = logits_of(model, row[None])[0, :-1]
        total += torch.nn.functional.cross_entropy(
            logits, row[1:], reduction="sum"
        ).item()
    return round(total / (used.numel() - count) / math.log(2), 4)


@torch.inference_mode()
def continue_greedily(
    model: PreTrainedModel, tokens: Sequence[int], count: int
) -> list[int]:
    """Returns `count` more tokens; the whole row is computed each time."""
    room = len(tokens) + count
    row = torch.full((1, room), END_OF_TEXT, device=model.device)
    row[0, : len(tokens)] = torch.tensor(tokens)
    for index in range(len(tokens), room):
        hidden = model.model(input_ids=row, use_cache=False).last_hidden_state
        row[0, index] = model.lm_head(hidden[0, index - 1]).argmax(-1)
    return row[0, len(tokens) :].tolist()


def text_tokens(documents: Sequence[str], limit: int) -> list[int]:
    tokens: list[int] = []
    for document in documents:
        tokens += [*document.encode(), END_OF_TEXT]
    return tokens[:limit]


def scores(model: PreTrainedModel, plan: Plan) -> dict:
    """Runs the whole plan, and returns percentages, bits a byte and samples."""
    documents = held_out_documents()
    text = "\n".join(documents)
    needle = {
        str(length): {
            str(depth): percent(
                model,
                [needle_case(length, depth, s, text) for s in range(plan.cases)],
            )
            for depth in plan.depths
        }
        for length in plan.lengths
    }
    multi = {
        f"{length}, {asked} of 8": percent(
            model,
            [
                multi_needle_case(length, 8, seed, text, asked)
                for seed in range(plan.cases)
            ],
        )
        for length in plan.lengths
        if length >= 1024
        for asked in (1, 3)
    }
    key_value = {
        str(length): percent(
            model, [key_value_case(length, seed) for seed in range(plan.cases)]
        )
        for length in plan.key_value_lengths
    }
    tokens = text_tokens(documents, plan.text_bytes)
    windows = [w for w in (512, 2048, CONTEXT) if w <= len(tokens)]
    samples = []
    for document in documents[:3]:
        prompt = document.encode()[:600]
        more = continue_greedily(model, list(prompt), plan.sample_tokens)
        said = bytes(t for t in more if t < 256).decode(errors="replace")
        samples.append({"after": prompt[-120:].decode(errors="replace"), "text": said})
    return {
        "cases_a_cell": plan.cases,
        "needle": needle,
        "multi_needle": multi,
        "key_value": key_value,
        "bits_per_byte": {str(w): bits_per_byte(model, tokens, w) for w in windows},
        "samples": samples,
    }


def table(result: dict) -> str:
    """Returns the scores as Markdown."""
    depths = list(next(iter(result["needle"].values())))
    lines = [
        "| needle, % right | " + " | ".join(f"depth {d}" for d in depths) + " |",
        "|---" * (len(depths) + 1) + "|",
    ]
    for length, row in result["needle"].items():
        lines.append(f"| {length} | " + " | ".join(str(v) for v in row.values()) + " |")
    lines += ["", "| task | % right |", "|---|---|"]
    for case, value in result["multi_needle"].items():
        lines.append(f"| {case} codes asked for, length and number | {value} |")
    for length, value in result["key_value"].items():
        lines.append(f"| look-up in a list of {length} bytes | {value} |")
    lines += ["", "| window of held-out text | bits a byte |", "|---|---|"]
    lines += [f"| {w} | {v} |" for w, v in result["bits_per_byte"].items()]
    return "\n".join(lines) + "\n"


def run(folder: Path, device: torch.device, plan: Plan) -> dict:
    """Scores the model in `folder`; writes scores.json there, and prints a table."""
    start = time.monotonic()
    model = load_model(folder).to(device).eval()
    result = scores(model, plan)
    result["seconds"] = round(time.monotonic() - start, 1)
    (folder / "scores.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result), flush=True)
    for sample in result["samples"]:
        print(f"...{sample['after']}[[{sample['text']}]]\n")
    return result


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL_FOLDER)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--short", action="store_true", help="a few short cases")
    return parser


if __name__ == "__main__":
    arguments = build_parser().parse_args()
    plan = SHORT if arguments.short else FULL
    run(arguments.folder, torch.device(arguments.device), plan)
