# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Training rows: half plain text, half chats that ask for facts strewn in text.

A row is built as bytes. Three control characters, which the corpus does not hold, stand
for the special tokens. The whole row then becomes tokens: bytes, or a vocabulary's.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np
from tasks import (
    ATTRIBUTES,
    END_OF_TEXT,
    FACTS,
    LOOK_UP,
    QUESTIONS,
    SEVERAL,
    Pool,
    draw_code,
    draw_name,
    draw_value,
    join_names,
)
from torch.utils.data import Dataset
from vocabulary import Vocabulary

EOT, START, END = b"\0", b"\1", b"\2"
CONTROLS = rb"[\0\1\2]"
TOKENS = np.arange(256, dtype=np.int16)
TOKENS[:3] += 256

# Bytes that a row has at first for each token of a vocabulary: most rows then fit.
BYTES_A_TOKEN = 3
ANSWER_WEIGHT = 20
# For answers that repeat a whole line: many bytes, most of them easy.
LINE_WEIGHT = 4
SHORTEST_CHAT = 192
USER = START + b"user\n"
ASSISTANT = END + b"\n" + START + b"assistant\n"
TURN_END = END + b"\n"


def encoded(
    row: bytes, spans: Sequence[tuple[int, int, int]], vocabulary: Vocabulary
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a row's tokens, and the weight of each: that of its first byte.

    No token crosses the border of an answer: a generated answer has no such token.
    """
    of_bytes = np.ones(len(row), np.uint8)
    borders = {0, len(row)}
    for start, end, weight in spans:
        of_bytes[start:end] = weight
        if weight > 0:
            borders |= {start, end}
    for control in re.finditer(CONTROLS, row):
        borders |= {control.start(), control.end()}
    tokens: list[int] = []
    starts: list[int] = []
    places = sorted(borders)
    for start, end in zip(places, places[1:]):
        piece = row[start:end]
        if piece in (EOT, START, END):
            found = [END_OF_TEXT + piece[0]]
        else:
            found = vocabulary.encode(piece.decode(errors="ignore"))
        for token in found:
            tokens.append(token)
            starts.append(start)
            start += len(vocabulary.bytes_of[token])
    return np.array(tokens, np.int16), of_bytes[starts]


@dataclass(frozen=True)
class Phase:
    """Rows of one length, for a number of steps or a share of the time."""

    length: int
    steps: int
    share: float


@dataclass
class Turn:
    """A question and its answer, whose bytes have `weight` in the loss."""

    question: str
    answer: str
    weight: int = ANSWER_WEIGHT

    def __len__(self) -> int:
        content = len(self.question.encode()) + len(self.answer.encode())
        return len(USER) + len(ASSISTANT) + len(TURN_END) + content


@dataclass
class Material:
    """The content of a chat: lines to strew, or a list to put first, and questions."""

    lines: list[str]
    turns: list[Turn]
    listing: bool = False


class Rows(Dataset):
    """Batches of training rows, each decided by the seed and its key alone."""

    def __init__(
        self,
        corpus: bytes,
        phases: Sequence[Phase],
        tokens: int,
        seed: int,
        vocabulary: Vocabulary | None = None,
    ):
        """Takes the training text, its documents joined by NUL bytes."""
        self.corpus = corpus
        self.phases = phases
        self.tokens = tokens
        self.seed = seed
        self.vocabulary = vocabulary
        if vocabulary is not None:
            documents = [text.decode(errors="ignore") for text in corpus.split(EOT)]
            self.encoded_corpus = np.array(vocabulary.documents(documents), np.int16)

    def __getitem__(self, key: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens (rows, length + 1) and the targets' weights (rows, length)."""
        phase, step = key
        length = self.phases[phase].length
        random = Random(f"{self.seed} {phase} {step}")
        count = max(2, self.tokens // length)
        if self.vocabulary is not None:
            both = [
                self.encoded_row(random, length + 1, is_task=bool(index % 2))
                for index in range(count)
            ]
            tokens, weights = (np.stack(arrays) for arrays in zip(*both))
            return tokens, weights[:, 1:]
        rows = [
            self.task_row(random, length + 1)
            if index % 2
            else (self.text(random, length + 1), [])
            for index in range(count)
        ]
        joined = np.frombuffer(b"".join(row for row, _ in rows), np.uint8)
        weights = np.ones((count, length + 1), np.uint8)
        for row_weights, (_, spans) in zip(weights, rows):
            for start, end, weight in spans:
                row_weights[start:end] = weight
        return TOKENS[joined].reshape(count, -1), weights[:, 1:]

    def encoded_row(
        self, random: Random, length: int, is_task: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns `length` tokens of a vocabulary, and their weights.

        A row of chats is rebuilt until it fits, because its answers are at its end.
        Text fills the rest.
        """
        assert self.vocabulary is not None
        tokens, weights = np.zeros(0, np.int16), np.zeros(0, np.uint8)
        size = BYTES_A_TOKEN * length
        while is_task:
            tokens, weights = encoded(*self.task_row(random, size), self.vocabulary)
            if len(tokens) <= length:
                break
            size = int(size * min(0.98, length / len(tokens)))
        missing = length - len(tokens)
        start = random.randrange(len(self.encoded_corpus) - missing)
        text = self.encoded_corpus[start : start + missing]
        ones = np.ones(missing, np.uint8)
        return np.concatenate([tokens, text]), np.concatenate([weights, ones])

    def text(self, random: Random, length: int) -> bytes:
        start = random.randrange(len(self.corpus) - length)
        return self.corpus[start : start + length]

    def lines(self, random: Random, length: int) -> list[bytes]:
        """Returns lines of text, the first one whole, with `length` bytes in all."""
        text = self.text(random, length + 200).replace(EOT, b"\n")
        start = text.find(b"\n", 0, 200) + 1
        return text[start : start + length].split(b"\n")

    def task_row(
        self, random: Random, length: int
    ) -> tuple[bytes, list[tuple[int, int, int]]]:
        """Packs chats of mixed lengths into a row; also returns their weights."""
        row, spans = b"", []
        while (room := length - len(row)) >= SHORTEST_CHAT:
            size = room
            if random.random() < 0.6:
                low, high = math.log(SHORTEST_CHAT), math.log(room)
                size = int(math.exp(random.uniform(low, high)))
            chat, chat_spans = self.chat(random, size)
            spans += [(len(row) + a, len(row) + b, w) for a, b, w in chat_spans]
            row += chat
        return row + self.text(random, room), spans

    def chat(
        self, random: Random, size: int
    ) -> tuple[bytes, list[tuple[int, int, int]]]:
        """Returns a chat of `size` tokens, and (start, end, weight) of answers."""
        material = self.material(random, size)
        turns = material.turns
        needed = sum(len(turn) for turn in turns) + len(EOT) + 2
        needed += sum(len(line.encode()) + 1 for line in material.lines)
        while needed > size and len(turns) > 1:
            needed -= len(turns.pop())
        if needed > size:
            return self.text(random, size), []
        encoded = [line.encode() for line in material.lines]
        context = self.lines(random, size - needed)
        if material.listing:
            context = [*encoded, *context]
        else:
            scatter(random, context, encoded)
        # `needed` counts a line end after each strewn line; the text's last line has
        # none, so the blank line before the question adds one and its own.
        chat, spans = USER + b"\n".join(context) + b"\n\n", []
        if material.listing:
            spans.append((0, len(chat), 0))
        for index, turn in enumerate(turns):
            chat += (USER if index else b"") + turn.question.encode() + ASSISTANT
            start = len(chat)
            chat += turn.answer.encode() + TURN_END
            spans.append((start, len(chat) - 1, turn.weight))
        return chat + EOT, spans

    def material(self, random: Random, size: int) -> Material:
        kind = random.random()
        asked = min(24, random.randint(1, 2 + size // 128))
        most = max(2, size // 120)
        pool = Pool(random, held_out=False)
        if kind < 0.15:
            return listed(pool, size - 150, asked)
        if kind < 0.3:
            return self.copied(random, min(asked, max(1, size // 240)))
        count = asked + random.randint(1, 6)
        return stated(pool, min(most, count), asked)

    def copied(self, random: Random, count: int) -> Material:
        """Lines of other text, each to be repeated from its first characters."""
        material = Material([], [])
        for _ in range(count):
            lines = self.lines(random, 400)[:-1]
            line = max(lines, key=len, default=b"")[:80].strip()
            text = line.decode(errors="ignore").strip()
            begin = text[:12]
            material.lines.append(text)
            material.turns.append(
                Turn(f'Repeat the line that begins with "{begin}".', text, LINE_WEIGHT)
            )
        random.shuffle(material.turns)
        return material


def stated(pool: Pool, count: int, asked: int) -> Material:
    """Facts in sentences, asked for one by one, in groups, or to be repeated."""
    random = pool.random
    canonical = random.random() < 0.4
    what = "code" if canonical else random.choice(ATTRIBUTES)
    facts = pool.pairs(count, draw_code if canonical else draw_value)
    # Most chats have one wording, so that the wording does not give the fact away.
    one = random.choice(FACTS)
    form: Callable[[], str] = (
        (lambda: FACTS[0])
        if canonical
        else partial(random.choice, FACTS)
        if random.random() < 0.5
        else (lambda: one)
    )
    sentences = {
        name: form().format(what=what, name=name, value=value)
        for name, value in facts.items()
    }
    names = list(facts)
    turns = []
    for _ in range(asked):
        kind = random.random()
        name = random.choice(names)
        if kind < 0.12:
            turns.append(
                Turn(f"Repeat the line about {name}.", sentences[name], LINE_WEIGHT)
            )
        elif kind < 0.24 and count > 2:
            chosen = random.sample(names, random.randint(2, min(4, count)))
            question = SEVERAL[0] if canonical else random.choice(SEVERAL)
            question = question.format(what=what, names=join_names(chosen))
            turns.append(Turn(question, ", ".join(facts[n] for n in chosen)))
        else:
            question = QUESTIONS[0] if canonical else random.choice(QUESTIONS)
            turns.append(Turn(question.format(what=what, name=name), facts[name]))
    return Material(list(sentences.values()), turns)


def listed(pool: Pool, room: int, asked: int) -> Material:
    """A list of names and values; half of the lists fill the room."""
    random = pool.random
    form = random.choice(("{name}: {value}", "{name}: {value}", '"{name}": "{value}",'))
    value = draw_code if random.random() < 0.5 else draw_value
    filled = random.choice((1, random.uniform(0.3, 1)))
    room = int(room * filled) - 60 * asked
    lines: list[str] = []
    facts: dict[str, str] = {}
    while room > 0 or len(facts) < 2:
        name, fact = pool.draw(draw_name), pool.draw(value)
        facts[name] = fact
        lines.append(form.format(name=name, value=fact))
        room -= len(lines[-1]) + 1
    names = list(facts)
    chosen = [random.choice(names) for _ in range(asked)]
    turns = [
        Turn(random.choice(LOOK_UP).format(name=name), facts[name]) for name in chosen
    ]
    return Material(lines, turns, listing=True)


def scatter(random: Random, context: list[bytes], lines: Sequence[bytes]) -> None:
    """Puts lines between those of the context, or now and then at the end of one.

    One line in ten goes to the very start, and one in ten to the very end: few chats
    are so short that they would have lines there otherwise.
    """
    for line in lines:
        at = random.random()
        index = random.randrange(len(context))
        if at < 0.1:
            context.insert(0, line)
        elif at < 0.2:
            context.append(line)
        elif at < 0.35:
            context[index] += b" " + line
        else:
            context.insert(index, line)


def keys(phases: Sequence[Phase], expired: Callable[[int], bool]) -> Iterator:
    """Yields (phase, step); a phase ends with its steps or when it has expired."""
    for index, phase in enumerate(phases):
        for step in range(phase.steps):
            if expired(index):
                break
            yield index, step
