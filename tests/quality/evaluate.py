# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scores the retrieval model on held-out names, values and text, in PyTorch.

An answer counts if greedy decoding would have given it: each of its tokens, and the one
that ends the turn, is the most likely one after those before it.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from needle_model import CONTEXT, MODEL_FOLDER, load_model
from tasks import (
    END_OF_TEXT,
    Case,
    Encode,
    as_bytes,
    held_out_documents,
    key_value_case,
    multi_needle_case,
    needle_case,
)
from transformers import PreTrainedModel
from vocabulary import Vocabulary

TOKENS_A_BATCH = 65536


@dataclass(frozen=True)
class Plan:
    """The cases that a model is scored on."""

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
def answered_tokens(
    model: PreTrainedModel, both: Sequence[tuple[list[int], list[int]]]
) -> list[bool]:
    """Returns for each prompt and its answer whether greedy decoding would give it."""
    device = model.device
    longest = max(len(prompt) + len(answer) for prompt, answer in both)
    size = max(1, TOKENS_A_BATCH // longest)
    results: list[bool] = []
    for first in range(0, len(both), size):
        batch = both[first : first + size]
        # Rows are padded at their end, which a causal model does not see.
        rows = torch.full((len(batch), longest), END_OF_TEXT)
        for row, (prompt, answer) in zip(rows, batch):
            tokens = prompt + answer
            row[: len(tokens)] = torch.tensor(tokens)
        rows = rows.to(device)
        hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state
        for row, states, (prompt, answer) in zip(rows, hidden, batch):
            start, count = len(prompt), len(answer)
            guesses = model.lm_head(states[start - 1 : start - 1 + count]).argmax(-1)
            results.append(bool((guesses == row[start : start + count]).all()))
    return results


def answered(
    model: PreTrainedModel, cases: Sequence[Case], encode: Encode = as_bytes
) -> list[bool]:
    """Returns for each case whether greedy decoding would give its answer."""
    both = [(case.prompt_tokens(encode), case.answer_tokens(encode)) for case in cases]
    return answered_tokens(model, both)


def percent(
    model: PreTrainedModel, cases: Sequence[Case], encode: Encode = as_bytes
) -> float:
    results = answered(model, cases, encode)
    return round(100 * sum(results) / len(results), 1)


def bits_per_byte(
    model: PreTrainedModel,
    tokens: Sequence[int],
    window: int,
    vocabulary: Vocabulary | None = None,
) -> float:
    """Returns the mean over windows that start afresh, their first token left out.

    The end of a text counts as a byte.
    """
    count = max(1, len(tokens) // window)
    used = torch.tensor(tokens[: count * window], device=model.device)
    total = 0.0
    rows = used.view(count, -1)
    for row in rows:
        logits = logits_of(model, row[None])[0, :-1]
        total += torch.nn.functional.cross_entropy(
            logits, row[1:], reduction="sum"
        ).item()
    predicted = rows[:, 1:].flatten().tolist()
    num_bytes = len(predicted)
    if vocabulary is not None:
        num_bytes = sum(len(vocabulary.bytes_of[token]) or 1 for token in predicted)
    return round(total / num_bytes / math.log(2), 4)


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


def scores(model: PreTrainedModel, plan: Plan, vocabulary: Vocabulary) -> dict:
    """Runs the whole plan, and returns percentages, bits a byte and samples."""
    documents = held_out_documents()
    text = "\n".join(documents)

    def right(make: Callable[[int, int], Case], length: int) -> float:
        """Returns the percentage of right answers to cases of `length` tokens.

        Args:
            make: Makes a case of at most so many bytes from a seed.
            length: Tokens of a case, at most.

        """
        cases = [
            vocabulary.fitting(partial(make, seed=seed), length)
            for seed in range(plan.cases)
        ]
        return percent(model, cases, vocabulary.encode)

    needle = {
        str(length): {
            str(depth): right(
                lambda size, seed, depth=depth: needle_case(size, depth, seed, text),
                length,
            )
            for depth in plan.depths
        }
        for length in plan.lengths
    }
    multi = {
        f"{length}, {asked} of 8": right(
            lambda size, seed, asked=asked: multi_needle_case(
                size, 8, seed, text, asked
            ),
            length,
        )
        for length in plan.lengths
        if length >= 1024
        for asked in (1, 3)
    }
    key_value = {
        str(length): right(key_value_case, length) for length in plan.key_value_lengths
    }
    tokens = vocabulary.documents(documents)[: plan.text_bytes]
    windows = [w for w in (512, 2048, CONTEXT) if w <= len(tokens)]
    samples = []
    for document in documents[:3]:
        start = document.encode()[:600].decode(errors="ignore")
        prompt = vocabulary.encode(start)
        more = continue_greedily(model, prompt, plan.sample_tokens)
        samples.append({"after": start[-120:], "text": vocabulary.decode(more)})
    return {
        "cases_a_cell": plan.cases,
        "needle": needle,
        "multi_needle": multi,
        "key_value": key_value,
        "bits_per_byte": {
            str(w): bits_per_byte(model, tokens, w, vocabulary) for w in windows
        },
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
        lines.append(f"| look-up in a list of {length} tokens | {value} |")
    lines += ["", "| window of held-out text | bits a byte |", "|---|---|"]
    lines += [f"| {w} | {v} |" for w, v in result["bits_per_byte"].items()]
    return "\n".join(lines) + "\n"


def run(folder: Path, device: torch.device, plan: Plan) -> dict:
    """Scores the model in `folder`; writes scores.json there, and prints a table."""
    start = time.monotonic()
    model = load_model(folder).to(device).eval()
    result = scores(model, plan, Vocabulary(folder))
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
