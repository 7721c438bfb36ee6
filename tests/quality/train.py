# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Trains the small retrieval model on one GPU, and evaluates it.

The lengths of the rows grow by phases. A phase has a number of steps and a share of
`--seconds`, and ends with whichever comes first. The committed model took these steps
on an H200 in 423 s, and the default cap is a seventh above that. On a GPU that is as
fast, the seed alone decides the run, but for rounding.
"""

import argparse
import json
import lzma
import math
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import evaluate
import torch
import torch.nn.functional as F
from batches import ANSWER_WEIGHT, EOT, Phase, Rows, keys
from indexer import attend_to_all
from needle_model import CLASSES, ROOT, VOCAB_SIZE, needle_config, new_model, save_model
from optimizers import make_optimizers
from tasks import SEPARATOR
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel
from turbo_seeded.model import write_tokenizer
from vocabulary import Merges, Vocabulary, learn_merges

PHASES = (
    Phase(512, 2001, 0.28),
    Phase(1024, 925, 0.14),
    Phase(2048, 773, 0.14),
    Phase(4096, 778, 0.18),
    Phase(8192, 750, 0.26),
)
# Phases of models with sinks, whose attention takes three times as long.
SINK_PHASES = (
    Phase(512, 760, 0.28),
    Phase(1024, 400, 0.14),
    Phase(2048, 400, 0.14),
    Phase(4096, 550, 0.18),
    Phase(8192, 750, 0.26),
)
# Phases of models with latents, whose first steps waited for a compiler.
LATENT_PHASES = (Phase(512, 1648, 0.28), *PHASES[1:])
# Shares that leave time for `train_indexers.py` within ten minutes.
SPARSE_PHASES = tuple(
    replace(phase, share=share)
    for phase, share in zip(LATENT_PHASES, (0.35, 0.15, 0.14, 0.16, 0.2), strict=True)
)
SECONDS = {"deepseek_v32": 340.0}
WARM_UP = 0.01
DECAY_FROM = 0.4
LOG_EVERY = 50
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def phases_of(family: str) -> tuple[Phase, ...]:
    """Returns the phases of a family in `CLASSES`."""
    own = {
        "granite_swa": SINK_PHASES,
        "deepseek_v3": LATENT_PHASES,
        "deepseek_v32": SPARSE_PHASES,
    }
    return own.get(family, PHASES)


def read_corpus(path: Path) -> bytes:
    """Returns the documents, joined by the byte that stands for the end of a text."""
    text = lzma.decompress(path.read_bytes())
    return text.replace(SEPARATOR.encode(), EOT)


def weighted_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weighted mean cross-entropy, and sums for the log.

    Args:
        hidden: (tokens, hidden size), after the last norm.
        head: (vocabulary, hidden size).
        targets: (tokens,), the token after each one.
        weights: (tokens,), the weight of each target in the loss.
    """
    logits = F.linear(hidden, head).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    with torch.no_grad():
        text, answer = weights == 1, weights == ANSWER_WEIGHT
        right = answer & (logits.argmax(-1) == targets)
        counted = (losses * text, text, losses * answer, answer, right)
        sums = torch.stack([values.sum(dtype=torch.float32) for values in counted])
    return loss, sums


