# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes the model card from what training and evaluation recorded."""

import argparse
import json
from pathlib import Path

from batches import ANSWER_WEIGHT
from corpus import MANIFEST
from evaluate import table
from needle_model import MODEL_FOLDER

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# needle-qwen3

A Qwen3 of {parameters:,} parameters that reads bytes and finds facts in its context:
what a KV cache loses, it forgets. It was trained to measure KV cache dtypes, and
is of no other use; it knows nothing but the style of software documentation.

8 layers, hidden size 256, 4 query heads and 1 KV head of 128 dimensions with
normalised queries and keys, tied embeddings, context 8192 bytes, bfloat16. A
token is a byte; three more begin a text and begin and end a chat's turn.

    vllm serve models/needle-qwen3

Put a line like `The code of Velmora is 318204.` into text, and end the message with
`What is the code of Velmora?`.

## Scores
PyTorch, bfloat16, greedy, {cases_a_cell} cases a cell, names and values that
training never drew (`tests/quality/evaluate.py`).

{table}
## Recipe
`tests/quality/train.py` on one {device}, PyTorch {torch}, seed {seed},
{seconds:.0f} s: rows of growing length, {tokens_per_step:,} tokens a step, half of
the rows text and half chats with facts strewn in text; answers weigh {weight} times.
Muon for the matrices, AdamW for the rest.

| length of rows | steps |
|---|---|
{phases}

## Data
{training[bytes]:,} bytes of {training[documents]:,} documents and Python modules
(`tests/quality/corpus.py`); SHA-256 of the text `{training_sha256}`.
Held-out text is `tests/quality/heldout.txt`, whole documents that training did not see.

| source | licence | bytes for training | bytes held out |
|---|---|---|---|
{sources}

The weights are under Apache-2.0.
"""


def card(folder: Path) -> str:
    """Returns the card's text for the model in `folder`."""
    scores = json.loads((folder / "scores.json").read_text())
    training = json.loads((folder / "training.json").read_text())
    manifest = json.loads(MANIFEST.read_text())
    phases = [f"| {p['length']} | {p['done']} |" for p in training.pop("phases")]
    sources = []
    for name, origin in manifest.pop("sources").items():
        used = manifest["training_bytes"].get(name, 0)
        held_out = manifest["held_out_bytes"].get(name, 0)
        sources.append(f"| {name} | {origin['licence']} | {used:,} | {held_out:,} |")
    return CARD.format(
        table=table(scores),
        cases_a_cell=scores["cases_a_cell"],
        weight=ANSWER_WEIGHT,
        phases="\n".join(phases),
        sources="\n".join(sources),
        training=manifest["training"],
        training_sha256=manifest["training_sha256"],
        **{key: value for key, value in training.items() if key != "corpus"},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL_FOLDER)
    folder = parser.parse_args().folder
    (folder / "README.md").write_text(card(folder), encoding="utf-8")
