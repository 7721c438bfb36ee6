# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measures the share of attention that goes to the tokens that indexers list."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from indexer import Indexer, index_scores, indexers, is_later, round_to_fp8
from needle_model import CONTEXT, load_model
from tasks import as_bytes, held_out_documents, key_value_case, needle_case
from transformers import PreTrainedModel

# Rows of each kind, and query tokens of a row of text.
ROWS = 8
QUERIES = 512
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

# A row's tokens, and the places of its query tokens.
Row = tuple[list[int], list[int]]


def attention_shares(
    query: torch.Tensor, key: torch.Tensor, scaling: float, places: torch.Tensor
) -> torch.Tensor:
    """Returns the mean of the heads' attention weights, (rows, Q, T) float32.

    Args:
        query: (rows, heads, T, head_dim).
        key: (rows, heads, T, head_dim).
        scaling: The softmax scale.
        places: (rows, Q), positions of the query tokens.

    """
    index = places[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
    scores = (query.gather(2, index) @ key.transpose(2, 3)).float() * scaling
    hidden = is_later(places, key.shape[2]).unsqueeze(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).mean(1)


class Recall:
    """Shares of a layer's attention, by the layer's number.

    Attributes:
        places: (1, Q), query tokens of the row that the model reads.
        listed: Shares of the listed tokens.
        best: Shares of the tokens with the largest weights: no list has more.
        last: Shares of the last tokens.

    """

    places: torch.Tensor

    def __init__(self) -> None:
        self.listed: dict[int, list[float]] = {}
        self.best: dict[int, list[float]] = {}
        self.last: dict[int, list[float]] = {}

    @torch.no_grad()
    def __call__(
        self, indexer: Indexer, query: torch.Tensor, key: torch.Tensor, scaling: float
    ) -> None:
        hidden_states, compressed, (cos, sin) = indexer.inputs
        own, length, size = self.places[0], key.shape[2], indexer.index_topk
        shares = attention_shares(query, key, scaling, self.places)
        states = indexer.queries(compressed[:, own], (cos[:, own], sin[:, own]))
        keys = round_to_fp8(indexer.keys(hidden_states, (cos, sin)))
        weights = indexer.head_weights(hidden_states[:, own])
        scores = index_scores(round_to_fp8(states), keys, weights)
        scores.masked_fill_(is_later(self.places, length), float("-inf"))
        listed = shares.gather(2, scores.topk(size, dim=-1).indices).sum(-1)
        is_last = ~is_later(own, length) & is_later(own - size, length)
        found = (
            (self.listed, listed),
            (self.best, shares.topk(size, dim=-1).values.sum(-1)),
            (self.last, (shares * is_last).sum(-1)),
        )
        for sums, values in found:
            sums.setdefault(indexer.layer_idx, []).append(values.mean().item())


def text_rows(length: int) -> list[Row]:
    """Returns rows of held-out text, with query tokens of their second half."""
    tokens = as_bytes("\n".join(held_out_documents()))
    step = (len(tokens) - length) // ROWS
    places = list(range(length // 2, length, max(1, length // 2 // QUERIES)))
    return [(tokens[i * step : i * step + length], places) for i in range(ROWS)]


def case_rows(length: int, make: Callable) -> list[Row]:
    """Returns chats, whose query tokens predict the answers."""
    rows = []
    for seed in range(ROWS):
        case = make(seed)
        prompt, answer = case.prompt_tokens(), case.answer_tokens()
        tokens = (prompt + answer)[:length]
        rows.append((tokens, list(range(len(prompt) - 1, len(tokens) - 1))))
    return rows


def kinds_of_rows(length: int) -> dict[str, list[Row]]:
    text = "\n".join(held_out_documents())
    return {
        "text": text_rows(length),
        "needle": case_rows(
            length,
            lambda seed: needle_case(length, DEPTHS[seed % len(DEPTHS)], seed, text),
        ),
        "key_value": case_rows(length, lambda seed: key_value_case(length, seed)),
    }


@torch.no_grad()
def measure_recall(model: PreTrainedModel, length: int = CONTEXT) -> dict:
    """Returns shares by kind of row: "listed", "best" and "last", each by layer.

    The model attends to all tokens meanwhile.
    """
    found = {}
    own = list(indexers(model))
    lists = [indexer.lists for indexer in own]
    for kind, rows in kinds_of_rows(length).items():
        recall = Recall()
        for indexer in own:
            indexer.observer, indexer.lists = recall, False
        for tokens, places in rows:
            recall.places = torch.tensor([places], device=model.device)
            row = torch.tensor([tokens], device=model.device)
            model.model(input_ids=row, use_cache=False)
        found[kind] = {
            name: [round(sum(values) / len(values), 4) for values in layers.values()]
            for name, layers in vars(recall).items()
            if name != "places"
        }
    for indexer, listing in zip(own, lists, strict=True):
        indexer.observer, indexer.lists = None, listing
    return found


def recall_table(found: dict) -> str:
    """Returns the shares as Markdown, in percent."""
    lines = ["| query tokens of | tokens | % of attention, by layer |", "|---|---|---|"]
    for kind, shares in found.items():
        for name, layers in shares.items():
            values = ", ".join(f"{100 * value:.1f}" for value in layers)
            lines.append(f"| {kind} | {name} | {values} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--length", type=int, default=CONTEXT)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    shares = measure_recall(load_model(args.folder).to(args.device), args.length)
    print(json.dumps(shares, indent=1))
    print(recall_table(shares))
