# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The loss of caches where an answer weighs many far tokens at once.

Writes rivals.json and rivals.md. A text gives one name eight codes, which begin with
different digits, and asks for the code. The distribution of the answer's first digit is
one over eight places, far apart and far away. Only its KL divergence from the one on
exact K and V counts. All tokens, or all but the newest, are read from the cache.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from attention import Cache, Reading
from measure import Comparison
from report import kl_cell, page, run_programme
from windows import MODEL, MODELS, load_subject, variants

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tasks import HELD_OUT_TEXT, RIVALS, rival_case  # noqa: E402
from vocabulary import Vocabulary  # noqa: E402

CASES = 16
LENGTH = 2048
# No window, a token's own as in turbo dtypes' decodes, and a recent window.
WINDOWS = (0, 1, 24)
FIGURES = ("kl", "kl_error", "agreement")


def first_digits(name: str) -> tuple[list[torch.Tensor], list[int]]:
    """Returns each case's tokens before the answer, (1, T), and each digit's token."""
    text = HELD_OUT_TEXT.read_text(encoding="utf-8")
    vocabulary = Vocabulary(MODEL.with_name(name))
    cases = [
        vocabulary.fitting(partial(rival_case, seed=seed, text=text), LENGTH)
        for seed in range(CASES)
    ]
    prompts = [torch.tensor([c.prompt_tokens(vocabulary.encode)]) for c in cases]
    return prompts, [vocabulary.encode(digit)[0] for digit in "0123456789"]


def measure_model(name: str) -> list[dict]:
    lab, _, means = load_subject(name, 1, LENGTH)
    prompts, digits = first_digits(name)
    exact, layers = [], lab.num_layers
    for prompt in prompts:
        tokens = prompt.to(lab.device)
        exact.append(lab.log_probs(tokens, Cache([None] * layers))[:, -1:])
    of_digits = torch.cat(exact).exp()[..., digits]
    shares = of_digits / of_digits.sum(-1, keepdim=True)
    entropy = -(shares * shares.clamp(min=1e-30).log()).sum(-1).mean().item()
    rows = []
    for variant in variants(lab.head_size, bool(means)):
        row: dict = {"model": name, "cache": variant.name}
        row |= {"digits": of_digits.sum(-1).mean().item(), "entropy": entropy}
        for window in WINDOWS:
            comparison = Comparison()
            for prompt, own in zip(prompts, exact, strict=True):
                tokens = prompt.to(lab.device)
                own_means = [mean[:, : tokens.shape[1]] for mean in means]
                reading = Reading(window=window)
                cache = Cache([variant] * layers, reading, means=own_means)
                theirs = lab.log_probs(tokens, cache)[:, -1:]
                comparison.add(own, theirs, tokens[:, -1:])
            figures = comparison.figures(slice(None))
            row[str(window)] = {key: figures[key] for key in FIGURES}
        rows.append(row)
        print(f"{name}: {variant.name}", flush=True)
    return rows


def measure() -> list[dict]:
    return [row for name in MODELS for row in measure_model(name)]


def markdown(rows: list[dict]) -> str:
    about = (
        f"{CASES} texts of {LENGTH} tokens that give one name {RIVALS} codes; fp32; KL "
        "in millinats of the answer's first digit with the standard error of the mean, "
        "and in how many per cent of the texts it is the same one, by how many of the "
        "newest tokens are seen as they are. Exactly read, the digits have so much of "
        "the probability, and spread it by so many nats (all alike: "
        f"{torch.tensor(RIVALS).log().item():.2f}). Written by "
        "`tests/quality/lab/rivals.py`."
    )

    def cell(figures: dict[str, float]) -> str:
        return f"{kl_cell(figures, 1)}, {100 * figures['agreement']:.0f} %"

    head = ["model", "probability", "spread", "cache", *WINDOWS]
    cells = [
        [row["model"], f"{row['digits']:.2f}", f"{row['entropy']:.2f}", row["cache"]]
        + [cell(row[str(w)]) for w in WINDOWS]
        for row in rows
    ]
    title = "Where an answer weighs many far tokens at once"
    return page(title, about, [head, *cells])


if __name__ == "__main__":
    run_programme("rivals", __doc__, measure, markdown)
