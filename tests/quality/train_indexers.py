# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Teaches the indexers of a trained sparse model, on one GPU, and scores the model.

`train.py` leaves them as they were drawn. The model stays as it is. Each indexer learns
the attention of its layer to all tokens, as in the dense warm-up of DeepSeek V3.2
(arXiv:2512.02556). The target is the mean of the heads' weights. The loss is the
divergence of the softmax of scores from it. Query tokens are drawn from those that see
more tokens than a list has. Up to a half of them predict answers.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import evaluate
import torch
import train
from batches import Phase, Rows, keys
from indexer import Indexer, attend_to_all, index_scores, indexers, is_later
from needle_model import CONTEXT, load_model, save_model
from optimizers import make_optimizers
from recall import attention_shares, measure_recall, recall_table
from transformers import PreTrainedModel

STEPS = 2000
LOG_EVERY = 50
# Query tokens of a row, half of them predict answers if there are so many.
QUERIES = 512
TOKENS = 65536

Divergence = Callable[..., torch.Tensor]


def divergence(
    queries: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    shares: torch.Tensor,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Returns the mean divergence in nats of the indexer's softmax from attention.

    Args:
        queries: See `index_scores`.
        keys: See `index_scores`.
        weights: See `index_scores`.
        shares: (rows, Q, T), attention weights.
        hidden: (rows, Q, T), whether a query token does not see a token.

    """
    scores = index_scores(queries, keys, weights).masked_fill(hidden, float("-inf"))
    logs = scores.log_softmax(-1).masked_fill(hidden, 0.0)
    own = shares.clamp(min=torch.finfo(shares.dtype).tiny).log()
    return (shares * (own - logs)).sum(-1).mean()


def draw_places(weights: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Draws query tokens of rows, those that predict answers for up to a half.

    Args:
        weights: (rows, T), the weights of targets in the loss.
        first: The first token that may be drawn.
        count: Query tokens of a row.

    Returns:
        (rows, count) positions.

    """
    chances = torch.rand(weights.shape, device=weights.device)
    chances[:, :first] = -1.0
    is_answer = (weights > 1) & (chances >= 0)
    some = (chances + is_answer).topk(count // 2, dim=1).indices
    chances.scatter_(1, some, -2.0)
    others = chances.topk(count - count // 2, dim=1).indices
    return torch.cat([some, others], 1)


class Teacher:
    """A frozen model whose indexers learn from its attention."""

    def __init__(self, model: PreTrainedModel, queries: int, compiled: bool):
        self.model = model.eval().requires_grad_(False)
        attend_to_all(model)
        self.queries = queries
        self.divergence: Divergence = divergence
        if compiled:
            self.divergence = torch.compile(divergence, fullgraph=True, dynamic=False)
        self.indexers = list(indexers(model))
        for indexer in self.indexers:
            # Master weights: products take them in the dtype of the states.
            indexer.float().requires_grad_(True)
            indexer.observer = self.teach
        named = [
            (f"{number}.{name}", weight)
            for number, indexer in enumerate(self.indexers)
            for name, weight in indexer.named_parameters()
        ]
        self.optimizers = make_optimizers(
            [weight for _, weight in named if weight.dim() == 2],
            [weight for _, weight in named if weight.dim() < 2],
        )
        groups = [group for o in self.optimizers for group in o.param_groups]
        self.rates = [(group, group["lr"]) for group in groups]
        self.losses: list[torch.Tensor] = []

    def teach(
        self, indexer: Indexer, query: torch.Tensor, key: torch.Tensor, scaling: float
    ) -> None:
        """Adds the gradients of a layer's indexer, at the places of this step."""
        hidden_states, compressed, (cos, sin) = indexer.inputs
        places = self.places
        rows = torch.arange(len(places), device=places.device).unsqueeze(1)
        shares = attention_shares(query, key, scaling, places)
        hidden = is_later(places, key.shape[2])
        with torch.enable_grad():
            loss = self.divergence(
                indexer.queries(
                    compressed[rows, places], (cos[0, places], sin[0, places])
                ),
                indexer.keys(hidden_states, (cos, sin)),
                indexer.head_weights(hidden_states[rows, places]),
                shares,
                hidden,
            )
            loss.backward()
        self.losses.append(loss.detach())

    @torch.no_grad()
    def step(
        self, tokens: torch.Tensor, weights: torch.Tensor, rate: float
    ) -> torch.Tensor:
        """Learns from a batch, and returns each layer's loss before."""
        device = self.model.device
        tokens = tokens.to(device, non_blocking=True).long()
        first = min(self.indexers[0].index_topk, tokens.shape[1] - 1 - self.queries)
        self.places = draw_places(weights.to(device), max(first, 0), self.queries)
        self.losses.clear()
        self.model.model(input_ids=tokens[:, :-1], use_cache=False)
        for group, full in self.rates:
            group["lr"] = full * rate
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(self.losses)

    def end(self) -> None:
        """Lets the model attend by the indexers' lists, whose weights are bfloat16."""
        for indexer in self.indexers:
            indexer.observer = None
            indexer.lists = True
            indexer.requires_grad_(False).to(self.model.dtype)


@dataclass(frozen=True)
class Course:
    """Seconds at most, and the workers that make rows."""

    seconds: float
    workers: int


def teach_all(teacher: Teacher, rows: Rows, course: Course) -> int:
    """Teaches through the rows' only phase, and returns the steps that it took."""
    clock = train.Clock(rows.phases, course.seconds)
    order = train.list_loader(rows, keys(rows.phases, clock.expired), course.workers)
    done, sums = 0, torch.zeros(len(teacher.indexers), device=teacher.model.device)
    for phase, tokens, weights in order:
        rate = train.learning_rate(clock.progress(phase, done))
        sums += teacher.step(tokens, weights, rate)
        done += 1
        if done % LOG_EVERY == 0:
            nats = "  ".join(f"{value / LOG_EVERY:.3f}" for value in sums.tolist())
            now = clock.elapsed()
            print(
                f"{now:6.1f} s  step {done:5d}  rate {rate:.3f}  nats {nats}",
                flush=True,
            )
            sums.zero_()
    return done


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="corpus.py's text, an .xz file")
    parser.add_argument("folder", type=Path, help="the model, which gets the weights")
    parser.add_argument("--seconds", type=float, default=100.0, help="cap of training")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--length", type=int, default=CONTEXT, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens a step")
    parser.add_argument("--queries", type=int, default=QUERIES, help="of a row, learnt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-evaluate", action="store_true")
    return parser


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    phases = (Phase(args.length, args.steps, 1.0),)
    rows = Rows(train.read_corpus(args.corpus), phases, args.tokens, args.seed)
    model = load_model(args.folder).to(args.device)
    teacher = Teacher(model, args.queries, not args.no_compile)
    start = time.monotonic()
    done = teach_all(teacher, rows, Course(args.seconds, args.workers))
    seconds = round(time.monotonic() - start, 1)
    teacher.end()
    save_model(model, args.folder)
    record = json.loads((args.folder / "training.json").read_text())
    record["indexers"] = {
        "seed": args.seed,
        "seconds": seconds,
        "tokens_per_step": args.tokens,
        "queries_per_row": args.queries,
        "phase": asdict(phases[0]) | {"done": done},
        "recall": measure_recall(model, args.length),
    }
    (args.folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(recall_table(record["indexers"]["recall"]), flush=True)
    if not args.no_evaluate:
        evaluate.run(args.folder, torch.device(args.device), evaluate.FULL)


if __name__ == "__main__":
    main(build_parser().parse_args())
