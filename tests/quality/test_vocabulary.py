# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tokens that are words: vLLM's, those of training's rows, and those of cases."""

from pathlib import Path

import evaluate
import numpy as np
import pytest
import tasks
import torch
import train
from batches import ANSWER_WEIGHT, EOT, Phase, Rows
from needle_model import load_model, needle_config, new_model
from transformers import AutoTokenizer
from turbo_seeded.model import write_tokenizer
from vocabulary import Merges, Vocabulary, learn_merges

TEXT = "\n".join(tasks.held_out_documents())[:60_000]
DOCUMENT = TEXT.encode() + EOT
SIZE = 1024
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def merges() -> Merges:
    return learn_merges(DOCUMENT.replace(EOT, b""), SIZE)


@pytest.fixture(scope="module")
def folder(merges: Merges, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged")
    assert write_tokenizer(folder, merges) == SIZE
    return folder


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary(folder)


def test_words_are_tokens_and_digits_are_apart(vocabulary: Vocabulary):
    assert len(vocabulary) == SIZE
    said = [vocabulary.decode([token]) for token in vocabulary.encode(" that the 318")]
    assert said == [" that", " the", " ", "3", "1", "8"]


@pytest.mark.parametrize("text", [TEXT, "äöü 漢字 \t\n\n  x", "", "\u0000\u0001"])
def test_what_is_encoded_is_decoded(vocabulary: Vocabulary, text: str):
    tokens = vocabulary.encode(text)
    assert vocabulary.decode(tokens) == text
    assert not {tasks.END_OF_TEXT, tasks.IM_START, tasks.IM_END} & set(tokens)


def test_bytes_are_tokens_without_merges(tmp_path: Path):
    assert write_tokenizer(tmp_path) == 259
    vocabulary = Vocabulary(tmp_path)
    assert vocabulary.encode(TEXT) == list(TEXT.encode())
    assert vocabulary.decode([*TEXT.encode(), tasks.IM_END]) == TEXT


@pytest.mark.parametrize("seed", range(3))
def test_a_case_is_what_the_chat_template_makes(
    folder: Path, vocabulary: Vocabulary, seed: int
):
    case = tasks.needle_case(1024, 0.5, seed, TEXT)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(
        case.messages, tokenize=False, add_generation_prompt=True
    )
    prompt = case.prompt_tokens(vocabulary.encode)
    assert tokenizer(rendered)["input_ids"] == prompt
    assert len(prompt) < len(case.prompt_tokens()) / 2


@pytest.mark.parametrize("length", [256, 1024])
def test_cases_fill_their_tokens(vocabulary: Vocabulary, length: int):
    for make in (
        lambda size: tasks.needle_case(size, 0.5, 7, TEXT),
        lambda size: tasks.key_value_case(size, 7),
    ):
        case = vocabulary.fitting(make, length)
        found = len(case.prompt_tokens(vocabulary.encode))
        found += len(case.answer_tokens(vocabulary.encode))
        assert 0.75 * length < found <= length


def test_rows_are_full_and_end_their_answers(vocabulary: Vocabulary):
    rows = Rows(DOCUMENT * 20, [Phase(512, 1, 1.0)], 16 * 512, 0, vocabulary)
    tokens, weights = rows[0, 0]
    again, _ = rows[0, 0]
    assert np.array_equal(tokens, again)
    assert tokens.shape == (16, 513) and weights.shape == (16, 512)
    assert not (weights[::2] != 1).any()
    marked = weights[1::2] == ANSWER_WEIGHT
    targets = tokens[1::2, 1:]
    assert (targets[marked] == tasks.IM_END).sum() > 8
    # The row has each value of an answer before that answer.
    for row, spots in zip(tokens[1::2], marked):
        (places,) = np.nonzero(spots)
        for run in np.split(places, np.nonzero(np.diff(places) > 1)[0] + 1):
            if len(run) and row[run[-1] + 1] == tasks.IM_END:
                answer = vocabulary.decode(row[run[0] + 1 : run[-1] + 1].tolist())
                before = vocabulary.decode(row[: run[0]].tolist())
                assert all(value in before for value in answer.split(", "))


def test_a_few_steps_lower_the_loss(
    tmp_path: Path, merges: Merges, vocabulary: Vocabulary
):
    torch.manual_seed(0)
    rows = Rows(DOCUMENT * 20, [Phase(128, 24, 1.0)], 1024, 0, vocabulary)
    model = new_model(needle_config("llama", vocab_size=SIZE, **TINY), 0)
    trainer = train.Trainer(model, torch.device("cpu"), False, merges)
    tokens = vocabulary.documents([TEXT])[:1024]
    before = evaluate.bits_per_byte(model, tokens, 256, vocabulary)
    assert train.train(trainer, rows, 1e6, 0, tmp_path) == [24]
    saved = load_model(tmp_path)
    after = evaluate.bits_per_byte(saved, tokens, 256, Vocabulary(tmp_path))
    assert 0 < after < 0.9 * before
