# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The files of the seeded model."""

import subprocess
import sys
from pathlib import Path

import pytest
from harness import WRITE_MODEL
from transformers import AutoTokenizer, PreTrainedTokenizerBase


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("seed, same", [(0, True), (1, False)])
def test_the_seed_decides_every_byte(
    model: Path, tmp_path: Path, seed: int, same: bool
):
    command = [sys.executable, WRITE_MODEL, tmp_path, "--seed", str(seed)]
    subprocess.run(command, check=True)
    first, second = contents(model), contents(tmp_path)
    assert first.keys() == second.keys()
    assert (first == second) == same


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model)


def test_a_token_is_a_byte(tokenizer: PreTrainedTokenizerBase):
    text = "Größe: 3 µm\n\t…"
    tokens = tokenizer(text)["input_ids"]
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


def test_a_chat_ends_with_the_assistants_turn(tokenizer: PreTrainedTokenizerBase):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert prompt == ("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(prompt)["input_ids"].count(tokenizer.eos_token_id) == 1
