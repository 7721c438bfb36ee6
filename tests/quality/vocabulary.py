# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A model's tokens: bytes, or words and parts of words that were learnt from a corpus.

Both have the bytes first, then the special tokens. Merged pairs follow.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks import END_OF_TEXT, SPECIAL_TOKENS, Case
from tokenizers import Tokenizer, pre_tokenizers, trainers
from turbo_seeded.model import byte_alphabet, tokenizer_content

Merges = Sequence[tuple[str, str]]
# Bytes of a corpus that merges are learnt from, and bytes of each piece of them.
TAUGHT_BYTES = 8 << 20
PIECE_BYTES = 1 << 16
# The byte of each character of byte-level vocabularies.
BYTES = {character: byte for byte, character in enumerate(byte_alphabet())}


def learn_merges(text: bytes, vocab_size: int) -> list[tuple[str, str]]:
    """Returns the merges that byte-pair encoding learns, for a vocabulary's size.

    Pairs are of byte-level characters (`turbo_seeded.model.byte_alphabet`).
    """
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_content((), of_words=True)))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    step = max(len(text) * PIECE_BYTES // TAUGHT_BYTES, PIECE_BYTES)
    pieces = (
        text[start : start + PIECE_BYTES].decode(errors="ignore")
        for start in range(0, len(text), step)
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def check_tokens(folder: Path, content: dict[str, Any]) -> None:
    """Checks that the first tokens of a tokenizer.json are the tasks' tokens.

    Raises:
        ValueError: If they are not: the tasks' ids would be other words of the model.

    """
    model = content["model"]
    of_id = {index: token for token, index in dict(model.get("vocab", ())).items()}
    of_id |= {each["id"]: each["content"] for each in content["added_tokens"]}
    for index, token in enumerate((*byte_alphabet(), *SPECIAL_TOKENS)):
        if of_id.get(index) != token:
            raise ValueError(
                f"token {index} of {folder} is {of_id.get(index)!r}, and not "
                f"{token!r}: its vocabulary is not that of the models in models/, "
                "whose tokens the tasks are made of; scripts/check_model.py takes any "
                "model"
            )


class Vocabulary:
    """A model's tokens, as its folder has them: the bytes first, then special ones.

    Raises:
        ValueError: If the folder has other tokens.

    """

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{folder} has no tokenizer.json")
        content = json.loads(path.read_text(encoding="utf-8"))
        model = content["model"]
        check_tokens(folder, content)
        self.has_merges = bool(model["merges"])
        # Special tokens have no text.
        self.bytes_of = [b""] * max(len(model["vocab"]), 256 + len(SPECIAL_TOKENS))
        for token, index in model["vocab"].items():
            if token not in SPECIAL_TOKENS:
                self.bytes_of[index] = bytes(BYTES[character] for character in token)
        self._tokenizer = Tokenizer.from_file(str(path))

    def __len__(self) -> int:
        return len(self.bytes_of)

    def encode(self, text: str) -> list[int]:
        """Returns a text's tokens, none of which is a special one."""
        if not self.has_merges:
            return list(text.encode())
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=False
        )
        return encoding.ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        said = b"".join(self.bytes_of[token] for token in tokens)
        return said.decode(errors="replace")

    def documents(self, documents: Sequence[str]) -> list[int]:
        """Returns the tokens of documents, with the end of each, as in training."""
        if self.has_merges:
            encoded = self._tokenizer.encode_batch_fast(
                list(documents), add_special_tokens=False
            )
            each = [encoding.ids for encoding in encoded]
        else:
            each = [self.encode(document) for document in documents]
        return [token for tokens in each for token in (*tokens, END_OF_TEXT)]

    def fitting(self, make: Callable[[int], Case], length: int) -> Case:
        """Returns a case of `make` with at most `length` tokens, and nearly as many."""

        def count(case: Case) -> int:
            found = len(case.prompt_tokens(self.encode))
            return found + len(case.answer_tokens(self.encode))

        return fitting(make, length, 4 * length if self.has_merges else length, count)


def fitting(
    make: Callable[[int], Case], length: int, size: int, count: Callable[[Case], int]
) -> Case:
    """Returns a case of `make` with at most `length` tokens, and nearly as many.

    Args:
        make: Makes a case of at most so many bytes.
        length: Tokens of the case, at most.
        size: Bytes to begin with, enough for `length` tokens.
        count: Returns the number of a case's tokens.

    """
    while True:
        case = make(size)
        found = count(case)
        if found <= length:
            return case
        size = int(size * min(0.99, length / found))
