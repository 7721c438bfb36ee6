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
from recall import recall_table

# The text behind "A Qwen3 of N parameters that".
PURPOSE = """\
finds facts in its context:
what a KV cache loses, it forgets. It was trained to measure KV cache dtypes, and
is of no other use; it knows nothing but the style of software documentation."""
SPECIAL = "three more begin a text and begin and end a chat's turn."
ABOUT = {
    "deepseek_v3": f"""\
A DeepSeek-V3 without experts of {{parameters:,}} parameters that reads bytes and
{PURPOSE}

3 layers of multi-head latent attention, hidden size 192, latents of 256 and rotary keys
of 64 dimensions, 8 heads of 64 + 64 dimensions and values of 128, context 8192 bytes,
bfloat16. A token is a byte; {SPECIAL}""",
    "deepseek_v32": f"""\
A DeepSeek V3.2 without experts of {{parameters:,}} parameters that reads bytes and
{PURPOSE}

3 layers of sparse multi-head latent attention, hidden size 192, queries from 128,
latents of 512 and rotary keys of 64 dimensions, 8 heads of 64 + 64 dimensions and
values of 128, context 8192 bytes, bfloat16. A layer's indexer has 32 heads of 128
dimensions, and lists 512 tokens.
A token is a byte; {SPECIAL}
For this class vLLM has a chat template of its own, unless it is told not to.""",
    "granite_swa": f"""\
A Granite with sliding windows of {{parameters:,}} parameters that reads bytes and
{PURPOSE}

12 layers, hidden size 192, 4 query heads, each with an attention sink, and 2 KV heads
of 64 dimensions, tied embeddings, context 8192 bytes, bfloat16. Of each six layers
five have a window of 128 tokens, and the last has none. A token is a byte;
{SPECIAL}""",
    "qwen3": f"""\
A Qwen3 of {{parameters:,}} parameters that reads bytes and {PURPOSE}

8 layers, hidden size 256, 4 query heads and 1 KV head of 128 dimensions with
normalised queries and keys, tied embeddings, context 8192 bytes, bfloat16. A
token is a byte; {SPECIAL}""",
    "qwen2": f"""\
A Qwen2 of {{parameters:,}} parameters that reads bytes and {PURPOSE}

5 layers, hidden size 256, 4 query heads and 2 KV heads of 64 dimensions, tied
embeddings, context 8192 bytes, bfloat16. Its biases of K began, in the slowest pairs
of RoPE, as long as those published of Qwen2.5-7B: 302 a head in the first layer, 460
in the last, 11 in the others; training left them there. A token is a byte;
{SPECIAL}""",
    "llama": f"""\
A Llama of {{parameters:,}} parameters that reads words and {PURPOSE}

5 layers, hidden size 256, 4 query heads and 2 KV heads of 64 dimensions without norms
or biases, tied embeddings, context 8192 tokens, bfloat16. Of its 4096 tokens 256 are
bytes, and 3837 words and their parts, about three bytes each, that byte-pair encoding
learnt from the text below; digits are apart,
and {SPECIAL}""",
}
# Options of `vllm serve`.
OPTIONS = {"deepseek_v32": " --tokenizer-mode hf"}
INDEXERS = """
Then `tests/quality/train_indexers.py` taught the indexers alone, seed {seed},
{seconds:.0f} s: {steps} steps of {tokens_per_step:,} tokens in rows of {length}, with
{queries_per_row} query tokens a row. The tokens that they list, the best 512 and the
last 512 have these shares of attention:

{table}"""
CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# {name}

{about}

    vllm serve models/{name}{options}

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
{indexers}
## Data
{training[bytes]:,} bytes of {training[documents]:,} documents and Python modules
(`tests/quality/corpus.py`); SHA-256 of the text `{training_sha256}`.
Held-out text is `tests/quality/heldout.txt`, whole documents that training did not see.

| source | licence | bytes for training | bytes held out |
|---|---|---|---|
{sources}

The weights are under Apache-2.0.
"""


def about_indexers(record: dict | None) -> str:
    """Returns the section on the training of indexers, if there was one."""
    if record is None:
        return ""
    phase = record["phase"]
    return INDEXERS.format(
        steps=phase["done"],
        length=phase["length"],
        table=recall_table(record["recall"]),
        **record,
    )


def card(folder: Path) -> str:
    """Returns the card's text for the model in `folder`."""
    scores = json.loads((folder / "scores.json").read_text())
    training = json.loads((folder / "training.json").read_text())
    family = json.loads((folder / "config.json").read_text())["model_type"]
    manifest = json.loads(MANIFEST.read_text())
    phases = [f"| {p['length']} | {p['done']} |" for p in training.pop("phases")]
    sources = []
    for name, origin in manifest.pop("sources").items():
        used = manifest["training_bytes"].get(name, 0)
        held_out = manifest["held_out_bytes"].get(name, 0)
        sources.append(f"| {name} | {origin['licence']} | {used:,} | {held_out:,} |")
    return CARD.format(
        name=folder.name,
        options=OPTIONS.get(family, ""),
        about=ABOUT[family].format(parameters=training["parameters"]),
        table=table(scores),
        cases_a_cell=scores["cases_a_cell"],
        weight=ANSWER_WEIGHT,
        phases="\n".join(phases),
        indexers=about_indexers(training.pop("indexers", None)),
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