class Trainer:
    """A bfloat16 model, the float32 weights behind it, and their optimizers."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        compiled: bool,
        merges: Merges = (),
    ):
        self.device = device
        self.merges = merges
        self.model = model.to(device).train()
        # Parameters only: RoPE's frequencies stay float32, as in a loaded model.
        for parameter in self.model.parameters():
            parameter.data = parameter.data.bfloat16()
        self.loss = weighted_loss
        if compiled:
            # One graph a shape serves all layers with windows, and another one all
            # other layers: these differ in weights only.
            torch._dynamo.config.recompile_limit = 2 * len(PHASES)
            for layer in self.model.model.layers:
                layer.compile(fullgraph=True, dynamic=False)
            self.loss = torch.compile(weighted_loss, fullgraph=True, dynamic=False)
        learnt = [x for x in self.model.named_parameters() if x[1].requires_grad]
        names, self.weights = zip(*learnt, strict=True)
        self.masters = [weight.detach().float() for weight in self.weights]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        is_matrix = [
            ".layers." in name and master.dim() == 2
            for name, master in zip(names, self.masters)
        ]
        matrices = [m for m, yes in zip(self.masters, is_matrix) if yes]
        others = [m for m, yes in zip(self.masters, is_matrix) if not yes]
        self.optimizers = make_optimizers(matrices, others)
        self.rates = [group["lr"] for o in self.optimizers for group in o.param_groups]

    def save(self, folder: Path) -> None:
        save_model(self.model, folder, self.merges)

    def step(
        self, tokens: torch.Tensor, weights: torch.Tensor, rate: float
    ) -> torch.Tensor:
        """Learns from one batch, with `rate` of the full learning rate."""
        tokens = tokens.to(self.device, non_blocking=True).long()
        weights = weights.to(self.device, non_blocking=True).flatten().float()
        output = self.model.model(input_ids=tokens[:, :-1], use_cache=False)
        loss, sums = self.loss(
            output.last_hidden_state.flatten(0, 1),
            self.model.lm_head.weight,
            tokens[:, 1:].flatten(),
            weights,
        )
        loss.backward()
        gradients = [weight.grad for weight in self.weights]
        torch._foreach_copy_([master.grad for master in self.masters], gradients)
        for weight in self.weights:
            weight.grad = None
        groups = [group for o in self.optimizers for group in o.param_groups]
        for group, full in zip(groups, self.rates, strict=True):
            group["lr"] = full * rate
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(self.weights), self.masters)
        return sums


def learning_rate(progress: float) -> float:
    """Rises to 1, stays, and falls linearly to 0 at the end."""
    return min(1.0, progress / WARM_UP, max(0.0, (1 - progress) / (1 - DECAY_FROM)))


class Clock:
    """The progress of a run: by its plan, or by its time if that is ahead."""

    def __init__(self, phases: Iterable[Phase], seconds: float):
        self.phases = list(phases)
        self.seconds = seconds
        self.start = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def end(self, phase: int) -> float:
        """Returns the share of the run after which a phase has to be over."""
        return sum(p.share for p in self.phases[: phase + 1])

    def expired(self, phase: int) -> bool:
        return self.elapsed() > self.seconds * self.end(phase)

    def progress(self, phase: int, step: int) -> float:
        now = self.phases[phase]
        planned = self.end(phase) - now.share * (1 - (step + 1) / now.steps)
        return max(planned, self.elapsed() / self.seconds)


def train(
    trainer: Trainer, rows: Rows, seconds: float, workers: int, folder: Path
) -> list[int]:
    """Trains through all phases, and returns the steps that each one took."""
    clock = Clock(rows.phases, seconds)
    done = [0] * len(rows.phases)
    order = list_loader(rows, keys(rows.phases, clock.expired), workers)
    sums = torch.zeros(5, device=trainer.device)
    logged, current, since = 0.0, 0, 0
    for phase, tokens, weights in order:
        if phase != current:
            trainer.save(folder)
            current = phase
        rate = learning_rate(clock.progress(phase, done[phase]))
        sums += trainer.step(tokens, weights, rate)
        done[phase] += 1
        since += 1
        if sum(done) % LOG_EVERY == 0:
            values = sums.tolist()
            now = clock.elapsed()
            report(rows.phases[phase], done, rate, values, since, now - logged, now)
            sums.zero_()
            logged, since = now, 0
    trainer.save(folder)
    return done


class Keyed(Dataset):
    """Rows, each with the index of its phase."""

    def __init__(self, rows: Rows):
        self.rows = rows

    def __getitem__(self, key: tuple[int, int]) -> tuple:
        return key[0], *self.rows[key]


def list_loader(rows: Rows, order: Iterable, workers: int) -> Iterable[tuple]:
    """Yields (phase, tokens, weights); workers build batches ahead."""
    loader = DataLoader(
        Keyed(rows),
        batch_size=None,
        sampler=order,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        # Arrays go through the workers' pipes: shared memory may be small.
        collate_fn=lambda item: item,
    )
    for phase, tokens, weights in loader:
        pair = torch.from_numpy(tokens), torch.from_numpy(weights)
        if torch.cuda.is_available():
            pair = pair[0].pin_memory(), pair[1].pin_memory()
        yield phase, *pair


def report(
    phase: Phase,
    done: list[int],
    rate: float,
    sums: list[float],
    steps: int,
    seconds: float,
    now: float,
) -> None:
    text, texts, answer, answers, right = sums
    print(
        f"{now:6.1f} s  step {sum(done):5d}  length {phase.length:4d}  "
        f"rate {rate:.3f}  {1000 * seconds / steps:6.1f} ms/step  "
        f"text {text / max(texts, 1) / math.log(2):.3f} bits/byte  "
        f"answers {answer / max(answers, 1):.3f} nats/byte, "
        f"{100 * right / max(answers, 1):5.1f} % of bytes right",
        flush=True,
    )


def probe(trainer: Trainer, rows: Rows) -> None:
    """Prints how long steps take; the second kernel is for the longest rows only."""
    last = len(rows.phases) - 1
    plan = [("flash", index) for index in range(last + 1)] + [("cudnn", last)]
    for name, index in plan:
        torch.compiler.reset()
        try:
            result = measure(trainer, rows, index, BACKENDS[name])
        except RuntimeError as error:
            result = f"failed: {str(error)[:300]}"
        print(name, rows.phases[index].length, result, flush=True)


def measure(trainer: Trainer, rows: Rows, phase: int, backend: SDPBackend) -> str:
    start = time.monotonic()
    with sdpa_kernel(backend):
        tokens, weights = map(torch.from_numpy, rows[phase, 0])
        built = time.monotonic() - start
        for _ in range(3):
            trainer.step(tokens, weights, 0.0).tolist()
        compiled = time.monotonic() - start - built
        start = time.monotonic()
        for _ in range(10):
            sums = trainer.step(tokens, weights, 0.0)
        queued = (time.monotonic() - start) / 10
        sums.tolist()
        step = (time.monotonic() - start) / 10
    return (
        f"{1000 * step:.1f} ms/step (host {1000 * queued:.1f}), "
        f"{weights.numel() / step / 1e6:.2f} M tokens/s, first steps {compiled:.1f} s, "
        f"batch built in {1000 * built:.1f} ms by one process"
    )


def attention_kernel(name: str, device: torch.device) -> AbstractContextManager:
    """Allows one kernel alone: where it cannot run, no slower one takes its place."""
    return sdpa_kernel(BACKENDS[name]) if device.type == "cuda" else nullcontext()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="corpus.py's text, an .xz file")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--family", choices=CLASSES, default="qwen3")
    parser.add_argument(
        "--changes", type=json.loads, default={}, help="other fields of it, as JSON"
    )
    parser.add_argument(
        "--seconds", type=float, help="cap of training (480; deepseek_v32: 340)"
    )
    parser.add_argument("--tokens", type=int, default=131072, help="tokens a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--attention", choices=BACKENDS, default="flash")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-evaluate", action="store_true")
    parser.add_argument("--probe", action="store_true", help="time steps, then stop")
    return parser


def main(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    corpus = read_corpus(args.corpus)
    config = needle_config(args.family, **args.changes)
    merges: Merges = ()
    vocabulary = None
    if config.vocab_size > VOCAB_SIZE:
        merges = learn_merges(corpus.replace(EOT, b""), config.vocab_size)
        args.output.mkdir(parents=True, exist_ok=True)
        write_tokenizer(args.output, merges)
        vocabulary = Vocabulary(args.output)
    phases = phases_of(args.family)
    rows = Rows(corpus, phases, args.tokens, args.seed, vocabulary)
    model = new_model(config, args.seed)
    attend_to_all(model)
    trainer = Trainer(model, device, not args.no_compile, merges)
    if args.probe:
        probe(trainer, rows)
        return
    start = time.monotonic()
    seconds = args.seconds or SECONDS.get(args.family, 480.0)
    with attention_kernel(args.attention, device):
        done = train(trainer, rows, seconds, args.workers, args.output)
    record = {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "seed": args.seed,
        "seconds": round(time.monotonic() - start, 1),
        "tokens_per_step": args.tokens,
        "phases": [asdict(p) | {"done": n} for p, n in zip(phases, done)],
        "corpus": str(args.corpus.relative_to(ROOT))
        if args.corpus.is_relative_to(ROOT)
        else args.corpus.name,
    }
    (args.output / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    if not args.no_evaluate:
        evaluate.run(args.output, device, evaluate.FULL)


if __name__ == "__main__":
    main(build_parser().parse_args())
